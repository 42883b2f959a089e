"""The script of a model server: its replies and the faults that it injects, call by call."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from agl_testing.model_server.codec import ConversationTurn, FunctionCall

Dialect: TypeAlias = Literal["chat", "completions", "responses", "messages", "embeddings", "models"]
"""The APIs that the server speaks."""

Flavour: TypeAlias = Literal["vllm", "sglang", "every", "plain", "openai"]
"""``vllm`` and ``sglang`` return token ids in their own fields when asked; ``every`` does so in every API, the
messages and tool calls of responses included, which vLLM leaves out; ``plain`` ignores the request for them; ``openai``
refuses it with a 400, as an API that checks its arguments does."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call of a reply; arguments are JSON text, or a mapping that is encoded to it.

    ``namespace`` is the group of the tool in the responses API.
    """

    name: str
    arguments: str | Mapping[str, Any] = "{}"
    namespace: str = ""

    def to_call(self) -> FunctionCall:
        """Return the call with its arguments as JSON text."""
        if isinstance(self.arguments, str):
            return FunctionCall(self.name, self.arguments, self.namespace)
        return FunctionCall(self.name, msgspec.json.encode(self.arguments).decode(), self.namespace)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the model.

    Attributes:
        text: The content.
        tool_calls: Tools that the model calls, in parallel where there are several.
        finish_reason: In chat's words; ``""`` means ``tool_calls`` with tool calls and ``stop`` without.
            ``length`` leaves the end token out.
        delay: Seconds before the first byte; ``chunk_delay`` before each streamed piece.
        chunks: Number of pieces of a streamed text (at most one per character), or the pieces themselves.
        headers: Headers that are added to the response's.
    """

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    delay: float = 0.0
    chunk_delay: float = 0.0
    chunks: int | tuple[str, ...] = 4
    headers: dict[str, str] = {}

    @property
    def reason(self) -> str:
        """The finish reason in chat's words."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with an HTTP error, such as 429 with ``retry_after`` seconds, or 500."""

    code: int
    retry_after: float | None = None
    message: str = "injected by the script"


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Send ``after_chunks`` streamed events, nothing for ``seconds``, then the rest of ``reply``."""

    seconds: float
    after_chunks: int = 0
    reply: Reply | None = None


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Close the connection after ``after_chunks`` streamed events, or within a plain body."""

    after_chunks: int = 1
    reply: Reply | None = None


class Garbage(msgspec.Struct, frozen=True, kw_only=True):
    """Answer 200 with bytes that are not what the API promises."""

    body: bytes = b"<html>it works!</html>"
    content_type: str = "text/html"


Step: TypeAlias = Reply | tuple[Reply, ...] | Status | Stall | Cut | Garbage
"""One call's script; a tuple holds one reply per choice of a request with ``n > 1``."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a scripting function sees it.

    Attributes:
        index: Position among the server's model calls, from 0.
        body: The parsed JSON.
        turns: The conversation, the same for every dialect; one user turn for a text prompt.
        prompt_ids: The ids that the server reports for the prompt.
    """

    index: int
    dialect: Dialect
    headers: Mapping[str, str]
    body: dict[str, Any]
    turns: tuple[ConversationTurn, ...]
    prompt_ids: list[int]

    @property
    def last_text(self) -> str:
        """The text of the newest message."""
        return self.turns[-1].text if self.turns else ""


Respond: TypeAlias = Callable[[ModelRequest], Step]
"""Gives the next step of the script for a request."""
