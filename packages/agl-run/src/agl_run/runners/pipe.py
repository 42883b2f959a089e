"""Messages between the experiment's process and a child process: length-prefixed msgpack over the child's pipes."""

import struct
from typing import Any, BinaryIO

import msgspec

from agl.contracts import Upstream
from agl.schemas import Attempt, Outcome, Record, Resource, Rollout, Span, encode
from agl_run.replay.script import Script

_HEADER = struct.Struct("<I")


class ChildStart(Record, frozen=True, kw_only=True, tag="start"):
    """The first message to a child: the settings that all attempts of the child share."""

    agent_path: str
    folder: str
    sys_path: tuple[str, ...]
    gateway_url: str
    upstreams: tuple[Upstream, ...]
    tracers: tuple[str, ...]


class ChildRun(Record, frozen=True, kw_only=True, tag="run"):
    """A message to a child that asks it to run an attempt."""

    rollout: Rollout
    attempt: Attempt
    resources: dict[str, Resource]
    token: str
    replay: Script | None = None


class ChildReady(Record, frozen=True, kw_only=True, tag="ready"):
    """A message from a child that has loaded its agent, or the ``error`` that prevented it."""

    error: str = ""


class ChildSpans(Record, frozen=True, kw_only=True, tag="spans"):
    """A message from a child with new spans of the running attempt."""

    spans: tuple[Span, ...]


class ChildDone(Record, frozen=True, kw_only=True, tag="done"):
    """A message from a child with the outcome of an attempt."""

    outcome: Outcome


ToChild = ChildStart | ChildRun
FromChild = ChildReady | ChildSpans | ChildDone

_TO_CHILD = msgspec.msgpack.Decoder(ToChild)
_FROM_CHILD = msgspec.msgpack.Decoder(FromChild)


def frame(message: Any) -> bytes:
    """Encode a message with its length in front."""
    data = encode(message)
    return _HEADER.pack(len(data)) + data


def read_to_child(stream: BinaryIO) -> ToChild | None:
    """Read the next message to the child, blocking until it arrives; ``None`` at the end of the stream."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    return _TO_CHILD.decode(stream.read(_HEADER.unpack(header)[0]))


async def read_from_child(stream: Any) -> FromChild:
    """Read the next message from the child; raises :class:`asyncio.IncompleteReadError` if the child has ended."""
    header = await stream.readexactly(_HEADER.size)
    return _FROM_CHILD.decode(await stream.readexactly(_HEADER.unpack(header)[0]))
