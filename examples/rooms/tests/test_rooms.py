"""The rooms example: its office is consistent, its scripted world obeys, and tuning finds the rules."""

import asyncio
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agl
from agl_run import Quiet, parse_config

FOLDER = Path(__file__).parents[1]
sys.path.insert(0, str(FOLDER))

import agent  # noqa: E402
import make_data  # noqa: E402
import office  # noqa: E402
import scripted  # noqa: E402


def prompt_with(*words: str) -> str:
    lines = agent.PROMPT.split("\n")
    return "\n".join([lines[0], *(scripted.RULES[word] for word in words), *lines[1:]])


def mean_score(prompt: str, *, count: int = 12) -> float:
    """The agent's mean score with a prompt, over real HTTP."""

    async def play(base_url: str) -> list[float]:
        llm = SimpleNamespace(base_url=base_url, api_key="none", model=scripted.BOOKING_MODEL)
        rows = make_data.tasks(count, seed=0)
        texts = await asyncio.gather(*(agent.book({"request": row["request"]}, llm, prompt) for row in rows))
        await agent.connections(base_url).close()
        agent.connections.cache_clear()  # a later server may get the same port
        return [office.judge(agent.booked_room(text), row["needs"])[0] for text, row in zip(texts, rows, strict=True)]

    with scripted.server() as server:
        scores = asyncio.run(play(server.base_url))
    return sum(scores) / len(scores)


def test_every_task_has_a_room_and_the_best_one_has_no_fault() -> None:
    rows = make_data.tasks(48, seed=1)
    assert 48 == len({row["request"] for row in rows})
    assert all((1.0, "") == office.judge(office.best_room(row["needs"]), row["needs"]) for row in rows)


def test_judge_names_every_fault() -> None:
    needs: dict[str, Any] = {"day": "Friday", "hour": 9, "people": 9, "equipment": ["phone"], "wheelchair": True}
    score, said = office.judge("cedar", needs)
    assert 0.0 == score
    for word in ("has no phone", "seats 6, but 9 people come", "closed for repairs on Friday", "without steps"):
        assert word in said
    assert (0.5, "oak is larger than needed: hazel fits as well.") == office.judge("oak", needs)


def test_rules_in_the_prompt_raise_the_score() -> None:
    none, some, every = (mean_score(prompt_with(*words)) for words in ((), ("capacity", "equipment"), scripted.RULES))
    assert none < 0.35 < some < every
    assert 1.0 == every


def test_optimizer_reads_feedback_and_edits_only_the_text_it_is_shown() -> None:
    request = f"<text>\n{agent.PROMPT}\n</text>\nash has no phone. ash has no screen. elm seats 6, but 9 people come."
    assert f"Advice: {scripted.RULES['equipment']}" == scripted.optimise(request)
    said = scripted.optimise(f"{request} Return it between <new_text> and </new_text>.")
    assert f"<new_text>\n{prompt_with('equipment')}\n</new_text>" in said


@pytest.mark.parametrize(
    ("optimiser", "file"), [("apo", "experiment.toml"), ("gepa", "experiment.toml"), ("apo", "messages.toml")]
)
def test_tuning_finds_the_rules(optimiser: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if optimiser == "gepa":
        pytest.importorskip("gepa", reason="needs gepa")
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--out", str(tmp_path / "data")])
    make_data.main()
    with scripted.server() as server:
        data = tomllib.loads((FOLDER / file).read_text(encoding="utf-8"))
        data["experiment"] |= {
            "store": f"sqlite:///{tmp_path / 'runs.db'}",
            "workdir": str(tmp_path / "run"),
            "train": str(tmp_path / "data" / "train.jsonl"),
            "val": str(tmp_path / "data" / "val.jsonl"),
        }
        data["policy"]["llm"] |= {"base_url": server.base_url, "model": scripted.BOOKING_MODEL, "api_key_env": ""}
        optimizer = {"base_url": server.base_url, "model": scripted.OPTIMIZER_MODEL}
        (tuner,) = data["algorithm"]
        tuner["use"] = optimiser
        tuner["params"] |= {"budget": 300, "optimizer": optimizer}
        result = agl.Trainer.from_config(parse_config(data), folder=FOLDER, progress=Quiet()).fit()
    assert result.before < 0.4
    assert result.after > 0.9
