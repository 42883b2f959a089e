"""The example that mixes algorithms: its parts agree with each other, and a short training runs from first to last."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch and torch")
pytest.importorskip("agl_algo_apo", reason="needs agl-algo-apo")
pytest.importorskip("matplotlib", reason="needs matplotlib")

MIXED = Path(__file__).parents[1]
sys.path.insert(0, str(MIXED))

import agent  # noqa: E402
import curves  # noqa: E402
import house  # noqa: E402
import make_data  # noqa: E402
import scripted  # noqa: E402
from reward import FormIsRight  # noqa: E402

from agl_run import load_config  # noqa: E402
from agl_testing.model_server import Reply, ScriptedModelServer  # noqa: E402
from worlds.prompts import line_of  # noqa: E402

FACTS = {"name": "Holt", "city": "Bergen", "item": "lamps", "quantity": "7", "amount": "80", "date": "3 May 2027"}
RULES = [line_of(field, style) for field, style in house.HOUSE.items()]
FORM = "name: HOLT\ncity: Bergen\nitem: lamps\nquantity: seven\namount: 80 EUR\ndate: 2027-05-03"
TINY = {
    "experiment.validation_limit": 4,
    "algorithm.sft.params.updates": 2,
    "algorithm.apo.params.budget": 64,
    "algorithm.apo.params.beam_rounds": 1,
    "algorithm.grpo.params.steps": 1,
    "algorithm.grpo.params.tasks_per_step": 1,
    "algorithm.grpo.params.group_size": 2,
}
"""Settings that make the experiments small enough for a test."""


def with_lines(*lines: str) -> str:
    """The checker's first prompt with lines added."""
    first, *rest = agent.CHECK.split("\n")
    return "\n".join([first, *lines, *rest])


def play(draft: str, prompt: str) -> tuple[str, Any]:
    """The form that is sent where the writer says `draft`, and its reward; over real HTTP."""

    async def send(writer: str, checker: str) -> str:
        llms = [
            SimpleNamespace(base_url=url, api_key="none", model=model)
            for url, model in ((writer, "writer"), (checker, scripted.CHECKER_MODEL))
        ]
        form = await agent.solve({"letter": "..."}, *llms, prompt)
        for url in (writer, checker):
            await agent.connections(url).close()
        agent.connections.cache_clear()  # a later server may get the same port
        return form

    with ScriptedModelServer([Reply(text=draft)]) as writer, scripted.server() as checker:
        form = asyncio.run(send(writer.base_url, checker.base_url))
    calls = [{"choices": [{"message": {"content": text}}]} for text in (draft, form)]
    spans = [SimpleNamespace(call=SimpleNamespace(response=call)) for call in calls]
    return form, FormIsRight()(SimpleNamespace(task={"facts": FACTS}), spans)


def test_a_right_draft_and_a_prompt_with_every_rule_make_a_perfect_form() -> None:
    form, reward = play(house.write_form(FACTS), with_lines(*RULES))

    assert FORM == form
    assert (1.0, {"facts": 1.0, "style": 1.0}, "") == (reward.value, reward.dimensions, reward.feedback)


def test_a_right_draft_alone_earns_the_entries_that_stay_as_they_are() -> None:
    _, reward = play(house.write_form(FACTS), agent.CHECK)

    assert (pytest.approx(2 / 6), pytest.approx(2 / 6)) == (reward.value, reward.dimensions["style"])
    assert "[checker] date: expected ISO 8601, found plain." in reward.feedback


def test_a_perfect_prompt_alone_earns_what_the_writer_read() -> None:
    draft = house.write_form({**dict.fromkeys(FACTS, "?"), "quantity": "7"})
    _, reward = play(draft, with_lines(*RULES))

    assert (pytest.approx(1 / 6), 1.0) == (reward.value, reward.dimensions["style"])
    assert "[writer] name: the letter says something else." in reward.feedback
    assert None is play("", with_lines(*RULES))[1].dimensions["style"]


@pytest.mark.parametrize("field", house.FIELDS)
def test_the_wrong_style_is_named_and_leads_to_the_right_line(field: str) -> None:
    _, reward = play(house.write_form(FACTS), with_lines(line_of(field, "EUR"), *RULES[:1]))
    said = scripted.ScriptedOptimizer(skill=1.0).answer(f"<text>\n{agent.CHECK}\n</text>\n{reward.feedback}")

    assert any(line in said for line in [*RULES, line_of("city", "plain"), line_of("item", "plain")])
    if field == "date":
        assert "[checker] date: expected ISO 8601, found EUR." in reward.feedback


def test_no_style_loses_what_the_shop_has_to_know() -> None:
    rows = make_data.tasks(300, seed=3)
    for field in house.FIELDS:
        facts = {row["facts"][field] for row in rows}
        assert len(facts) == len({house.wanted(field, fact) for fact in facts}), field


def test_letters_hold_their_facts_and_none_is_validated_that_was_trained(tmp_path: Path) -> None:
    run(MIXED, "make_data.py", "--out", str(tmp_path))
    train, val, taught = (lines(tmp_path / f"{name}.jsonl") for name in ("train", "val", "dialogues"))
    letters = [{row["letter"] for row in rows} for rows in (train, val)]
    letters.append({row["messages"][1]["content"] for row in taught})

    assert all(fact in row["letter"] for row in train + val for fact in row["facts"].values())
    assert len(train) + len(val) + len(taught) == len(set.union(*letters))
    assert agent.WRITE == taught[0]["messages"][0]["content"]


def test_the_three_experiments_differ_in_what_trains_only() -> None:
    mixed, *others = (
        tomllib.loads((MIXED / f"{arm}.toml").read_text(encoding="utf-8")) for arm in ("mixed", "grpo-only", "apo-only")
    )
    algorithms = {item["use"]: item for item in mixed["algorithm"]}
    assert agent.CHECK == mixed["resource"]["checker_prompt"]["template"]
    for other in others:
        (algorithm,) = other["algorithm"]
        assert paid(mixed) == paid(other)
        assert without_size(algorithms[algorithm["use"]]) == without_size(algorithm)
        assert shared(mixed) == shared(other)


def test_the_large_models_run_the_same_experiment() -> None:
    small, large = (tomllib.loads((MIXED / f"{arm}.toml").read_text(encoding="utf-8")) for arm in ("mixed", "large"))

    for key in ("experiment", "runner", "reward", "resource"):
        assert small[key] == large[key]
    assert ["apo", "grpo"] == [algorithm.name for algorithm in load_config(MIXED / "large.toml").algorithm]


def shared(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that all experiments share: no names, no algorithms, no source of the writer's weights."""
    own = ("name", "workdir", "validate_every")
    section = {key: value for key, value in config["experiment"].items() if key not in own}
    writer = {key: value for key, value in config["policy"]["writer"].items() if key != "model"}
    rest = {key: value for key, value in config.items() if key not in ("experiment", "policy", "algorithm", "schedule")}
    return {**rest, "experiment": section, "writer": writer, "checker": config["policy"]["checker"]}


def without_size(algorithm: dict[str, Any]) -> dict[str, Any]:
    params = {key: value for key, value in algorithm["params"].items() if key not in ("steps", "budget")}
    return {**algorithm, "params": params}


def paid(config: dict[str, Any]) -> int:
    """Rollouts that an experiment pays for at most."""
    found = {item["use"]: item["params"] for item in config["algorithm"]}
    grpo = found.get("grpo", {"steps": 0, "tasks_per_step": 0, "group_size": 0})
    return grpo["steps"] * grpo["tasks_per_step"] * grpo["group_size"] + found.get("apo", {"budget": 0})["budget"]


def test_a_short_training_runs_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MIXED, tmp_path / "mixed", ignore=shutil.ignore_patterns("out", "tests", "__py*")))
    run(folder, "make_data.py")
    run(folder, str(MIXED.parent / "make_model.py"))
    val = folder / "out/data/val.jsonl"
    val.write_text("".join(val.read_text(encoding="utf-8").splitlines(keepends=True)[:9]), encoding="utf-8")
    with scripted.server() as server:
        urls = ("policy.checker.base_url", "algorithm.apo.params.optimizer.base_url")
        settings = {**TINY, **dict.fromkeys(urls, server.base_url)}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        result = json.loads(run(folder, "-m", "agl", "run", "mixed.toml", "--json", *words))
    points = curves.read_points(folder / "out/runs.db", "mixed")

    assert {"sft": 1, "apo": 3, "grpo": 1} == result["steps"]
    assert [result["before"], result["after"]] == [points[0].reward, points[-1].reward]
    assert points[0].rollouts == 0 < points[-1].rollouts <= TINY["algorithm.apo.params.budget"] + 2
    for arm in ("grpo-only", "apo-only"):
        warmed_up = load_config(folder / f"{arm}.toml").policy["writer"].params["model"]
        assert (folder / warmed_up / "model.safetensors").exists()


def ended(arm: str, seed: int, reward: float) -> curves.Curve:
    """A run that began with nothing."""
    first = curves.Point(rollouts=0, reward=0.0, facts=0.0, style=math.nan)
    last = curves.Point(rollouts=576, reward=reward, facts=reward, style=1.0)
    return curves.Curve(arm=arm, seed=seed, points=[first, last], seconds=2.0, cpu=1.0)


def test_curves_are_compared_with_the_better_one_and_drawn(tmp_path: Path) -> None:
    rewards = {"mixed": (0.8, 0.9), "grpo-only": (0.1, 0.2), "apo-only": (0.2, 0.4)}
    found = [ended(arm, seed, reward) for arm, pair in rewards.items() for seed, reward in enumerate(pair)]
    curves.draw(found, tmp_path / "curves.png")

    assert "mixed is 55.0 points above apo-only" == curves.comparison(found).splitlines()[-1]
    assert "| mixed | 1 | 576 | 0.90 | 1.00 | **0.90** | 2 | 1 |" == curves.table(found).splitlines()[3]
    assert (tmp_path / "curves.png").stat().st_size > 5000


def run(folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
