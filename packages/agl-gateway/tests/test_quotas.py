"""An attempt that makes calls or appends spans without end is stopped, and its record says why."""

import math
from collections.abc import Callable

import openai
import pytest

from agl.errors import AglError, ConfigError
from agl.schemas import Span, new_span_id
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_gateway.settings import Settings

MESSAGES = [{"role": "user", "content": "hi"}]


async def refusals(it, attempt_id: str) -> list[str]:
    return [span.status_message for span in await it.spans(attempt_id) if span.name == "agl.gateway.quota"]


async def test_calls_beyond_the_quota_are_refused_and_the_record_says_so(stage):
    async with stage(max_calls=2) as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token, max_retries=2) as client:
            for _ in range(2):
                await client.chat.completions.create(model="main_llm", messages=MESSAGES)
            for _ in range(2):
                with pytest.raises(openai.PermissionDeniedError, match="has made 2 model calls") as caught:
                    await client.chat.completions.create(model="main_llm", messages=MESSAGES)
        assert "quota_exceeded" == caught.value.code
        assert 2 == len(it.server.calls)
        assert 2 == len(await it.calls(attempt_id))
        (told,) = await refusals(it, attempt_id)
        assert "raise the gateway's max_calls" in told
        _, other = await it.open_attempt()
        async with it.openai(other) as client:
            await client.chat.completions.create(model="main_llm", messages=MESSAGES)


async def test_spans_beyond_the_quota_are_refused_all_at_once(stage):
    async with stage(max_spans=3) as it:
        attempt_id, token = await it.open_attempt()
        store = HttpStore(it.url, token=token)
        rollout_id = attempt_id.rpartition(".")[0]

        def spans(count: int) -> list[Span]:
            return [
                Span(rollout_id=rollout_id, attempt_id=attempt_id, span_id=new_span_id(), name="step")
                for _ in range(count)
            ]

        await store.append_spans(spans(2))
        for _ in range(2):
            with pytest.raises(AglError, match="has appended 2 spans and sends 2 more"):
                await store.append_spans(spans(2))
        await store.append_spans(spans(1))
        await store.close()
        assert ["agl.gateway.quota", "step", "step", "step"] == sorted(s.name for s in await it.spans(attempt_id))
        (told,) = await refusals(it, attempt_id)
        assert "raise the gateway's max_spans" in told


@pytest.mark.parametrize("found", [0, math.nan])
@pytest.mark.parametrize("name", ["max_answer", "max_calls", "max_spans", "timeout_s"])
@pytest.mark.parametrize("kind", [Settings, EmbeddedGateway])
def test_limit_that_is_not_positive_is_refused_with_a_number_that_works(
    kind: Callable[..., object], name: str, found: float
):
    with pytest.raises(ConfigError, match=rf"the gateway's {name} is {found}; give a number above 0, such as \d+"):
        kind(**{name: found})
