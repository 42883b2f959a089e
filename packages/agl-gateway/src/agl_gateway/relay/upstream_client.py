"""Sends requests to backends: one aiohttp session, the headers to pass on, and failures as problems."""

import asyncio
import io
from collections.abc import Mapping

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from agl.schemas import Dialect
from agl_gateway.relay.routing import UpstreamTarget
from agl_gateway.wire.problems import Problem

_FORWARDED = (
    "content-type",
    "accept",
    "user-agent",
    "anthropic-version",
    "anthropic-beta",
    "openai-beta",
    "idempotency-key",
    "traceparent",
    "tracestate",
)
"""Request headers that are passed to the backend; all others, above all credentials, are dropped."""

_NOT_RELAYED = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "set-cookie",
        "date",
        "server",
    }
)

CONNECT_TRIES = 3
_KEEPALIVE_S = 4.0
"""Below the 5 seconds after which uvicorn, and so vLLM, closes an idle connection."""
_CONNECT_PAUSE_S = 0.1
_IN_PARTS = 1024 * 1024
"""Bytes from which a body is sent in parts, so that other requests have their turn between them."""


def make_session(*, timeout_s: float, connect_timeout_s: float) -> aiohttp.ClientSession:
    """Create a session for all upstreams: no decompression, no cookies, no limit on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept-Encoding", "User-Agent", "Accept"),
        read_bufsize=256 * 1024,
    )


def request_headers(headers: Mapping[str, str], target: UpstreamTarget, dialect: Dialect | None) -> dict[str, str]:
    """Return the headers for the backend: the client's harmless ones and the provider's key."""
    sent = {name: value for name in _FORWARDED if (value := headers.get(name)) is not None}
    sent["accept-encoding"] = "identity"
    if target.key:
        sent["authorization"] = f"Bearer {target.key}"
        if dialect == "messages":
            sent["x-api-key"] = target.key
    return sent


def reply_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the backend's headers for the client, without hop-by-hop headers."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_RELAYED)


async def open_upstream(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    connect_tries: int = CONNECT_TRIES,
) -> aiohttp.ClientResponse:
    """Send a request; returns when the response's head has arrived.

    A failed connection is tried again, because nothing was sent; other failures are not.

    Raises:
        Problem: 502 if the backend cannot be reached or hangs up, 504 if it is silent too long.
    """
    for attempt in range(1, connect_tries + 1):
        try:
            data = io.BytesIO(body) if len(body) > _IN_PARTS else body
            return await session.request(method, url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if attempt == connect_tries:
                raise problem_of(error, url) from error
            await asyncio.sleep(_CONNECT_PAUSE_S * attempt)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise problem_of(error, url) from error
    raise AssertionError("unreachable: the last try returns or raises")


def problem_of(error: Exception, url: str) -> Problem:
    """Return a failure of the backend as a problem for the client."""
    where = url.split("?", 1)[0]
    if isinstance(error, aiohttp.ClientConnectorError):
        return Problem(
            502,
            f"the backend at {where} cannot be reached ({error}); check that it runs, and the policy's URL",
            code="upstream_unreachable",
            is_retryable=True,
        )
    if isinstance(error, TimeoutError):
        return Problem(
            504,
            f"the backend at {where} was silent for too long ({type(error).__name__}); "
            "check its load, or raise the gateway's timeout",
            code="upstream_timeout",
            is_retryable=True,
        )
    return Problem(
        502,
        f"the backend at {where} ended the connection before its answer did ({error or type(error).__name__})",
        code="upstream_failed",
        is_retryable=True,
    )
