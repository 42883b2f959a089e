"""``agl replay --align`` on a real SQLite store, with the real search; judge and optimiser are one scripted model."""

import asyncio
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl import Reward, Rollout, Span, semconv
from agl.tracing import make_reward_span
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Status
from agl_testing.stores.samples import claim_one, outcome_of

EXPERIMENT = """
[experiment]
agent = "missing:agent"
name = "letters"
store = "sqlite:///runs/letters.db"
train = "missing.jsonl"

[[reward]]
use = "judge"
params = {{ source = "output", retries = 0, model = {{ base_url = "{url}", model = "scripted" }} }}

[policy.editor]
use = "openai"
model = "scripted"
params = {{ base_url = "{url}", api_key_env = "" }}
"""

COMMENT = "It has to be polite."
RULE = "Only polite work is good."


def answer(request: ModelRequest) -> Reply:
    """Judge by the length, or by politeness if the template says so; improve a template by what people said."""
    text = "\n".join(turn.text for turn in request.turns)
    old = re.search(r"<text>\n(.*)\n</text>", text, re.DOTALL)
    if old is not None and "# Job" in text:
        rule = RULE if COMMENT in text else "Be fair."
        return Reply(text=f"<new_text>\n{rule}\n{old[1]}\n</new_text>")
    work = text.partition("<work>")[2].partition("</work>")[0]
    good = "please" in work if RULE in text else len(work) > 40
    return Reply(text=f"I looked at it.\nScore: {9 if good else 2}")


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=answer) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ScriptedModelServer) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(url=server.base_url))
    (tmp_path / "runs").mkdir()
    return tmp_path


async def record(tasks: int, *, comment: str) -> None:
    """Record letters, half of them long and half of them polite; people rate the polite ones good.

    People also note the minutes that a rating took, which is a reward with a name; some tasks have no tone.
    """
    store, rng = SQLiteStore("sqlite:///runs/letters.db"), random.Random(0)
    for number in range(tasks):
        is_polite, is_long = number % 2 == 0, rng.random() < 0.5
        said = " ".join(rng.choices(("river", "stone", "cloud", "violet"), k=12 if is_long else 3))
        made = Rollout(
            rollout_id=f"letters-1-grpo-train-00001-{number:05d}-000",
            task={
                "ask": f"letter {number} about {rng.choice(('bread', 'rain', 'trains'))}",
                **({"tone": "kind"} if number % 5 else {}),
            },
            experiment="letters",
            group_id=f"task-{number}",
        )
        await store.enqueue([made])
        claim = await claim_one(store)
        ids = made.rollout_id, claim.attempt.attempt_id
        output = {semconv.OUTPUT: f"please {said}" if is_polite else said}
        span = Span(rollout_id=ids[0], attempt_id=ids[1], span_id="a" * 16, name="rollout", attributes=output)
        rating = Reward(value=float(is_polite), source="human", feedback="" if is_polite else comment)
        minutes = Reward(value=4.0, name="minutes", source="human")
        rewards = [make_reward_span(*ids, one) for one in (rating, minutes)]
        await store.finish([outcome_of(claim, spans=[span, *rewards])])
    await store.close()


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, ["replay", "--align", "experiment.toml", *args], catch_exceptions=False)


def kappas(output: str) -> dict[str, float]:
    found = re.findall(r"(before|after): agreement with people on 30 rated rollouts: kappa (-?[\d.]+) ", output)
    return {when: float(kappa) for when, kappa in found}


def test_template_that_agrees_more_on_held_out_ratings_is_written(folder: Path) -> None:
    asyncio.run(record(60, comment=COMMENT))
    result = invoke()
    assert 0 == result.exit_code, result.output
    found = kappas(result.output)
    assert abs(found["before"]) < 0.4
    assert 1.0 == found["after"]
    assert RULE in (folder / "judge.txt").read_text()
    assert "wrote judge.txt" in result.output


def test_template_that_agrees_no_more_is_not_written(folder: Path) -> None:
    asyncio.run(record(60, comment=""))
    result = invoke("--optimizer", "editor")
    assert 1 == result.exit_code, result.output
    assert "the template stays" in result.output
    assert not (folder / "judge.txt").exists()


def test_same_template_is_not_judged_again(folder: Path) -> None:
    judged = itertools.count()

    def improve(request: ModelRequest) -> Reply:
        """Judge by length, and by politeness after the first measurement; have no idea for a template."""
        text = "\n".join(turn.text for turn in request.turns)
        if "# Job" in text:
            return Reply(text="I have no better idea.")
        work = text.partition("<work>")[2].partition("</work>")[0]
        good = len(work) > 40 if next(judged) < 30 else "please" in work
        return Reply(text=f"Score: {9 if good else 2}")

    asyncio.run(record(60, comment=COMMENT))
    with ScriptedModelServer(respond=improve) as other:
        (folder / "experiment.toml").write_text(EXPERIMENT.format(url=other.base_url))
        result = invoke()
    assert 1 == result.exit_code, result.output
    assert "the template stays: the search found nothing better" in result.output
    assert {"before"} == {*kappas(result.output)}
    assert not (folder / "judge.txt").exists()


def test_rollouts_without_a_score_are_left_out_of_both_measurements(folder: Path) -> None:
    judged = itertools.count(1)

    def refuse(request: ModelRequest) -> Reply | Status:
        if "# Job" not in request.turns[-1].text and next(judged) in (5, 15, 25):
            return Status(code=429)
        return answer(request)

    asyncio.run(record(60, comment=COMMENT))
    with ScriptedModelServer(respond=refuse) as other:
        (folder / "experiment.toml").write_text(EXPERIMENT.format(url=other.base_url))
        result = invoke()
    assert 0 == result.exit_code, result.output
    assert "the judge gave no score for 3 held-out rollouts; both measurements leave these out" in result.output
    assert "before, of the others: agreement with people on 27 rated rollouts" in result.output
    assert "after: agreement with people on 27 rated rollouts: kappa 1.00" in result.output


def test_judge_that_breaks_ends_the_command(folder: Path, server: ScriptedModelServer) -> None:
    made = EXPERIMENT.replace("retries = 0,", 'retries = 0, template = "{{tone}}: {{text}}",')
    (folder / "experiment.toml").write_text(made.format(url=server.base_url))
    asyncio.run(record(60, comment=COMMENT))
    result = invoke()
    assert 0 != result.exit_code
    assert "tone" in result.output
    assert "before" not in result.output


def test_too_few_ratings_are_refused_before_the_first_question(folder: Path, server: ScriptedModelServer) -> None:
    asyncio.run(record(30, comment=COMMENT))
    result = invoke()
    assert 0 != result.exit_code
    assert "people rated 30 tasks, " in result.output
    assert "20 of each at least" in result.output
    assert not server.calls
