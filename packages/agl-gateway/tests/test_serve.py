"""``agl serve`` as a process: acknowledged calls survive ``kill -9``, and OTLP exporters can send spans to it."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import Compression, OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from agl.contracts import RolloutQuery
from agl.errors import ConfigError, StoreError
from agl.schemas import Outcome, Rollout, Span, new_rollout_id, new_span_id
from agl_gateway.cli.serve import admin_key_of, parse_upstream
from agl_gateway.client import HttpStore
from agl_inspect.retention import RetentionLimits, retaining
from agl_run.access.tokens import AttemptTokens
from agl_testing.waiting import eventually

TOKEN = "a-token-of-the-tests-0123456789"
SECRET = "a secret of the gateway's own tests"
KILLS = 15


class Serve:
    """Runs ``agl serve`` on one database, one process at a time."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.options = options
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", "from agl_inspect.terminal.program import main; main()", "serve"]
        command += ["--store", "served.db", "--port", str(self.port), *self.options]
        environment = {**os.environ, "AGL_TOKEN": TOKEN, "AGL_SECRET": SECRET}
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "serving" in first, process.communicate()[1]
        return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _open_attempt(store: HttpStore) -> tuple[str, str]:
    await store.enqueue([Rollout(rollout_id=new_rollout_id(), task=1)])
    (claim,) = await store.claim(worker="test", lease_s=600)
    return claim.rollout.rollout_id, claim.attempt.attempt_id


async def _write_until_killed(store: HttpStore, rollout_id: str, attempt_id: str, acknowledged: set[str]) -> None:
    while True:
        spans = [Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="n") for _ in range(5)]
        await store.append_spans(spans)
        acknowledged.update(span.span_id for span in spans)


def _has_grown(acknowledged: set[str], before: int, writers: list[asyncio.Task[None]]) -> bool:
    for writer in writers:
        assert not writer.done(), writer.exception()
    return len(acknowledged) > before


@pytest.mark.long
async def test_killed_server_loses_no_acknowledged_span(tmp_path):
    serve = Serve(tmp_path)
    draw = random.Random(5)
    acknowledged: set[str] = set()
    process = serve.start()
    store = HttpStore(serve.url, token=TOKEN)
    rollout_id, attempt_id = await _open_attempt(store)
    for _ in range(KILLS):
        writers = [
            asyncio.create_task(_write_until_killed(store, rollout_id, attempt_id, acknowledged)) for _ in range(3)
        ]
        await asyncio.sleep(draw.uniform(0.05, 0.3))
        process.kill()
        process.communicate()
        process = await asyncio.to_thread(serve.start)
        before = len(acknowledged)
        await eventually(partial(_has_grown, acknowledged, before, writers))
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        stored = {span.span_id for span in await store.spans(rollout_id, limit=1_000_000)}
        assert set() == acknowledged - stored
    await store.close()
    process.kill()
    process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.skipif(sys.platform == "win32", reason="signals to children need a console on Windows")
async def test_signal_ends_the_server_cleanly(tmp_path, number):
    serve = Serve(tmp_path)
    process = serve.start()
    store = HttpStore(serve.url, token=TOKEN)
    waiting = asyncio.create_task(store.claim(worker="w", wait_s=30))
    await asyncio.sleep(0.3)
    process.send_signal(number)
    out, err = await asyncio.to_thread(process.communicate, timeout=60)
    assert 0 == process.returncode
    assert "everything recorded is in the store" in err
    assert "Traceback" not in out + err
    assert TOKEN not in out + err
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await store.close()


@pytest.mark.long
async def test_server_removes_old_rollouts_by_itself_and_through_a_client(tmp_path):
    serve = Serve(tmp_path)
    process = serve.start()
    store = HttpStore(serve.url, token=TOKEN)
    for number in range(5):
        await store.enqueue([Rollout(rollout_id=f"ro-{number}", task=1)])
        (claim,) = await store.claim(worker="test")
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
    said: list[str] = []
    async with retaining(store, RetentionLimits(keep=4), say=said.append):
        await eventually(lambda: bool(said))
    assert ["retention: removed 1 old rollout; new ones take their space"] == said
    process.terminate()
    await asyncio.to_thread(process.communicate, timeout=60)

    serve.options = ("--keep", "2", "--older-than", "0s")
    process = serve.start()
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    told = await asyncio.to_thread(next, (line for line in lines if line.startswith("retention:")), "nothing")
    assert "retention: removed 2 old rollouts; new ones take their space\n" == told
    assert await _has(store, "ro-3", "ro-4")
    await store.close()
    process.terminate()
    await asyncio.to_thread(process.communicate, timeout=60)


async def _has(store: HttpStore, *rollout_ids: str) -> bool:
    return [*rollout_ids] == [rollout.rollout_id for rollout in await store.rollouts(RolloutQuery())]


def test_second_server_on_the_port_says_what_to_do(tmp_path):
    serve = Serve(tmp_path)
    process = serve.start()
    command = [
        sys.executable,
        "-c",
        "from agl_inspect.terminal.program import main; main()",
        "serve",
        "--store",
        "memory://",
    ]
    done = subprocess.run([*command, "--port", str(serve.port)], capture_output=True, text=True, check=False)
    process.kill()
    process.communicate()
    assert 1 == done.returncode
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr
    assert 1 == len([line for line in done.stderr.splitlines() if line.startswith("Error")])


async def test_otlp_spans_join_the_attempt_of_their_token_or_of_their_attributes(tmp_path):
    serve = Serve(tmp_path)
    process = serve.start()
    store = HttpStore(serve.url, token=TOKEN)
    rollout_id, attempt_id = await _open_attempt(store)
    token = AttemptTokens(SECRET.encode()).issue(rollout_id, attempt_id, expires_at=time.time() + 60)
    await asyncio.to_thread(_export, serve.url, token, {}, "by-token")
    home = {"agl.rollout_id": rollout_id, "agl.attempt_id": attempt_id}
    await asyncio.to_thread(_export, serve.url, TOKEN, home, "by-attributes")
    await asyncio.to_thread(_export, serve.url, TOKEN, {}, "homeless")
    await asyncio.to_thread(_export, serve.url, token, {**home, "agl.attempt_id": "ro-other.1"}, "foreign")
    await asyncio.to_thread(_export, serve.url, token, {}, "not-finite", score=float("nan"))
    spans = await store.spans(rollout_id)
    inner_of_refused = spans.pop()
    assert "inner not-finite" == inner_of_refused.name
    assert ["inner by-token", "by-token", "inner by-attributes", "by-attributes"] == [span.name for span in spans]
    inner, outer = spans[:2]
    assert (outer.span_id, outer.trace_id) == (inner.parent_id, inner.trace_id)
    assert ([1, 2], True, "x") == tuple(inner.attributes[key] for key in ("list", "flag", "text"))
    assert ("agent", 0.5, "judge") == (outer.reward.source, outer.reward.value, outer.reward.name)
    assert "evaluator" == spans[3].reward.source
    assert "happened" == inner.events[0].name
    await store.close()
    process.kill()
    process.communicate()


def _export(url: str, token: str, attributes: dict[str, str], name: str, *, score: float = 0.5) -> None:
    exporter = OTLPSpanExporter(
        f"{url}/v1/traces", headers={"authorization": f"Bearer {token}"}, compression=Compression.Gzip
    )
    provider = TracerProvider(resource=Resource(attributes))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    scores = {"gen_ai.evaluation.score.value": score, "gen_ai.evaluation.name": "judge"}
    with (
        tracer.start_as_current_span(name, attributes=scores),
        tracer.start_as_current_span(f"inner {name}", attributes={"list": [1, 2], "flag": True, "text": "x"}) as span,
    ):
        span.add_event("happened")
    provider.shutdown()


@pytest.mark.long
async def test_store_that_is_not_there_is_an_error_that_says_so():
    store = HttpStore(f"http://127.0.0.1:{_free_port()}", token=TOKEN)
    with pytest.raises(StoreError, match="agl serve"):
        await store.cursor()
    await store.close()


def test_store_url_without_a_token_is_refused(monkeypatch):
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="AGL_TOKEN"):
        HttpStore("http://127.0.0.1:4747")


def test_token_in_the_url_is_never_shown():
    assert "very-secret" not in repr(HttpStore("http://:very-secret@127.0.0.1:4747"))


def test_upstream_option_is_parsed_and_refused_with_a_reason():
    one = parse_upstream("main=http://h/v1,model=m,key_env=KEY,aliases=a*|b,trained=1")
    assert ("main", "http://h/v1", "m", "KEY", ("a*", "b"), True) == (
        one.name,
        one.base_url,
        one.model,
        one.api_key_env,
        one.aliases,
        one.is_trained,
    )
    with pytest.raises(ConfigError, match="NAME=URL"):
        parse_upstream("http://h/v1")
    with pytest.raises(ConfigError, match="modle"):
        parse_upstream("main=http://h/v1,modle=m")
    for given, is_trained in (("True", True), ("yes", True), ("0", False), ("false", False), ("no", False)):
        assert is_trained == parse_upstream(f"main=http://h/v1,trained={given}").is_trained
    for rest in ("trained", "trained=on-demand", "trained=1,trained=0"):
        with pytest.raises(ConfigError, match="trained"):
            parse_upstream(f"main=http://h/v1,{rest}")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no file modes")
def test_admin_token_file_is_private_and_kept(tmp_path, monkeypatch):
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    path = tmp_path / "sub" / "token"
    token, shown = admin_key_of(path)
    assert 0o600 == path.stat().st_mode & 0o777
    assert str(path) == shown
    again, _ = admin_key_of(path)
    assert callable(token)
    assert callable(again)
    assert token() == again()
