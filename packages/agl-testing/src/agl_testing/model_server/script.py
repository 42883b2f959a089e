"""The script of a model server: the replies and faults with which it answers calls."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from agl_testing.model_server.codec import ConversationTurn, FunctionCall

Dialect: TypeAlias = Literal["chat", "completions", "responses", "messages", "embeddings", "models"]
"""The APIs that the server speaks."""

Flavour: TypeAlias = Literal["vllm", "sglang", "every", "plain", "openai"]
"""The model server to imitate, which decides how a request for token ids is answered.

``vllm`` and ``sglang`` return ids in the fields of these servers. ``every`` returns ids in every API, also where vLLM
does not: in the messages API, and for tool calls of the responses API. ``plain`` ignores the request. ``openai``
answers 400, as an API that checks its arguments does.
"""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in a reply; its arguments are JSON text, or a mapping that is encoded as JSON.

    ``namespace`` is the tool's group in the responses API.
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
        text: The text of the answer.
        tool_calls: The tool calls of the answer; several are parallel calls.
        finish_reason: The finish reason of the chat API; ``""`` stands for ``tool_calls`` if there are tool calls, and
            else for ``stop``. With ``length`` the answer has no end token.
        delay: Seconds before the first byte.
        chunk_delay: Seconds before each streamed event.
        chunks: Number of pieces of a streamed text (at most one per character), or the pieces themselves.
        headers: Headers to add to the response.
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
        """The finish reason of the chat API, with the default filled in."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: the server answers with an HTTP error, such as 429 with ``retry_after`` seconds, or 500."""

    code: int
    retry_after: float | None = None
    message: str = "injected by the script"


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: the server sends ``after_chunks`` events of ``reply``, pauses for ``seconds``, then sends the rest."""

    seconds: float
    after_chunks: int = 0
    reply: Reply | None = None


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: the server closes the connection after ``after_chunks`` streamed events, or within a plain body."""

    after_chunks: int = 1
    reply: Reply | None = None


class Garbage(msgspec.Struct, frozen=True, kw_only=True):
    """A fault: the server answers 200 with a body that is not valid in the API."""

    body: bytes = b"<html>it works!</html>"
    content_type: str = "text/html"


Step: TypeAlias = Reply | tuple[Reply, ...] | Status | Stall | Cut | Garbage
"""A reply or a fault that answers one call; a tuple has one reply for each choice of a request with ``n > 1``."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request that a ``respond`` function gets.

    Attributes:
        index: Position among the server's model calls, from 0.
        dialect: The API of the request.
        headers: The request's headers, by name in lower case.
        body: The parsed JSON body.
        turns: The conversation, in the same form for every dialect; a text prompt is one user turn.
        prompt_ids: The token ids that the server reports for the prompt.
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
"""A function that returns the step with which a request is answered."""
