"""A subclass may weaken a test only by an xfail with its reason."""

import pytest

from agl_testing.conformance import CreditConformance
from agl_testing.conformance._base import Conformance, require

GUARD = "test_no_test_is_weakened_without_a_reason"


class Silenced(CreditConformance):
    def test_values_are_finite_and_baselines_are_named(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do nothing."""


class Removed(CreditConformance):
    test_values_are_finite_and_baselines_are_named = None  # pyright: ignore[reportAssignmentType]


class Unexplained(CreditConformance):
    @pytest.mark.xfail
    def test_values_are_finite_and_baselines_are_named(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


@pytest.mark.skip(reason="some day")
class Skipped(CreditConformance): ...


class Explained(CreditConformance):
    @pytest.mark.xfail(reason="returns NaN for empty groups")
    def test_values_are_finite_and_baselines_are_named(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError


class Extended(CreditConformance):
    is_per_episode = False

    def test_something_of_its_own(self) -> None:
        """Add a test, which subclasses may do."""


@pytest.mark.parametrize("weakened", [Silenced, Removed, Unexplained, Skipped])
def test_weakened_class_is_caught(weakened: type[Conformance]) -> None:
    with pytest.raises(AssertionError, match="xfail"):
        getattr(weakened(), GUARD)()


@pytest.mark.parametrize("honest", [CreditConformance, Explained, Extended])
def test_honest_class_passes(honest: type[Conformance]) -> None:
    getattr(honest(), GUARD)()


def test_lowered_flag_skips_and_names_itself() -> None:
    with pytest.raises(pytest.skip.Exception, match="is_durable = False"):
        require(False, "is_durable", "store")
