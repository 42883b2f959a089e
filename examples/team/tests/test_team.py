"""The team example: the same team on LangGraph and on AutoGen gives equal rows, and a short training runs."""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("langgraph", reason="needs langgraph, langchain-openai")
pytest.importorskip("autogen_agentchat", reason="needs autogen-agentchat, autogen-ext[openai]")
pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")
pytest.importorskip("matplotlib", reason="needs matplotlib")

TEAM = Path(__file__).parents[1]
sys.path[:0] = [str(TEAM), str(TEAM.parent)]

import agent  # noqa: E402
import autogen_agent  # noqa: E402
import demo  # noqa: E402
import make_data  # noqa: E402
from reward import score  # noqa: E402

import make_model  # noqa: E402
from agl import PluginManager  # noqa: E402
from agl.schemas import unpack_ids  # noqa: E402
from agl_run import load_config  # noqa: E402
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, ToolCall, decode  # noqa: E402
from tests.adapters import Played, play  # noqa: E402

END = 1
"""The scripted server's token at the end of a message."""
ORDERS = [make_data.make_order(random.Random(seed)) for seed in range(3)]
TINY = {
    "policy.guide.model": "out/model",
    "policy.picker.model": "out/model",
    "experiment.validation_limit": 4,
    "algorithm.guiding.params.steps": 1,
    "algorithm.guiding.params.tasks_per_step": 1,
    "algorithm.guiding.params.group_size": 2,
    "algorithm.picking.params.steps": 1,
}
"""Settings that make the experiment small enough for a test; it begins with random weights."""


def careful(request: ModelRequest) -> Reply:
    """Name the right box as the guide; look and report as the picker."""
    last = request.body["messages"][-1]
    if "tools" not in request.body:
        return Reply(text=next(task["box"] for task in ORDERS if task["order"] == last["content"]))
    if last["role"] == "tool":
        return Reply(text=last["content"])
    return Reply(tool_calls=(ToolCall("look", json.dumps({"box": last["content"]})),))


def stubborn(request: ModelRequest) -> Reply:
    """Name a box that does not exist, and never stop looking."""
    if "tools" not in request.body:
        return Reply(text="Z")
    return Reply(tool_calls=(ToolCall("look", json.dumps({"box": "Z"})),))


async def langgraph(task: Any, main_llm: Any) -> str:
    try:
        return await agent.solve(task)
    finally:
        await agent.model().root_async_client.close()
        agent.model.cache_clear()


async def autogen(task: Any, main_llm: Any) -> str:
    try:
        return await autogen_agent.solve(task)
    finally:
        await autogen_agent.client().close()
        autogen_agent.client.cache_clear()


TEAMS = {"langgraph": langgraph, "autogen": autogen}
"""The team of each framework, by its tracer."""


def play_order(tracer: str, order: dict[str, object], respond: Any) -> Played:
    """Return what a framework's team did with an order, through a server of its own, because clients are closed."""
    manager = PluginManager.from_environment()
    tracers = [manager.build(manager.tracer(name)) for name in (tracer, "wire")]
    with ScriptedModelServer(respond=respond) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", server.base_url)
        return play(TEAMS[tracer], [order], server=server, tracers=tracers)[0]


def rows_of(rollout: Played) -> list[tuple[str, bytes, list[tuple[str, int, int]]]]:
    """Return text, mask and sampled parts with their agents of each row, without the line of the tool's schema.

    The frameworks describe the same function in different JSON; `test_the_model_reads_what_it_was_taught` covers it.
    """
    found: list[tuple[str, bytes, list[tuple[str, int, int]]]] = []
    for row in rollout.episode.rows:
        text = decode(unpack_ids(row.ids))
        skipped = unpack_ids(row.ids).index(END) + 1 if text.startswith("<|tools|>") else 0
        parts = [(part.agent, part.start - skipped, part.stop - skipped) for part in row.segments]
        found.append((decode(unpack_ids(row.ids)[skipped:]), row.mask[skipped:], parts))
    return found


@pytest.mark.parametrize("respond", [careful, stubborn])
def test_both_frameworks_give_equal_rows(respond: Any) -> None:
    for order in ORDERS:
        langgraph, autogen = (play_order(tracer, order, respond) for tracer in TEAMS)
        assert ["guide", "picker", "picker"] == langgraph.agents == autogen.agents
        assert [["guide"], ["picker", "picker"]] == [[part[0] for part in row[2]] for row in rows_of(langgraph)]
        assert rows_of(langgraph) == rows_of(autogen)


def test_the_model_reads_what_it_was_taught(tmp_path: Path) -> None:
    taught = [write(task, is_careful=True) for task in ORDERS for write in (make_data.guided, make_data.picked)]
    expected = rendered(taught, tmp_path)
    for tracer in TEAMS:
        rollouts = [play_order(tracer, order, careful) for order in ORDERS]
        calls = [span.call for rollout in rollouts for span in (rollout.calls[0], rollout.calls[-1]) if span.call]
        asked = [{**call.request, "messages": [*call.request["messages"], answer(call)]} for call in calls]
        assert expected == rendered(asked, tmp_path)


def answer(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": call.response["choices"][0]["message"]["content"]}


def rendered(rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return conversations as the model sees them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_model.rendered([file])


@pytest.mark.parametrize(
    ("box", "report", "parts"),
    [
        ("B", "12", (1.0, 1.0, 1.0)),
        ("A", "98", (0.0, 0.0, 1.0)),
        ("B", "many", (0.0, 1.0, 0.0)),
        ("Z", "nothing", (0.0, 0.0, 0.0)),
    ],
)
def test_the_reward_needs_both(box: str, report: str, parts: tuple[float, float, float]) -> None:
    calls = [{"choices": [{"message": {"content": text}}]} for text in (box, report)]
    spans = [SimpleNamespace(call=SimpleNamespace(response=call)) for call in calls]
    reward = score(SimpleNamespace(task={"boxes": {"A": "98", "B": "12"}, "box": "B"}), spans)

    assert parts == (reward.value, reward.dimensions["guide"], reward.dimensions["picker"])


def test_the_control_differs_in_what_trains_only() -> None:
    team, alone = (
        tomllib.loads((TEAM / f"{name}.toml").read_text(encoding="utf-8")) for name in ("experiment", "alone")
    )
    guiding, picking = team.pop("algorithm")
    (grpo,) = alone.pop("algorithm")
    team.pop("schedule")
    for config in (team, alone):
        del config["experiment"]["name"], config["experiment"]["validate_every"]

    assert team == alone
    assert guiding["params"] == grpo["params"]
    assert guiding["params"] == {**picking["params"], "tasks_per_step": 8, "group_size": 8}


def test_the_team_begins_with_the_weights_of_the_warmup() -> None:
    warmup, team = (load_config(TEAM / f"{name}.toml") for name in ("warmup", "experiment"))
    (sft,) = warmup.algorithm
    weights = f"{warmup.experiment.workdir}/{warmup.experiment.name}/run-1/{sft.name}/weights/000001"

    assert {"guide": weights, "picker": weights} == {name: one.params["model"] for name, one in team.policy.items()}


def test_a_short_training_runs_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TEAM, tmp_path / "team", ignore=shutil.ignore_patterns("out", "tests", "__py*")))
    run(folder, "make_data.py")
    dialogues = folder / "out/data/dialogues.jsonl"
    dialogues.write_text("".join(dialogues.read_text(encoding="utf-8").splitlines(keepends=True)[:400]))
    run(folder, str(TEAM.parent / "make_model.py"))
    words = [word for key, value in TINY.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    result = json.loads(run(folder, "-m", "agl", "run", "experiment.toml", "--json", *words))
    curve = asyncio.run(demo.read_curves(folder / "out/runs.db", "team"))
    demo.draw({"team": curve}, tmp_path / "curves.png")

    assert {"guiding": 1, "picking": 1} == result["steps"]
    assert [result["before"], result["after"]] == [means["team"] for means in curve.values()]
    assert {"guide", "picker", "team"} == set(curve[0])
    assert (tmp_path / "curves.png").stat().st_size > 5000


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout
