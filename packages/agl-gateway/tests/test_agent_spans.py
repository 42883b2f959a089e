"""With an attempt's own token, nobody can record the attributes that only runners set and rewards rely on."""

from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl import semconv
from agl.schemas import Span, new_span_id
from agl_gateway.client import HttpStore

SAID = {**dict.fromkeys(semconv.RUNNER_ATTRIBUTES, "mine"), semconv.OBJECT: "kept"}

Send = Callable[[str, str, str], Awaitable[None]]


async def through_the_store_api(url: str, token: str, attempt_id: str) -> None:
    rollout_id = attempt_id.rpartition(".")[0]
    store = HttpStore(url, token=token)
    span = Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="x", attributes=SAID)
    await store.append_spans([span])
    await store.close()


async def as_an_exporter(url: str, token: str, attempt_id: str) -> None:
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(name="x", span_id=b"1" * 8, trace_id=b"1" * 16)
    for name, value in SAID.items():
        span.attributes.add(key=name).value.string_value = value
    headers = {"authorization": f"Bearer {token}", "content-type": "application/x-protobuf"}
    body = request.SerializeToString()
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/traces", data=body, headers=headers) as sent:
        assert 200 == sent.status


@pytest.mark.parametrize("send", [through_the_store_api, as_an_exporter])
async def test_what_only_a_runner_records_is_removed_from_an_agents_span(stage, send: Send):
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        await send(it.url, token, attempt_id)
        (span,) = await it.spans(attempt_id)
    assert {semconv.OBJECT: "kept"} == span.attributes
