"""Records one model call in the agent's process, from its request to the last byte of its answer.

The answer's bytes reach the agent as they arrive, and are copied to the record on their way.
"""

import logging
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agl._redact import redact
from agl.contracts import Upstream
from agl.dialects import Exchange, Request, calls_of
from agl.errors import describe
from agl.schemas import Json
from agl.tracing._context import ActiveAttempt
from agl.tracing._spans import chat_spans

_log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class OpenCall:
    """A call in flight; it becomes spans exactly once, when it is finished or abandoned.

    No method raises: a call that cannot be recorded is logged with its traceback.

    Attributes:
        attempt: The attempt that makes the call.
        request: The client's request.
        upstream: The policy that serves the call; ``None`` if no policy does.
        wants_ids: Whether token ids are requested.
        parent_id: The enclosing span.
        request_id: The id that the client's retries share.
        retry_count: The client's own count of retries.
        about: Attributes of the call's spans that are known when it leaves, such as the caller's names and the client.
    """

    attempt: ActiveAttempt
    request: Request
    upstream: Upstream | None
    wants_ids: bool
    parent_id: str
    request_id: str
    retry_count: int
    about: Mapping[str, Json]
    start_ns: int = field(default_factory=time.time_ns)
    since: int = field(default_factory=time.perf_counter_ns)
    first_s: float | None = None
    chunks: list[bytes] = field(default_factory=list[bytes])
    head: "_Head | None" = None
    is_parent: bool = False

    def __post_init__(self) -> None:
        self.attempt.spans.add(self._key, self)

    @property
    def _key(self) -> str:
        # Not the request's id: retries of one request may overlap in time.
        return f"call {id(self)}"

    def answered(self, response: Any) -> None:
        """Remember the status, headers and class of the client's response."""
        headers = {name.lower(): value for name, value in response.headers.items()}
        self.head = _Head(response.status_code, headers, type(response))

    def take(self, chunk: bytes) -> None:
        """Add a chunk of the body, still in the response's content encoding."""
        if self.first_s is None:
            self.first_s = self._elapsed_s()
        self.chunks.append(chunk)

    def finish(self, *, is_complete: bool, error: str = "", body: bytes | None = None) -> None:
        """Record the call; ``body`` is the decoded body of the response if the client has read it already."""
        # Whoever removes the call from the open ones records it, so that it is recorded exactly
        # once.
        if self.discard():
            self._record(is_complete=is_complete, error=error, body=body)

    def discard(self) -> bool:
        """Drop the call without recording it; returns False if it was recorded or dropped before."""
        return self.attempt.spans.take(self._key) is self

    def abandon(self) -> None:
        """Record the call in its present state, because the attempt ends."""
        error = "" if self.chunks else "the attempt ended before an answer came"
        self._record(is_complete=False, error=error, body=None)

    def _record(self, *, is_complete: bool, error: str, body: bytes | None) -> None:
        attempt, upstream = self.attempt, self.upstream
        try:
            # The body is read only now: the agent has its answer, and does not wait for the
            # parsing.
            calls = calls_of(
                self._exchange(is_complete=is_complete, error=error, body=body),
                policy=upstream.name if upstream else "",
                model_version=upstream.model_version if upstream else "",
                want_ids=self.wants_ids,
            )
            spans = chat_spans(
                calls,
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                trace_id=attempt.trace_id,
                parent_id=self.parent_id,
                # The innermost span when the call left; recorded in this process, parent and
                # framework's span are the same.
                framework_span_id=self.parent_id,
                about=self.about,
                start_ns=self.start_ns,
                end_ns=time.time_ns(),
            )
        except Exception:  # noqa: BLE001  # isolation point: the agent's call goes on
            _log.exception("A model call of attempt %s could not be recorded.", attempt.attempt_id)
            return
        for span in spans:
            attempt.add(span)

    def _exchange(self, *, is_complete: bool, error: str, body: bytes | None) -> Exchange:
        latency, head = self._elapsed_s(), self.head or _Head()
        return Exchange(
            request=self.request,
            request_id=self.request_id,
            status=head.status,
            response=head.decoded(b"".join(self.chunks)) if body is None else body,
            # By what came, not by what was asked: some servers answer a request for a stream with a
            # plain body.
            is_streamed="text/event-stream" in head.headers.get("content-type", ""),
            is_complete=is_complete,
            latency_s=latency,
            first_token_s=latency if self.first_s is None else self.first_s,
            retry_count=self.retry_count,
            error=redact(error),
        )

    def _elapsed_s(self) -> float:
        return (time.perf_counter_ns() - self.since) / 1e9


class _Head(NamedTuple):
    """A response's status, headers and class."""

    status: int = 0
    headers: Mapping[str, str] = {}
    kind: Any = None

    def decoded(self, body: bytes) -> bytes:
        """Decode ``body`` by the response's content encoding; for an incomplete body, return its readable part."""
        encoding = self.headers.get("content-encoding", "identity")
        if not body or encoding == "identity":
            return body
        # The client's own response class knows the encodings that it offered to the server.
        return self.kind(200, headers={"content-encoding": encoding}, content=body).content


class Tee:
    """A response's stream that also copies its chunks to the call's record; mixed with the client's stream class."""

    def __init__(self, inner: Any, call: OpenCall) -> None:
        self._inner = inner
        self._call = call

    def __del__(self) -> None:
        self._call.finish(is_complete=False)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the inner stream's chunks, and copy each to the record."""
        with self._watched():
            for chunk in self._inner:
                self._call.take(chunk)
                yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the inner stream's chunks, and copy each to the record."""
        with self._watched():
            async for chunk in self._inner:
                self._call.take(chunk)
                yield chunk

    def close(self) -> None:
        """Close the inner stream; an answer that was not read to its end is recorded as incomplete."""
        try:
            self._inner.close()
        finally:
            self._call.finish(is_complete=False)

    async def aclose(self) -> None:
        """Close the inner stream; an answer that was not read to its end is recorded as incomplete."""
        try:
            await self._inner.aclose()
        finally:
            self._call.finish(is_complete=False)

    @contextmanager
    def _watched(self) -> Generator[None]:
        try:
            yield
        # The reader left early; close() says so.
        except GeneratorExit:
            raise
        except BaseException as error:
            self._call.finish(is_complete=False, error=describe(error))
            raise
        self._call.finish(is_complete=True)
