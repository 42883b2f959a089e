"""A whole installation whose programs can be killed: a store, ``agl serve``, trainer, workers and a writer."""

import asyncio
import json
import shutil
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from agl.contracts import RolloutQuery, Store
from agl.schemas import RetryPolicy, Rollout
from agl.stores import read_recordings
from agl_inspect.records.state import load_algorithm, load_experiment, trained_rollouts
from agl_store_sqlite._store import SQLiteStore
from agl_testing.stores.samples import make_span, outcome_of

from .programs import Forks, Main, Place, Program, run_agl

T = TypeVar("T")

TOKEN = {"AGL_TOKEN": "an-admin-token-of-the-tests"}


def open_store(url: str) -> Store:
    """Open the store at ``url``."""
    if url.startswith("http:"):
        from agl_gateway.client import HttpStore

        return HttpStore(url)
    if url.startswith("postgresql:"):
        from agl_store_postgres.store import PostgresStore

        return PostgresStore(url)
    return SQLiteStore(url)


def write_on(url: str, report: str) -> None:
    """Run rollouts one after the other, and note in ``report`` what the store acknowledged."""
    asyncio.run(_write_on(url, Path(report)))


async def _write_on(url: str, report: Path) -> None:
    store = open_store(url)
    with report.open("ab", buffering=0) as acknowledged:
        while True:
            name, experiment = uuid.uuid4().hex, f"writer-{report.name}"
            retry = RetryPolicy(max_attempts=1)
            await store.enqueue([Rollout(rollout_id=name, task=None, experiment=experiment, retry=retry)])
            acknowledged.write(f"enqueued {name}\n".encode())
            print("wrote", flush=True)
            for claim in await store.claim(worker=name, experiment=experiment, lease_s=600):
                name = claim.rollout.rollout_id
                await store.append_spans([make_span(claim, name="work")])
                acknowledged.write(f"appended {name}\n".encode())
                await store.finish([outcome_of(claim, spans=[make_span(claim, name="last")])])
                acknowledged.write(f"finished {name}\n".encode())


@dataclass
class Installation:
    """A store that ``agl serve`` serves, a trainer that uses it, two workers and a writer.

    Attributes:
        file: The experiment's file; the store is a URL in it.
        served: URL of the store that ``agl serve`` opens.
        port: The port at which it is served.
        gateway: The port of the trainer's gateway, at which workers reach it from every machine.
        variables: Environment of the programs.
        lease_s: Seconds of the programs' leases; ``None`` leaves them as they are.
        pace: Share of the usual time that each program works before it is killed.
    """

    forks: Forks
    file: Path
    port: int
    gateway: int
    served: str
    variables: dict[str, str]
    lease_s: float | None = None
    pace: float = 1.0
    homes: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def address(self) -> str:
        """The URL of ``agl serve``."""
        return f"http://{self.host_of('agl serve')}:{self.port}"

    @property
    def used(self) -> str:
        """The store's URL for the trainer and the workers."""
        return self.address

    def host_of(self, name: str) -> str:
        """Return the address of a program's machine; all are this one."""
        del name
        return "127.0.0.1"

    def network_of(self, name: str) -> str:
        """Return the network namespace of a program's machine; all use that of the test."""
        del name
        return ""

    def programs(self) -> list[Program]:
        """Every program: what others need first, the trainer before the workers."""
        return [
            self._program("agl serve", "stop with", self._serve, lives_s=12, moves=False),
            self._program("trainer", "step", self._train),
            self._program("worker", "experiment 'toy'", partial(self._work, "async")),
            self._program("worker with processes", "experiment 'toy'", partial(self._work, "process")),
            self._writer("writer", self.address),
        ]

    def is_finished(self) -> bool:
        """Return true if the experiment has ended well."""
        saved = self.look(lambda store: load_experiment(store, "toy"))
        return saved is not None and saved.status == "finished"

    def step(self) -> int:
        """Return the algorithm's last finished step."""
        state = self.look(lambda store: load_algorithm(store, "toy", 1, "counter"))
        return state.state["step"] if state else 0

    def lost(self) -> list[str]:
        """Return what was acknowledged to the writers and is not in the store, or is there in another state."""
        found = list[str]()
        for report in sorted(self._reports.iterdir()):
            lines = [line.split() for line in report.read_text().splitlines() if len(line) > 40]
            found += self.look(lambda store, lines=lines, name=report.name: missing_of(store, lines, writer=name))
        return found

    def acknowledged(self) -> int:
        """Return how many writes were acknowledged to the writers."""
        return sum(report.read_bytes().count(b"\n") for report in self._reports.iterdir())

    def trained_twice(self) -> int:
        """Return how many rollouts the trainer's sum, one for each, has too many."""
        return self.look(trained_twice)

    def losses(self) -> int:
        """Return how many attempts of the experiment lost their worker."""
        query = RolloutQuery(experiment="toy", limit=10**6)
        return sum(one.losses for one in self.look(lambda store: store.rollouts(query)))

    def look(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Do ``work`` with the store, opened for it."""

        async def looked() -> T:
            store = open_store(self.served)
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(looked())

    @property
    def _reports(self) -> Path:
        """The folder in which writers keep what was acknowledged."""
        folder = self.file.parent / "acknowledged"
        folder.mkdir(exist_ok=True)
        return folder

    def _program(
        self, name: str, sign: str, start: Callable[[str], BaseProcess], *, lives_s: float = 3.0, moves: bool = True
    ) -> Program:
        return Program(name, sign, self._log(name), start, lives_s=lives_s * self.pace, moves=moves)

    def _writer(self, name: str, url: str) -> Program:
        words = (url, str(self._reports / name.replace(" ", "-")))
        return self._program(name, "wrote", lambda host: self._start(write_on, words, name=name, host=host), lives_s=6)

    def _serve(self, host: str) -> BaseProcess:
        own = self.host_of("agl serve")
        words = ("serve", "--store", self.served, "--host", own, "--allow-host", own, "--port", str(self.port))
        return self._start(run_agl, words, name="agl serve", host=host)

    def _train(self, host: str) -> BaseProcess:
        file = self._home(f"trainer-{host}")
        words = ("run", str(file), "--resume")
        return self._start(run_agl, words, name="trainer", host=host, folder=file.parent)

    def _work(self, runner: str, host: str) -> BaseProcess:
        file = self._home(f"worker-{host}-{runner}")
        words = ("worker", str(file), "--set", f"runner.use={runner}", "--concurrency", "2", "--stay")
        words += ("--gateway", f"http://{self.host_of('trainer')}:{self.gateway}")
        name = "worker" if runner == "async" else "worker with processes"
        return self._start(run_agl, words, name=name, host=host, folder=file.parent)

    def _start(
        self, main: Main, words: tuple[str, ...], *, name: str, host: str = "", folder: Path | None = None
    ) -> BaseProcess:
        variables = {**self.variables, **TOKEN}
        place = Place(
            folder=folder or self.file.parent,
            variables=variables,
            host=host,
            lease_s=self.lease_s,
            network=self.network_of(name),
        )
        return self.forks.start(main, words, place=place, log=self._log(name))

    def _log(self, name: str) -> Path:
        return self.file.parent / f"{name}.log"

    def _home(self, name: str) -> Path:
        """A folder with the experiment's files, one per machine and program."""
        if name not in self.homes:
            folder = self.file.parent.parent / name
            folder.mkdir()
            for wanted in (self.file.name, "toy_agent.py", "train.jsonl"):
                shutil.copy(self.file.parent / wanted, folder)
            self.homes[name] = folder / self.file.name
        return self.homes[name]


async def missing_of(store: Store, lines: list[list[str]], *, writer: str) -> list[str]:
    """Return the acknowledged writes that ``store`` does not have.

    A writer that is killed between two writes leaves an attempt with a span behind. Once its lease is over, another
    attempt of that rollout finishes, and what it wrote is in that attempt alone.
    """
    query = RolloutQuery(experiment=f"writer-{writer}")
    found = {one.rollout.rollout_id: one async for one in read_recordings(store, query, spans="all")}
    missing = list[str]()
    for kind, name in lines:
        one = found.get(name)
        status = one and one.rollout.status
        spans = one.spans if one is not None else []
        names = [span.name for span in spans]
        deciding = [span.name for span in spans if one is not None and span.attempt_id == one.rollout.attempt_id]
        is_finished = status == "succeeded" and ["work", "last"] == deciding
        kept = {"enqueued": one is not None, "appended": "work" in names, "finished": is_finished}
        if not kept[kind]:
            missing.append(f"{kind} {name}: {status}, {names}")
    return missing


async def trained_twice(store: Store) -> int:
    """Return by how much the toy's sum of rewards, 1 for each rollout, exceeds the number of trained rollouts."""
    state = await load_algorithm(store, "toy", 1, "counter")
    return round(state.state["sum"]) - len(await trained_rollouts(store, "toy", 1, "counter")) if state else 0


def use_store(file: Path, url: str, *, gateway: int, advertise: str = "127.0.0.1") -> None:
    """Let the experiment in ``file`` use the store at ``url``, one attempt for each rollout and that gateway's port."""
    text = file.read_text().replace('"sqlite:///runs/toy.db"', json.dumps(url))
    text = text.replace("concurrency = 3", "concurrency = 2\nmax_attempts = 1\nmax_losses = 1000")
    params = f'{{ host = "0.0.0.0", port = {gateway} }}'
    file.write_text(f'{text}\n[gateway]\nparams = {params}\nadvertise = "{advertise}"\n')
