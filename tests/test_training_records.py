"""What the steps of algorithms did with a rollout: kept with it, once, and told apart from steps that never ended."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery, StepReport
from agl_inspect.rollouts.step_tallies import StepTally, read_tallies
from agl_run import Quiet, policy
from agl_run.run.driver import Driver
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import invoke_agl
from agl_testing.model_server import ScriptedModelServer
from agl_testing.plugins import PluginFolder

PLUGIN = '''
import agl
from agl.contracts import CallUse, StepReport
from agl_testing.toys import ToyAlgorithm

SEEN = []


class Learner(ToyAlgorithm):
    """Trains on every rollout that is not all right, as far as its report says."""

    def __init__(self, *, advantage=0.5):
        self._advantage, self._step = advantage, 0

    async def step(self):
        self._step += 1
        collected = await self._context.collect(self._context.train, step=self._step)
        uses = {
            episode.rollout.rollout_id: (
                CallUse(span_id="1" * 16, row=0, credit=episode.reward, advantage=self._advantage, note="as it was"),
                CallUse(span_id="2" * 16, note="not_selected"),
            )
            for episode in collected.episodes
        }
        return StepReport(step=self._step, is_finished=self._step >= 2, trained=tuple(uses), uses=uses)


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="learner", factory=Learner)


@agl.hookimpl
def agl_step_finished(report):
    SEEN.append(report.uses)
'''


@pytest.fixture
def plugin(toy: str, agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return __import__(agl_plugins.install(PLUGIN, name="learner"))


def solve(task: dict[str, Any], llm: agl.LLM) -> float | None:
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "what is 1?"}])
    if task["n"] == 3:
        raise ValueError("no such page")
    return None if task["n"] == 2 else float(task["n"])


@pytest.fixture
def fit(plugin: Any, server: ScriptedModelServer, tmp_path: Path) -> Callable[..., Any]:
    def run(*, advantage: float = 0.5, resume: bool = False) -> Any:
        trainer = agl.Trainer(
            name="told",
            algorithm=[algorithm("learner", tunes="main", advantage=advantage)],
            policies={"main": policy("served", base_url=server.base_url)},
            store=f"sqlite:///{tmp_path}/runs.db",
            folder=tmp_path,
            progress=Quiet(),
        )
        return trainer.fit(solve, [{"n": n} for n in range(4)], resume=resume)

    return run


@pytest.fixture
def why(tmp_path: Path) -> Callable[..., str]:
    def ask(place: str, *options: str) -> str:
        url = f"sqlite:///{tmp_path}/runs.db"
        return invoke_agl("why", f"told-1-learner-train-{place}-000", "--store", url, *options, folder=tmp_path)

    return ask


def test_why_names_the_steps_use_of_each_call_and_the_reason_of_each_rollout_left_out(
    fit: Callable[..., Any], why: Callable[..., str], plugin: Any
) -> None:
    fit()
    told = why("00001-00001")
    assert "learner, step 1: trained on 1 of 2 calls; as it was\n" in told
    assert f"learner, step 1, call {'1' * 16}: row 0, credit 1, advantage 0.5\n" in told
    assert f"learner, step 1, call {'2' * 16}: did not train: not_selected\n" in told
    assert 'left out before training, no reward: it has no reward; [experiment] missing_reward = "pena' in why(
        "00002-00002"
    )
    assert "learner, step 1: left out before training, failed: the attempt failed" in why("00001-00003")
    assert [{}, {}] == plugin.SEEN, "observers get the report without them"


def test_sums_of_steps_are_kept_by_agent(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit()
    found = asyncio.run(_tallies(f"sqlite:///{tmp_path}/runs.db"))
    assert [("learner", 1, "train", 4), ("learner", 2, "train", 4)] == [
        (each.algorithm, each.step, each.mode, each.rollouts) for each in found
    ]
    for each in found:
        (everybody,) = each.agents
        assert (4, 4) == (everybody.rollouts, everybody.calls)
        assert everybody.tokens > 0 < everybody.seconds
        assert (2, 0.5) == (everybody.reward.count, everybody.reward.mean), "of four, one failed and one has none"


async def _tallies(url: str) -> list[StepTally]:
    store = SQLiteStore(url)
    try:
        (record,) = await store.experiments("told")
        return await read_tallies(store, record)
    finally:
        await store.close()


def test_step_that_was_killed_is_told_from_the_one_that_repeated_it(
    fit: Callable[..., Any], why: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Driver.commit

    async def dies(driver: Driver, turn: Any, report: StepReport, **rest: Any) -> StepReport:
        if report.step == 2:
            raise RuntimeError("killed on purpose")
        return await commit(driver, turn, report, **rest)

    monkeypatch.setattr(Driver, "commit", dies)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit()
    assert "trained on 1 of 2 calls; as it was; the step was not saved" not in why("00001-00001")
    killed = json.loads(why("00002-00001", "--json"))
    assert [(2, False)] == [(each["step"], each["is_saved"]) for each in killed["training"]]
    assert "as it was; the step was not saved, and is repeated when the run is resumed" in why("00002-00001")

    monkeypatch.setattr(Driver, "commit", commit)
    fit(resume=True, advantage=0.25)
    repeated = json.loads(why("00002-00001", "--json"))
    assert [(2, True)] == [(each["step"], each["is_saved"]) for each in repeated["training"]]
    assert 0.25 == repeated["training"][0]["calls"][0]["advantage"], "the newest record counts"


def test_what_was_kept_goes_with_its_rollout(fit: Callable[..., Any], tmp_path: Path, why: Callable[..., str]) -> None:
    fit()
    url, copy = f"sqlite:///{tmp_path}/runs.db", f"sqlite:///{tmp_path}/copy.db"
    invoke_agl("data", "copy", url, copy, folder=tmp_path)
    told = invoke_agl("why", "told-1-learner-train-00001-00001-000", "--store", copy, folder=tmp_path)
    assert "row 0, credit 1, advantage 0.5" in told

    async def spans_of_removed() -> int:
        store = SQLiteStore(url)
        ids = [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery(experiment="told"))]
        kept = sum([len(await store.spans(each, attempt_id="")) for each in ids])
        assert 8 == kept, "one record for each rollout and step"
        await store.delete(ids)
        await store.enqueue([agl.schemas.Rollout(rollout_id=ids[0], task={})])
        left = len(await store.spans(ids[0], attempt_id=""))
        await store.close()
        return left

    assert 0 == asyncio.run(spans_of_removed())
