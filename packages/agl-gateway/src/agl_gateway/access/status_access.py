"""Access to ``/metrics`` and ``/openapi.json``: without a token only for hosts that are known to be this gateway.

A page in a browser can give its own host name this machine's address (DNS rebinding) and would otherwise read both.
It cannot do so with an address in place of a name, and it has no token.
"""

import socket
from collections.abc import Collection
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.wire.problems import Problem


class StatusAccess:
    """Checks requests for the gateway's status.

    Args:
        is_protected: Whether every request needs the admin token.
        hosts: Host names under which the gateway is known, besides ``localhost``, this machine's and all addresses.
    """

    def __init__(self, identities: Identities, *, is_protected: bool, hosts: Collection[str]) -> None:
        self._identities = identities
        self._is_protected = is_protected
        self._hosts = {name.lower() for name in ("localhost", socket.gethostname(), *hosts)}

    def check(self, request: web.BaseRequest) -> None:
        """Raise a 401 or 403 :class:`Problem` unless the request names a known host or has the admin token."""
        host, key = request.headers.get("host", ""), key_of(request.headers)
        if not self._is_protected:
            if self._is_known(host):
                return
            if not key:
                raise Problem(
                    403,
                    f"the request is for the host {host!r}, by which this gateway is not known; ask for its address, "
                    "send the admin token, or start it with --allow-host",
                )
        require_scope(self._identities.verify(key), ("admin",), what=f"{request.path} here")

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with suppress(ValueError):
            return bool(ip_address(name))
        return not host or name in self._hosts
