from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import RewardEmitter
from agl.errors import ConfigError
from agl_rewards.numeric import NumberFinder, NumericMatch
from agl_testing.conformance.reward import RewardConformance

from .cases import one

INFINITE = float("inf")


class TestNumericMatch(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return NumericMatch()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("The answer is 42.", ["42"]),
        ("1,234.5 and -3", ["1234.5", "-3"]),
        ("-1,000,000.25", ["-1000000.25"]),
        ("1'000 1_000 1\u202f000 1 000", ["1000", "1000", "1000", "1", "000"]),
        ("1,2,3 and 1,2345", ["1", "2", "3", "1", "2345"]),
        ("3-5 and (3)-5", ["3", "5", "3", "5"]),
        ("-5 \u22125 -$5 $-5 +5", ["-5", "-5", "-5", "-5", "5"]),
        ("x2 H2O v1 2nd", ["2"]),
        ("1.2.3", ["1.2"]),
        (".5 0.50 5.", ["0.5", "0.5", "5"]),
        ("3/4 -1/2 3/0", ["3/4", "-1/2", "3"]),
        ("1e3 2E-3 1e\u22121", ["1000", "0.002", "0.1"]),
        ("1e9999 7", ["7"]),
        ("9" * 301, []),
        ("", []),
        ("no number", []),
    ],
)
def test_numbers_are_found_in_text(text: str, numbers: list[str]) -> None:
    assert list(map(Fraction, numbers)) == NumberFinder().find(text)


def test_decimal_comma_swaps_the_separators() -> None:
    assert [Fraction("1234.5"), Fraction("3.5")] == NumberFinder(decimal=",").find("1.234,5 and 3,5.")


def test_units_scale_the_number_that_they_follow() -> None:
    numbers = NumberFinder(units={"km": 1000, "m": 1, "%": 0.01, "million": 1e6})
    found = numbers.find("3 km, 4m, 50%, 2.5 million, 6 miles, 7 meters")
    assert [3000, 4, Fraction(1, 2), 2_500_000, 6, 7] == found


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**12), max_value=10**12))
def test_number_is_read_back_however_it_is_grouped(value: Any) -> None:
    for text in (f"{value}", f"{value:,}", f"{value:,}".replace(",", "_"), f"it is {value:,}."):
        assert [Fraction(value)] == NumberFinder().find(text)


@given(st.text())
def test_no_text_breaks_the_search_for_numbers(text: str) -> None:
    assert all(isinstance(number, Fraction) for number in NumberFinder().find(text))


@given(st.integers(), st.fractions(min_value=0, max_value=100), st.fractions(min_value=-100, max_value=100))
def test_tolerance_is_the_largest_distance_that_counts(answer: int, tolerance: Fraction, distance: Fraction) -> None:
    emitter = NumericMatch(tolerance=float(tolerance))
    said = answer + distance
    reward = one(emitter, {"answer": answer}, f"{said.numerator}/{said.denominator}")
    allowed = Fraction(str(float(tolerance)))
    if said.denominator < 10**9:
        assert float(abs(said - answer) <= allowed) == reward.value


@pytest.mark.parametrize(
    ("text", "params", "value"),
    [
        ("first 41 then 42", {}, 1.0),
        ("first 41 then 42", {"which": "first"}, 0.0),
        ("42 is not 41", {"which": "first"}, 1.0),
        ("41, 42 or 43", {"which": "any"}, 1.0),
        ("40 #### 42 and 43", {"which": "first", "after": "####"}, 1.0),
        ("the answer is 42", {"after": "####"}, 0.0),
        ("42.4", {"tolerance": 0.5}, 1.0),
        ("42.6", {"tolerance": 0.5}, 0.0),
        ("44.1", {"relative": 0.05}, 1.0),
        ("44.2", {"relative": 0.05}, 0.0),
        ("4200%", {"units": {"%": 0.01}}, 1.0),
        ("42,0", {"decimal": ","}, 1.0),
        ("nothing", {}, 0.0),
    ],
)
def test_number_that_counts_is_declared(text: str, params: dict[str, Any], value: float) -> None:
    assert value == one(NumericMatch(**params), {"answer": 42}, text).value


@pytest.mark.parametrize("answer", [1234.5, "1,234.50", "so it is #### 1234.5"])
def test_answer_of_the_task_is_a_number_or_text_with_one(answer: Any) -> None:
    assert 1.0 == one(NumericMatch(), {"answer": answer}, "1234.5").value


def test_feedback_says_both_numbers() -> None:
    reward = one(NumericMatch(which="any"), {"answer": "7/2"}, "3 or 4")
    assert (0.0, "numeric-match", "expected 3.5, got 3, 4") == (reward.value, reward.name, reward.feedback)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1e999/7", "100000000000...(1000 digits)/7"),
        ("-1e999/7", "-100000000000...(1000 digits)/7"),
        (f"1e999/{'7' * 30}", "100000000000...(1000 digits)/777777777777...(30 digits)"),
    ],
)
def test_fraction_beyond_floats_is_wrong_and_no_error(text: str, shown: str) -> None:
    reward = one(NumericMatch(), {"answer": 42}, text)
    assert (0.0, f"expected 42, got {shown}") == (reward.value, reward.feedback)
    assert 1.0 == one(NumericMatch(), {"answer": text}, text).value


@pytest.mark.parametrize("task", [{}, {"answer": None}, {"answer": "none"}, {"answer": True}, "text"])
def test_task_without_a_number_is_refused(task: Any) -> None:
    with pytest.raises(ConfigError, match="compares with the number in the task's 'answer'"):
        one(NumericMatch(), task, "42")


@pytest.mark.parametrize(
    "params",
    [
        {"which": "middle"},
        {"tolerance": -1},
        {"relative": float("nan")},
        {"decimal": ";"},
        {"units": {"m": float("inf")}},
    ],
)
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NumericMatch(**params)
