"""What a type checker sees through ``import agl``: names that are imported lazily keep their types."""

from typing import assert_type

import agl
from agl import AlgorithmSpec, PluginManager, RewardEntry, Rollout, StoreEntry, TracerEntry


def entries(manager: PluginManager) -> None:
    assert_type(manager.tracer("otel"), TracerEntry)
    assert_type(manager.store_entry("sqlite"), StoreEntry)
    assert_type(manager.reward("exact-match"), RewardEntry)


def specifications() -> None:
    assert_type(agl.VERL({"trainer": {}}), AlgorithmSpec)
    assert_type(agl.GRPO(tunes="main_llm", lr=1e-5), AlgorithmSpec)


def values(rollout: Rollout) -> None:
    assert_type(agl.Rollout(rollout_id="r", task=1), Rollout)
    assert_type(rollout.is_finished, bool)


def agents() -> None:
    @agl.agent
    def solve(task: str) -> float:
        return float(task)

    assert_type(solve("1"), float)


class Plugin:
    @agl.hookimpl
    def agl_rollout_finished(self, rollout: Rollout) -> None:
        assert_type(rollout.status, agl.RolloutStatus)
