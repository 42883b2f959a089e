"""The conformance class of reward emitters: for any recorded spans, values are finite and equal every time."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar, cast

import msgspec
import pytest

from agl.contracts import RewardEmitter
from agl.schemas import Record, Reward, Rollout, Span
from agl_testing.conformance._base import Conformance, require
from agl_testing.conformance.samples import chat_span, error_span, rollout_of, tool_span


class RewardCase(Record, frozen=True, kw_only=True):
    """A finished attempt, and the value that the emitter must give to it; ``None`` for no value."""

    rollout: Rollout
    spans: tuple[Span, ...]
    expected: float | None


class RewardConformance(Conformance):
    """Run every test of the contract for reward emitters.

    .. code-block:: python

        class TestMyReward(RewardConformance):
            task = {"question": "1+1", "answer": "2"}

            @pytest.fixture
            def emitter(self):
                return MyReward()

    Override the fixture ``cases`` too, to state values that the emitter must give.
    """

    contract: ClassVar[str] = "reward"

    task: ClassVar[Any] = {"question": "what is 6 * 7?", "answer": "42"}
    """A task that the emitter understands, including hidden fields."""

    is_deterministic: ClassVar[bool] = True
    """True if equal records get equal rewards; false for an emitter that calls a model."""

    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        """The emitter under test; the only fixture that must be overridden."""
        raise NotImplementedError("override the fixture 'emitter' with the reward emitter under test")

    @pytest.fixture
    def cases(self) -> Sequence[RewardCase]:
        """Attempts with the values that the emitter must give; empty by default."""
        return ()

    @pytest.fixture
    def attempts(self) -> list[tuple[Rollout, list[Span]]]:
        """Sample attempts: without spans, with a plain answer, with a tool, with errors, and with a failed rollout."""
        rollout = rollout_of(self.task)
        answer = chat_span(rollout, text="42")
        spans = [[], [answer], [tool_span(rollout), answer], [error_span(rollout), tool_span(rollout, status="error")]]
        failed = msgspec.structs.replace(rollout, status="failed")
        return [*((rollout, list(recorded)) for recorded in spans), (failed, [answer])]

    def test_rewards_are_finite_numbers_or_no_opinion(
        self, emitter: RewardEmitter, attempts: list[tuple[Rollout, list[Span]]]
    ) -> None:
        for rollout, spans in attempts:
            for reward in evaluate(emitter, rollout, spans):
                values = [reward.value, *reward.dimensions.values()]
                assert all(value is None or math.isfinite(value) for value in values)

    def test_rewards_about_spans_name_recorded_spans(
        self, emitter: RewardEmitter, attempts: list[tuple[Rollout, list[Span]]]
    ) -> None:
        for rollout, spans in attempts:
            named = {reward.span_id for reward in evaluate(emitter, rollout, spans) if reward.span_id is not None}
            assert named <= {span.span_id for span in spans}

    def test_equal_records_get_equal_rewards(
        self, emitter: RewardEmitter, attempts: list[tuple[Rollout, list[Span]]]
    ) -> None:
        require(self.is_deterministic, "is_deterministic", self.contract)
        for rollout, spans in attempts:
            assert evaluate(emitter, rollout, spans) == evaluate(emitter, rollout, spans)

    def test_records_are_left_as_they_were(
        self, emitter: RewardEmitter, attempts: list[tuple[Rollout, list[Span]]]
    ) -> None:
        for rollout, spans in attempts:
            before = copy.deepcopy((rollout, spans))
            evaluate(emitter, rollout, spans)
            assert before == (rollout, spans)

    def test_agent_is_never_named_as_the_source(
        self, emitter: RewardEmitter, attempts: list[tuple[Rollout, list[Span]]]
    ) -> None:
        sources = {r.source for rollout, spans in attempts for r in evaluate(emitter, rollout, spans)}
        assert "agent" not in sources

    def test_stated_cases_get_their_values(self, emitter: RewardEmitter, cases: Sequence[RewardCase]) -> None:
        for case in cases:
            values = [reward.value for reward in evaluate(emitter, case.rollout, case.spans)]
            assert [case.expected] == (values or [None])


def evaluate(emitter: RewardEmitter, rollout: Rollout, spans: Sequence[Span]) -> list[Reward]:
    """Return the emitter's rewards as a list; the emitter may be a function or a coroutine function."""
    given: Any = emitter(rollout, spans)
    if inspect.isawaitable(given):
        given = asyncio.run(_await(given))
    if given is None:
        return []
    if isinstance(given, Reward):
        return [given]
    if isinstance(given, int | float):
        return [Reward(value=float(given))]
    rewards = list(cast("Sequence[Any]", given))
    assert all(isinstance(reward, Reward) for reward in rewards), f"{given!r} is not a sequence of Reward"
    return rewards


async def _await(given: Awaitable[Any]) -> Any:
    return await given
