"""Numbers and times as the pages write them."""

import math

import pytest

from agl_console.pages import clock, number


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "\N{EN DASH}"), (0.0, "0"), (-5.8e-17, "0"), (1e-9, "1e-09"), (0.123456, "0.1235"), (math.nan, "nan")],
)
def test_numbers_have_four_digits_and_no_rounding_of_zero(value: float | None, shown: str) -> None:
    assert shown == number(value)


@pytest.mark.parametrize(("value", "shown"), [(1.7e12, "1.7e+12 s"), (-1e300, "-1e+300 s"), (math.nan, "nan s")])
def test_time_that_no_calendar_has_is_shown_in_seconds(value: float, shown: str) -> None:
    assert shown == clock(value)
