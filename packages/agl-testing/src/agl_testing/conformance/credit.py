"""The conformance class of credit: calls without a reject reason get one finite number each, other calls get none."""

# ruff: noqa: D102  # the names of the tests say what holds

import copy
import math
import random
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest

from agl.contracts import Credit
from agl.schemas import CallCredit, Episode
from agl_testing.conformance._base import Conformance, require
from agl_testing.conformance.samples import make_group

SEEDS = range(25)
"""Seeds of the random groups that every test uses."""


class CreditConformance(Conformance):
    """Run every test of the credit contract.

    .. code-block:: python

        class TestMyCredit(CreditConformance):
            @pytest.fixture
            def credit(self):
                return MyCredit(gamma=0.9)
    """

    contract: ClassVar[str] = "credit"

    is_per_episode: ClassVar[bool] = True
    """True if the credit of an episode's calls depends on that episode alone.

    Baselines over the group are the estimator's task. Set this flag to false for credit that reads the group's other
    episodes, such as counterfactual credit.
    """

    @pytest.fixture
    def credit(self) -> Credit:
        """The credit under test; the only fixture to override."""
        raise NotImplementedError("override the fixture 'credit' with the credit assignment under test")

    def test_exactly_the_calls_that_are_not_rejected_get_credit_in_order(self, credit: Credit) -> None:
        for group in _groups():
            expected = [[call.span_id for call in episode.transitions if not call.reject] for episode in group]
            assert expected == [[given.span_id for given in credits] for credits in credit.assign(group)]

    def test_values_are_finite_and_baselines_are_named(self, credit: Credit) -> None:
        for group in _groups():
            for given in _flat(credit.assign(group)):
                assert math.isfinite(given.value)
                assert given.baseline

    def test_assignment_is_deterministic_and_leaves_episodes_as_they_were(self, credit: Credit) -> None:
        for group in _groups():
            before = copy.deepcopy(group)
            assert _plain(credit.assign(group)) == _plain(credit.assign(group))
            assert before == group

    def test_empty_groups_and_episodes_without_calls_get_nothing(self, credit: Credit) -> None:
        assert [] == list(credit.assign([]))
        episode = msgspec.structs.replace(_groups()[0][0], transitions=(), rows=())
        assert [[]] == _plain(credit.assign([episode]))

    def test_order_of_the_episodes_does_not_matter(self, credit: Credit) -> None:
        for group in _groups():
            assert _plain(credit.assign(group))[::-1] == _plain(credit.assign(group[::-1]))

    def test_splitting_a_rollout_into_other_rows_changes_nothing(self, credit: Credit) -> None:
        for group in _groups():
            merged = [msgspec.structs.replace(episode, rows=episode.rows[:1]) for episode in group]
            assert _plain(credit.assign(group)) == _plain(credit.assign(merged))

    def test_siblings_do_not_change_an_episodes_returns(self, credit: Credit) -> None:
        require(self.is_per_episode, "is_per_episode", "credit")
        for group in _groups():
            alone = [_plain(credit.assign([episode]))[0] for episode in group]
            assert alone == _plain(credit.assign(group))

    def test_baselines_never_compare_tasks(self, credit: Credit) -> None:
        keys = [{given.baseline for given in _flat(credit.assign(group))} for group in _groups()]
        for index, mine in enumerate(keys):
            for others in keys[index + 1 :]:
                assert set() == mine & others


def _groups() -> list[list[Episode]]:
    return [make_group(random.Random(seed), size=1 + seed % 5) for seed in SEEDS]


def _plain(credits: Sequence[Sequence[CallCredit]]) -> list[list[CallCredit]]:
    return [list(given) for given in credits]


def _flat(credits: Sequence[Sequence[CallCredit]]) -> list[CallCredit]:
    return [given for episode in credits for given in episode]
