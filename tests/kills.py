"""A whole installation whose programs are killed at random and come back: store's server, trainer, workers, writer.

:class:`Installation` has the programs, :class:`Campaign` kills them and reports. Some come back under the name of
another machine, and some much later than their leases last.
"""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agl.contracts import RolloutQuery, Store
from agl_run.experiment.state import load_experiment
from agl_testing.waiting import wait_until

StartAgl = Callable[..., "subprocess.Popen[str]"]

TOKEN = {"AGL_TOKEN": "an-admin-token-of-the-tests"}
HOSTS = ("", "", "left", "right")
"""Names of machines under which programs come back; ``""`` keeps this machine's."""

ORPHANS_S = 5.0
"""Seconds after which nothing that a killed program started may run."""

WRITER = """
import asyncio
import sys
import uuid

from agl.schemas import RetryPolicy, Rollout
from agl_gateway.client import HttpStore
from agl_testing.stores.samples import make_span, outcome_of


async def main(url, report):
    store = HttpStore(url)
    with open(report, "ab", buffering=0) as acknowledged:
        while True:
            name = uuid.uuid4().hex
            retry = RetryPolicy(max_attempts=1)
            await store.enqueue([Rollout(rollout_id=name, task=None, experiment="writer", retry=retry)])
            acknowledged.write(f"enqueued {name}\\n".encode())
            for claim in await store.claim(worker=name, experiment="writer", lease_s=600):
                name = claim.rollout.rollout_id
                await store.append_spans([make_span(claim, name="work")])
                acknowledged.write(f"appended {name}\\n".encode())
                await store.finish([outcome_of(claim, spans=[make_span(claim, name="last")])])
                acknowledged.write(f"finished {name}\\n".encode())


asyncio.run(main(*sys.argv[1:]))
"""


@dataclass
class Program:
    """One program of the installation.

    Attributes:
        name: What it is, for the report.
        start: Starts it on a machine of that name.
        returns_at: Monotonic time at which it is started again while it is dead.
    """

    name: str
    start: Callable[[str], "subprocess.Popen[str]"]
    process: "subprocess.Popen[str] | None" = None
    started_at: float = 0.0
    returns_at: float = 0.0

    def is_alive(self) -> bool:
        """Return true if it runs."""
        return self.process is not None and self.process.poll() is None

    def begin(self, host: str = "") -> None:
        """Start it."""
        self.process, self.started_at = self.start(host), time.monotonic()

    def kill(self) -> list[tuple[int, str]]:
        """``kill -9``; returns the process and its descendants, each with the time of its start."""
        assert self.process is not None
        family = [(pid, start_of(pid)) for pid in family_of(self.process.pid)]
        self.process.kill()
        self.process.communicate()
        return family

    def last_words(self) -> str:
        """The output of a program that has ended."""
        assert self.process is not None
        out, err = self.process.communicate()
        return out + err


@dataclass
class Installation:
    """A served store, a trainer that uses it, two workers and a writer.

    Attributes:
        file: The experiment's file; the store is a URL in it.
        port: The port at which the store is served.
        open_store: Opens the store behind the server.
    """

    agl: StartAgl
    file: Path
    port: int
    served: str
    open_store: Callable[[], Store]
    homes: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def report(self) -> Path:
        """The file in which the writer keeps what was acknowledged."""
        return self.file.parent / "acknowledged"

    def programs(self) -> list[Program]:
        """Every program, the server first."""
        return [
            Program("server", self._server),
            Program("trainer", self._trainer),
            Program("worker", lambda host: self._worker(host, "async")),
            Program("worker with processes", lambda host: self._worker(host, "process")),
            Program("writer", self._writer),
        ]

    def is_begun(self) -> bool:
        """Return true if the experiment is in the store."""
        return asyncio.run(self._with_store(lambda store: load_experiment(store, "toy"))) is not None

    def lost(self) -> list[str]:
        """Return what was acknowledged to the writer and is not in the store, or is there in another state."""
        lines = [line.split() for line in self.report.read_text().splitlines() if len(line) > 40]
        return asyncio.run(self._with_store(lambda store: missing_of(store, lines)))

    def trainer_options(self) -> tuple[str, ...]:
        """``--resume`` once there is something to resume."""
        return ("--resume",) if self.is_begun() else ()

    async def _with_store(self, work: Callable[[Store], object]) -> object:
        store = self.open_store()
        try:
            return await work(store)
        finally:
            await store.close()

    def _server(self, host: str) -> "subprocess.Popen[str]":
        del host  # its address stays
        words = ("--store", self.served, "--port", str(self.port))
        return self.agl("serve", *words, cwd=self.file.parent, **TOKEN)

    def _trainer(self, host: str) -> "subprocess.Popen[str]":
        file = self._home(f"trainer-{host}")
        return self.agl("run", str(file), "--quiet", *self.trainer_options(), cwd=file.parent, HOST_NAME=host, **TOKEN)

    def _worker(self, host: str, runner: str) -> "subprocess.Popen[str]":
        file = self._home(f"worker-{host}-{runner}")
        words = ("--set", f"runner.use={runner}", "--concurrency", "2", "--stay", "--quiet")
        return self.agl("worker", str(file), *words, cwd=file.parent, HOST_NAME=host, **TOKEN)

    def _writer(self, host: str) -> "subprocess.Popen[str]":
        del host
        words = [sys.executable, "-c", WRITER, f"http://127.0.0.1:{self.port}", str(self.report)]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env={**os.environ, **TOKEN}, stdout=pipe, stderr=pipe, text=True)

    def _home(self, name: str) -> Path:
        """A folder with the experiment's files, one per machine and program."""
        if name not in self.homes:
            folder = self.file.parent.parent / name
            folder.mkdir()
            for wanted in (self.file.name, "toy_agent.py", "train.jsonl"):
                shutil.copy(self.file.parent / wanted, folder)
            self.homes[name] = folder / self.file.name
        return self.homes[name]


async def missing_of(store: Store, lines: list[list[str]]) -> list[str]:
    """Return the acknowledged writes that ``store`` does not have."""
    rollouts = {one.rollout_id: one for one in await store.rollouts(RolloutQuery(experiment="writer", limit=10**6))}
    missing = list[str]()
    for kind, name in lines:
        rollout = rollouts.get(name)
        names = [] if rollout is None or kind == "enqueued" else [span.name for span in await store.spans(name)]
        kept = {"enqueued": rollout is not None, "appended": "work" in names, "finished": ["work", "last"] == names}
        if not kept[kind] or (kind == "finished" and rollout is not None and rollout.status != "succeeded"):
            missing.append(f"{kind} {name}: {rollout and rollout.status}, {names}")
    return missing


@dataclass
class Campaign:
    """Kills the programs of an installation at random.

    Attributes:
        kills: How many.
        away_s: Draws the seconds for which a killed program is gone.
        lapse: Called after some kills, to let leases lapse at once; or ``None`` to wait for it.
    """

    installation: Installation
    kills: int
    draw: random.Random
    away_s: Callable[[random.Random], float]
    lapse: Callable[[], None] | None = None
    killed: Counter[str] = field(default_factory=Counter[str])
    ended: Counter[str] = field(default_factory=Counter[str])
    families: list[tuple[float, list[tuple[int, str]]]] = field(
        default_factory=list[tuple[float, list[tuple[int, str]]]]
    )
    orphans: list[str] = field(default_factory=list[str])
    longest_s: float = 0.0
    last_words: dict[str, str] = field(default_factory=dict[str, str])

    def run(self) -> None:
        """Kill until the number is reached, then let everything come back and the trainer finish."""
        programs = self.installation.programs()
        for program in programs:
            program.begin()
        while self.killed.total() < self.kills:
            time.sleep(self.draw.uniform(0.05, 0.6))
            self._look(programs)
            self._kill_one([one for one in programs if one.is_alive()])
        self._end(programs)

    def report(self) -> str:
        """What was done and found, as a table."""
        by_name = ", ".join(f"{name} {count}" for name, count in sorted(self.killed.items()))
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.ended.items())) or "none"
        return (
            f"{self.killed.total()} kills: {by_name}; away for up to {self.longest_s:.0f} s; "
            f"ended by themselves, and were started again: {ended}; "
            f"left running after {ORPHANS_S:g} s: {len(self.orphans)}"
        )

    def _kill_one(self, alive: list[Program]) -> None:
        if not alive:
            return
        program = self.draw.choice(alive)
        self.families.append((time.monotonic() + ORPHANS_S, program.kill()[1:]))
        self.killed[program.name] += 1
        away_s = self.away_s(self.draw)
        self.longest_s = max(self.longest_s, away_s)
        program.returns_at = time.monotonic() + away_s
        if self.lapse is not None and self.draw.random() < 0.3:
            self.lapse()

    def _look(self, programs: list[Program]) -> None:
        """Start what is due, and look for processes that outlived who started them."""
        now = time.monotonic()
        for program in programs:
            if not program.is_alive() and now >= program.returns_at:
                self._note_end(program)
                program.begin(self.draw.choice(HOSTS))
        for due, family in self.families:
            if now >= due:
                self.orphans += [f"{pid}: {command_of(pid)}" for pid, start in family if start_of(pid) == start]
        self.families = [item for item in self.families if now < item[0]]

    def _note_end(self, program: Program) -> None:
        """Count a program that ended by itself."""
        if program.process is not None and program.process.returncode != -9:
            self.ended[program.name] += 1
            self.last_words[program.name] = program.last_words()

    def _end(self, programs: list[Program]) -> None:
        server, trainer, *others = programs
        if self.lapse is not None:
            self.lapse()
        for program in programs:
            if not program.is_alive():
                program.begin()
        wait_until(lambda: self._is_finished(trainer), within_s=400, every_s=0.1)
        for program in (*others, server):
            program.kill()
        wait_until(lambda: not [one for _, family in self.families for one in family if start_of(one[0]) == one[1]])

    def _is_finished(self, trainer: Program) -> bool:
        """Return true once the trainer has ended well; a refused one is started again."""
        if trainer.is_alive():
            return False
        assert trainer.process is not None
        if trainer.process.returncode != 0:
            self._note_end(trainer)
            time.sleep(1)
            trainer.begin()
            return False
        trainer.last_words()
        return True


def family_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def start_of(pid: int) -> str:
    """The time at which a process started, which tells it from a later one of the same id; ``""`` if it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] == "Z" else after_name[19]


def command_of(pid: int) -> str:
    """The command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def serve(file: Path, url: str) -> None:
    """Let the experiment in ``file`` use the store at ``url`` and give each rollout one attempt."""
    text = file.read_text().replace('"sqlite:///runs/toy.db"', json.dumps(url))
    file.write_text(text.replace("concurrency = 3", "concurrency = 2\nmax_attempts = 1\nmax_losses = 1000"))
