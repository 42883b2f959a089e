"""Every question that can be asked about a domain, with the query that answers it.

Seven shapes: filters by text and by number, both together, extremes, the best few, aggregates, groups and joins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from domains import Domain

AGGREGATES = {"average": "AVG", "total": "SUM", "largest": "MAX", "smallest": "MIN"}
COMPARISONS = {"above": ">", "below": "<"}
ORDERS = {"highest": "DESC", "lowest": "ASC"}
STEPS = 12
"""Thresholds that are asked about, per number."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question in words, its query, and which shape it has."""

    domain: Domain
    shape: str
    text: str
    query: str


def every_question(domain: Domain) -> Iterator[Question]:
    """All questions about a domain, in a fixed order, each text once."""
    for shape, make in SHAPES.items():
        for text, query in make(domain):
            yield Question(domain=domain, shape=shape, text=text, query=query)


def thresholds(domain: Domain) -> list[tuple[str, int]]:
    """Numbers to compare with, spread over the middle of each column."""
    found: list[tuple[str, int]] = []
    for column, (low, high) in domain.numbers.items():
        found += [(column, low + (high - low) * (k + 2) // (STEPS + 3)) for k in range(STEPS)]
    return found


def by_kind(d: Domain) -> Iterator[tuple[str, str]]:
    """Names, or their number, of one kind."""
    for value in d.kinds:
        where = f"FROM {d.table} WHERE {d.kind} = '{value}'"
        yield f"Which {d.table} have {d.kind} {value}?", f"SELECT {d.label} {where}"
        yield f"How many {d.table} have {d.kind} {value}?", f"SELECT COUNT(*) {where}"


def by_number(d: Domain) -> Iterator[tuple[str, str]]:
    """Names, or their number, above or below a number."""
    for (column, number), (word, sign) in product(thresholds(d), COMPARISONS.items()):
        where = f"FROM {d.table} WHERE {column} {sign} {number}"
        yield f"Which {d.table} have {column} {word} {number}?", f"SELECT {d.label} {where}"
        yield f"How many {d.table} have {column} {word} {number}?", f"SELECT COUNT(*) {where}"


def by_both(d: Domain) -> Iterator[tuple[str, str]]:
    """Names by kind and number."""
    for value, (column, number), (word, sign) in product(d.kinds, thresholds(d), COMPARISONS.items()):
        yield (
            f"Which {d.table} have {d.kind} {value} and {column} {word} {number}?",
            f"SELECT {d.label} FROM {d.table} WHERE {d.kind} = '{value}' AND {column} {sign} {number}",
        )


def best(d: Domain) -> Iterator[tuple[str, str]]:
    """The extreme one, and the first few."""
    for column, (word, order) in product(d.numbers, ORDERS.items()):
        query = f"SELECT {d.label} FROM {d.table} ORDER BY {column} {order}"
        yield f"Which {d.one} has the {word} {column}?", f"{query} LIMIT 1"
        for count in range(2, 7):
            yield f"List the {count} {d.table} with the {word} {column}.", f"{query} LIMIT {count}"


def aggregate(d: Domain) -> Iterator[tuple[str, str]]:
    """A number about one kind."""
    for value, column, (word, function) in product(d.kinds, d.numbers, AGGREGATES.items()):
        yield (
            f"What is the {word} {column} of {d.table} with {d.kind} {value}?",
            f"SELECT {function}({column}) FROM {d.table} WHERE {d.kind} = '{value}'",
        )


def group(d: Domain) -> Iterator[tuple[str, str]]:
    """A number for every kind."""
    yield (
        f"How many {d.table} are there for each {d.kind}?",
        f"SELECT {d.kind}, COUNT(*) FROM {d.table} GROUP BY {d.kind}",
    )
    for column, (word, function) in product(d.numbers, AGGREGATES.items()):
        yield (
            f"What is the {word} {column} for each {d.kind}?",
            f"SELECT {d.kind}, {function}({column}) FROM {d.table} GROUP BY {d.kind}",
        )


def join(d: Domain) -> Iterator[tuple[str, str]]:
    """Questions about the other table."""
    for value in d.places:
        where = f"FROM {d.table} JOIN {d.other} ON {d.reference} = id WHERE {d.place} = '{value}'"
        yield f"Which {d.table} belong to {d.other} with {d.place} {value}?", f"SELECT {d.label} {where}"
        yield f"How many {d.table} belong to {d.other} with {d.place} {value}?", f"SELECT COUNT(*) {where}"
        for column, (word, function) in product(d.numbers, AGGREGATES.items()):
            yield (
                f"What is the {word} {column} of {d.table} that belong to {d.other} with {d.place} {value}?",
                f"SELECT {function}({column}) {where}",
            )


SHAPES = {
    "kind": by_kind,
    "number": by_number,
    "both": by_both,
    "best": best,
    "aggregate": aggregate,
    "group": group,
    "join": join,
}
