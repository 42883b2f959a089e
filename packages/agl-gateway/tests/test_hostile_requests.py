"""Malformed requests get a 4xx response that says what is wrong, and the gateway continues."""

import asyncio
import gzip
import http.client
import json
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from agl_gateway.access.identity import Identities
from agl_gateway.traffic.conversations import conversation_id
from agl_gateway.wire.problems import Problem
from agl_run.access.tokens import AttemptTokens

CALL = json.dumps({"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}).encode()
MODEL = "/v1/chat/completions"
DEEP = b"[" * 1500 + b"]" * 1500


def post(url: str, path: str, body: bytes, headers: dict[str, bytes]) -> tuple[int, str]:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        connection.putrequest("POST", path, skip_accept_encoding=True)
        for name, value in {"Content-Length": str(len(body)).encode(), **headers}.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "body", "headers", "expected"),
    [
        (MODEL, b'{"model":"main_llm","messages":' + DEEP + b"}", {}, "nested too deep"),
        (MODEL, b"\xff\xfe{", {}, "not a JSON object"),
        (MODEL, b"[1]", {}, "not a JSON object"),
        (MODEL, b"no gzip at all", {"Content-Encoding": b"gzip"}, "content-encoding 'gzip'"),
        (MODEL, b"no deflate at all", {"Content-Encoding": b"deflate"}, "content-encoding 'deflate'"),
        (MODEL, CALL, {"Authorization": b"Bearer \xff\xfe"}, "not an agl token"),
        ("/settle", b'{"attempt_id":"\xff"}', {}, "attempt_id"),
        ("/settle", b'{"attempt_id":' + DEEP + b"}", {}, "attempt_id"),
    ],
)
async def test_unreadable_request_is_refused(stage, path: str, body: bytes, headers: dict[str, bytes], expected: str):
    async with stage() as it:
        _, token = await it.open_attempt()
        sent = {"Authorization": f"Bearer {token}".encode(), "Content-Type": b"application/json", **headers}
        status, text = await asyncio.to_thread(post, it.url, path, body, sent)
        assert 400 <= status < 500
        assert expected in text
        sent = {"Authorization": f"Bearer {token}".encode(), "Content-Encoding": b"gzip"}
        assert 200 == (await asyncio.to_thread(post, it.url, MODEL, gzip.compress(CALL), sent))[0]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("rollouts", {"query": {"limit": -1}}),
        ("rollouts", {"query": {"limit": 2**63}}),
        ("recordings", {"query": {"limit": -1}}),
        ("changes", {"limit": -1}),
        ("changes", {"after": -1}),
        ("claim", {"worker": "w", "limit": -1}),
        ("spans", {"rollout_id": "r", "limit": -1}),
        ("spans", {"rollout_id": "r", "after": 2**64}),
    ],
)
async def test_page_that_no_store_can_count_to_is_refused(stage, method: str, params: dict[str, Any]):
    async with stage() as it:
        admin = it.tokens.issue("", "", expires_at=time.time() + 60, scope="admin")
        headers = {"Authorization": f"Bearer {admin}".encode(), "Content-Type": b"application/json"}
        status, text = await asyncio.to_thread(post, it.url, f"/store/{method}", json.dumps(params).encode(), headers)
        assert 400 == status
        assert "limit" in text or "after" in text


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("enqueue", {"rollouts": [{"rollout_id": "../secrets", "task": 1}]}),
        ("enqueue", {"rollouts": [{"rollout_id": "r", "task": 1, "experiment": "x" * 257}]}),
        ("announce", {"presence": {"experiment": "e", "member": "\x1b[2J", "session": "s"}}),
        ("log_metrics", {"metrics": [{"experiment": "a\0b", "algorithm": "a", "step": 1, "name": "n", "value": 1.0}]}),
    ],
)
async def test_id_that_no_store_takes_is_refused(stage, method: str, params: dict[str, Any]):
    async with stage() as it:
        admin = it.tokens.issue("", "", expires_at=time.time() + 60, scope="admin")
        headers = {"Authorization": f"Bearer {admin}".encode(), "Content-Type": b"application/json"}
        status, text = await asyncio.to_thread(post, it.url, f"/store/{method}", json.dumps(params).encode(), headers)
        assert 400 == status
        assert "an id or a name has 1 to 256, without slashes, control characters" in text


def test_key_of_any_bytes_is_compared_with_the_configured_ones():
    identities = Identities(AttemptTokens(b"x" * 40), admin_key="secret")
    with pytest.raises(Problem, match="not an agl token"):
        identities.verify("\udcff\udcfe")
    assert "admin" == identities.verify("secret").scope


def test_conversation_must_be_text():
    with pytest.raises(Problem, match="not UTF-8 text"):
        conversation_id({"x-agl-conversation-id": "c\udcff"})


@pytest.mark.parametrize("count", [True, False, "2", 2.5, [], -3])
async def test_call_with_a_count_that_is_no_number_can_be_read_from_its_record(stage, count: object):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        body = json.dumps({**json.loads(CALL), "n": count}).encode()
        await asyncio.to_thread(post, it.url, MODEL, body, {"Authorization": f"Bearer {token}".encode()})
        assert [1] == [call.choices for call in await it.calls(attempt_id)]


@pytest.mark.parametrize(
    "line", [b"GET /\x00 HTTP/1.1", b"POST /settle HTTP/1.1\r\nContent-Length: x", b"GET http://[ HTTP/1.1"]
)
async def test_bytes_that_are_no_request_are_refused_and_do_not_fill_the_log(
    stage, line: bytes, caplog: pytest.LogCaptureFixture
):
    async with stage() as it:
        place = urlsplit(it.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(line + b"\r\nHost: a\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert [] == [record.getMessage() for record in caplog.records]
