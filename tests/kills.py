"""A campaign of ``kill -9`` against an installation, and its report with a row for each class of programs.

Programs die at random moments, some before they work, and come back later or much later, some under the name of
another machine. In the end everything comes back, and the experiment must finish.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from agl_testing.waiting import wait_until

from .installation import Installation
from .programs import Program, command_of, start_of

HOSTS = ("", "", "left", "right")
"""Names of machines under which programs come back; ``""`` keeps this machine's."""

EARLY = 0.2
"""Share of the programs that are killed before or soon after they work."""

ORPHANS_S = 5.0
"""Seconds after which nothing that a killed program started may run."""

PATIENCE_S = 300.0
"""Seconds without a further step after which an experiment counts as one that cannot go on."""

COLUMNS = ("kills", "elsewhere", "lost", "twice", "stuck", "alive")


@dataclass
class Row:
    """A class of programs in the report.

    Attributes:
        kills: How often one was killed.
        elsewhere: How often one came back under the name of another machine.
        lost: Acknowledged writes that are gone.
        twice: Rollouts that were trained twice.
        stuck: Experiments that could not go on.
        alive: Processes that a killed program had started and that ran 5 s later.
    """

    kills: int = 0
    elsewhere: int = 0
    lost: int = 0
    twice: int = 0
    stuck: int = 0
    alive: int = 0

    def findings(self) -> int:
        """Everything that must not be."""
        return self.lost + self.twice + self.stuck + self.alive


@dataclass
class Campaign:
    """Kills the programs of an installation at random.

    Attributes:
        kills: How many.
        away_s: Draws the seconds for which a killed program is gone.
        each: How often every program is killed at least.
        most: How often every program is killed at most.
        each_s: Seconds for a kill, at most, on average.
        rows: The report; a finding of the experiment counts for every class that was killed in it, because any of them
            may be its cause.
    """

    installation: Installation
    kills: int
    draw: random.Random
    away_s: Callable[[random.Random], float]
    each: int = 1
    most: int = 10**6
    each_s: float = 20.0
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    ended: Counter[str] = field(default_factory=Counter[str])
    orphans: list[str] = field(default_factory=list[str])
    last_words: dict[str, str] = field(default_factory=dict[str, str])
    longest_s: float = 0.0
    _dies_at: dict[str, float] = field(default_factory=dict[str, float])
    _returns_at: dict[str, float] = field(default_factory=dict[str, float])
    _families: list[tuple[float, str, list[tuple[int, str]]]] = field(
        default_factory=list[tuple[float, str, list[tuple[int, str]]]]
    )

    def run(self) -> None:
        """Kill until the number is reached and no class is left out, let everything come back and finish, and look."""
        programs = self.installation.programs()
        self.rows = {program.name: Row() for program in programs}
        within_s = 60 + self.each_s * max(self.kills, self.each * len(programs))
        wait_until(lambda: self._tick(programs), within_s=within_s, every_s=0.02)
        stuck = not self._ends(programs)
        lost, twice = len(self.installation.lost()), self.installation.trained_twice()
        for row in self.rows.values():
            if row.kills:
                row.lost, row.twice, row.stuck = lost, twice, int(stuck)

    def report(self) -> str:
        """The rows, and what else is worth knowing."""
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.ended.items())) or "none"
        return (
            f"{table(self.rows)}\n"
            f"away for up to {self.longest_s:.0f} s; ended by themselves, and were started again: {ended}; "
            f"attempts that lost their worker: {self.installation.losses()}; "
            f"acknowledged writes: {self.installation.acknowledged()}"
        )

    def _tick(self, programs: Iterable[Program]) -> bool:
        """Start and kill what is due; returns true after the last kill."""
        for program in programs:
            if not self._is_over(programs):
                self._step(program)
        self._look_for_orphans()
        return self._is_over(programs)

    def _is_over(self, programs: Iterable[Program]) -> bool:
        """Return true once enough were killed, every program among them; on a busy machine some start late."""
        is_reached = sum(row.kills for row in self.rows.values()) >= self.kills
        return is_reached and all(self.rows[each.name].kills >= self.each or each.is_done() for each in programs)

    def _step(self, program: Program) -> None:
        now, name = time.monotonic(), program.name
        if not program.is_alive():
            if now >= self._returns_at.get(name, 0.0) and not program.is_done():
                self._begin(program)
        elif name not in self._dies_at:
            if program.works() and self.rows[name].kills < self.most:
                self._dies_at[name] = now + self.draw.uniform(0, program.lives_s)
        elif now >= self._dies_at[name]:
            self._kill(program)

    def _begin(self, program: Program) -> None:
        self._note_end(program)
        host = self.draw.choice(HOSTS) if program.moves else ""
        self.rows[program.name].elsewhere += bool(host)
        self._dies_at.pop(program.name, None)
        program.begin(host)
        if self.draw.random() < EARLY and program.moves and self.rows[program.name].kills < self.most:
            self._dies_at[program.name] = time.monotonic() + self.draw.uniform(0, program.lives_s / 2)

    def _kill(self, program: Program) -> None:
        self._families.append((time.monotonic() + ORPHANS_S, program.name, program.kill()))
        self.rows[program.name].kills += 1
        away_s = self.away_s(self.draw)
        self.longest_s = max(self.longest_s, away_s)
        self._returns_at[program.name] = time.monotonic() + away_s

    def _look_for_orphans(self) -> None:
        """Note the processes that outlived the program that started them."""
        now = time.monotonic()
        for due, name, family in self._families:
            alive = [pid for pid, start in family if start and start_of(pid) == start] if now >= due else []
            self.rows[name].alive += len(alive)
            self.orphans += [f"{name}: {pid}: {command_of(pid)}" for pid in alive]
        self._families = [item for item in self._families if now < item[0]]

    def _note_end(self, program: Program) -> None:
        """Count a program that ended by itself, and keep what it said."""
        if program.ended_by_itself():
            self.ended[program.name] += 1
            self.last_words[program.name] = program.output()[-2000:]

    def _ends(self, programs: list[Program]) -> bool:
        """Let everything come back; returns true if the experiment finished."""
        for program in programs:
            if not program.is_alive() and not program.is_done():
                self._note_end(program)
                program.begin()
        try:
            before = -1
            while not self._finishes(programs):
                last, before = before, self.installation.step()
                if before <= last:
                    self.last_words |= {program.name: program.output()[-2000:] for program in programs}
                    return False
        finally:
            for program in reversed(programs):
                if program.is_alive() and not program.is_kept:
                    self._families.append((time.monotonic() + ORPHANS_S, program.name, program.kill()))
            wait_until(lambda: self._look_for_orphans() or not self._families)
        return True

    def _finishes(self, programs: list[Program]) -> bool:
        """Return true if the experiment finishes within the patience for one step."""
        try:
            return wait_until(lambda: self._is_finished(programs), within_s=PATIENCE_S, every_s=0.5)
        except AssertionError:
            return False

    def _is_finished(self, programs: list[Program]) -> bool:
        """Return true once the trainer has ended well; what ended otherwise is started again."""
        for program in programs:
            if program.is_alive():
                if program.is_kept and not program.works():
                    return False  # a database that does not answer yet, and was started again
            elif program.name != "trainer":
                self._note_end(program)
                program.begin()
            elif self.installation.is_finished():
                return True
            else:
                self._note_end(program)
                program.begin()
        return False


def table(rows: dict[str, Row]) -> str:
    """The rows below their columns, and their sum."""
    total = Row(*(sum(getattr(row, name) for row in rows.values()) for name in COLUMNS[:2]))
    width = max(map(len, (*rows, "all")))
    lines = [f"{'':{width}} " + " ".join(f"{name:>9}" for name in COLUMNS)]
    for name, row in rows.items():
        lines.append(f"{name:{width}} " + " ".join(f"{getattr(row, column):9}" for column in COLUMNS))
    lines.append(f"{'all':{width}} {total.kills:9} {total.elsewhere:9}")
    return "\n".join(lines)
