"""Errors in the format that the client's library expects: OpenAI's, or Anthropic's and Google's for their endpoints."""

import msgspec
from aiohttp import web

from agl_gateway.wire.translation import ClientApi

_KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    409: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    502: ("api_error", "api_error"),
    503: ("api_error", "overloaded_error"),
    504: ("api_error", "api_error"),
}

_SERVERS_FAULT = 500
_GOOGLE_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Google's names for HTTP statuses."""


class Problem(Exception):  # noqa: N818  # a response that is raised, not a fault of the program
    """An error response of the gateway itself; the message says what was found and what to do next.

    Attributes:
        status: HTTP status.
        code: OpenAI's ``code``, a fixed word for programs.
        is_retryable: True if clients should try again; sent as ``x-should-retry``.
        retry_after_s: Seconds to wait before another try; sent as ``retry-after`` unless 0.
    """

    def __init__(
        self, status: int, message: str, *, code: str = "", is_retryable: bool = False, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.is_retryable = is_retryable
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """Return the headers that tell clients whether and when to try again."""
        wait = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        return {"x-should-retry": "true" if self.is_retryable else "false", **wait}


def store_away(unknown: str) -> Problem:
    """Return the 503 for a call that needs a part of the store that is not cached; ``unknown`` names that part."""
    return Problem(
        503,
        f"the gateway's store does not answer, so {unknown}; the model was not asked. Try again later",
        code="store_away",
        is_retryable=True,
        retry_after_s=5,
    )


def problem_body(problem: Problem, dialect: ClientApi | None) -> bytes:
    """Return the JSON body of ``problem`` in the format of ``dialect``."""
    if dialect == "google":
        return google_error(problem.status, str(problem))
    openai_kind, anthropic_kind = _KINDS.get(problem.status, ("api_error", "api_error"))
    if dialect == "messages":
        return msgspec.json.encode(
            {"type": "error", "error": {"type": anthropic_kind, "message": str(problem)}},
        )
    error = {"message": str(problem), "type": openai_kind, "param": None, "code": problem.code or None}
    return msgspec.json.encode({"error": error})


def google_error(status: int, message: str) -> bytes:
    """Return the JSON body of an error in Google's format."""
    kind = _GOOGLE_STATUSES.get(status, "INVALID_ARGUMENT" if status < _SERVERS_FAULT else "INTERNAL")
    return msgspec.json.encode({"error": {"code": status, "message": message, "status": kind}})


def problem_response(problem: Problem, dialect: ClientApi | None) -> web.Response:
    """Return ``problem`` as an HTTP response."""
    return web.Response(
        body=problem_body(problem, dialect),
        status=problem.status,
        content_type="application/json",
        headers=problem.headers(),
    )
