"""The URL of a gateway, as seen from its own machine and from others."""

import ipaddress
import socket
from urllib.parse import urlsplit, urlunsplit

from agl.errors import ConfigError
from agl.urls import web_parts

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_UNUSED_ADDRESS = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737), used to find the outgoing interface; nothing is sent there."""


def local_url(url: str) -> str:
    """Return the URL by which this machine reaches a gateway: over loopback if it listens on all interfaces."""
    # A wildcard address cannot be called on every system.
    return _with_host(url, _WILDCARDS.get(urlsplit(url).hostname or "", ""))


def advertised_url(url: str, advertise: str = "") -> str:
    """Return the gateway's URL for other machines.

    Args:
        url: The URL at which the gateway listens.
        advertise: A host name, which gets the gateway's port, or a whole URL. By default the address to which the
            gateway is bound is used, or, if it listens on all interfaces, the address of the network interface.

    Raises:
        ConfigError: ``advertise`` is neither a host name nor a URL.
    """
    if "://" in advertise:
        parts = web_parts(advertise)
        if parts is None or parts.username:
            raise ConfigError(f"[gateway] advertise is {advertise!r}; write a host name, or http://HOST:PORT")
        return advertise.rstrip("/")
    if "/" in advertise or "@" in advertise:
        raise ConfigError(f"[gateway] advertise is {advertise!r}; write a host name, or http://HOST:PORT")
    if advertise:
        return _with_host(url, advertise)
    return _with_host(url, _own_address() if urlsplit(url).hostname in _WILDCARDS else "")


def is_loopback(url: str) -> bool:
    """Return true if only processes on the same machine can reach ``url``."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_host(url: str, host: str) -> str:
    if not host:
        return url
    parts = urlsplit(url)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))


def _own_address() -> str:
    """Return the address of the outgoing network interface, or the host name if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only makes the system choose an
            # interface.
            probe.connect(_UNUSED_ADDRESS)
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()
