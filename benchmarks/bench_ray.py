"""A thousand agents at once on one machine: through workers that Ray places, and through ``agl worker`` without Ray.

Needs ``agl-ray``, and gives no figures elsewhere. An agent lives for 30 seconds, in which it asks the model five times
through the experiment's gateway and waits in between; the model takes half a second for each answer and says so, and
what a call took beyond that counts as latency. ``agl run`` is a process of its own as for a user, with its gateway,
and four workers hold 250 agents each. Everything runs once in turn: Ray with a SQLite file behind the gateway, the same
with ``agl worker``, Ray with PostgreSQL where its server can be had, and the agents alone with a bare proxy.

Memory is PSS, which counts what processes share once; the largest sum of a run counts, each second.
"""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agl.contracts import RolloutQuery, Store
from agl.stores import read_recordings
from benchmarks._crowd import CALLS, Note
from benchmarks._harness import Figure, component, table
from benchmarks._processes import Look, watched
from benchmarks.bench_gateway import started
from benchmarks.bench_postgres import running_server, server_programs

ROOT = Path(__file__).parent.parent
SECRET = "a-secret-of-the-benchmarks-alone-with-enough-characters"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sets the number of agents and the life of each."""

    agents: int = 1000
    workers: int = 4
    seconds: float = 30.0


QUICK = Size(agents=24, workers=2, seconds=4.0)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds the figures of one run.

    Attributes:
        lost_rollouts: Those that have not succeeded.
        lost_calls: Calls that were answered and are not in the store.
        repeated: Attempts beyond one for each rollout.
        at_once: Agents that lived at the same time.
        claims: Claims per second, from the first one to the last.
        finishes: Outcomes per second, likewise.
        notes: What the agents saw.
        looks: Memory and CPU of the processes, over time.
        load: The machine's load before it.
    """

    lost_rollouts: int
    lost_calls: int
    repeated: int
    at_once: int
    claims: float
    finishes: float
    notes: list[Note]
    looks: list[Look]
    load: float

    def beyond_ms(self, share: float) -> float:
        """Milliseconds beyond the model that a share of the calls stayed within."""
        return quantile_ms(self.notes, share)

    def largest(self, mb: Callable[[Look], float]) -> float:
        """The largest sum of memory that was seen."""
        return max(mb(look) for look in self.looks)

    def cpu_s(self, seconds: Callable[[Look], float]) -> float:
        """CPU seconds from the first agent's first line on, without what programs need to start."""
        first = min(note.began for note in self.notes)
        before = [seconds(look) for look in self.looks if look.at <= first]
        return max(seconds(look) for look in self.looks) - max(before, default=0.0)


def quantile_ms(notes: Sequence[Note], share: float) -> float:
    """Milliseconds beyond the model that a share of all calls stayed within."""
    ordered = sorted(each for note in notes for each in note.beyond_s)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3


def most_at_once(notes: Sequence[Note]) -> int:
    """The largest number of agents that lived at one moment."""
    changes = sorted([(note.began, 1) for note in notes] + [(note.ended, -1) for note in notes])
    found = now = 0
    for _, change in changes:
        now += change
        found = max(found, now)
    return found


def per_second(times: Sequence[float]) -> float:
    """Return the rate of events from the first to the last, per second."""
    taken = max(times) - min(times)
    return (len(times) - 1) / taken if taken else 0.0


def write_experiment(folder: Path, size: Size, *, model: str, store: str, runner: str) -> Path:
    """Write an experiment that records a rollout of every agent."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    tasks = [{"number": number, "seconds": size.seconds, "notes": str(notes)} for number in range(size.agents)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    file = folder / "experiment.toml"
    file.write_text(
        f'[experiment]\nname = "crowd"\nagent = "benchmarks._crowd:solve"\nstore = "{store}"\ntrain = "tasks.jsonl"\n\n'
        f'[policy.main_llm]\nuse = "openai"\nbase_url = "{model}"\nmodel = "canned"\napi_key_env = ""\n\n{runner}'
    )
    return file


def on_ray(size: Size) -> str:
    """The tables of an experiment with workers on a Ray cluster of its own."""
    return (
        f'[runner]\nuse = "ray"\nconcurrency = {size.agents // size.workers}\n\n'
        f'[runner.params]\naddress = "local"\nmax_workers = {size.workers}\nwait_s = 60\n'
        f"cluster = {{ num_cpus = {size.workers} }}\n"
    )


def read_notes(folder: Path) -> list[Note]:
    """The notes of all processes."""
    decoder = msgspec.json.Decoder(Note)
    return [note for file in sorted(folder.glob("*.jsonl")) for note in decoder.decode_lines(file.read_bytes())]


def environment() -> dict[str, str]:
    """The variables of every process of an experiment."""
    return {**os.environ, "AGL_SECRET": SECRET, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}


@contextmanager
def agl(*words: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A command in a process of its own, which is interrupted at the end of the block if it still runs."""
    log = (folder / f"{words[0]}-{time.monotonic_ns()}.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-m", "agl", *words],
        cwd=folder,
        env=environment(),
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait()
        log.close()


def run_with_ray(folder: Path, size: Size, *, model: str, store: str) -> Result:
    """The agents in actors."""
    file = write_experiment(folder, size, model=model, store=store, runner=on_ray(size))
    load = os.getloadavg()[0]
    with agl("run", str(file), "--quiet", folder=folder) as run:
        looks = watched(run, [run.pid])
    return asyncio.run(result_of(folder, size, store=store, looks=looks, load=load, status=run.returncode))


def run_with_workers(folder: Path, size: Size, *, model: str, store: str) -> Result:
    """The agents in processes of ``agl worker``, which reach the store through the gateway as Ray's actors do."""
    port = free_port()
    runner = f"[runner]\nconcurrency = 0\n\n[gateway]\nparams = {{ port = {port} }}\n"
    file = write_experiment(folder, size, model=model, store=store, runner=runner)
    words = ["worker", str(file), "--store", f"http://127.0.0.1:{port}", "--concurrency"]
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(agl(*words, str(size.agents // size.workers), "--quiet", folder=folder))
            for _ in range(size.workers)
        ]
        run = stack.enter_context(agl("run", str(file), "--quiet", folder=folder))
        looks = watched(run, [run.pid, *(worker.pid for worker in workers)])
    return asyncio.run(result_of(folder, size, store=store, looks=looks, load=load, status=run.returncode))


def run_bare(folder: Path, size: Size, *, model: str) -> list[Note]:
    """The agents without agl, in as many processes, with a proxy between them and the model that keeps nothing."""
    folder.mkdir()
    each = size.agents // size.workers
    with started("benchmarks._served", "proxy", model) as proxy:
        command = [sys.executable, "-m", "benchmarks._crowd", "agents", f"{proxy.url}/v1", str(each)]
        rest = (str(size.seconds), str(folder))
        running = [
            subprocess.Popen([*command, str(first), *rest], cwd=ROOT) for first in range(0, each * size.workers, each)
        ]
        if any([process.wait() for process in running]):
            raise RuntimeError("the agents without agl failed")
    return read_notes(folder)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def result_of(folder: Path, size: Size, *, store: str, looks: list[Look], load: float, status: int) -> Result:
    """Read back what a run left in its store."""
    if status:
        logs = "\n".join(file.read_text() for file in folder.glob("*.log"))
        raise RuntimeError(f"agl run ended with {status}:\n{logs}")
    opened: Store = component("store", store.partition(":")[0], url=store)
    found = [recording async for recording in read_recordings(opened, RolloutQuery(experiment="crowd"))]
    await opened.close()
    attempts = [attempt for recording in found for attempt in recording.attempts]
    calls = sum(span.call is not None for recording in found for span in recording.spans)
    notes = read_notes(folder / "notes")
    return Result(
        lost_rollouts=size.agents - sum(recording.rollout.status == "succeeded" for recording in found),
        lost_calls=size.agents * CALLS - calls,
        repeated=len(attempts) - size.agents,
        at_once=most_at_once(notes),
        claims=per_second([attempt.started_at for attempt in attempts]),
        finishes=per_second([attempt.finished_at for attempt in attempts]),
        notes=notes,
        looks=looks,
        load=load,
    )


def _ours_mb(look: Look) -> float:
    return look.run_mb + look.workers_mb


def _run_mb(look: Look) -> float:
    return look.run_mb


def _run_cpu_s(look: Look) -> float:
    return look.run_cpu_s


def _workers_cpu_s(look: Look) -> float:
    return look.workers_cpu_s


def _counts(title: str, size: Size, found: Result) -> list[Figure]:
    agents, calls = size.agents, size.agents * CALLS
    return [
        Figure(name=f"{title}: agents at once", value=found.at_once, unit=f"of {agents}", bar=agents),
        Figure(name=f"{title}: rollouts lost", value=found.lost_rollouts, unit=f"of {agents}", bar=0, better="lower"),
        Figure(name=f"{title}: calls lost", value=found.lost_calls, unit=f"of {calls}", bar=0, better="lower"),
        Figure(name=f"{title}: attempts repeated", value=found.repeated, unit="", better="lower"),
    ]


def _costs(title: str, found: Result, base: Result, bare: Sequence[Note]) -> list[Figure]:
    other, proxy = "the same with agl worker", "the agents alone, a bare proxy"

    def compared(name: str, value: float, unit: str, baseline: float) -> Figure:
        return Figure(name=f"{title}: {name}", value=value, unit=unit, baseline=baseline, baseline_name=other)

    def latency(share: float, bar: float | None) -> Figure:
        return Figure(
            name=f"{title}: call beyond the model, p{share * 100:.0f}",
            value=found.beyond_ms(share),
            unit="ms",
            bar=bar,
            better="lower",
            baseline=quantile_ms(bare, share),
            baseline_name=proxy,
        )

    return [
        latency(0.5, None),
        latency(0.99, 50.0),
        Figure(
            name=f"{title}: PSS of workers and agl run",
            value=found.largest(_ours_mb),
            unit="MB",
            bar=1200.0,
            better="lower",
            baseline=base.largest(_ours_mb),
            baseline_name=other,
        ),
        compared("of it agl run with its gateway", found.largest(_run_mb), "MB", base.largest(_run_mb)),
        Figure(name=f"{title}: PSS of Ray's own processes", value=found.largest(lambda look: look.ray_mb), unit="MB"),
        compared("CPU of agl run, agents alive", found.cpu_s(_run_cpu_s), "s", base.cpu_s(_run_cpu_s)),
        compared("CPU of the workers, agents alive", found.cpu_s(_workers_cpu_s), "s", base.cpu_s(_workers_cpu_s)),
        compared("claims", found.claims, "/s", base.claims),
        compared("finishes", found.finishes, "/s", base.finishes),
        Figure(name=f"{title}: load before it", value=found.load, unit=""),
    ]


def figures(size: Size) -> list[Figure]:
    """Measure everything."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = stack.enter_context(started("benchmarks._crowd", "model")).url
        files = {name: f"sqlite:///{folder}/{name}.db" for name in ("ray", "worker")}
        first = run_with_ray(folder / "ray", size, model=model, store=files["ray"])
        base = run_with_workers(folder / "worker", size, model=model, store=files["worker"])
        bare = run_bare(folder / "bare", size, model=model)
        found = {"Ray, SQLite": first}
        programs = server_programs()
        if programs is not None:
            url = stack.enter_context(running_server(programs))
            found["Ray, PostgreSQL"] = run_with_ray(folder / "postgres", size, model=model, store=url)
        own = [*_counts("agl worker, SQLite", size, base), *_costs("agl worker, SQLite", base, base, bare)]
        return [
            *(figure for name, each in found.items() for figure in _counts(name, size, each)),
            *(figure for name, each in found.items() for figure in _costs(name, each, base, bare)),
            *own,
        ]


def run(*, quick: bool) -> list[Figure]:
    """Every figure; quickly with few agents that live for four seconds, and none without ``agl-ray``."""
    if importlib.util.find_spec("agl_ray") is None:
        return []
    return figures(QUICK if quick else Size())


if __name__ == "__main__":
    print(table(run(quick=False)))
