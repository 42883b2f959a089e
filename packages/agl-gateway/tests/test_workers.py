"""``agl serve --workers``: calls spread over processes and gateways are recorded, counted and settled together."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from click.testing import CliRunner

from agl.contracts import Upstream
from agl.errors import StoreError
from agl.schemas import Outcome, Rollout, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.cli.serve import wait_for_store
from agl_gateway.client import HttpStore
from agl_gateway.processes.peers import Board, Group
from agl_gateway.record.spool_file import spools_for
from agl_gateway.service import GatewayService
from agl_gateway.settings import Settings
from agl_inspect.terminal.program import cli
from agl_run.access.tokens import AttemptTokens
from agl_testing.model_server import ScriptedModelServer
from agl_testing.waiting import eventually, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")

TOKEN = "a-token-of-the-tests-0123456789"
SECRET = "a secret of the gateway's own tests"


class Serve:
    """Runs ``agl serve`` with several processes on one SQLite file."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.lines: list[str] = []

    def __enter__(self) -> "Serve":
        command = [sys.executable, "-c", "from agl_inspect.terminal import main; main()", "serve", "--port", "0"]
        self.log = (self.folder / "serve.log").open("w+")
        environment = {**os.environ, "AGL_TOKEN": TOKEN, "AGL_SECRET": SECRET, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, *self.options], cwd=self.folder, env=environment, stdout=self.log, stderr=subprocess.STDOUT
        )
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()

    @property
    def text(self) -> str:
        return (self.folder / "serve.log").read_text()

    def pids(self, count: int) -> list[int]:
        """Wait until ``count`` processes serve; returns their ids."""
        found: dict[str, int] = {}
        for line in self.text.splitlines():
            if " serves as " in line:
                found[line.split()[1]] = int(line.split()[-1])
        assert self.process.poll() is None, self.text
        return list(found.values()) if len(found) == count else []

    def url(self, count: int) -> str:
        wait_until(lambda: self.pids(count))
        first = next(line for line in self.text.splitlines() if line.startswith("serving"))
        return first.split()[-1]


@pytest.fixture
def slow_server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer() as server:
        yield server


def options(server: ScriptedModelServer, folder: Path, *more: str) -> list[str]:
    upstream = f"main_llm={server.base_url},model=scripted,trained=1"
    return ["--store", "served.db", "--spool", str(folder / "spool"), "--upstream", upstream, *more]


async def call(url: str, key: str, text: str, *, retry: int = 0) -> int:
    """Make a model call on a new connection, so that calls spread over processes; returns the status."""
    body = {"model": "main_llm", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


async def opened(store: HttpStore | MemoryStore, **metadata: object) -> tuple[str, str, str]:
    """Open an attempt; returns the rollout's id, the attempt's id and the attempt's token."""
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=1, metadata=metadata)])  # type: ignore[arg-type]
    (claim,) = await store.claim(worker="test", lease_s=600)
    attempt = claim.attempt
    key = AttemptTokens(SECRET.encode()).issue(attempt.rollout_id, attempt.attempt_id, expires_at=time.time() + 600)
    return attempt.rollout_id, attempt.attempt_id, key


async def metrics(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def by_process(found: Mapping[str, float], name: str) -> Counter[str]:
    """Return a metric's sum per process, over its other labels."""
    sums: Counter[str] = Counter()
    for key, value in found.items():
        if key.startswith(f"{name}{{"):
            sums[key.split('process="')[1].split('"')[0]] += int(value)
    return sums


@pytest.mark.timeout(200)
async def test_calls_spread_over_processes_are_recorded_whole_and_survive_kills(tmp_path, slow_server):
    with Serve(tmp_path, *options(slow_server, tmp_path, "--workers", "2")) as serve:
        url = await asyncio.to_thread(serve.url, 2)
        store = HttpStore(url, token=TOKEN)
        attempts = [await opened(store) for _ in range(4)]
        answered: Counter[str] = Counter()

        async def calls(attempt_id: str, key: str) -> None:
            for number in range(15):
                try:
                    status = await call(url, key, f"{attempt_id} {number}")
                except aiohttp.ClientError:
                    continue  # the process that had the call was killed
                assert 200 == status
                answered[attempt_id] += 1

        working = [asyncio.create_task(calls(attempt_id, key)) for _, attempt_id, key in attempts]
        await eventually(lambda: answered.total() > 10)
        os.kill(serve.pids(2)[0], signal.SIGKILL)
        await asyncio.gather(*working)
        for rollout_id, attempt_id, _ in attempts:
            await store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
            spans = [span for span in await store.spans(rollout_id) if span.call is not None]
            assert answered[attempt_id] <= len(spans)
            assert not any(span.is_late for span in spans)
        await eventually(lambda: len(serve.pids(2)) == 2 and "is started again in 0.1 s" in serve.text)
        await eventually(lambda: _all_up(url))
        assert 3 == (await metrics(url))["agl_gateway_process_starts_total"]
        serve.process.send_signal(signal.SIGTERM)
        assert 0 == await asyncio.to_thread(serve.process.wait, 60)
        assert 2 == serve.text.count("everything recorded is in the store")
        assert "Traceback" not in serve.text
        await store.close()


async def test_attempt_ends_only_once_the_calls_that_another_process_holds_are_in_the_store(tmp_path):
    board = Board(2)
    asked = asyncio.Event()
    may_answer = asyncio.Event()

    async def settle(request: web.Request) -> web.Response:
        assert {"attempt_id": "a-1"} == await request.json()
        asked.set()
        await may_answer.wait()
        return web.json_response({})

    other = web.Application()
    other.router.add_post("/settle", settle)
    runner = web.AppRunner(other)
    await runner.setup()
    group = Group(number=0, folder=tmp_path, board=board)
    await web.UnixSite(runner, str(group.socket(1))).start()
    store = MemoryStore()
    service = GatewayService(
        store=store, upstreams=[], tokens=AttemptTokens(SECRET.encode()), settings=Settings(), group=group
    )
    await service.start()
    unknown = board.held(1)  # as of a process that has not looked into its spool yet, or was killed
    try:
        board.hold(1, 0)
        await service.peers.settle("a-1")
        assert not asked.is_set()
        for held in (3, unknown):
            board.hold(1, held)
            asked.clear()
            may_answer.clear()
            settling = asyncio.create_task(service.peers.settle("a-1"))
            await asyncio.wait([settling, asyncio.create_task(asked.wait())], return_when=asyncio.FIRST_COMPLETED)
            assert asked.is_set()
            assert not settling.done()
            may_answer.set()
            await settling
    finally:
        await service.stop()
        await runner.cleanup()
        await store.close()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and ") Z" in stat.read_text())  # one that has ended and that nobody has waited for


async def _all_up(url: str) -> bool:
    found = await metrics(url)
    return [1.0, 1.0] == [found[f'agl_gateway_process_up{{process="{number}"}}'] for number in range(2)]


@pytest.mark.timeout(200)
async def test_processes_know_each_others_requests_count_to_one_limit_and_end_with_their_parent(tmp_path, slow_server):
    with Serve(tmp_path, *options(slow_server, tmp_path, "--workers", "2", "--max-calls", "30")) as serve:
        url = await asyncio.to_thread(serve.url, 2)
        store = HttpStore(url, token=TOKEN)
        rollout_id, attempt_id, key = await opened(store)
        assert 200 == await call(url, key, "again")
        for retry in range(1, 6):
            assert 200 == await call(url, key, "again", retry=retry)
        others = [await call(url, key, f"number {number}") for number in range(40)]
        assert {200: 24, 403: 16} == Counter(others)
        assert 2 == len(+by_process(await metrics(url), "agl_calls_total"))
        await store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
        found = [span.call for span in await store.spans(rollout_id) if span.call is not None]
        ids = Counter(each.request_id for each in found)
        assert [6, *[1] * 24] == sorted(ids.values(), reverse=True)
        await store.close()
        pids = serve.pids(2)
        serve.process.kill()
        await eventually(lambda: 2 == serve.text.count("everything recorded is in the store"))
        await eventually(lambda: not any(_runs(pid) for pid in pids))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--store", "memory://"], "the store is in memory"),
        (["--store", "x.db", "--spool", "off"], "take away --spool off"),
        (["--store", "x.db", "--max-spans-per-minute", "5"], "use --base-rate"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(tmp_path, monkeypatch, more, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    monkeypatch.setenv("AGL_SECRET", SECRET)
    done = CliRunner().invoke(cli, ["serve", "--port", "0", "--workers", "2", *more])
    assert 1 == done.exit_code
    assert "--workers 2 is refused" in done.output
    assert told in done.output


def test_processes_that_cannot_start_end_the_command_with_their_reason(tmp_path):
    with Serve(tmp_path, "--workers", "2", "--store", "x.db", "--split", "production=1") as serve:
        assert 1 == serve.process.wait(60)
        assert "Error:" in serve.text
        assert "production" in serve.text
        assert "Traceback" not in serve.text


class AwayStore(MemoryStore):
    """A store that fails twice and then answers."""

    asked = 0

    async def cursor(self) -> int:
        self.asked += 1
        if self.asked < 3:
            raise StoreError("it is being started")
        return await super().cursor()


SIGNALLED = """
import asyncio, os, signal
from agl_gateway.processes.supervisor import Supervisor, listening

fork, parent = os.fork, os.getpid()


def fork_and_signal():
    pid = fork()
    if os.getpid() == parent:
        os.kill(parent, signal.SIGTERM)
    return pid


async def serve(place):
    is_orphan = asyncio.Event()
    asyncio.get_running_loop().add_reader(place.parent, is_orphan.set)
    await is_orphan.wait()


os.fork = fork_and_signal
listener = listening("127.0.0.1", 0, backlog=8)
raise SystemExit(Supervisor(count=2, listener=listener, serve=serve, run_async=asyncio.run, say=print).run())
"""


def test_signal_that_arrives_while_a_process_is_started_ends_it_too():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=30)
    assert (0, "") == (done.returncode, done.stderr)


async def test_gateway_waits_at_its_start_for_a_store_that_is_away(capsys):
    store = AwayStore()
    assert await wait_for_store(store, "postgresql://db", asyncio.Event())
    assert 3 == store.asked
    told = "the store postgresql://db does not answer; the gateway starts once it does: it is being started\n"
    assert told == capsys.readouterr().err


async def test_signal_ends_a_gateway_that_waits_for_its_store():
    stopping = asyncio.Event()
    store = AwayStore()
    store.asked = -1_000_000
    waiting = asyncio.create_task(wait_for_store(store, "postgresql://db", stopping))
    await eventually(lambda: store.asked > -1_000_000)
    stopping.set()
    assert not await waiting


async def test_gateways_behind_a_balancer_know_each_others_requests_and_positions(server, tmp_path):
    store = MemoryStore()
    gateways: list[GatewayService] = []
    for _ in range(2):
        gateway = GatewayService(
            store=store,
            upstreams=[Upstream(name="main_llm", base_url=server.base_url, model="scripted", is_trained=True)],
            tokens=AttemptTokens(SECRET.encode()),
            settings=Settings(is_shared=True),
            spools=await spools_for(store, str(tmp_path / "spool"), shown="memory://"),
        )
        await gateway.start()
        gateways.append(gateway)
    await eventually(lambda: _announced(store))
    rollout_id, attempt_id, key = await opened(store, seed=7)
    for number in range(8):
        assert 200 == await call(gateways[number % 2].url, key, "the same", retry=number % 2)
    for gateway in gateways:
        await gateway.peers.settle(attempt_id)
    seeds = [each.headers["x-agl-seed"] for each in server.calls]
    assert 8 == len(set(seeds))
    spans = [span.call for span in await store.spans(rollout_id) if span.call is not None]
    assert [2, 2, 2, 2] == list(Counter(each.request_id for each in spans).values())
    assert await gateways[0].peers.start() == await gateways[1].peers.start()
    for gateway in gateways:
        await gateway.stop()
    await store.close()


async def _announced(store: MemoryStore) -> bool:
    return len(await store.presences("agl-gateways")) == 2
