"""Small Python modules with one bug each, and the tests that find it.

A module holds one function: its docstring says what is right, and its last line does something else. Every hidden test
fails while the bug is there, and at least one of them fails for the other wrong line that its kind of bug knows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

NAMES = (
    *("total", "price", "score", "level", "limit", "share", "stock", "width"),
    *("ticket", "weight", "height", "margin", "record", "signal", "sample", "budget"),
)
PAIRS = (
    *(("a", "b"), ("x", "y"), ("m", "n"), ("p", "q"), ("left", "right"), ("old", "new"), ("one", "two")),
    *(("start", "end"), ("base", "rest"), ("up", "down"), ("north", "south"), ("red", "blue"), ("i", "j")),
)
TESTS = 4
"""Hidden tests of a module."""

Case = tuple[tuple[object, ...], object]
"""Arguments of a function and what it should return for them."""


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A module to repair.

    Attributes:
        name: Of the function, and of its module.
        parameters: Of the function, separated by commas.
        purpose: What the docstring says.
        line: The function's body, with ``{}`` for what is wrong in it.
        wrong: What stands there; it occurs once in the module.
        right: What belongs there.
        other: What a careless repair would put there.
        cases: What the repaired function returns; the one with the bug returns something else for each.
    """

    name: str
    parameters: str
    purpose: str
    line: str
    wrong: str
    right: str
    other: str
    cases: tuple[Case, ...]

    @property
    def file(self) -> str:
        """Name of the module's file."""
        return f"{self.name}.py"

    @property
    def source(self) -> str:
        """The module with its bug."""
        body = self.line.format(self.wrong)
        return f'def {self.name}({self.parameters}):\n    """{self.purpose}"""\n    return {body}\n'

    def tests(self, count: int) -> str:
        """Return a test module with the first `count` cases, one test each."""
        lines = [
            "import unittest",
            "",
            f"from {self.name} import {self.name}",
            "",
            "",
            "class Test(unittest.TestCase):",
        ]
        for number, (arguments, expected) in enumerate(self.cases[:count]):
            call = f"{self.name}({', '.join(map(repr, arguments))})"
            lines += [f"    def test_{number}(self):", f"        self.assertEqual({expected!r}, {call})"]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Kind:
    """A purpose and a line for it, with what belongs into its gap and two things that do not.

    ``{a}`` and ``{b}`` stand for parameters, ``{n}`` and ``{m}`` for two digits, ``{gap}`` for the gap.
    """

    purpose: str
    line: str
    right: str
    wrongs: tuple[str, str]


_KINDS = (
    _Kind("Return the sum of {a} and {b}.", "{a} {gap} {b}", "+", ("-", "*")),
    _Kind("Return {a} minus {b}.", "{a} {gap} {b}", "-", ("+", "*")),
    _Kind("Return {a} times {b}.", "{a} {gap} {b}", "*", ("+", "-")),
    _Kind("Return the larger of {a} and {b}.", "{gap}({a}, {b})", "max", ("min", "sum")),
    _Kind("Return the smaller of {a} and {b}.", "{gap}({a}, {b})", "min", ("max", "sum")),
    _Kind("Say if {a} is above {b}.", "{a} {gap} {b}", ">", ("<", "==")),
    _Kind("Say if {a} is below {b}.", "{a} {gap} {b}", "<", (">", "==")),
    _Kind("Return {a} plus {n}.", "{a} + {gap}", "{n}", ("{m}", "1")),
    _Kind("Return {a} times {n}.", "{a} * {gap}", "{n}", ("{m}", "1")),
    _Kind("List the numbers up to {a}.", "list(range({a} + {gap}))", "1", ("0", "2")),
    _Kind("List the numbers below {a}.", "list(range({a} + {gap}))", "0", ("1", "2")),
    _Kind("Return the first item of {a}.", "{a}[{gap}]", "0", ("1", "2")),
    _Kind("Return the second item of {a}.", "{a}[{gap}]", "1", ("0", "2")),
    _Kind("Return the third item of {a}.", "{a}[{gap}]", "2", ("0", "1")),
)


def make(rng: random.Random) -> Bug:
    """Return a random module with a bug."""
    kind, name, (a, b) = rng.choice(_KINDS), rng.choice(NAMES), rng.choice(PAIRS)
    n, m = rng.sample(range(2, 10), 2)
    line, right, *wrongs = (text.format(a=a, b=b, n=n, m=m, gap="{}") for text in (kind.line, kind.right, *kind.wrongs))
    rng.shuffle(wrongs)
    names = [a, b] if "{b}" in kind.purpose else [a]
    return Bug(
        name=name,
        parameters=", ".join(names),
        purpose=kind.purpose.format(a=a, b=b, n=n),
        line=line,
        wrong=wrongs[0],
        right=right,
        other=wrongs[1],
        cases=_cases(rng, names, [line.format(part) for part in (right, *wrongs)]),
    )


def _cases(rng: random.Random, names: Sequence[str], expressions: Sequence[str]) -> tuple[Case, ...]:
    """Return cases that tell the right expression, the first one, from the second; some tell it from the third, too."""
    is_list = "[" in expressions[0]
    while True:
        found: dict[str, Case] = {}
        while len(found) < TESTS:
            arguments = tuple(rng.sample(range(1, 10), 3) if is_list else rng.randrange(1, 20) for _ in names)
            expected, bad = (_value(expression, names, arguments) for expression in expressions[:2])
            if expected != bad:
                found[repr(arguments)] = (arguments, expected)
        cases = tuple(found.values())
        if any(expected != _value(expressions[2], names, arguments) for arguments, expected in cases):
            return cases


def _value(expression: str, names: Sequence[str], arguments: Sequence[object]) -> object:
    """Return the value of an expression, or `None` for one that fails."""
    try:
        return eval(expression, dict(zip(names, arguments, strict=True)))
    except TypeError:
        return None


def make_many(count: int, *, seed: int) -> list[Bug]:
    """Return `count` modules of which no two have the same text."""
    rng, found = random.Random(seed), dict[str, Bug]()
    while len(found) < count:
        bug = make(rng)
        found.setdefault(bug.source, bug)
    return list(found.values())
