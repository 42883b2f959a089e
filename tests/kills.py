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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from agl.contracts import RolloutQuery, Store
from agl_run.experiment.state import load_experiment
from agl_testing.waiting import wait_until

T = TypeVar("T")

StartAgl = Callable[..., "subprocess.Popen[str]"]

TOKEN = {"AGL_TOKEN": "an-admin-token-of-the-tests"}
HOSTS = ("", "", "left", "right")
"""Names of machines under which programs come back; ``""`` keeps this machine's."""

EARLY = 0.2
"""Share of the programs that are killed before or soon after they work."""

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
            print("wrote", flush=True)
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
        sign: Text in its output once it works.
        log: The file with its output.
        start: Starts it on a machine of that name, with its output into that file.
        lives_s: Seconds for which it works at most before it is killed.
        returns_at: Monotonic time at which it is started again while it is dead.
        dies_at: Monotonic time at which it is killed; ``None`` until it works.
    """

    name: str
    sign: str
    log: Path
    start: Callable[[str, IO[bytes]], "subprocess.Popen[str]"]
    lives_s: float = 3.0
    process: "subprocess.Popen[str] | None" = None
    returns_at: float = 0.0
    dies_at: float | None = None

    def is_alive(self) -> bool:
        """Return true if it runs."""
        return self.process is not None and self.process.poll() is None

    def works(self) -> bool:
        """Return true once its output has the sign."""
        return self.sign in self.output()

    def output(self) -> str:
        """Everything that it wrote since it was last started."""
        return self.log.read_text(errors="replace")

    def begin(self, host: str = "") -> None:
        """Start it."""
        with self.log.open("wb") as log:
            self.process, self.dies_at = self.start(host, log), None

    def kill(self) -> list[tuple[int, str]]:
        """``kill -9``; returns the process and its descendants, each with the time of its start."""
        assert self.process is not None
        family = [(pid, start_of(pid)) for pid in family_of(self.process.pid)]
        self.process.kill()
        self.process.wait()
        return family


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
        """Every program, the server first, the trainer next."""
        of_process = "worker with processes"
        return [
            Program("server", "stop with", self._log("server"), self._server, lives_s=12),
            Program("trainer", "step", self._log("trainer"), self._trainer),
            Program("worker", "experiment 'toy'", self._log("worker"), partial(self._worker, "async")),
            Program(of_process, "experiment 'toy'", self._log(of_process), partial(self._worker, "process")),
            Program("writer", "wrote", self._log("writer"), self._writer, lives_s=6),
        ]

    def _log(self, name: str) -> Path:
        return self.file.parent / f"{name}.log"

    def is_begun(self) -> bool:
        """Return true if the experiment is in the store."""
        return asyncio.run(self._with_store(lambda store: load_experiment(store, "toy"))) is not None

    def lost(self) -> list[str]:
        """Return what was acknowledged to the writer and is not in the store, or is there in another state."""
        lines = [line.split() for line in self.report.read_text().splitlines() if len(line) > 40]
        return asyncio.run(self._with_store(lambda store: missing_of(store, lines)))

    def losses(self) -> int:
        """Return how many attempts of the experiment lost their worker."""
        query = RolloutQuery(experiment="toy", limit=10**6)
        return sum(one.losses for one in asyncio.run(self._with_store(lambda store: store.rollouts(query))))

    async def _with_store(self, work: Callable[[Store], Awaitable[T]]) -> T:
        store = self.open_store()
        try:
            return await work(store)
        finally:
            await store.close()

    def _server(self, host: str, log: IO[bytes]) -> "subprocess.Popen[str]":
        del host  # its address stays
        words = ("--store", self.served, "--port", str(self.port))
        return self.agl("serve", *words, cwd=self.file.parent, log=log, **TOKEN)

    def _trainer(self, host: str, log: IO[bytes]) -> "subprocess.Popen[str]":
        file = self._home(f"trainer-{host}")
        options = ("--resume",) if self.is_begun() else ()
        return self.agl("run", str(file), *options, cwd=file.parent, log=log, HOST_NAME=host, **TOKEN)

    def _worker(self, runner: str, host: str, log: IO[bytes]) -> "subprocess.Popen[str]":
        file = self._home(f"worker-{host}-{runner}")
        words = ("--set", f"runner.use={runner}", "--concurrency", "2", "--stay")
        return self.agl("worker", str(file), *words, cwd=file.parent, log=log, HOST_NAME=host, **TOKEN)

    def _writer(self, host: str, log: IO[bytes]) -> "subprocess.Popen[str]":
        del host
        words = [sys.executable, "-c", WRITER, f"http://127.0.0.1:{self.port}", str(self.report)]
        return subprocess.Popen(words, env={**os.environ, **TOKEN}, stdout=log, stderr=log, text=True)

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
        while self.killed.total() < self.kills:
            for program in programs:
                self._step(program)
            self._look_for_orphans()
            time.sleep(0.05)
        self._end(programs)

    def report(self) -> str:
        """The kills, the returns and the findings, on one line."""
        by_name = ", ".join(f"{name} {count}" for name, count in sorted(self.killed.items()))
        ended = ", ".join(f"{name} {count}" for name, count in sorted(self.ended.items())) or "none"
        return (
            f"{self.killed.total()} kills: {by_name}; away for up to {self.longest_s:.0f} s; "
            f"ended by themselves, and were started again: {ended}; "
            f"attempts that lost their worker: {self.installation.losses()}; "
            f"left running after {ORPHANS_S:g} s: {len(self.orphans)}"
        )

    def _step(self, program: Program) -> None:
        """Start or kill a program, if its time has come."""
        now = time.monotonic()
        if not program.is_alive():
            if now >= program.returns_at:
                self._note_end(program)
                program.begin(self.draw.choice(HOSTS))
                program.dies_at = now + self.draw.uniform(0, 2) if self.draw.random() < EARLY else None
        elif program.dies_at is None:
            program.dies_at = now + self.draw.uniform(0, program.lives_s) if program.works() else None
        elif now >= program.dies_at:
            self._kill(program)

    def _kill(self, program: Program) -> None:
        self.families.append((time.monotonic() + ORPHANS_S, program.kill()[1:]))
        self.killed[program.name] += 1
        away_s = self.away_s(self.draw)
        self.longest_s = max(self.longest_s, away_s)
        program.returns_at = time.monotonic() + away_s
        if self.lapse is not None and self.draw.random() < 0.3:
            self.lapse()

    def _look_for_orphans(self) -> None:
        """Note the processes that outlived the program that started them."""
        now = time.monotonic()
        for due, family in self.families:
            if now >= due:
                self.orphans += [
                    f"{pid}: {command_of(pid)}" for pid, start in family if start and start_of(pid) == start
                ]
        self.families = [item for item in self.families if now < item[0]]

    def _note_end(self, program: Program) -> None:
        """Count a program that ended by itself, and keep what it said."""
        if program.process is not None and program.process.returncode != -9:
            self.ended[program.name] += 1
            self.last_words[program.name] = program.output()[-2000:]

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
        wait_until(lambda: self._look_for_orphans() or not self.families)

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
    text = text.replace("concurrency = 3", "concurrency = 2\nmax_attempts = 1\nmax_losses = 1000")
    file.write_text(text + '\n[gateway]\nparams = { host = "0.0.0.0" }\nadvertise = "127.0.0.1"\n')
