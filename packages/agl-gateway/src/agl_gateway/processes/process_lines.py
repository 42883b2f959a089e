"""The lines of JSON that a gateway in a process of its own and its owner send each other.

They travel over a socket pair that only these two processes hold, because the first one carries the signing keys and
the store's address with its password. The note that answers an order has the order's number.
"""

from typing import Literal

import msgspec

from agl.contracts import Upstream
from agl_gateway.service import Settings
from agl_gateway.store_api.contract import Fault

LONGEST = 2**24
"""Largest line in bytes; the upstreams of thousands of replicas fit."""


class GateState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a policy's calls: held or not, and the version and model that they have; ``""`` as at the start."""

    is_paused: bool = False
    model_version: str = ""
    model: str = ""


class Beginning(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that a process needs to serve.

    Attributes:
        spool: Folder for the spool.
        tls_cert: As for :class:`agl_gateway.embedded.EmbeddedGateway`, like ``tls_key``.
        plugins: Environment that makes it load the same plugins.
        keys: Keys of attempt tokens, one a line.
        gates: State of the policies that were paused or resumed before.
    """

    store_url: str
    settings: Settings
    spool: str
    keys: bytes
    upstreams: tuple[Upstream, ...]
    tls_cert: str = ""
    tls_key: str = ""
    plugins: dict[str, str] = {}
    gates: dict[str, GateState] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the owner: ``begin``, ``pause`` or ``resume`` a policy, ``settle`` an attempt, say that you live, ``stop``.

    Attributes:
        name: The policy, or the attempt's id.
        drain_s: Seconds that a pause waits for calls under way.
        gate: What calls carry after ``resume``.
        keys: New keys of attempt tokens, with ``beat``; empty for the ones before.
    """

    kind: Literal["begin", "pause", "resume", "settle", "beat", "stop"]
    number: int = 0
    beginning: Beginning | None = None
    name: str = ""
    drain_s: float = 0.0
    gate: GateState | None = None
    keys: bytes = b""


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the process: an order is ``done``, or a line for the ``log``.

    Attributes:
        text: The URL after ``begin``, the last words after ``stop``; the line.
        fault: The error for which the order could not be carried out.
        logger: Name of the line's logger.
        level: Number of the line's level.
    """

    kind: Literal["done", "log"]
    number: int = 0
    text: str = ""
    fault: Fault | None = None
    logger: str = ""
    level: int = 0


def line(message: Order | Note) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"
