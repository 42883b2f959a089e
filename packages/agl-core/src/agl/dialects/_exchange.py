"""One HTTP exchange with a model server, as the bytes that a proxy or a wire hook saw."""

import msgspec

from agl.dialects._request import Request
from agl.schemas import Dialect, Json

# In this order: a path that ends in /chat/completions ends in /completions too.
ENDPOINTS: dict[Dialect, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
    "embeddings": "/embeddings",
}
"""Maps each API to the suffix of its endpoint's URL path."""


def dialect_of(path: str) -> Dialect | None:
    """The API whose endpoint is at ``path`` (a URL or its path); ``None`` for any other path."""
    # Azure and gateways add a query, such as ?api-version=, and prefixes of their own.
    plain = path.split("?", 1)[0].rstrip("/")
    return next((dialect for dialect, suffix in ENDPOINTS.items() if plain.endswith(suffix)), None)


class Exchange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request and its response.

    Attributes:
        request: The client's request.
        status: HTTP status; 0 when no response came.
        response: The decoded bytes of the body, as far as they arrived.
        is_streamed: Whether the body is a stream of server-sent events.
        is_complete: Whether the whole body arrived.
        latency_s: Seconds from the request's last byte to the response's last byte.
        first_token_s: Seconds from the request's last byte to the first byte of the response's body.
        request_id: An id that is shared by the retries of one request.
        retry_count: The client's count of retries.
        error: The failure of the exchange as text, ``""`` if it did not fail.
    """

    request: Request
    request_id: str
    # 0 is not an HTTP status: the connection failed before one came.
    status: int = 0
    response: bytes = b""
    is_streamed: bool = False
    is_complete: bool = True
    latency_s: float = 0.0
    first_token_s: float = 0.0
    retry_count: int = 0
    error: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled answer, as parsed by a dialect's reader; fields that the backend did not send are ``None``.

    Attributes:
        response: The whole body as plain JSON with this choice only, without ids and log-probabilities.
        is_finished: Whether the end of this answer arrived.
    """

    index: int
    response: Json
    finish_reason: str = ""
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    is_finished: bool = True


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All answers in one body, as parsed by a dialect's reader.

    Attributes:
        choices: The choices, sorted by index; may be empty.
        model_version: Version of the weights as the backend names it; several versions are joined with ``+``.
        error: The backend's error message; ``""`` if there is none.
        prompt_media: The placeholder runs of the prompt's pictures as the backend sent them, unchecked.
        processor: The processor that made these runs, unchecked.
    """

    choices: tuple[Choice, ...] = ()
    model_version: str = ""
    error: str = ""
    prompt_media: Json = None
    processor: Json = None
