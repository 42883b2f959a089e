"""Every change by the admin token is logged with its caller, time and result, and without secrets."""

import asyncio
import json
import logging
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from agl.contracts import LabelMove, RolloutQuery
from agl.errors import ConflictError, NotFoundError
from agl.schemas import (
    Outcome,
    PromptTemplate,
    ResourceVersion,
    Reward,
    Rollout,
    Span,
    new_span_id,
    new_trace_id,
)
from agl_gateway.client import HttpStore
from agl_gateway.service import GatewayService
from agl_gateway.traffic.conversations import HEADER
from agl_inspect.terminal.program import cli
from agl_run.access.tokens import AdminKey
from agl_testing.model_server import ScriptedModelServer

from .conftest import ADMIN, SECRET, ServiceFactory, StageFactory
from .test_scopes import everything

TASK = "a task that no line holds"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the parsed lines of an audit log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def a_rollout(name: str) -> Rollout:
    return Rollout(rollout_id=name, task=TASK, experiment="mine")


def a_reward(attempt_id: str) -> Span:
    return Span(
        rollout_id=attempt_id.partition(".")[0],
        attempt_id=attempt_id,
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name="reward",
        start_ns=1,
        reward=Reward(value=1.0),
    )


def served(service: GatewayService, *, token: str = ADMIN) -> HttpStore:
    return HttpStore(service.url, token=token)


async def test_each_privileged_change_leaves_one_line_and_the_work_of_workers_none(
    serving: ServiceFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="agl.audit")
    log = tmp_path / "audit.jsonl"
    async with serving(audit_log=str(log)) as service:
        store = served(service)
        await store.enqueue([a_rollout("ro-1"), a_rollout("ro-2")])
        claims = await store.claim(worker="w", limit=2)
        await store.renew([claim.attempt.attempt_id for claim in claims])
        await store.append_spans([a_reward("ro-2.1")])
        await store.finish([Outcome(attempt_id="ro-1.1", status="succeeded")])
        await store.append_spans([a_reward("ro-1.1")])
        await store.cancel(["ro-2"])
        await store.delete(["ro-1", "ro-2"])
        await store.publish([ResourceVersion(name="prompt", version="v1", resource=PromptTemplate(template=TASK))])
        for is_back in (False, True):
            move = LabelMove(name="prompt", label="production", version="v1", is_back=is_back)
            await store.move_label(move)
        await store.save_state({"experiment/mine/1/last": b"{}"})
        await store.make_worker_token("mine", valid_s=60, name="node-7")
        await store.close()
    lines = lines_of(log)
    told = [(line["action"], line.get("objects", []), line.get("experiment", "")) for line in lines]
    assert [
        ("enqueue", ["ro-1", "ro-2"], "mine"),
        ("late reward", ["ro-1.1"], ""),
        ("cancel", ["ro-2"], "mine"),
        ("delete", ["ro-1", "ro-2"], "mine"),
        ("publish", ["prompt@v1"], ""),
        ("promote", ["prompt@v1 as production"], ""),
        ("rollback", ["prompt@v1 as production"], ""),
        ("save_state", ["experiment/mine/1/last"], ""),
        ("make worker token", ["node-7"], "mine"),
    ] == told
    assert {("done", "admin", "admin token 1", "127.0.0.1")} == {
        (line["result"], line["scope"], line["token"], line["remote"]) for line in lines
    }
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert all(line["time"].startswith(today) and line["time"].endswith("Z") for line in lines)
    assert log.read_text().splitlines() == [record.getMessage() for record in caplog.records]
    assert 0o600 == stat.S_IMODE(log.stat().st_mode)
    assert not any(secret in log.read_text() for secret in (ADMIN, SECRET.decode(), TASK))


async def test_a_change_that_the_store_refuses_is_a_line_with_the_reason(
    serving: ServiceFactory, tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    async with serving(audit_log=str(log)) as service:
        store = served(service)
        await store.enqueue([a_rollout("ro-1")])
        with pytest.raises(ConflictError):
            await store.delete(["ro-1"])
        with pytest.raises(NotFoundError):
            await store.cancel(["ro-none"])
        await store.close()
    failed = [line for line in lines_of(log) if line["result"] == "failed"]
    assert [("delete", "mine"), ("cancel", "")] == [(line["action"], line.get("experiment", "")) for line in failed]
    assert failed[0]["error"].startswith("ConflictError: rollout 'ro-1' is queued")


async def test_a_token_that_was_signed_names_the_process_that_signed_it(
    serving: ServiceFactory, tmp_path: Path
) -> None:
    log = tmp_path / "audit.jsonl"
    async with serving(audit_log=str(log)) as service:
        store = served(service, token=AdminKey(SECRET)())
        await store.enqueue([a_rollout("ro-1")])
        await store.close()
    assert [f"{socket.gethostname()}:{os.getpid()}"] == [line["token"] for line in lines_of(log)]


async def test_many_objects_are_counted_and_the_first_are_named(serving: ServiceFactory, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with serving(audit_log=str(log)) as service:
        store = served(service)
        await store.enqueue([a_rollout(f"ro-{number:03d}") for number in range(300)])
        await store.close()
    [line] = lines_of(log)
    assert (300, 20, "ro-000") == (line["count"], len(line["objects"]), line["objects"][0])


async def test_log_that_was_moved_away_begins_anew_and_one_that_cannot_be_written_stops_nothing(
    serving: ServiceFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log" / "audit.jsonl"
    log.parent.mkdir()
    async with serving(audit_log=str(log)) as service:
        store = served(service)
        await store.enqueue([a_rollout("ro-1")])
        log.rename(tmp_path / "audit.jsonl.1")
        await store.enqueue([a_rollout("ro-2")])
        assert [["ro-2"]] == [line["objects"] for line in lines_of(log)]
        log.unlink()
        log.parent.rmdir()
        await store.enqueue([a_rollout("ro-3")])
        assert 3 == await service.store.count_rollouts(RolloutQuery())
        await store.close()
    assert "cannot be written" in caplog.text


async def test_a_conversation_that_the_admin_token_ends_is_a_line_and_one_that_its_client_ends_is_none(
    server: ScriptedModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="agl.audit")
    async with everything(server) as (service, tokens), aiohttp.ClientSession() as session:
        for conversation, scope in (("first", "client"), ("second", "admin")):
            headers = {"authorization": f"Bearer {tokens[scope]}", HEADER: conversation}
            body = {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}
            for path in ("/v1/chat/completions", "/conversations/end"):
                async with session.post(service.url + path, headers=headers, json=body) as reply:
                    assert 200 == reply.status
    [line] = [json.loads(record.getMessage()) for record in caplog.records if record.name == "agl.audit"]
    assert ("end conversation", "admin", "second") == (line["action"], line["scope"], line["objects"][0])


async def test_commands_on_a_served_store_are_written_down_by_the_gateway(
    serving: ServiceFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "audit.jsonl"
    monkeypatch.setenv("AGL_TOKEN", ADMIN)
    async with serving(audit_log=str(log)) as service:
        versions = [
            ResourceVersion(name="prompt", version=name, resource=PromptTemplate(template=name))
            for name in ("v1", "v2")
        ]
        await service.store.publish(versions)
        await service.store.enqueue([a_rollout(f"ro-{number}") for number in (1, 2)])
        await service.store.cancel(["ro-1", "ro-2"])

        async def agl(*words: str) -> str:
            done = await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--store", service.url])
            assert 0 == done.exit_code, done.output
            return done.output

        await agl("runs", "rm", "ro-1")
        await agl("runs", "gc", "--keep", "0")
        await agl("resources", "promote", "prompt", "v1")
        await agl("resources", "promote", "prompt", "v2")
        await agl("resources", "rollback", "prompt")
        token = (await agl("worker-token", "mine", "--valid", "1h", "--name", "node-7")).strip()
    assert [
        ("delete", ["ro-1"]),
        ("delete", ["ro-2"]),
        ("promote", ["prompt@v1 as production"]),
        ("promote", ["prompt@v2 as production"]),
        ("rollback", ["prompt@v1 as production"]),
        ("make worker token", ["node-7"]),
    ] == [(line["action"], line["objects"]) for line in lines_of(log)]
    assert token.startswith("agl_")
    assert token not in log.read_text()


async def test_an_experiments_own_gateway_writes_the_lines_too(stage: StageFactory, tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    async with stage(audit_log=str(log)) as it:
        store = HttpStore(it.url, token=AdminKey(SECRET)())
        await store.enqueue([a_rollout("ro-1")])
        await store.close()
    assert ["enqueue"] == [line["action"] for line in lines_of(log)]
