"""The number of rollouts at once follows the load of model servers: simulated ones, and one with an address."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

import agl_run
from agl import PluginManager, Rollout
from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.schemas import Claim, Outcome
from agl.stores import MemoryStore
from agl_run import Quiet, RunContext, Trainer, Worker, parse_config, policy
from agl_run.checks.planning import make_plan
from agl_run.worker.slots import Load, Slots, adapt, load_of

TURNS, PROMPT, ANSWER, TICK_S = 3, 200, 100, 0.1


@dataclass(eq=False)
class Call:
    """A model call of a rollout: its turn, and the tokens that it still needs."""

    turn: int = 0
    prefill: float = 0.0
    left: float = ANSWER


@dataclass(kw_only=True)
class Engine:
    """A server in virtual time: it decodes all running calls together, and drops the newest where memory ends."""

    rows: int  # most calls that run
    memory: float  # tokens of the KV cache
    half: float  # calls at which each has half of the full speed
    tool_s: float  # seconds between two calls of a rollout

    def __post_init__(self) -> None:
        self.running: list[Call] = []
        self.waiting: list[Call] = []

    @property
    def used(self) -> float:
        return sum(PROMPT + call.turn * ANSWER + ANSWER - call.left for call in self.running)

    def tick(self) -> list[Call]:
        """Compute for a tenth of a second, and return the calls that are answered."""
        while self.waiting and len(self.running) < self.rows and self.used + PROMPT < self.memory:
            call = self.waiting.pop(0)
            call.prefill = PROMPT + call.turn * ANSWER + ANSWER - call.left
            self.running.append(call)
        speed = 40.0 * TICK_S * self.half / (self.half + len(self.running))
        for call in self.running:
            prefilled = min(call.prefill, 20 * speed)
            call.prefill -= prefilled
            call.left -= speed - prefilled / 20
        done = [call for call in self.running if call.left <= 0]
        self.running = [call for call in self.running if call.left > 0]
        while self.used > self.memory:
            self.waiting.insert(0, self.running.pop())
        return done


def finished(engine: Engine, *, fixed: int = 0) -> float:
    """Return the rollouts that finish in four minutes, with a fixed number at once or with an adaptive one."""
    slots, done, thinking = Slots(128, is_adaptive=not fixed), 0, list[tuple[float, Call]]()
    for tick in range(int(240 / TICK_S)):
        now = tick * TICK_S
        if tick % 10 == 0:
            cache = min(1.0, engine.used / engine.memory)
            slots.fit(Load(waiting=len(engine.waiting), running=len(engine.running), cache=cache))
        while slots.taken < (fixed or slots.count):
            slots.take()
            engine.waiting.append(Call())
        engine.waiting += [call for ready, call in thinking if ready <= now]
        thinking = [(ready, call) for ready, call in thinking if ready > now]
        for call in engine.tick():
            if call.turn + 1 < TURNS:
                thinking.append((now + engine.tool_s, Call(turn=call.turn + 1)))
            else:
                slots.leave()
                done += 1
    return done


ENGINES = {
    "wide": {"rows": 64, "memory": 1e6, "half": 32, "tool_s": 0.0},
    "small cache": {"rows": 256, "memory": 8000, "half": 64, "tool_s": 2.0},
    "narrow with slow tools": {"rows": 4, "memory": 1e6, "half": 8, "tool_s": 15.0},
}


@pytest.mark.parametrize("name", ENGINES)
def test_adaptive_number_is_nearly_as_good_as_the_best_fixed_one(name: str) -> None:
    best = max(finished(Engine(**ENGINES[name]), fixed=fixed) for fixed in (4, 8, 16, 24, 32, 48, 64, 128))  # type: ignore[arg-type]
    assert finished(Engine(**ENGINES[name])) >= 0.9 * best  # type: ignore[arg-type]


def fitted(slots: Slots, load: Load, *, taken: int) -> int:
    slots.taken = taken
    slots.fit(load)
    return slots.count


def test_number_stays_within_its_bound_and_waits_for_a_step_to_take_effect() -> None:
    slots = Slots(20, is_adaptive=True)
    assert [8, 16, 20, 20] == [slots.count, *(fitted(slots, Load(), taken=taken) for taken in (8, 16, 20))]
    crowded = Load(waiting=9, running=20)
    assert [18, 18, 16] == [fitted(slots, crowded, taken=taken) for taken in (20, 19, 18)]
    assert [16, 17] == [fitted(slots, Load(cache=cache), taken=16) for cache in (0.95, 0.5)]


def test_short_queue_of_other_workers_does_not_shrink_the_number() -> None:
    assert 16 == fitted(Slots(64, is_adaptive=True), Load(waiting=3, running=60), taken=8)


def test_time_that_slots_offer_follows_their_number() -> None:
    now = [0.0]
    slots = Slots(64, is_adaptive=True, clock=lambda: now[0])
    slots.take()
    now[0] = 10.0
    slots.resize(32)
    now[0] = 15.0
    assert (8 * 10.0 + 32 * 5.0, 15.0) == slots.totals()


VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""
SGLANG = """sglang:num_running_reqs{model_name="m"} 6.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.75
"""


def test_metrics_of_several_servers_are_one_load() -> None:
    assert Load(waiting=5.0, running=10.0, cache=0.75) == load_of([VLLM, SGLANG.replace(":", "_"), ""])


class Metrics(ThreadingHTTPServer):
    """Answers `/metrics` with its text; the first requests get the statuses instead."""

    def __init__(self, text: str, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.text, self.statuses, self.asked = text, list(statuses), 0
        self.upstream = Upstream(name="m", base_url=f"http://me:my-key@127.0.0.1:{self.server_port}/v1")


class Answer(BaseHTTPRequestHandler):
    server: Metrics

    def do_GET(self) -> None:
        self.server.asked += 1
        failure = self.server.statuses.pop(0) if self.server.statuses else 0
        self.send_response(failure or (200 if self.path == "/metrics" else 404))
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def log_message(self, *_: object) -> None: ...


Serve = Callable[..., Metrics]

IDLE = VLLM.replace(" 3.0", " 0.0")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(text, *statuses)` starts a server of metrics, which is read every hundredth of a second."""
    monkeypatch.setattr("agl_run.worker.slots.POLL_S", 0.01)
    with ExitStack() as stack:

        def start(text: str, *statuses: int) -> Metrics:
            server = stack.enter_context(Metrics(text, *statuses))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.shutdown)
            return server

        yield start


def adapted(*upstreams: Upstream, readings: int) -> int:
    """Return the number of slots of 64, of which 8 are taken, after some readings of the servers."""

    async def body() -> int:
        slots, read = Slots(64, is_adaptive=True), asyncio.Semaphore(0)
        slots.taken = 8
        task = asyncio.create_task(adapt(slots, upstreams, changed=read.release))
        async with asyncio.timeout(30):
            for _ in range(readings):
                await read.acquire()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return slots.count

    return asyncio.run(body())


@pytest.mark.parametrize(("text", "count"), [(VLLM, 7), (IDLE, 16), (VLLM.replace("vllm:", "vllm_"), 7)])
def test_slots_follow_a_server(serve: Serve, text: str, count: int) -> None:
    assert count == adapted(serve(text).upstream, readings=1)


@pytest.mark.parametrize("status", [429, 503])
def test_server_that_does_not_answer_leaves_the_say_to_the_others(
    serve: Serve, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    silent, other = serve(VLLM, status, status), serve(IDLE)
    assert 16 == adapted(silent.upstream, other.upstream, readings=2)
    assert 1 == caplog.text.count(f"http://127.0.0.1:{silent.server_port}/metrics does not answer")


@pytest.mark.parametrize("status", [429, 503])
def test_number_stays_until_a_server_answers(serve: Serve, status: int) -> None:
    server = serve(VLLM, status)
    assert 8 == adapted(server.upstream, readings=1)
    server.statuses = [status]
    assert 7 == adapted(server.upstream, readings=2)


def test_server_of_several_upstreams_is_read_once(serve: Serve) -> None:
    server = serve(IDLE)
    again = replace(server.upstream, name="again", base_url=server.upstream.base_url + "/")
    adapted(server.upstream, again, readings=1)
    assert 1 == server.asked


@pytest.mark.parametrize("text", ["<html>", "# about num_requests_waiting\n"])
def test_server_without_metrics_leaves_the_number_as_it_is(
    serve: Serve, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert 64 == adapted(serve(text).upstream, readings=2)
    assert "no model server has /metrics: 64 rollouts at once" in caplog.text


class Crowd:
    """A runner whose attempts wait until all rollouts run; `at_once` has how many ran when each of them began."""

    def __init__(self, slots: Callable[[], Slots]) -> None:
        self.slots, self.at_once, self.is_full = slots, list[int](), asyncio.Event()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def execute(self, claim: Claim) -> Outcome:
        self.at_once.append(self.slots().taken)
        if len(self.at_once) == 64:
            self.is_full.set()
        await self.is_full.wait()
        return Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")


def test_worker_begins_with_few_of_the_queued_rollouts_and_takes_more(serve: Serve) -> None:
    async def body() -> list[int]:
        store = MemoryStore()
        await store.enqueue([Rollout(rollout_id=f"r{number}", task=None, experiment="e") for number in range(64)])
        context = RunContext(store=store, concurrency=64, upstreams=[serve(IDLE).upstream])
        crowd = Crowd(lambda: worker.slots)
        worker = Worker(context, crowd, is_adaptive=True)
        async with asyncio.timeout(30), worker:
            await crowd.is_full.wait()
        return crowd.at_once

    at_once = asyncio.run(body())
    assert [8] * 8 == at_once[:8]
    assert 64 == at_once[-1]


def test_adaptive_run_follows_the_servers_of_its_policies(serve: Serve, tmp_path: Path) -> None:
    server, running = serve(IDLE), set[str]()
    at_once = list[int]()

    async def solve(task: str) -> float:
        running.add(task)
        await asyncio.sleep(0)  # the others of this claim begin
        at_once.append(len(running))
        async with asyncio.timeout(30):
            while len(running) < 16:
                await asyncio.sleep(0.01)
        return 1.0

    Trainer(
        policies={"llm": policy("openai", base_url=server.upstream.base_url, model="m", api_key_env="")},
        runner=agl_run.runner("async", concurrency=16, is_adaptive=True),
        gateway="none",
        store=MemoryStore(),
        folder=tmp_path,
        progress=Quiet(),
    ).dev(solve, [str(number) for number in range(16)], tasks=16)
    assert 8 == at_once[0]
    assert server.asked


def test_adaptive_run_without_attempts_of_its_own_is_refused(tmp_path: Path) -> None:
    runner = {"is_adaptive": True, "concurrency": 0}
    config = parse_config({"experiment": {"agent": "agent:solve"}, "runner": runner})
    with pytest.raises(ConfigError, match=r"runner.is_adaptive follows the model servers' load"):
        make_plan(config, folder=tmp_path, manager=PluginManager())
