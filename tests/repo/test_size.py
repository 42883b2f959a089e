"""No package is larger than its budget, and a budget is not much larger than its package."""

import pytest

from tools.size import budgets, lines_of, sizes

SIZES = sizes()


def test_every_package_has_a_budget():
    assert list(SIZES) == sorted(budgets())


@pytest.mark.parametrize("name", SIZES)
def test_package_keeps_its_budget(name):
    assert SIZES[name] <= budgets()[name], f"{name} has {SIZES[name]} lines: make it smaller, or say why it grows"
    assert budgets()[name] <= 1.05 * SIZES[name] + 20, f"lower the budget of {name} to {SIZES[name]}"


def test_only_code_counts():
    assert 2 == lines_of('"""A docstring."""\n\n# a comment\nx = 1\n\n\ndef f():\n    """Another."""\n')
    assert 3 == lines_of("x = [\n    1,  # one\n]\n")
