"""Replay of rollouts of earlier steps: the choice of rollouts, their importance weights, and their records."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

import agl
from agl.algorithms import algorithm
from agl.contracts import CallUse, RolloutQuery
from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.batch import RowSample
from agl_algo_torch.learner.replay import REPLAY_FILE, ReplayBuffer
from agl_algo_torch.ppo import PPO
from agl_objectives.directories import write_directory
from agl_objectives.settings import Replay
from agl_run import Quiet, policy
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import invoke_agl
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, run

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import StepReport


def scenario_of(model_dir: Path, *, kind: type[GRPO | PPO] = GRPO, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 4, "tasks_per_step": 2, "group_size": 4, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(kind, **settings),
        play=World().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    """The rollouts that may be replayed are the same after a restart."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(model_dir, replay_share=0.5, updates_per_step=2)


@pytest.mark.long
class TestConformanceOfPPO(AlgorithmConformance):
    """PPO also replays the same rollouts after a restart."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(model_dir, kind=PPO, replay_share=0.5, updates_per_step=2, critic_warmup=1)


def reports_of(tmp_path: Path, model_dir: Path, **params: Any) -> list[StepReport]:
    return asyncio.run(run(AlgorithmBench(scenario_of(model_dir, **params), tmp_path)))


def row(rollout: str, *, advantage: float = 1.0, behaviour: float = -1.0) -> RowSample:
    mask = torch.tensor([False, True, True])
    return RowSample(
        rollout=rollout,
        ids=torch.tensor([1, 2, 3]),
        mask=mask,
        advantages=advantage * mask.float(),
        behaviour=behaviour * mask.float(),
        temperature=torch.ones(3),
    )


def buffer(*, share: float = 0.5, bound: float = 2.0, max_staleness: int = 2) -> ReplayBuffer:
    return ReplayBuffer("grpo", Replay(share=share, bound=bound, max_staleness=max_staleness))


def uses(*rollouts: str) -> dict[str, tuple[CallUse, ...]]:
    return {name: (CallUse(span_id=f"{name}/0", row=0), CallUse(span_id=f"{name}/1", note="cut")) for name in rollouts}


async def no_pictures(spans: Any) -> None:
    raise AssertionError("there are no pictures")


def keep_only(saved: Path, keys: tuple[str, ...]) -> None:
    """Leave only these keys in the saved state, as before pictures were trained."""
    tensors, state = (saved / "rows.safetensors").read_bytes(), json.loads((saved / REPLAY_FILE).read_text())

    def fill(directory: Path) -> None:
        (directory / "rows.safetensors").write_bytes(tensors)
        (directory / REPLAY_FILE).write_text(json.dumps({key: state[key] for key in keys}))

    write_directory(saved, fill)


def names(found: Any) -> list[str]:
    return [rollout.rows[0].rollout for rollout in found.rollouts]


def test_the_newest_come_first_then_the_largest_advantages_and_each_once() -> None:
    kept = buffer()
    kept.pool.take("v1", own=9)
    kept.pool.add("v1", [row("old", advantage=9.0)], uses=uses("old"))
    kept.pool.take("v2", own=0)
    kept.pool.add("v2", [row("small", advantage=-0.5), row("large", advantage=-2.0)], uses=uses("small", "large"))
    found = kept.pool.take("v3", own=2)
    assert (["large", "small"], (1, 1)) == (names(found), found.ages)
    found = kept.pool.take("v3", own=2)
    assert (["old"], (2,)) == (names(found), found.ages)
    assert [] == names(kept.pool.take("v3", own=2))


def test_rollouts_of_the_live_version_and_silent_ones_are_not_replayed() -> None:
    kept = buffer()
    kept.pool.take("v1", own=1)
    kept.pool.add("v1", [row("loud"), row("silent", advantage=0.0)], uses=uses("loud", "silent"))
    assert [] == names(kept.pool.take("v1", own=9))
    assert ["loud"] == names(kept.pool.take("v2", own=9))


def test_no_rollout_is_replayed_after_more_versions_than_allowed() -> None:
    kept = buffer(max_staleness=2)
    kept.pool.take("v1", own=1)
    kept.pool.add("v1", [row("a"), row("b")], uses=uses("a", "b"))
    kept.pool.take("v2", own=0)
    assert (2,) == kept.pool.take("v3", own=1).ages
    assert [] == names(kept.pool.take("v4", own=9))


def test_the_share_is_that_of_all_rollouts_that_a_step_trains_on() -> None:
    kept = buffer(share=0.25)
    kept.pool.take("v1", own=1)
    kept.pool.add("v1", [row(str(n)) for n in range(20)], uses=uses(*map(str, range(20))))
    assert 4 == len(names(kept.pool.take("v2", own=12)))


class Known:
    """An objective with a constant log pi_old."""

    def __init__(self, old: float) -> None:
        self.old = old

    def with_old_logprobs(self, rows: Any, **_: Any) -> list[RowSample]:
        return [replace(row, old=torch.full((3,), self.old)) for row in rows]


def test_weights_are_the_ratio_to_the_policy_that_drew_the_tokens_up_to_the_bound() -> None:
    kept = buffer(bound=2.0)
    rows: list[RowSample] = []
    for behaviour in (-1.0, -0.5, -3.0):
        known: Any = Known(-1.0)
        none: Any = None
        rows += kept.weighed([row("a", behaviour=behaviour)], objective=known, learner=none)
    weights = [float(each.importance[1]) for each in rows if each.importance is not None]
    assert [1.0, pytest.approx(0.60653, abs=1e-4), 2.0] == weights
    assert {"replay_weight": pytest.approx(3.60653 / 3, abs=1e-4), "replay_truncated": pytest.approx(1 / 3)} == (
        kept.truncated(rows)
    )


@pytest.mark.parametrize("keys", [("pool", "names", "media", "processor"), ("pool", "names")])
def test_a_saved_buffer_goes_on_as_if_it_had_not_been_saved(tmp_path: Path, keys: tuple[str, ...]) -> None:
    one, two = buffer(), buffer()
    one.pool.take("v1", own=1)
    one.pool.add("v1", [row("a"), row("a", advantage=-2.0), row("b")], uses=uses("a", "b"))
    one.save(tmp_path, step=1, keep=2)
    keep_only(tmp_path / "replay/000001", keys)
    asyncio.run(two.load(tmp_path, step=1, shown=no_pictures, say=print))
    first, second = one.pool.take("v2", own=1), two.pool.take("v2", own=1)
    assert (names(first), first.uses(bound=2.0)) == (names(second), second.uses(bound=2.0))
    for left, right in zip(first.rows, second.rows, strict=True):
        assert all(torch.equal(getattr(left, name), getattr(right, name)) for name in ("ids", "mask", "advantages"))


def test_a_step_replays_rollouts_beside_its_own_and_the_ledger_has_each_once(model_dir: Path, tmp_path: Path) -> None:
    reports = reports_of(tmp_path, model_dir, replay_share=0.5)
    loud = {name for name, calls in reports[0].uses.items() if any(call.advantage for call in calls)}
    assert [0.0, len(loud)] == [report.metrics["rollouts_replayed"] for report in reports[:2]]
    trained = [rollout for report in reports for rollout in report.trained]
    assert len(set(trained)) == len(trained) == 4 * 8
    again = {name: calls for name, calls in reports[1].uses.items() if name in reports[0].trained}
    assert loud == set(again), "as many as the step has of its own, and none without a gradient"
    assert {"replayed 1 version later, with importance weights of at most 2"} == {
        call.note for calls in again.values() for call in calls
    }
    assert not set(again) & set(reports[2].uses), "a rollout is replayed once"
    assert reports[1].metrics["replay_weight"] == pytest.approx(1.0, abs=0.3)


def test_ppo_replays_for_the_policy_once_the_critic_has_learned_alone(model_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kind": PPO, "critic_warmup": 1, "critic_lr": 1e-2, "updates_per_step": 2, "lr": 1e-4}
    plain = reports_of(tmp_path / "plain", model_dir, **settings)
    mixed = reports_of(tmp_path / "mixed", model_dir, **settings, replay_share=0.5)
    assert [0.0, 0.0, 8.0] == [report.metrics["rollouts_replayed"] for report in mixed[:3]]
    assert set(mixed[1].trained) <= set(mixed[2].uses), "the first step whose policy was trained"
    assert not set(mixed[0].trained) & set(mixed[2].uses)
    trained = [rollout for report in mixed for rollout in report.trained]
    assert 4 * 8 == len(set(trained)) == len(trained)
    losses = [[report.metrics["value_loss"] for report in reports[:3]] for reports in (plain, mixed)]
    assert losses[0] == losses[1], "the critic learns from new rollouts alone"
    assert plain[2].metrics["grad_norm"] != mixed[2].metrics["grad_norm"]
    assert mixed[2].metrics["replay_weight"] == pytest.approx(1.0, abs=0.3)


def test_replayed_rollouts_change_the_update_and_none_without_a_share(model_dir: Path, tmp_path: Path) -> None:
    plain = reports_of(tmp_path / "plain", model_dir, steps=2)
    mixed = reports_of(tmp_path / "mixed", model_dir, steps=2, replay_share=0.5)
    assert "rollouts_replayed" not in plain[1].metrics
    assert plain[0].metrics["grad_norm"] == mixed[0].metrics["grad_norm"]
    further = 2 * mixed[1].metrics["rollouts_replayed"]  # two tokens each
    assert plain[1].metrics["tokens"] + further == mixed[1].metrics["tokens"]
    assert plain[1].metrics["grad_norm"] != mixed[1].metrics["grad_norm"]


def test_importance_weights_reach_the_loss_where_the_sampler_is_not_corrected(model_dir: Path, tmp_path: Path) -> None:
    loose = reports_of(tmp_path / "loose", model_dir, steps=2, replay_share=0.5, correction_cap=0.0)
    tight = reports_of(tmp_path / "tight", model_dir, steps=2, replay_share=0.5, correction_cap=0.0, replay_bound=1e-6)
    assert 1.0 == tight[1].metrics["replay_truncated"]
    assert loose[1].metrics["grad_norm"] != tight[1].metrics["grad_norm"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"replay_share": 1.0}, "replay.share is 1.0; write a number of at least 0 and below 1"),
        ({"replay_share": -0.5}, "replay.share is -0.5; write a number of at least 0 and below 1"),
        ({"replay_share": 0.5, "replay_bound": 0.0}, "replay.bound is 0.0; write a number above 0"),
        (
            {"replay_share": 0.5, "replay_max_staleness": 0},
            "replay.max_staleness is 0; write a whole number of at least 1",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(GRPO, **params)


async def say(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
    """Make one call; the reward differs between the rollouts of a task."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        said: list[Any] = [{"role": "user", "content": task["text"]}]
        await client.chat.completions.create(model=llm.model, messages=said, max_tokens=3)
    return float(rollout.rollout_id[-1] == "0")


def test_agl_why_names_both_steps_that_trained_on_a_rollout(
    make_loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    loaded = make_loaded()
    loaded.model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"compute": {"device": "cpu", "threads": 1}, "tunes": "llm"}
    trainer = agl.Trainer(
        name="again",
        algorithm=algorithm("grpo", steps=2, tasks_per_step=1, group_size=2, replay={"share": 0.5}, **settings),
        policies={"llm": policy("torch", model=str(tmp_path / "model"), threads=1)},
        store=f"sqlite:///{tmp_path}/runs.db",
        folder=tmp_path,
        progress=Quiet(),
    )
    trainer.fit(say, [{"text": "one"}, {"text": "two"}])

    async def first() -> str:
        store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
        try:
            return (await store.rollouts(RolloutQuery(experiment="again")))[0].rollout_id
        finally:
            await store.close()

    rollout = asyncio.run(first())
    told = invoke_agl("why", rollout, "--store", "runs.db", folder=tmp_path)
    assert "grpo, step 1: trained on 1 of 1 call" in told
    assert "grpo, step 2: trained on 1 of 1 call; replayed 1 version later" in told
    assert "not saved" not in told
    found = json.loads(invoke_agl("why", rollout, "--store", "runs.db", "--json", folder=tmp_path))
    assert [True, True] == [step["is_saved"] for step in found["training"]]
