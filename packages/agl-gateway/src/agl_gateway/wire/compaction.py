"""Makes a conversation of OpenAI's responses shorter, for policies whose servers cannot: the policy writes a summary.

The answer is what OpenAI's ``/responses/compact`` gives: the user's messages, and an item that holds the summary, which
the next request brings back (``responses_requests``). The policy samples the summary, so it is a call
like any other: recorded, with its token ids.
"""

import time
from typing import Any

import msgspec

from agl.dialects import Request
from agl.schemas import Json
from agl_gateway.wire.chat import first_choice, pieces_of, usage_of
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.responses import ResponsesTranslation, usage_of_response
from agl_gateway.wire.thoughts import seal
from agl_gateway.wire.translation import as_object, object_of, objects_in, text_in

_ASKED = (
    "Summarize this conversation so that you can go on from the summary alone: the task, what was done and found, what "
    "was decided and why, names of files and exact values that are still needed, and what is left to do. Answer with "
    "the summary only, and call no tool."
)


class CompactionTranslation(ResponsesTranslation):
    """Translates a request for a compaction to a chat completion that asks for a summary, and back."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[dict[str, Any]] = []

    def asked(self, request: Request) -> Request:
        """Return the conversation with one more message, which asks for its summary.

        The tools stay, because they belong to the prompt's beginning, which servers keep ready.
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
        """Return the user's messages and the summary; raises a 502 :class:`Problem` without one."""
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
