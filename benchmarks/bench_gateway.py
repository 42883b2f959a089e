"""The gateway: CPU per call, calls per second, added latency, streams, disk, and the store over HTTP.

Every part is a process of its own: a canned backend, the gateway over a durable SQLite store, a bare aiohttp proxy
that records nothing (the baseline), and the load generator. CPU is what the measured process says of itself, after
everything is in the store.
"""

import asyncio
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agl.schemas import ModelCall, Rollout, Span, new_rollout_id, new_span_id, pack_floats, pack_ids, rollout_id_of
from agl_run.access import AttemptTokens
from benchmarks._harness import Figure, component, table
from benchmarks._load import Connection
from benchmarks._served import SECRET

CONNECTIONS = 16
CLIENTS = 8
ADMIN = "an admin token of the benchmarks alone"
CALLS = 2000
RATE = 200.0
REPEATS = 3
AGL = ("-c", "from agl_inspect.terminal.program import main; main()")


@dataclass(frozen=True, kw_only=True)
class Server:
    """A measured process and its URL."""

    process: "subprocess.Popen[str]"
    url: str

    def cpu_s(self) -> float:
        """CPU seconds that it used so far, once it has nothing more to write."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("cpu\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One load against one server."""

    calls: int
    wall_s: float
    p50: float
    p99: float
    cpu_s: float = 0.0

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds per call."""
        return self.cpu_s / self.calls * 1e3


@contextmanager
def started(*arguments: str) -> Iterator[Server]:
    """A child process until the end of the block."""
    command = [sys.executable, "-m", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(process=process, url=process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()


def load(url: str, tokens: Path, *, calls: int, rate: float = 0.0, is_streamed: bool = False, seed: int = 0) -> Run:
    """Run the load generator once."""
    arguments = [url, str(tokens), str(calls), str(CONNECTIONS), str(rate), str(int(is_streamed)), str(seed)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._load", *arguments], capture_output=True, text=True, check=True
    )
    return msgspec.json.decode(done.stdout, type=Run)


def measured(server: Server, tokens: Path, **settings: float) -> Run:
    """A load with the CPU that the server spent on it."""
    before = server.cpu_s()
    run = load(f"{server.url}/v1", tokens, **settings)  # type: ignore[arg-type]
    calls = run.calls + CONNECTIONS
    cpu_s = (server.cpu_s() - before) * run.calls / calls
    return Run(calls=run.calls, wall_s=run.wall_s, p50=run.p50, p99=run.p99, cpu_s=cpu_s)


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


class Bench:
    """The processes and what is measured on them."""

    def __init__(self, stack: ExitStack, folder: Path, *, calls: int, repeats: int) -> None:
        self.calls = calls
        self.repeats = repeats
        self.tokens = folder / "tokens"
        self.path = folder / "runs.db"
        backend = ["benchmarks.canned", "64"]
        self.backend = stack.enter_context(started(*backend)).url
        served = ["benchmarks._served", "gateway", self.backend, f"sqlite:///{self.path}", str(self.tokens)]
        self.gateway = stack.enter_context(started(*served, str(CONNECTIONS)))
        self.proxy = stack.enter_context(started("benchmarks._served", "proxy", self.backend))
        self._seed = 0

    def pairs(self, **settings: float) -> tuple[list[Run], list[Run]]:
        """Interleaved runs of the gateway and of the proxy."""
        through: list[Run] = []
        bare: list[Run] = []
        for _ in range(self.repeats):
            self._seed += 1000
            through.append(measured(self.gateway, self.tokens, seed=self._seed, **settings))
            bare.append(measured(self.proxy, self.tokens, seed=self._seed, **settings))
        return through, bare

    def plain(self) -> list[Figure]:
        """Plain calls: CPU, rate and disk."""
        size = disk_bytes(self.path)
        through, bare = self.pairs(calls=self.calls)
        stored = (disk_bytes(self.path) - size) / ((self.calls + CONNECTIONS) * self.repeats)
        cpu, cpu_bare = median([run.cpu_ms for run in through]), median([run.cpu_ms for run in bare])
        rate = median([run.calls / run.wall_s for run in through])
        rate_bare = median([run.calls / run.wall_s for run in bare])
        raw = msgspec.msgpack.encode(sample_spans("ro-0.1", 1)[0])
        base = "bare aiohttp proxy"
        return [
            _figure("gateway CPU per call", cpu, "ms", 0.4, "lower", cpu_bare, base),
            _figure("gateway calls per second", rate, "/s", 2000, "higher", rate_bare, base),
            _figure("disk per call", stored / 1000, "KB", 10, "lower", len(raw) / 1000, "ids, logprobs as msgpack"),
        ]

    def streamed(self) -> list[Figure]:
        """Streamed calls of 50 events: CPU."""
        through, bare = self.pairs(calls=self.calls // 2, is_streamed=True)
        cpu, cpu_bare = median([run.cpu_ms for run in through]), median([run.cpu_ms for run in bare])
        return [_figure("gateway CPU per streamed call", cpu, "ms", 0.8, "lower", cpu_bare, "bare aiohttp proxy")]

    def latency(self) -> list[Figure]:
        """Latency added at a fixed rate, over calling the backend itself."""
        added: list[float] = []
        added_bare: list[float] = []
        for _ in range(self.repeats):
            calls = int(RATE * 5)
            direct = load(self.backend, self.tokens, calls=calls, rate=RATE)
            through = load(f"{self.gateway.url}/v1", self.tokens, calls=calls, rate=RATE)
            bare = load(f"{self.proxy.url}/v1", self.tokens, calls=calls, rate=RATE)
            added.append((through.p99 - direct.p99) * 1e3)
            added_bare.append((bare.p99 - direct.p99) * 1e3)
        name = f"added p99 latency at {RATE:.0f} calls/s"
        return [_figure(name, median(added), "ms", 5, "lower", median(added_bare), "bare aiohttp proxy")]

    def http_store(self) -> list[Figure]:
        """Spans with 700 token ids over HTTP into the durable store, in batches of 100."""
        token = Path(f"{self.tokens}.admin").read_text(encoding="utf-8")
        attempts = Path(f"{self.tokens}.ids").read_text(encoding="utf-8").split()
        rates = [asyncio.run(append_over_http(self.gateway.url, token, attempts)) for _ in range(self.repeats)]
        local = [encode_rate() for _ in range(self.repeats)]
        base = "msgpack encode + decode alone"
        figure = _figure("spans with ids over HTTP", median(rates), "/s", 12_000, "higher", median(local), base)
        return [figure, *self.http_requests()]

    def http_requests(self) -> list[Figure]:
        """Requests to the store's API from eight connections, next to what the disk allows them at most."""
        token = Path(f"{self.tokens}.admin").read_text(encoding="utf-8")
        attempts = Path(f"{self.tokens}.ids").read_text(encoding="utf-8").split()
        count = self.calls
        found: dict[str, list[tuple[float, float]]] = {}

        async def taken(name: str, requests: list[bytes], units: int) -> None:
            before = self.gateway.cpu_s()
            seconds = await request_all(self.gateway.url, requests)
            cpu_s = self.gateway.cpu_s() - before
            found.setdefault(name, []).append((len(requests) * units / seconds, cpu_s / len(requests)))

        async def measure() -> None:
            store = component("store", "http", url=self.gateway.url, token=token)
            for _ in range(self.repeats):
                found.setdefault("commit", []).append((commit_rate(self.path.parent / "bare.db"), 0.0))
                for name, size in (("one", 1), ("twenty", 20)):
                    number = count if size == 1 else count // 5
                    spans = [sample_spans(attempts[at % len(attempts)], size) for at in range(number)]
                    bodies = [{"spans": each} for each in spans]
                    await taken(name, [store_request(self.gateway.url, token, "append_spans", b) for b in bodies], size)
                await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=at) for at in range(count)])
                claim = {"worker": "bench", "limit": 1, "lease_s": 3600.0}
                claims = [{**claim, "claim_id": new_span_id()} for _ in range(count)]
                await taken("claim", [store_request(self.gateway.url, token, "claim", body) for body in claims], 1)
            await store.close()

        asyncio.run(measure())
        rates = {name: median([rate for rate, _ in runs]) for name, runs in found.items()}
        cpu = {name: median([cpu_s for _, cpu_s in runs]) * 1e6 for name, runs in found.items()}
        bars = {"one": 4_000, "twenty": 12_000, "claim": 4_000}
        titles = {
            "one": "spans with ids over HTTP one by one, 8 clients",
            "twenty": "spans with ids over HTTP in batches of 20, 8 clients",
            "claim": "claims over HTTP, 8 clients",
        }
        return [
            Figure(
                name=titles[name],
                value=rates[name],
                unit="/s",
                bar=bar,
                baseline=rates["commit"] * CLIENTS * (20 if name == "twenty" else 1),
                baseline_name="a bare commit for every eight requests",
                cpu_us=cpu[name],
            )
            for name, bar in bars.items()
        ]

    def processes(self) -> list[Figure]:
        """Calls per second of ``agl serve`` with one process and with two, on one SQLite file, with spools."""
        rates: dict[int, list[float]] = {1: [], 2: []}
        with ExitStack() as stack:
            served = {at: stack.enter_context(serve(self.path.parent, self.backend, workers=at)) for at in rates}
            for _ in range(self.repeats):
                for at, (url, tokens) in served.items():
                    self._seed += 1000
                    run = load(f"{url}/v1", tokens, calls=self.calls, seed=self._seed)
                    rates[at].append(run.calls / run.wall_s)
        name, base = "calls per second, agl serve --workers 2", "the same with one process"
        return [Figure(name=name, value=median(rates[2]), unit="/s", baseline=median(rates[1]), baseline_name=base)]


def _figure(name: str, value: float, unit: str, bar: float, better: str, baseline: float, baseline_name: str) -> Figure:
    return Figure(
        name=name,
        value=value,
        unit=unit,
        bar=bar,
        better=better,  # type: ignore[arg-type]
        baseline=baseline,
        baseline_name=baseline_name,
    )


def disk_bytes(path: Path) -> int:
    """Bytes of the database once its write-ahead log is folded in."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


def sample_spans(attempt_id: str, count: int) -> list[Span]:
    """Spans of calls with 500 prompt and 200 response ids of their own, and log-probabilities."""
    spans: list[Span] = []
    for _ in range(count):
        ids = os.urandom(700)
        call = ModelCall(
            request_id=new_span_id(),
            dialect="chat",
            model="canned",
            prompt_ids=pack_ids(ids[:500]),
            response_ids=pack_ids(ids[500:]),
            logprobs=pack_floats(-byte / 256 for byte in ids[500:]),
        )
        rollout_id = rollout_id_of(attempt_id)
        spans.append(
            Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="chat canned", call=call)
        )
    return spans


async def append_over_http(url: str, token: str, attempts: list[str], *, batches: int = 60) -> float:
    """Spans per second, four batches of 100 in flight."""
    store = component("store", "http", url=url, token=token)
    work = [sample_spans(attempts[number % len(attempts)], 100) for number in range(batches)]
    await store.cursor()
    started_at = time.perf_counter()
    left = iter(work)

    async def send() -> None:
        for spans in left:
            await store.append_spans(spans)

    await asyncio.gather(*(send() for _ in range(4)))
    elapsed = time.perf_counter() - started_at
    await store.close()
    return batches * 100 / elapsed


def store_request(url: str, token: str, method: str, params: dict[str, Any]) -> bytes:
    """The whole HTTP request of a call of the store."""
    body = msgspec.msgpack.encode(params)
    head = (
        f"POST /store/{method} HTTP/1.1\r\nhost: {url[7:]}\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/msgpack\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def commit_rate(path: Path, *, commits: int = 200) -> float:
    """Durable commits of one row a second."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "CREATE TABLE IF NOT EXISTS t (a)"):
            database.execute(statement)
        started_at = time.perf_counter()
        for number in range(commits):
            database.execute("INSERT INTO t VALUES (?)", (number,))
        return commits / (time.perf_counter() - started_at)


@contextmanager
def serve(folder: Path, backend: str, *, workers: int, program: Sequence[str] = AGL) -> Iterator[tuple[str, Path]]:
    """``agl serve`` with a spool and running attempts; gives its URL and the file of their tokens."""
    upstream = f"canned={backend},trained=1"
    command = [sys.executable, *program, "serve", "--port", "0"]
    options = ["--store", f"{folder}/{workers}.db", "--spool", f"{folder}/spool-{workers}", "--upstream", upstream]
    environment = {**os.environ, "AGL_TOKEN": ADMIN, "AGL_SECRET": SECRET.decode(), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, *options, "--workers", str(workers)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        tokens = folder / f"tokens-{workers}"
        tokens.write_text("\n".join(asyncio.run(open_attempts(url))), encoding="utf-8")
        yield url, tokens
    finally:
        process.terminate()
        process.communicate()


async def open_attempts(url: str) -> list[str]:
    """The tokens of as many running attempts as there are connections."""
    store, tokens = component("store", "http", url=url, token=ADMIN), AttemptTokens(SECRET)
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=at) for at in range(CONNECTIONS)])
    claims = await store.claim(worker="bench", limit=CONNECTIONS, lease_s=3600)
    await store.close()
    until = time.time() + 3600
    return [tokens.issue(each.attempt.rollout_id, each.attempt.attempt_id, expires_at=until) for each in claims]


async def request_all(url: str, requests: list[bytes], *, connections: int = CLIENTS) -> float:
    """Send all requests, each connection as fast as it is answered; returns the seconds."""
    opened = [Connection(url) for _ in range(connections)]
    for connection in opened:
        await connection.open()
    left = iter(requests)

    async def work(connection: Connection) -> None:
        for request in left:
            await connection.call(request)

    started_at = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in opened))
    seconds = time.perf_counter() - started_at
    for connection in opened:
        connection.close()
    return seconds


def encode_rate() -> float:
    """Spans per second of encoding and decoding alone."""
    spans = sample_spans("ro-0.1", 500)
    started_at = time.perf_counter()
    msgspec.msgpack.decode(msgspec.msgpack.encode(spans), type=list[Span])
    return len(spans) / (time.perf_counter() - started_at)


def stages(*, is_streamed: bool) -> str:
    """Where ``agl serve`` spends its CPU, as a share of each stage."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        backend = stack.enter_context(started("benchmarks.canned", "64")).url
        program = ("-m", "benchmarks._stages", str(folder / "stages"))
        with serve(folder, backend, workers=1, program=program) as (url, tokens):
            load(f"{url}/v1", tokens, calls=5 * CALLS, is_streamed=is_streamed)
        counts = msgspec.json.decode((folder / "stages").read_bytes(), type=dict[str, int])
    shares = sorted(((count / sum(counts.values()), name) for name, count in counts.items()), reverse=True)
    return "\n".join(f"{share:6.1%}  {name}" for share, name in shares)


def figures(*, calls: int = CALLS, repeats: int = REPEATS) -> list[Figure]:
    """Measure everything."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(stack, folder, calls=calls, repeats=repeats)
        return [*bench.plain(), *bench.streamed(), *bench.latency(), *bench.http_store(), *bench.processes()]


def run(*, quick: bool) -> list[Figure]:
    """Every figure; quickly with fewer calls."""
    return figures(calls=400, repeats=1) if quick else figures()


if __name__ == "__main__":
    if "--stages" in sys.argv:
        print(f"plain calls\n{stages(is_streamed=False)}\n\nstreamed calls\n{stages(is_streamed=True)}")
    else:
        print(table(run(quick=False)))
