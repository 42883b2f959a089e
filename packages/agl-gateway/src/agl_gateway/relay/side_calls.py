"""Answers what clients ask beside model calls: counts of tokens, and a conversation made shorter.

The policy's own server answers where it can, and nothing is recorded. Where it cannot count, the gateway estimates:
coding agents ask before every turn how much room is left, and stop or fill their log with errors where nobody answers.
Where it cannot make a conversation shorter, the policy is asked for a summary, by a call that is recorded.
"""

from typing import cast

import aiohttp
from aiohttp import web

from agl.dialects import Request
from agl.schemas import Dialect, Json
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.relay.json_values import check_values
from agl_gateway.relay.relay import Relay
from agl_gateway.relay.routing import UpstreamTarget
from agl_gateway.relay.upstream_client import open_upstream, problem_of, reply_headers, request_headers
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.thoughts import restored

COMPACT = "/responses/compact"

SIDE_CALLS: dict[str, Dialect] = {
    "/messages/count_tokens": "messages",
    "/responses/input_tokens": "responses",
    COMPACT: "responses",
}
"""Endpoints that belong to a model API beside its calls, with the API that they belong to."""

ESTIMATED_HEADER = "x-agl-estimated"
"""Response header of a count that the gateway estimated."""

_COUNTED = (
    *("system", "instructions", "messages", "input", "tools"),
    *("contents", "systemInstruction", "system_instruction", "generateContentRequest", "generate_content_request"),
)
_BYTES_PER_TOKEN = 4
_IMAGES = ("image", "input_image", "image_url")
_INLINE = frozenset({"inlineData", "inline_data"})
_IMAGE_TOKENS = 1600
"""Tokens of an image, about what Anthropic counts for the largest that it does not scale down."""

_ABSENT = (404, 405, 501)
"""Answers of servers that do not have an endpoint."""


class SideCalls:
    """Answers the endpoints of :data:`SIDE_CALLS`. Used in one event loop only.

    Args:
        relay: The relay of model calls, whose policies and served models count here too.
        session: For requests to the policies' servers.
        bodies: Reads the requests.
        max_body: Largest request body in bytes.
    """

    def __init__(self, *, relay: Relay, session: aiohttp.ClientSession, bodies: BodyReader, max_body: int) -> None:
        self._relay = relay
        self._session = session
        self._bodies = bodies
        self._max_body = max_body

    async def answer(
        self, request: web.BaseRequest, endpoint: str, *, rollout_id: str, attempt_id: str
    ) -> web.StreamResponse:
        """Answer one request; the caller has verified its token.

        Args:
            request: The request.
            endpoint: One of :data:`SIDE_CALLS`.
            rollout_id: The rollout that it comes from, like ``attempt_id``; ``""`` in a conversation, for which no
                summary is written.
            attempt_id: The attempt.

        Raises:
            Problem: 400 for a body that is no JSON object, 404 for an unknown model, 413 for thoughts longer than any
                model's context, 502 or 504 where a server that alone could answer does not.
        """
        dialect = SIDE_CALLS[endpoint]
        body = await self._bodies.read(request, limit=self._max_body)
        await check_values(body)
        asked = restored(Request(dialect, body))
        if not asked.is_object:
            raise Problem(400, "the request's body is not a JSON object; send the API's JSON", code="invalid_json")
        target = self._relay.router.choose(asked.model, dialect=dialect)
        is_count = endpoint != COMPACT
        if not is_count and attempt_id and not self._relay.speaks(target.upstream, dialect):
            return await self._relay.compact(request, asked, rollout_id=rollout_id, attempt_id=attempt_id)
        try:
            reply = await self._ask(request, asked, endpoint, target, rollout_id=rollout_id)
        except Problem:
            if not is_count:
                raise
            return _estimated(asked)
        if reply.status not in _ABSENT:
            return reply
        if is_count:
            return _estimated(asked)
        if not attempt_id:
            return reply
        return await self._relay.compact(request, asked, rollout_id=rollout_id, attempt_id=attempt_id)

    async def count_google(self, request: web.BaseRequest) -> web.Response:
        """Answer Google's ``countTokens`` with an estimate; the caller has verified its token.

        Raises:
            Problem: 400 for a body that is no JSON object.
        """
        body = await self._bodies.read(request, limit=self._max_body)
        await check_values(body)
        asked = Request("chat", body)
        if not asked.is_object:
            raise Problem(400, "the request's body is not a JSON object; send the API's JSON", code="invalid_json")
        return web.json_response({"totalTokens": estimate(asked)}, headers={ESTIMATED_HEADER: "true"})

    async def _ask(
        self, request: web.BaseRequest, asked: Request, endpoint: str, target: UpstreamTarget, *, rollout_id: str
    ) -> web.Response:
        model = self._relay.gates[target.upstream.name].model
        headers = request_headers(request.headers, target, asked.dialect)
        url, *_ = target.urls(rollout_id, endpoint, request.query_string)
        sent = asked.prepared(want_ids=False, model=model)
        response = await open_upstream(self._session, "POST", url, sent, headers, connect_tries=1)
        try:
            body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise problem_of(error, url) from error
        finally:
            response.close()
        return web.Response(body=body, status=response.status, headers=reply_headers(response.headers))


def _estimated(asked: Request) -> web.Response:
    count: dict[str, Json] = {"input_tokens": estimate(asked)}
    if asked.dialect == "responses":
        count = {"object": "response.input_tokens", **count}
    return web.json_response(count, headers={ESTIMATED_HEADER: "true"})


def estimate(asked: Request) -> int:
    """Return about how many tokens a request has: a token for every four bytes of its text, and 1,600 for an image."""
    sizes = [_size(asked.get(key)) for key in _COUNTED]
    return max(1, -(-sum(sizes) // _BYTES_PER_TOKEN))


def _size(value: object) -> int:
    """Return the bytes of a JSON value, with those of an image in it as if it were text."""
    size, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            fields = cast("dict[str, object]", item)
            if fields.get("type") in _IMAGES or _INLINE & fields.keys():
                size += _IMAGE_TOKENS * _BYTES_PER_TOKEN
            else:
                waiting += [*fields, *fields.values()]
        elif isinstance(item, list):
            waiting += cast("list[object]", item)
        elif isinstance(item, str):
            size += len(item.encode("utf-8", "replace"))
        elif item is not None:
            size += len(str(item))
    return size
