"""Where a gateway is, as its own machine and as others reach it."""

import ipaddress
import socket
from urllib.parse import urlsplit, urlunsplit

from agl.errors import ConfigError

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737); nothing is sent to it."""


def local_url(url: str) -> str:
    """``url`` as this machine reaches it: a gateway that listens everywhere is reached at its own address."""
    return _with_host(url, _WILDCARDS.get(urlsplit(url).hostname or "", ""))


def advertised_url(url: str, advertise: str = "") -> str:
    """What machines elsewhere are told.

    Args:
        url: Where the gateway listens.
        advertise: A host name, which gets the gateway's port, or a whole URL; by default the address that the
            gateway is bound to, or, where it listens everywhere, that of the interface to the network.

    Raises:
        ConfigError: ``advertise`` is neither.
    """
    if "://" in advertise:
        parts = urlsplit(advertise)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"[gateway] advertise is {advertise!r}; write a host name, or http://HOST:PORT")
        return advertise.rstrip("/")
    if "/" in advertise or "@" in advertise:
        raise ConfigError(f"[gateway] advertise is {advertise!r}; write a host name, or http://HOST:PORT")
    if advertise:
        return _with_host(url, advertise)
    return _with_host(url, _own_address() if urlsplit(url).hostname in _WILDCARDS else "")


def is_loopback(url: str) -> bool:
    """Whether only processes of the same machine reach ``url``."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_host(url: str, host: str) -> str:
    if not host:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))


def _own_address() -> str:
    """The address of the interface that leads out of this machine, else its host name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
