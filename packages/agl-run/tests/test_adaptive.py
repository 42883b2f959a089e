"""The number of rollouts at once follows the load of model servers: simulated ones, and one with an address."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agl import PluginManager
from agl.contracts import Upstream
from agl.errors import ConfigError
from agl_run import parse_config
from agl_run.checks.planning import make_plan
from agl_run.worker.slots import Limit, Load, Slots, adapt, load_of

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
    limit, taken, done, thinking = Limit(128), 0, 0, list[tuple[float, Call]]()
    for tick in range(int(240 / TICK_S)):
        now = tick * TICK_S
        if tick % 10 == 0:
            load = Load(waiting=len(engine.waiting), cache=min(1.0, engine.used / engine.memory))
            count = fixed or limit.update(load, taken=taken)
        while taken < count:
            taken += 1
            engine.waiting.append(Call())
        engine.waiting += [call for ready, call in thinking if ready <= now]
        thinking = [(ready, call) for ready, call in thinking if ready > now]
        for call in engine.tick():
            if call.turn + 1 < TURNS:
                thinking.append((now + engine.tool_s, Call(turn=call.turn + 1)))
            else:
                taken, done = taken - 1, done + 1
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


def test_limit_stays_within_its_bound_and_waits_for_a_step_to_take_effect() -> None:
    limit = Limit(20)
    assert [16, 20, 20] == [limit.update(Load(), taken=taken) for taken in (8, 16, 20)]
    assert [18, 18, 16] == [limit.update(Load(waiting=9), taken=taken) for taken in (20, 19, 18)]
    assert [16, 17] == [limit.update(Load(cache=cache), taken=16) for cache in (0.95, 0.5)]


VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""
SGLANG = 'sglang:num_queue_reqs{model_name="m"} 2.0\nsglang:token_usage{model_name="m"} 0.75\n'


def test_metrics_of_several_servers_are_one_load() -> None:
    assert Load(waiting=5.0, cache=0.75) == load_of([VLLM, SGLANG, ""])


class Metrics(BaseHTTPRequestHandler):
    """Answers `/metrics` with the server's text."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.server.text.encode())  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def adapted(server: ThreadingHTTPServer, *, taken: int, readings: int) -> int:
    """Return the number of slots of 64 after some readings of a server."""

    async def body() -> int:
        slots, read = Slots(64), asyncio.Semaphore(0)
        slots.taken = taken
        upstream = Upstream(name="m", base_url=f"http://127.0.0.1:{server.server_port}/v1")
        task = asyncio.create_task(adapt(slots, [upstream], changed=read.release))
        for _ in range(readings):
            await read.acquire()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return slots.count

    return asyncio.run(body())


def test_slots_follow_a_server(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_run.worker.slots.POLL_S", 0.01)
    server.text = VLLM  # type: ignore[attr-defined]
    assert 7 == adapted(server, taken=8, readings=1)
    server.text = VLLM.replace(" 3.0", " 0.0")  # type: ignore[attr-defined]
    assert 16 == adapted(server, taken=8, readings=3)


def test_server_without_metrics_leaves_the_number_as_it_is(
    server: ThreadingHTTPServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_run.worker.slots.POLL_S", 0.01)
    server.text = "<html>"  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        assert 64 == adapted(server, taken=8, readings=2)
    assert "no model server has /metrics: 64 rollouts at once" in caplog.text


def test_adaptive_run_without_attempts_of_its_own_is_refused(tmp_path: Path) -> None:
    runner = {"is_adaptive": True, "concurrency": 0}
    config = parse_config({"experiment": {"agent": "agent:solve"}, "runner": runner})
    with pytest.raises(ConfigError, match=r"runner.is_adaptive follows the model servers' load"):
        make_plan(config, folder=tmp_path, manager=PluginManager())
