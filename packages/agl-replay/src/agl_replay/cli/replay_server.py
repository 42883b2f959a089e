"""A model server that answers from a recorded attempt: the same conversation gets the recorded answer.

Answers are found by conversation, not by order, so agents that call in parallel replay as well. A conversation that was
not recorded is refused and noted: the agent has diverged from the recording.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeGuard

from agl.dialects import Request, dialect_of
from agl.schemas import Dialect, ModelCall, to_json
from agl_inspect.rollouts.answers import answer_of, asked, encode_answer, exchanges_of, key_of
from agl_inspect.rollouts.conversations import ending, nearest
from agl_inspect.text import short

_REFUSED = 400
_NO_ANSWER = 502


class ReplayServer:
    """Serves the calls of one attempt on a free port of this machine while the ``with`` block runs.

    Attributes:
        diverged: Descriptions of the requests that were not recorded, in order.
        served: Number of answers.
    """

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self.diverged: list[str] = []
        self.served = 0
        self._lock = threading.Lock()
        self._answers: dict[bytes, deque[list[ModelCall]]] = defaultdict(deque)
        for exchange in exchanges_of(calls):
            self._answers[key_of(exchange[0].dialect, exchange[0].request)].append(exchange)
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, name="agl-replay", daemon=True)

    @property
    def url(self) -> str:
        """Base URL of the server, without ``/v1``."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def unused(self) -> int:
        """Number of recorded answers that were not requested."""
        return sum(len(waiting) for waiting in self._answers.values())

    def __enter__(self) -> "ReplayServer":
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, data: bytes) -> tuple[int, str, bytes]:
        """Return status, content type and body for one request."""
        dialect = dialect_of(path)
        # Compared as a record has it: with references in place of pictures, and without credentials.
        body = Request(dialect, data).stored().request if dialect else None
        with self._lock:
            waiting = self._answers.get(key_of(dialect, body)) if dialect else None
            if dialect is None or not waiting:
                return _REFUSED, "application/json", _error(self._note(dialect, path, body))
            exchange = waiting.popleft()
            self.served += 1
        return _recorded(dialect, exchange, is_streamed=_is_object(body) and body.get("stream") is True)

    def _note(self, dialect: Dialect | None, path: str, body: Any) -> str:
        messages = asked(dialect, body) if dialect else []
        what = ending(messages) if messages else short(body, 120)
        where = nearest(messages, self._expected(dialect, body))
        self.diverged.append(f"{path}, ending with {what}{'; ' if where else ''}{where}" if dialect else path)
        return f"this request is not in the recorded rollout, or was made less often there ({what})"

    def _expected(self, dialect: Dialect | None, body: Any) -> list[list[Any]]:
        """Return the recorded conversations that a request may stand for: those that were not requested yet."""
        if dialect is not None and key_of(dialect, body) in self._answers:
            return [asked(dialect, body)]
        waiting = [exchange[0] for exchanges in self._answers.values() for exchange in exchanges]
        return [asked(call.dialect, call.request) for call in waiting if call.dialect == dialect]


def _handler(server: ReplayServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:  # the name that http.server calls
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(*server.answer(self.path, data))

        def do_GET(self) -> None:
            self._send(200, "application/json", b'{"object":"list","data":[]}')

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # http.server's name
            return

    return Handler


def _recorded(dialect: Dialect, exchange: list[ModelCall], *, is_streamed: bool) -> tuple[int, str, bytes]:
    first = exchange[0]
    answer = answer_of(exchange)
    if answer is None or first.status_code >= _REFUSED:
        body = to_json(first.response) if _is_object(first.response) else _error(first.error or "no answer")
        return first.status_code if first.status_code >= _REFUSED else _NO_ANSWER, "application/json", body
    return (200, *encode_answer(dialect, answer, is_streamed=is_streamed))


def _error(message: str) -> bytes:
    return to_json({"error": {"message": f"agl replay: {message}", "type": "replay_error", "code": None}})


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
