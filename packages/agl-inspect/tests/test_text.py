import math
from functools import reduce

import pytest

from agl.contracts import Moments
from agl.hints import count_of
from agl_inspect.text import ends, parts_text


def test_count_names_one_thing_in_the_singular():
    assert ["0 rows", "1 row", "1,200 rows"] == [count_of(number, "row") for number in (0, 1, 1200)]


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.5, 0.5), (-math.inf, math.inf)])
def test_interval_without_a_width_or_without_ends_is_not_shown(low, high):
    assert ("", " [0.250, 0.750]") == (ends(low, high), ends(0.25, 0.75))


def test_part_that_is_0_or_1_is_counted_and_another_is_a_mean():
    parts = {"exact": of(1.0, 0.0, 0.0), "form": of(0.5, 0.5, 1.0)}
    assert "exact 1 of 3, form 0.667" == parts_text(parts)


def of(*values):
    return reduce(Moments.plus, (Moments(count=1, mean=value) for value in values))
