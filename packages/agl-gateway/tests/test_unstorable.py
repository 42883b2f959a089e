"""Calls that no store can hold unchanged, and stores that refuse for a while: nothing is lost, and no one waits."""

import asyncio
import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agl.errors import StoreError
from agl.schemas import ModelCall, Sampling, Span, encode
from agl.stores import MemoryStore
from agl_gateway.record import recorder as attempt_writer
from agl_gateway.record.storable import storable
from agl_store_sqlite._store import SQLiteStore

BODY: dict[str, Any] = {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}


def post(url: str, token: str, body: dict[str, Any], headers: dict[str, bytes]) -> int:
    """Send a call whose header values may be any bytes, which careful clients refuse to send; returns the status."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        connection.putrequest("POST", "/v1/chat/completions", skip_accept_encoding=True)
        data = json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {token}".encode(), "Content-Length": str(len(data)).encode(), **headers}
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(data)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("body", "headers", "named"),
    [
        ({"seed": 2**70}, {}, "call.request.seed, call.sampling.seed"),
        ({"metadata": {"n": -(2**64)}}, {}, "call.request.metadata.n"),
        ({}, {"User-Agent": b"agent/\xff"}, "attributes.user_agent.original"),
        ({}, {"x-agl-request-id": b"id-\xff"}, "call.request_id"),
    ],
)
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_call_that_a_store_cannot_keep_is_recorded_without_the_value_and_does_not_train(
    stage,
    tmp_path: Path,
    kind: str,
    body: dict[str, Any],
    headers: dict[str, bytes],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(attempt_writer, "_RETRY_DELAYS_S", (60.0,))
    store = MemoryStore() if kind == "memory" else SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")
    async with stage(store=store) as it:
        attempt_id, token = await it.open_attempt()
        assert 200 == await asyncio.to_thread(post, it.url, token, BODY | body, headers)
        async with asyncio.timeout(30):  # without the pauses between tries
            (call,) = await it.calls(attempt_id)
        assert f"values were replaced that a store cannot keep: {named}" == call.error
        assert call.prompt_ids
        assert BODY["messages"] == call.request["messages"]


async def test_calls_of_others_are_stored_while_the_store_refuses_one_attempt(stage):
    store = Refusing()
    async with stage(store=store) as it:
        refused, token = await it.open_attempt()
        other, other_token = await it.open_attempt()
        store.refused = refused
        async with aiohttp.ClientSession() as session:
            for number in range(3):
                await call(session, it.url, token, f"refused {number}")
                await call(session, it.url, other_token, f"other {number}")
                assert number + 1 == len(await it.calls(other))
        settling = asyncio.create_task(it.calls(refused))
        await asyncio.sleep(0)
        assert not settling.done()
        store.refused = ""
        texts = [found.request["messages"][0]["content"] for found in await settling]
        assert ["refused 0", "refused 1", "refused 2"] == texts


class Refusing(MemoryStore):
    """A store that refuses the spans of one attempt."""

    refused = ""

    async def append_spans(self, spans: Sequence[Span]) -> None:
        if any(span.attempt_id == self.refused for span in spans):
            raise StoreError("the disk is full")
        await super().append_spans(spans)


async def call(session: aiohttp.ClientSession, url: str, token: str, text: str) -> None:
    body = {"model": "main_llm", "messages": [{"role": "user", "content": text}]}
    async with session.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {token}"}
    ) as answer:
        assert 200 == answer.status


def span(**fields: Any) -> Span:
    given = ModelCall(request_id="q", dialect="chat", model="m", **fields)
    return Span(rollout_id="r", attempt_id="r.1", span_id="s", name="chat m", call=given)


def test_span_that_fits_is_left_as_it_is():
    given = span(request={"n": 2**63 - 1})
    assert given is storable(given)


def test_numbers_out_of_range_become_the_nearest_one_and_the_error_names_them():
    kept = storable(span(choice=2**64, sampling=Sampling(seed=-(2**70)), error="cut"))
    encode(kept)
    assert kept.call is not None
    assert (2**63 - 1, -(2**63)) == (kept.call.choice, kept.call.sampling.seed)
    assert "cut; values were replaced that a store cannot keep: call.sampling.seed, call.choice" == kept.call.error


def test_half_characters_become_escapes_in_keys_and_values():
    kept = storable(span(request={"a\ud800": ["b\udcff", "whole"]}))
    encode(kept)
    assert kept.call is not None
    assert {"a\\ud800": ["b\\udcff", "whole"]} == kept.call.request


def test_json_that_is_nested_too_deep_is_cut_and_only_some_paths_are_named():
    deep: Any = 1
    for _ in range(3000):
        deep = [deep]
    kept = storable(span(request={"deep": deep, "wide": [2**64] * 9}))
    encode(kept)
    assert kept.call is not None
    assert "nested too deep" in str(kept.call.request["deep"])
    assert kept.call.error.endswith("and 5 more")
    assert len(kept.call.error) < 500
