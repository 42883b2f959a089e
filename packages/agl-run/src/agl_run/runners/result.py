"""Interprets an agent's return value, and describes its failure."""

import math
import traceback
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeGuard

import msgspec

from agl.errors import RunError
from agl.schemas import ErrorInfo, Json, Record, Reward, encode, to_json

MAX_TRACEBACK = 20_000
"""The most characters of a traceback; a longer one is cut at its start, because the error is at its end."""


class AgentResult(Record, frozen=True, kw_only=True):
    """The reward or the output that an agent returned."""

    reward: Reward | None = None
    output: Json = None


def read_result(value: Any) -> AgentResult:
    """Read an agent's return value.

    A number is the reward and also the output, a dict of numbers is the reward's dimensions, ``None`` is neither, and
    any other JSON value is the output.

    Raises:
        RunError: The value is not JSON, is a number that is not finite, or is an output that no store can hold.
    """
    if value is None:
        return AgentResult()
    reward = read_reward(value)
    if reward is None:
        return AgentResult(output=_json(value))
    if reward.fault:
        raise RunError(f"the agent returned {reward.fault} as a reward; return a finite number, or None for no reward")
    # A number is both the reward and the agent's output.
    return AgentResult(reward=reward, output=float(value) if isinstance(value, Real) else None)


def read_reward(value: Any) -> Reward | None:
    """Return a number, a dict of numbers or a reward as a ``Reward``, even if infinite or NaN; else ``None``."""
    if isinstance(value, Reward):
        return value
    # Numbers of numpy and torch scalars are ``Real`` too.
    if isinstance(value, Real):
        return Reward(value=_float(value), name="return")
    if _is_dimensions(value):
        return Reward(value=None, name="return", dimensions={str(key): _float(part) for key, part in value.items()})
    return None


def _float(value: Any) -> float:
    """Return a number as a float; a number beyond the range of floats becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def describe_error(error: BaseException) -> ErrorInfo:
    """Convert an exception to an ``ErrorInfo`` without secrets and with only the end of a long traceback."""
    from agl.tracing import plain

    kind = type(error)
    # As a traceback ends: people search for that text.
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  # the attempt boundary: the agent's own class
        message = f"{name}, whose __str__ raised"
    # A recursion without end makes tracebacks of megabytes.
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    return ErrorInfo(type=name, message=plain(message) or f"{name} without a message", traceback=plain(text))


def _is_dimensions(value: Any) -> TypeGuard[Mapping[Any, Real]]:
    return isinstance(value, Mapping) and bool(value) and all(_is_number(v) for v in value.values())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType, reportUnknownMemberType]  # a type guard takes anything


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    """Return an instance of a subclass of ``str``, which frameworks use for results, as a plain string."""
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError


def _json(value: Any) -> Json:
    try:
        # Frameworks return subclasses of ``str``, which would not survive the store.
        plain = msgspec.to_builtins(value, enc_hook=_text)
        to_json(plain)
    except (TypeError, ValueError, NotImplementedError, RecursionError, msgspec.MsgspecError):
        raise RunError(
            f"the agent returned {type(value).__name__}, which is neither a number (the reward), a dict of numbers, "
            "None nor a JSON value (the output); return one of these"
        ) from None
    try:
        encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RunError(
            f"the agent returned {type(value).__name__} that no store carries: {error}; return integers of at most 64 "
            "bits, or text in their place"
        ) from None
    return plain
