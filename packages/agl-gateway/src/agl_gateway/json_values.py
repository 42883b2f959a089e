"""Refuses JSON of so many values that parsing it would hold up all other requests."""

from agl_gateway.problems import Problem

MAX_CONTAINERS = 200_000
MAX_VALUES = 4_000_000
"""More than prompts of token ids have; a parser makes an object of each, and keeps the thread meanwhile."""


def check_values(body: bytes) -> None:
    """Look at a JSON body before it is parsed, in a fraction of the time that this would take.

    Raises:
        Problem: 413 when it has more than 200,000 lists and objects, or more than 4,000,000 values.
    """
    if len(body) <= MAX_CONTAINERS or _is_small([body]):
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MAX_VALUES or not _is_small(bare.split(b'"')[::2]):
        raise Problem(
            413,
            f"the request has more than {MAX_CONTAINERS:,} lists and objects, or more than {MAX_VALUES:,} values; "
            "send less at once",
            code="too_many_values",
        )


def _is_small(parts: list[bytes]) -> bool:
    """Return true if the parts of a text, those outside of strings, hold few enough values."""
    containers = sum(part.count(b"[") + part.count(b"{") for part in parts)
    return containers <= MAX_CONTAINERS and sum(part.count(b",") for part in parts) <= MAX_VALUES
