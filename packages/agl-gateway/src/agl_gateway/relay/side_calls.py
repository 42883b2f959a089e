"""Answers the clients' requests that are not model calls: token counts, and compaction of a conversation.

The policy's own server answers if it can, and nothing is recorded. If it cannot count tokens, the gateway estimates:
coding agents ask before every turn how much room is left, and without an answer they stop or fill their log with
errors. If it cannot compact a conversation, the gateway asks the policy for a summary, in a call that is recorded with
its token ids like any other. The answer has the form of OpenAI's ``/responses/compact``: the user's messages, and an
item with the summary, which the client sends back in its next request.
"""

import time
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from aiohttp import web

from agl.dialects import Request
from agl.schemas import Dialect, Json
from agl_gateway.relay.callers import Owner
from agl_gateway.relay.relay import Relay
from agl_gateway.relay.routing import UpstreamTarget
from agl_gateway.relay.sender import ABSENT, reply_headers, request_headers
from agl_gateway.wire.chat import first_choice, pieces_of, usage_of
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.responses import ResponsesTranslation, usage_of_response
from agl_gateway.wire.thoughts import restored, seal
from agl_gateway.wire.translation import CHAT, Outgoing, as_object, object_of, objects_in, text_in
from agl_run.access import AttemptToken

COMPACT = "/responses/compact"

SIDE_CALLS: dict[str, Dialect] = {
    "/messages/count_tokens": "messages",
    "/responses/input_tokens": "responses",
    COMPACT: "responses",
}
"""Maps the endpoints that are no model calls to the dialect that they belong to."""

ESTIMATED_HEADER = "x-agl-estimated"
"""Response header that marks a token count as the gateway's estimate."""

_COUNTED = (
    *("system", "instructions", "messages", "input", "tools"),
    *("contents", "systemInstruction", "system_instruction", "generateContentRequest", "generate_content_request"),
)
_BYTES_PER_TOKEN = 4
_IMAGES = ("image", "input_image", "image_url")
_INLINE = frozenset({"inlineData", "inline_data"})
_IMAGE_TOKENS = 1600
"""Estimated tokens of an image, about as Anthropic counts for the largest image that it does not scale down."""


@dataclass(frozen=True, eq=False)
class SideCalls:
    """Answers requests to the endpoints in :data:`SIDE_CALLS`, by the policies' servers or by the gateway itself.

    Used in one event loop only.
    """

    relay: Relay

    async def answer(self, request: web.BaseRequest, endpoint: str, claim: AttemptToken) -> web.StreamResponse:
        """Answer one request whose token is verified.

        If the policy's server cannot compact a conversation, the policy is asked for a summary, but only within an
        attempt.

        Raises:
            Problem: 400 for a body that is not a JSON object, 404 for an unknown model, 413 for thoughts longer than
                any model's context, 502 or 504 if only the server could answer and it does not.
        """
        given = await self._read(request, SIDE_CALLS[endpoint])
        asked = restored(given)
        target = self.relay.router.choose(asked.model, dialect=asked.dialect)
        is_count, is_attempt = endpoint != COMPACT, bool(claim.attempt_id)
        if not is_count and is_attempt and self.relay.sender.apis.is_translated(target.upstream, asked.dialect):
            return await self._summary(request, given, claim)
        try:
            reply = await self._ask(request, asked, endpoint, target, rollout_id=claim.rollout_id)
        except Problem:
            if not is_count:
                raise
            return _estimated(asked)
        if reply.status not in ABSENT or not (is_count or is_attempt):
            return reply
        return _estimated(asked) if is_count else await self._summary(request, given, claim)

    async def count_google(self, request: web.BaseRequest) -> web.Response:
        """Answer Google's ``countTokens`` with an estimate; the caller has verified the token.

        Raises:
            Problem: 400 for a body that is not a JSON object.
        """
        asked = await self._read(request, "chat")
        return web.json_response({"totalTokens": estimate(asked)}, headers={ESTIMATED_HEADER: "true"})

    async def _summary(self, request: web.BaseRequest, asked: Request, claim: AttemptToken) -> web.StreamResponse:
        """Answer an attempt's compaction request with a summary by the policy, recorded as a call of the attempt."""
        await self.relay.recorder.admit()
        outgoing = Outgoing(request=asked, endpoint=CHAT).translated(CompactionTranslation())
        owner = Owner(rollout_id=claim.rollout_id, attempt_id=claim.attempt_id)
        reply = await self.relay.relayed(request, outgoing, owner)
        assert isinstance(reply, web.StreamResponse)  # noqa: S101  # as the request
        return reply

    async def _read(self, request: web.BaseRequest, dialect: Dialect) -> Request:
        asked = Request(dialect, await self.relay.bodies.read_call(request))
        if not asked.is_object:
            raise Problem(400, "the request's body is not a JSON object; send the API's JSON", code="invalid_json")
        return asked

    async def _ask(
        self, request: web.BaseRequest, asked: Request, endpoint: str, target: UpstreamTarget, *, rollout_id: str
    ) -> web.Response:
        headers = request_headers(request.headers, target, asked.dialect)
        url = target.replicas.ranked(rollout_id)[0] + endpoint
        if request.query_string:
            url += f"?{request.query_string}"
        sent = asked.prepared(want_ids=False, model=target.gate.model)
        answer = await self.relay.sender.ask(url, sent, headers)
        response = answer.response
        response.close()
        return web.Response(body=answer.body, status=response.status, headers=reply_headers(response.headers))


def _estimated(asked: Request) -> web.Response:
    count: dict[str, Json] = {"input_tokens": estimate(asked)}
    if asked.dialect == "responses":
        count = {"object": "response.input_tokens", **count}
    return web.json_response(count, headers={ESTIMATED_HEADER: "true"})


def estimate(asked: Request) -> int:
    """Estimate the number of tokens in a request: one per four bytes of text, and 1,600 per image."""
    sizes = [_size(asked.get(key)) for key in _COUNTED]
    return max(1, -(-sum(sizes) // _BYTES_PER_TOKEN))


def _size(value: object) -> int:
    """Return the size of a JSON value in bytes of text; an image counts ``_IMAGE_TOKENS`` tokens at 4 bytes each."""
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


_ASKED = (
    "Summarize this conversation so that you can go on from the summary alone: the task, what was done and found, what "
    "was decided and why, names of files and exact values that are still needed, and what is left to do. Answer with "
    "the summary only, and call no tool."
)


class CompactionTranslation(ResponsesTranslation):
    """Translates a compaction request to a chat completion that asks for a summary, and the answer back."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[dict[str, Any]] = []

    def asked(self, request: Request) -> Request:
        """Return the conversation with one more message, which asks the model to summarise it.

        The tools stay, because they are part of the prompt's prefix, which servers cache.
        """
        given = request.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects_in(given)
        self._kept = [item for item in items if item.get("role") == "user"]
        if not items:
            raise Problem(400, "there is nothing to compact; send the conversation as input", code="invalid_request")
        body = object_of(super().asked(request).body)
        messages = [*objects_in(body.get("messages")), {"role": "user", "content": _ASKED}]
        if body.get("tools"):
            body["tool_choice"] = "none"
        return Request("chat", msgspec.json.encode({**body, "messages": messages}))

    def answer(self, body: bytes) -> bytes:
        """Return the answer to the compaction request: the user's messages and the summary.

        Raises:
            Problem: 502 if the model wrote no summary.
        """
        given = object_of(body)
        choice = first_choice(given)
        pieces = pieces_of(as_object(choice.get("message")))
        summary = "".join(piece.text for piece in pieces if piece.kind == "text").strip()
        if not summary:
            reason = text_in(choice.get("finish_reason"))
            raise Problem(
                502,
                f"the policy wrote no summary of the conversation, and its answer ended by {reason!r}; compact while "
                "its context has room for thoughts and a summary",
                code="no_summary",
            )
        name, created = text_in(given.get("id")), given.get("created")
        kept: list[Json] = [
            {"id": f"msg_{name}_{index}", "status": "completed", **item, "type": "message", "content": _parts(item)}
            for index, item in enumerate(self._kept)
        ]
        sealed: Json = {"id": f"cmp_{name}", "type": "compaction", "encrypted_content": seal({"summary": summary})}
        return msgspec.json.encode(
            {
                "id": f"resp_{name}",
                "object": "response.compaction",
                "created_at": created if isinstance(created, int) else int(time.time()),
                "output": [*kept, sealed],
                "usage": usage_of_response(usage_of(given)),
            }
        )


def _parts(item: dict[str, Any]) -> Json:
    content = item.get("content")
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content
