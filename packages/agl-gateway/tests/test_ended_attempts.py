"""The token of an attempt that has ended appends late spans, but no rewards and no model calls."""

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from agl.errors import TokenError
from agl.schemas import ModelCall, Outcome, Reward, Span, new_span_id
from agl_gateway.client import HttpStore
from agl_testing.waiting import eventually


def span(attempt_id: str, name: str, **fields) -> Span:
    rollout_id = attempt_id.rpartition(".")[0]
    return Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name=name, **fields)


async def ended(it) -> tuple[str, str]:
    """Return id and token of an attempt that has appended a reward with its token and then ended."""
    attempt_id, token = await it.open_attempt()
    store = HttpStore(it.url, token=token)
    await store.append_spans([span(attempt_id, "in time", reward=Reward(value=0.5))])
    await store.close()
    await it.store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
    return attempt_id, token


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"reward": Reward(value=1.0)}, "reward"),
        ({"call": ModelCall(request_id="r", dialect="chat", model="m")}, "model call"),
    ],
)
async def test_rewards_and_calls_of_an_ended_attempt_are_refused(stage, fields, kind: str):
    async with stage() as it:
        attempt_id, token = await ended(it)
        store = HttpStore(it.url, token=token)

        async def refused() -> str:
            try:
                await store.append_spans([span(attempt_id, "too late", **fields)])
            except TokenError as error:
                return str(error)
            return ""

        message = await eventually(refused)
        assert f"is a {kind}, and attempt {attempt_id!r} has ended" in message
        await store.append_spans([span(attempt_id, "still welcome")])
        await store.close()
        found = await it.spans(attempt_id)
        assert "still welcome" == found[-1].name
        assert found[-1].is_late


async def test_exported_evaluations_of_an_ended_attempt_are_rejected_and_other_spans_kept(stage):
    async with stage() as it:
        attempt_id, token = await ended(it)
        request = ExportTraceServiceRequest()
        spans = request.resource_spans.add().scope_spans.add().spans
        for number, name in enumerate(("evaluation", "step")):
            sent = spans.add(name=name, span_id=bytes([1] * 7 + [number]), trace_id=b"t" * 16)
            if name == "evaluation":
                sent.attributes.add(key="gen_ai.evaluation.score.value").value.double_value = 1.0
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/x-protobuf"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def rejected() -> ExportTraceServiceResponse | None:
                async with session.post(f"{it.url}/v1/traces", data=request.SerializeToString()) as answer:
                    found = ExportTraceServiceResponse.FromString(await answer.read())
                return found if found.partial_success.rejected_spans else None

            answer = await eventually(rejected)
        assert 1 == answer.partial_success.rejected_spans
        assert "no rewards and no model calls" in answer.partial_success.error_message
        assert "step" in [found.name for found in await it.spans(attempt_id)]


async def test_admin_token_adds_rewards_to_an_ended_attempt(stage):
    async with stage() as it:
        attempt_id, _ = await ended(it)
        admin = it.tokens.issue("", "", expires_at=2**40, scope="admin")
        store = HttpStore(it.url, token=admin)
        await store.append_spans([span(attempt_id, "thumb", reward=Reward(value=1.0, source="human"))])
        await store.close()
        assert "thumb" == (await it.spans(attempt_id))[-1].name
