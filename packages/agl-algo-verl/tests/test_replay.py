"""Replay in `verl`: rollouts of earlier steps are trained again, weighted, counted, and restored after a restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agl.contracts import CallUse
from agl.errors import ConfigError
from agl_algo_verl.rows.replay import VerlReplay, with_replayed
from agl_algo_verl.rows.rows import PreparedStep, RowSample
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import read_settings
from agl_testing.conformance import AlgorithmConformance
from agl_testing.conformance.bench import AlgorithmBench

from .world import config, scenario

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import StepReport
    from agl_testing.conformance import AlgorithmScenario

REPLAY: dict[str, Any] = {"replay.share": 0.5, "algorithm.rollout_correction.rollout_is": "token"}


class TestConformance(AlgorithmConformance):
    """The rollouts that may be replayed are the same after a restart."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario(model_dir, **REPLAY, **{"actor.ppo_mini_batch_size": 1})


def reports_of(folder: Path, model_dir: Path, *, steps: int = 3, **keys: Any) -> list[StepReport]:
    made = scenario(model_dir, **keys, **{"trainer.total_training_steps": steps})

    async def body() -> list[StepReport]:
        async with AlgorithmBench(made, folder) as bench:
            algorithm = made.make()
            try:
                await algorithm.setup(bench.context())
                return [await algorithm.step() for _ in range(steps)]
            finally:
                await algorithm.close()

    return asyncio.run(body())


def test_a_step_trains_old_rollouts_beside_its_own_and_the_ledger_has_each_once(
    model_dir: Path, tmp_path: Path
) -> None:
    reports = reports_of(tmp_path, model_dir, **REPLAY)
    loud = {name for name, calls in reports[0].uses.items() if any(call.advantage for call in calls)}
    assert [0.0, len(loud)] == [report.metrics["rollouts_replayed"] for report in reports[:2]]
    trained = [rollout for report in reports for rollout in report.trained]
    assert 3 * 8 == len(trained) == len(set(trained))
    again = {name: calls for name, calls in reports[1].uses.items() if name in reports[0].trained}
    assert loud == set(again)
    assert {"replayed 1 version later, with importance weights of at most 2"} == {
        call.note for calls in again.values() for call in calls
    }
    assert not set(again) & set(reports[2].uses)
    assert reports[1].metrics["replay_weight"] == pytest.approx(1.0, abs=0.3)


def test_the_bound_reaches_the_loss_and_a_critic_learns_from_new_rollouts_alone(
    model_dir: Path, tmp_path: Path
) -> None:
    tight = {**REPLAY, "algorithm.rollout_correction.rollout_is_threshold": 1e-6}
    loose, bound = (
        reports_of(tmp_path / name, model_dir, steps=2, **keys) for name, keys in (("a", REPLAY), ("b", tight))
    )
    assert 1.0 == bound[1].metrics["replay_truncated"] > loose[1].metrics["replay_truncated"]
    critic: dict[str, Any] = {
        "algorithm.adv_estimator": "gae",
        "critic.optim.lr": 1e-2,
        "trainer.critic_warmup": 2,
        "algorithm.rollout_correction.rollout_is": "token",
    }
    without, replayed = (
        reports_of(
            tmp_path / f"critic{share}", model_dir, steps=3, **critic, **({"replay.share": share} if share else {})
        )
        for share in (0.0, 0.5)
    )
    assert [0.0, 0.0] == [report.metrics["rollouts_replayed"] for report in replayed[:2]]
    assert [report.metrics["vf_loss"] for report in without] == [report.metrics["vf_loss"] for report in replayed]


def row(rollout: str, *, group: int = 0, advantage: float = 1.0) -> RowSample:
    mask = torch.tensor([True, True])
    return RowSample(
        rollout=rollout,
        group=group,
        ids=torch.tensor([1, 2, 3]),
        mask=mask,
        advantages=advantage * mask.float(),
        behaviour=-mask.float(),
        temperature=0.5,
        calls=((f"{rollout}/0", 0, 2),),
        old=-mask.float(),
    )


def test_saved_rows_come_back_and_are_dealt_out_over_the_tasks_of_a_step(tmp_path: Path) -> None:
    settings = read_settings(config(**REPLAY))[0]
    one, two = (VerlReplay(settings, workdir=tmp_path) for _ in range(2))
    own = PreparedStep(samples=[row("x"), row("y", group=1)], rollouts=[("x", 0), ("y", 1)], metrics={})
    one.take(own, version="v1")
    rows = [row("a"), row("a", advantage=-2.0), row("b"), row("silent", advantage=0.0)]
    uses = {name: (CallUse(span_id=f"{name}/0", row=0),) for name in ("a", "b", "silent")}
    one.add(rows, version="v1", uses=uses)
    one.save(step=3)
    two.load(step=3)
    first, second = (with_replayed(own, each.take(own, version="v2")) for each in (one, two))
    assert [("x", 0), ("y", 1), ("a", 0), ("b", 1)] == first.rollouts == second.rollouts
    assert [0, 1, 0, 0, 1] == [sample.group for sample in second.samples]
    for left, right in zip(first.samples, second.samples, strict=True):
        assert (left.temperature, left.calls) == (right.temperature, right.calls)
        assert torch.equal(left.advantages, right.advantages)
    assert all(sample.old is None for sample in second.samples[2:])
    one.clear(step=3)
    assert [] == with_replayed(own, one.take(own, version="v3")).samples[2:]


def test_damaged_rows_are_named_and_training_goes_on_without_them(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario(model_dir, **REPLAY, **{"trainer.total_training_steps": 2}), tmp_path)
    said: list[str] = []

    async def body() -> StepReport:
        async with bench:
            first, again = bench.scenario.make(), bench.scenario.make()
            await first.setup(bench.context())
            await first.step()
            (tmp_path / "replay" / "000001" / "rows.safetensors").write_bytes(b"damaged")
            await again.setup(replace(bench.context(), say=said.append))
            await again.restore(first.state())
            return await again.step()

    assert 0.0 == asyncio.run(body()).metrics["rollouts_replayed"]
    assert ["rows.safetensors is missing or was changed; training goes on"] == [
        text.partition("000001/")[2].partition(" without")[0] for text in said if "replay" in text
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"replay.share": 0.5}, r'rollout_correction\.rollout_is = "token"'),
        (
            {"replay.share": 1.0, "algorithm.rollout_correction.rollout_is": "token"},
            "replay.share = 1, which",
        ),
        ({"replay.max_staleness": 2}, "replay.max_staleness without replay.share"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(config(**keys))
    with pytest.raises(ConfigError, match=r"replay\.share = .*critic on Ray"):
        read_ray_settings(config(**REPLAY, **{"algorithm.adv_estimator": "gae", "rollout.name": "agl_hf"}))
