"""Records one model call in the process: from the request's departure to its answer's last byte.

The answer's bytes are passed on as they arrive, and shown to the record on their way.
"""

import logging
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agl._redact import redact
from agl.contracts import Upstream
from agl.dialects import Exchange, Request, calls_of
from agl.schemas import Json
from agl.tracing._context import ActiveAttempt
from agl.tracing._spans import chat_spans

_log = logging.getLogger(__name__)

_NO_UPSTREAM = Upstream(name="", base_url="")


class OpenCall:
    """A call that is under way; it becomes spans exactly once, when it is finished or abandoned.

    Nothing here raises: a call that cannot be recorded is logged with its traceback.

    Args:
        attempt: The attempt that the call was made in.
        request: What the client sent.
        upstream: The policy that serves it, if one does.
        wants_ids: Whether token ids are asked for.
        parent_id: The span in which the call is made.
        request_id: Shared by the client's retries.
        retry_count: The client's own count.
        about: Attributes of its spans that are known before it leaves, such as who makes it and with which client.
    """

    is_parent = False

    def __init__(
        self,
        attempt: ActiveAttempt,
        request: Request,
        *,
        upstream: Upstream | None,
        wants_ids: bool,
        parent_id: str,
        request_id: str,
        retry_count: int,
        about: Mapping[str, Json],
    ) -> None:
        self._attempt = attempt
        self._request = request
        self._upstream = upstream or _NO_UPSTREAM
        self._wants_ids = wants_ids
        self._parent_id = parent_id
        self._request_id = request_id
        self._retry_count = retry_count
        self._about = about
        self._start_ns = time.time_ns()
        self.since = time.perf_counter_ns()
        self._first_s: float | None = None
        self._chunks: list[bytes] = []
        self._status = 0
        self._headers: dict[str, str] = {}
        self._response_type: Any = None
        self._key = f"call {id(self)}"
        attempt.spans.add(self._key, self)

    def answered(self, response: Any) -> None:
        """The response's head arrived; ``response`` is the client's own object, and is not kept."""
        self._status = response.status_code
        self._headers = {name.lower(): value for name, value in response.headers.items()}
        self._response_type = type(response)

    def take(self, chunk: bytes) -> None:
        """A part of the body arrived, still encoded as the response's headers say."""
        if self._first_s is None:
            self._first_s = self._elapsed()
        self._chunks.append(chunk)

    def finish(self, *, is_complete: bool, error: str = "", body: bytes | None = None) -> None:
        """Record the call; ``body`` is its decoded content where the client has read it already."""
        if self.discard():
            self._record(is_complete=is_complete, error=error, body=body)

    def discard(self) -> bool:
        """Let somebody else record the call; returns whether nobody has done so yet."""
        return self._attempt.spans.take(self._key) is self

    def abandon(self) -> None:
        """Record what there is, because the attempt ends."""
        error = "" if self._chunks else "the attempt ended before an answer came"
        self._record(is_complete=False, error=error, body=None)

    def _record(self, *, is_complete: bool, error: str, body: bytes | None) -> None:
        attempt, upstream = self._attempt, self._upstream
        try:
            calls = calls_of(
                self._exchange(is_complete=is_complete, error=error, body=body),
                policy=upstream.name,
                model_version=upstream.model_version,
                want_ids=self._wants_ids,
            )
            spans = chat_spans(
                calls,
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                trace_id=attempt.trace_id,
                parent_id=self._parent_id,
                framework_span_id=self._parent_id,
                about=self._about,
                start_ns=self._start_ns,
                end_ns=time.time_ns(),
            )
        except Exception:  # noqa: BLE001  # isolation point: the agent's call goes on
            _log.exception("A model call of attempt %s could not be recorded.", attempt.attempt_id)
            return
        for span in spans:
            attempt.add(span)

    def _exchange(self, *, is_complete: bool, error: str, body: bytes | None) -> Exchange:
        latency = self._elapsed()
        return Exchange(
            request=self._request,
            request_id=self._request_id,
            status=self._status,
            headers=self._headers,
            response=self._decoded() if body is None else body,
            is_streamed="text/event-stream" in self._headers.get("content-type", ""),
            is_complete=is_complete,
            latency_s=latency,
            first_token_s=latency if self._first_s is None else self._first_s,
            retry_count=self._retry_count,
            error=redact(error),
        )

    def _elapsed(self) -> float:
        return (time.perf_counter_ns() - self.since) / 1e9

    def _decoded(self) -> bytes:
        """The chunks with the response's content encoding undone; a cut encoded body is what can be read of it."""
        raw = b"".join(self._chunks)
        encoding = self._headers.get("content-encoding", "identity")
        if not raw or encoding == "identity":
            return raw
        return self._response_type(200, headers={"content-encoding": encoding}, content=raw).content


class Tee:
    """A response's stream that shows its chunks, unchanged, to the record; mixed with the client's own stream class."""

    def __init__(self, inner: Any, call: OpenCall) -> None:
        self._inner = inner
        self._call = call

    def __del__(self) -> None:
        self._call.finish(is_complete=False)

    def __iter__(self) -> Iterator[bytes]:
        """The inner stream's chunks."""
        with self._watched():
            for chunk in self._inner:
                self._call.take(chunk)
                yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The inner stream's chunks."""
        with self._watched():
            async for chunk in self._inner:
                self._call.take(chunk)
                yield chunk

    def close(self) -> None:
        """Close the inner stream; what was not read by then counts as cut."""
        try:
            self._inner.close()
        finally:
            self._call.finish(is_complete=False)

    async def aclose(self) -> None:
        """Close the inner stream; what was not read by then counts as cut."""
        try:
            await self._inner.aclose()
        finally:
            self._call.finish(is_complete=False)

    @contextmanager
    def _watched(self) -> Generator[None]:
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._call.finish(is_complete=False, error=describe(error))
            raise
        self._call.finish(is_complete=True)


def describe(error: BaseException) -> str:
    """An exception as one line: its type and what it says."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
