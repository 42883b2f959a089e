"""Searches that ended and then continue: after an outage, with a larger budget, with more rounds or patience."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from agl.errors import ConfigError
from agl.stores import MemoryStore
from agl_testing.model_server import Status
from worlds.prompts import easy
from worlds.prompts_optimizer import ScriptedOptimizer

Optimize = Callable[..., Any]


@pytest.mark.parametrize("use", ["apo", "random", "gepa"])
def test_search_with_a_larger_budget_goes_on(optimize: Optimize, use: str) -> None:
    store = MemoryStore("memory://")
    short = optimize(use=use, budget=110, store=store)
    longer = optimize(use=use, budget=220, store=store, resume=True)
    assert short.stop_reason.startswith("budget:")
    assert 110 < len(longer.paid) == longer.state["spent"]["rollouts"] <= 220
    assert {r.rollout_id for r in short.paid} < {r.rollout_id for r in longer.paid}
    assert longer.progress["rounds"] > short.progress["rounds"]


def test_search_that_an_outage_ended_goes_on(optimize: Optimize) -> None:
    world, store = easy(1), MemoryStore("memory://")
    first = optimize(world, budget=300, store=store, script=ScriptedOptimizer(mode="dead", after=4))
    found = first.best
    second = optimize(world, budget=300, store=store, script=ScriptedOptimizer(), resume=True)
    assert first.stop_reason.startswith("optimizer_unreachable:")
    assert second.stop_reason.startswith("budget:")
    assert world.gap_closed(second.best) > world.gap_closed(found)
    assert len(second.paid) == second.state["spent"]["rollouts"] <= 300


@pytest.mark.parametrize(
    ("first", "then"), [({"beam_rounds": 1}, {"beam_rounds": 3}), ({"patience": 1}, {"patience": 4})]
)
def test_search_with_more_rounds_or_patience_goes_on(optimize: Optimize, first: Any, then: Any) -> None:
    store = MemoryStore("memory://")
    short = optimize(budget=600, store=store, **first)
    longer = optimize(budget=600, store=store, resume=True, **then)
    assert longer.progress["rounds"] > short.progress["rounds"]
    assert longer.progress["step"] > short.progress["step"]


def test_search_whose_file_asks_for_nothing_more_is_not_continued(optimize: Optimize) -> None:
    store = MemoryStore("memory://")
    optimize(budget=110, store=store)
    with pytest.raises(ConfigError, match="asks for nothing more"):
        optimize(budget=110, store=store, resume=True)


def test_outage_of_the_optimizer_ends_nothing(optimize: Optimize) -> None:
    class Flaky(ScriptedOptimizer):
        """Refuses its fifth to fifteenth request."""

        asked = itertools.count(1)

        def respond(self, request: Any) -> Any:
            return Status(code=503) if 5 <= next(self.asked) <= 15 else super().respond(request)

    calm, flaky = optimize(budget=200), optimize(budget=200, script=Flaky(), folder="flaky", wait_s=5.0)
    assert calm.result == flaky.result
    assert 1 == sum("the search waits for it" in line for line in flaky.said)
