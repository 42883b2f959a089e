"""Finds numbers in texts, and rewards the right number.

A number may have thousands separators, decimals, an exponent, or the form of a fraction ``3/4``. Digits inside a word
(``x2``, ``H2O``) are not numbers. All arithmetic is exact: 0.50 equals 0.5, and 0.1 is exactly a tenth.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any, Literal

from agl.errors import ConfigError
from agl.schemas import Json, Reward, Rollout, Span
from agl_rewards.source import as_text, task_fields, text_source

_GROUPS = "\u00a0\u2009\u202f_'"
"""Thousands separators that are always accepted: non-breaking spaces, underscores, apostrophes."""

MAX_DIGITS = 300
"""Numbers with more digits in a row, or with exponents of more than three digits, are ignored: they would fill memory.
"""


class NumberFinder:
    """Finds numbers in texts.

    Args:
        decimal: The decimal separator, ``.`` or ``,``; the other one separates thousands.
        units: Factors by the unit that directly follows a number, such as ``{"km": 1000, "%": 0.01}``; other units
            are ignored. The longest matching unit counts, and case matters.
    """

    def __init__(self, *, decimal: Literal[".", ","] = ".", units: Mapping[str, float] | None = None) -> None:
        if decimal not in (".", ","):
            raise ConfigError(f"the decimal separator is {decimal!r}; write decimal = '.' or ','")
        self._decimal = decimal
        self._units = {
            name: _exact(factor, f"the factor of the unit {name!r}") for name, factor in (units or {}).items()
        }
        self._regex = _regex(decimal, sorted(self._units, key=len, reverse=True))

    def find(self, text: str) -> list[Fraction]:
        """Return all numbers in a text, in order."""
        return [self._value(match) for match in self._regex.finditer(text) if _is_short(match[0])]

    def _value(self, match: re.Match[str]) -> Fraction:
        whole = re.sub(r"[^0-9]", "", match["whole"] or "0")
        decimals = match["decimals"] or match["part"] or "0"
        exponent = int((match["exponent"] or "0").replace("\u2212", "-"))
        # whole.decimals * 10^exponent / below; a fraction with 0 below the line counts as the number above it
        value = Fraction(f"{whole}.{decimals}e{exponent}") / (int(match["below"] or "1") or 1)
        is_negative = (match["sign"] or "+")[0] in "-\u2212"
        return (-value if is_negative else value) * self._units.get(match["unit"] or "", 1)


class NumericMatch:
    """Gives 1.0 if the number in the text equals the task's number, else 0.0; also 0.0 for a text without a number.

    Args:
        answer: The task's key that holds the number, or a text in which the number is found in the same way.
        source: Where the text comes from; see :mod:`agl_rewards.source`.
        which: The number that counts if the text has several: the ``last``, the ``first``, or ``any`` of them.
        after: Marker such as ``####``: only numbers after its last occurrence count; without the marker there are none.
        tolerance: The largest difference at which numbers count as equal.
        relative: The same as a fraction of the task's number; the larger of the two limits holds.
        decimal: The decimal separator; see :class:`NumberFinder`.
        units: Factors by unit; see :class:`NumberFinder`.
        name: The reward's name.
    """

    def __init__(
        self,
        *,
        answer: str = "answer",
        source: str = "answer",
        which: Literal["last", "first", "any"] = "last",
        after: str = "",
        tolerance: float = 0.0,
        relative: float = 0.0,
        decimal: Literal[".", ","] = ".",
        units: dict[str, float] | None = None,
        name: str = "numeric-match",
    ) -> None:
        if which not in ("last", "first", "any"):
            raise ConfigError(f"numeric-match got which = {which!r}; write 'last', 'first' or 'any'")
        self._answer = answer
        self._text = text_source(source)
        self._which = which
        self._after = after
        self._tolerance = _exact(tolerance, "tolerance", least=0)
        self._relative = _exact(relative, "relative", least=0)
        self._numbers = NumberFinder(decimal=decimal, units=units)
        self._name = name

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Return the reward of one attempt; raises :class:`ConfigError` if the task has no number under the key."""
        expected = self._expected(rollout)
        found = self._found(self._text(spans))
        # |x - expected| <= max(tolerance, relative * |expected|), in fractions, so the bound itself still counts
        allowed = max(self._tolerance, self._relative * abs(expected))
        is_right = any(abs(number - expected) <= allowed for number in found)
        says = ", ".join(map(_shown, found)) or "no number"
        feedback = "" if is_right else f"expected {_shown(expected)}, got {says}"
        return Reward(value=float(is_right), name=self._name, source="evaluator", feedback=feedback)

    def _expected(self, rollout: Rollout) -> Fraction:
        given = task_fields(rollout.task).get(self._answer)
        if isinstance(given, int | float) and not isinstance(given, bool):
            return _exact(given, f"the task's {self._answer!r}")
        numbers = self._numbers.find(as_text(given))
        if not numbers:
            raise ConfigError(
                f"the reward numeric-match compares with the number in the task's {self._answer!r}, and rollout "
                f"{rollout.rollout_id} has {_brief(given)} there; correct the dataset, or name another key with "
                "answer = ..."
            )
        return numbers[0] if self._which == "first" else numbers[-1]

    def _found(self, text: str) -> list[Fraction]:
        _, marker, rest = text.rpartition(self._after) if self._after else ("", "-", text)
        numbers = self._numbers.find(rest) if marker else []
        if self._which == "any":
            return numbers
        return numbers[:1] if self._which == "first" else numbers[-1:]


def _regex(decimal: str, units: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of one number; its possessive ``++`` keeps matching linear in the length of the text."""
    marks = ["," if decimal == "." else r"\.", *_GROUPS]
    # 1,234,567: one separator throughout, and groups of exactly three digits after the first
    grouped = "|".join(rf"[0-9]{{1,3}}(?:{mark}[0-9]{{3}})++(?![0-9])" for mark in marks)
    point = re.escape(decimal)
    ends = [re.escape(name) + (r"(?!\w)" if name[-1:].isalnum() else "") for name in units]
    unit = "|".join(ends) or "(?!)"  # without units a pattern that never matches
    return re.compile(
        r"(?P<sign>(?<![\w)\]])[-\u2212+][$\u20ac\u00a3\u00a5]?)?"  # after a word or a bracket it is an operator
        rf"(?<!\w)(?<![0-9]{point})"  # digits in a word, or of a version such as 1.2.3
        rf"(?:(?P<whole>{grouped}|[0-9]++)(?:{point}(?P<decimals>[0-9]++))?|(?<!{point}){point}(?P<part>[0-9]++))"
        r"(?:[eE](?P<exponent>[-+\u2212]?[0-9]{1,3})(?![0-9]))?(?![eE][-+\u2212]?[0-9])"
        r"(?:/(?P<below>[0-9]++)(?!/))?"
        rf"(?:[ \u00a0\u2009\u202f]?(?P<unit>{unit}))?"
    )


def _is_short(text: str) -> bool:
    return sum(map(str.isdigit, text)) <= MAX_DIGITS


def _exact(value: Any, what: str, *, least: float | None = None) -> Fraction:
    """Return the exact decimal value of a number as written: 0.1 is a tenth, not the nearest binary fraction."""
    if not isfinite(value) or (least is not None and value < least):
        raise ConfigError(f"{what} is {value}; use a finite number{'' if least is None else f' of at least {least:g}'}")
    return Fraction(str(value))


def _shown(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    try:
        return f"{float(number):.12g}"
    except OverflowError:  # above 1.8e308
        return f"{_shortened(number.numerator)}/{_shortened(number.denominator)}"


def _shortened(number: int) -> str:
    """Return a number's digits; for a long number, the first twelve digits and the number of digits."""
    digits, sign = str(abs(number)), "-" if number < 0 else ""
    return sign + (digits if len(digits) <= 24 else f"{digits[:12]}...({len(digits)} digits)")


def _brief(value: Json) -> str:
    return repr(as_text(value)[:80]) if value is not None else "nothing"
