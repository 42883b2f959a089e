"""The fate of the mutants, and the list of those that are known to change nothing."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

GOAL = 0.95
"""The share of the mutants that change something which has to be noticed."""

NOTICED = frozenset({"killed", "timeout", "segfault", "suspicious"})


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mutants of one function that change nothing, by the lines that they have instead of its own."""

    where: str
    reason: str
    now: list[str]


class Mutant(msgspec.Struct, frozen=True):
    """One mutant: where it is, what it changes, and what became of it."""

    name: str
    module: str
    where: str
    was: str
    now: str
    status: str

    @property
    def is_noticed(self) -> bool:
        """Tell if a test failed or hung because of it."""
        return self.status in NOTICED


def read_equivalents() -> dict[tuple[str, str], str]:
    """The reasons of ``equivalent.toml`` by place and changed lines."""
    text = Path(__file__).with_name("equivalent.toml").read_text(encoding="utf-8")
    entries = msgspec.convert(tomllib.loads(text).get("equivalent", []), list[Equivalent])
    return {(entry.where, now): entry.reason for entry in entries for now in entry.now}


class Report:
    """Counts mutants; those that are known to change nothing count for nothing."""

    def __init__(self, mutants: Sequence[Mutant], equivalents: dict[tuple[str, str], str]) -> None:
        self._mutants = mutants
        self._equivalents = equivalents

    @property
    def is_good(self) -> bool:
        """Tell if enough mutants are noticed, and the list of those that change nothing is right."""
        return self._share(Counter(map(self._kind, self._mutants))) >= GOAL and not self.wrong_entries()

    def survivors(self) -> list[Mutant]:
        """The mutants that no test noticed and that are not known to change nothing."""
        return [mutant for mutant in self._mutants if self._kind(mutant) == "survived"]

    def wrong_entries(self) -> list[str]:
        """Entries of ``equivalent.toml`` that no mutant has, or that a test noticed."""
        noticed = {self._key(mutant) for mutant in self._mutants if mutant.is_noticed}
        survived = {self._key(mutant) for mutant in self._mutants if not mutant.is_noticed}
        wrong: list[str] = []
        for where, now in self._equivalents:
            if (where, now) not in survived:
                why = "is noticed by a test" if (where, now) in noticed else "is no mutant any more"
                wrong.append(f"{where}: {now!r} {why}; remove it from equivalent.toml")
        return wrong

    def table(self) -> str:
        """One line for each module, and one for all."""
        by_module: dict[str, Counter[str]] = {}
        for mutant in self._mutants:
            by_module.setdefault(mutant.module, Counter())[self._kind(mutant)] += 1
        head = f"{'module':10} {'mutants':>8} {'noticed':>8} {'equivalent':>11} {'survived':>9}   noticed of the others"
        rows = [self._row(name, counts) for name, counts in by_module.items()]
        return "\n".join([head, *rows, self._row("all", sum(by_module.values(), Counter[str]()))])

    def _row(self, name: str, counts: Counter[str]) -> str:
        return (
            f"{name:10} {counts.total():8} {counts['noticed']:8} {counts['equivalent']:11} {counts['survived']:9}"
            f"   {self._share(counts):.1%}"
        )

    def _share(self, counts: Counter[str]) -> float:
        others = counts["noticed"] + counts["survived"]
        return counts["noticed"] / others if others else 1.0

    def _kind(self, mutant: Mutant) -> str:
        if mutant.is_noticed:
            return "noticed"
        return "equivalent" if self._key(mutant) in self._equivalents else "survived"

    def _key(self, mutant: Mutant) -> tuple[str, str]:
        return mutant.where, mutant.now
