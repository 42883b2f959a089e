"""Records one model call in the process: from the request's departure to its answer's last byte."""

import logging
import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

from agl._redact import redact
from agl.dialects import Exchange, calls_of
from agl.schemas import Json
from agl.tracing._context import Capture
from agl.tracing._spans import chat_spans
from agl.tracing._wire.routing import Route

_log = logging.getLogger(__name__)


class OpenCall:
    """A call that is under way; it becomes spans exactly once, when it is finished or abandoned.

    Nothing here raises: a call that cannot be recorded is logged with its traceback.

    Args:
        capture: The attempt that the call was made in.
        route: Where the call goes.
        body: The request's content as the client made it.
        parent_id: The span in which the call is made.
        request_id: Shared by the client's retries.
        retry_count: The client's own count.
        about: Attributes of its spans that are known before it leaves, such as who makes it and with which client.
    """

    def __init__(
        self,
        capture: Capture,
        route: Route,
        *,
        body: bytes,
        parent_id: str,
        request_id: str,
        retry_count: int,
        about: Mapping[str, Json] | None = None,
    ) -> None:
        self._capture = capture
        self._route = route
        self._body = body
        self._parent_id = parent_id
        self._request_id = request_id
        self._retry_count = retry_count
        self._about = about or {}
        self._start_ns = time.time_ns()
        self._started = time.perf_counter()
        self._first: float | None = None
        self._chunks: list[bytes] = []
        self._status = 0
        self._headers: dict[str, str] = {}
        self._response_type: Any = None
        self._lock = Lock()
        self._is_finished = False
        capture.closers[id(self)] = self._abandon

    def answered(self, response: Any) -> None:
        """The response's head arrived; ``response`` is the client's own object, and is not kept."""
        self._status = response.status_code
        self._headers = {name.lower(): value for name, value in response.headers.items()}
        self._response_type = type(response)

    def take(self, chunk: bytes) -> None:
        """A part of the body arrived, still encoded as the response's headers say."""
        if self._first is None:
            self._first = time.perf_counter()
        self._chunks.append(chunk)

    def finish(self, *, is_complete: bool, error: str = "", body: bytes | None = None) -> None:
        """Record the call; ``body`` is its decoded content where the client has read it already."""
        with self._lock:
            if self._is_finished:
                return
            self._is_finished = True
        self._capture.closers.pop(id(self), None)
        try:
            self._record(is_complete=is_complete, error=error, body=body)
        except Exception:  # noqa: BLE001  # isolation point: the agent's call goes on
            _log.exception("A model call of attempt %s could not be recorded.", self._capture.attempt_id)

    def discard(self) -> None:
        """Forget the call: somebody else records it."""
        with self._lock:
            self._is_finished = True
        self._capture.closers.pop(id(self), None)

    def _abandon(self) -> None:
        self.finish(is_complete=False, error="" if self._chunks else "the attempt ended before an answer came")

    def _record(self, *, is_complete: bool, error: str, body: bytes | None) -> None:
        exchange = self._exchange(is_complete=is_complete, error=error, body=body)
        upstream = self._route.upstream
        calls = calls_of(
            exchange,
            policy=upstream.name if upstream else "",
            model_version=upstream.model_version if upstream else "",
            want_ids=self._route.wants_ids,
        )
        capture = self._capture
        for span in chat_spans(
            calls,
            rollout_id=capture.rollout_id,
            attempt_id=capture.attempt_id,
            trace_id=capture.trace_id,
            parent_id=self._parent_id,
            framework_span_id=self._parent_id,
            about=self._about,
            start_ns=self._start_ns,
            end_ns=time.time_ns(),
        ):
            capture.record(span)

    def _exchange(self, *, is_complete: bool, error: str, body: bytes | None) -> Exchange:
        latency = time.perf_counter() - self._started
        first = latency if self._first is None else self._first - self._started
        return Exchange(
            path=self._route.url,
            request=self._body,
            request_id=self._request_id,
            status=self._status,
            headers=self._headers,
            response=self._decoded() if body is None else body,
            is_streamed="text/event-stream" in self._headers.get("content-type", ""),
            is_complete=is_complete,
            latency_s=latency,
            first_token_s=first,
            retry_count=self._retry_count,
            error=redact(error),
        )

    def _decoded(self) -> bytes:
        """The chunks with the response's content encoding undone; a cut encoded body is what can be read of it."""
        raw = b"".join(self._chunks)
        encoding = self._headers.get("content-encoding", "identity")
        if not raw or encoding == "identity":
            return raw
        return self._response_type(200, headers={"content-encoding": encoding}, content=raw).content
