"""The lines of JSON that a relay in a process of its own and its owner send each other.

The note that answers an order has the order's number, and the order that answers a question for the server at home has
the number of that question. News that replicas are lost has the number of the order to use them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from agl_algo_verl.serving.relay import Backend  # noqa: TC001 - msgspec resolves it

LONGEST = 2**20
"""Largest line in bytes; a cluster of thousands of replicas fits."""


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the owner: `use` other servers, `hold` calls, `count`, the server at `home`, `stop`.

    Attributes:
        backend: The servers of `use`, None for the one at home; the server at home.
        is_held: Whether calls are held after `use`.
        error: The reason why nobody serves at home.
    """

    kind: Literal["use", "hold", "count", "home", "stop"]
    number: int = 0
    backend: Backend | None = None
    is_held: bool = False
    error: str = ""


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """From the relay: it is `ready`, an order is `done`, it asks for the server at `home`, all replicas are `lost`.

    Attributes:
        calls: Answers of each replica since the process began.
        failures: How often each could not be reached.
    """

    kind: Literal["ready", "done", "home", "lost"]
    number: int = 0
    calls: dict[str, int] = {}
    failures: dict[str, int] = {}


def line(message: Order | Note) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"
