"""Keeps out other web pages and other machines: checks host names and a password, and sets protective headers."""

import base64
import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from agl.errors import ConfigError

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with no-referrer browsers send forms with the origin "null"
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer: the browser loads nothing from elsewhere, and no other page may embed or read the answer."""

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


METRICS = "/metrics"
"""The path that Prometheus reads; it may address the console by any IP address."""


def is_loopback(host: str) -> bool:
    """Return true if only this machine can reach the name or address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked_password(host: str, password: str) -> str:
    """Return the password; raises :class:`ConfigError` if it is empty and other machines can reach ``host``."""
    if password or is_loopback(host):
        return password
    raise ConfigError(
        f"--host {host} lets other machines read what agents and models wrote, and there is no password; set "
        "AGL_CONSOLE_PASSWORD, or leave --host away and forward the port with ssh -L"
    )


def is_address(host: str) -> bool:
    """Return true for an IP address; a request that names one cannot come from a domain that was pointed here."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


class Guard:
    """The middleware that every request passes.

    Args:
        hosts: Further host names of the console, in addition to those of this machine. A request with another name in
            ``Host`` is refused, because it comes from a page whose domain was pointed here.
        password: The password for HTTP basic authentication, with any user name; ``""`` for no password.
    """

    def __init__(self, *, hosts: Collection[str], password: str) -> None:
        self._hosts = LOCAL | {host.lower() for host in hosts}
        self._password = password.encode()

    def middleware(self) -> Middleware:
        """Return the middleware for ``web.Application``."""

        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return self._refusal(request) or await handler(request)

        return guarded

    def _refusal(self, request: web.Request) -> web.Response | None:
        host = host_of(request.headers.get("Host", ""))
        if host not in self._hosts and not (request.path == METRICS and is_address(host)):
            text = f"this console does not answer to the name {host!r}; start it with --allow-host {host or 'NAME'}\n"
            return web.Response(status=403, text=text)
        if self._password and not self._is_known(request.headers.get("Authorization", "")):
            challenge = {"WWW-Authenticate": 'Basic realm="agl console", charset="UTF-8"'}
            return web.Response(status=401, text="the password is that in AGL_CONSOLE_PASSWORD\n", headers=challenge)
        return None

    def _is_known(self, authorization: str) -> bool:
        scheme, _, credentials = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            _, _, password = base64.b64decode(credentials, validate=True).partition(b":")
        except ValueError:  # no base64, or not even ASCII
            return False
        return hmac.compare_digest(password, self._password)


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Add ``HEADERS`` to an answer; a handler of the signal ``on_response_prepare``."""
    response.headers.update(HEADERS)


def host_of(header: str) -> str:
    """Return the name in a ``Host`` header, in lower case and without its port; ``""`` if the header is malformed."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
