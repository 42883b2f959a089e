"""The store contract as HTTP messages, derived from :class:`agl.contracts.Store`.

Each method becomes ``POST /store/<method>`` with its parameters as one object. The client, the server and the OpenAPI
document all read this table, so they cannot disagree with the contract.
"""

import inspect
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from agl import errors
from agl.contracts import Store
from agl.errors import NotFoundError, StoreError

MAX_WAIT_S = 25.0
"""The longest wait of one request, in seconds; short, so that no proxy cuts the connection. Clients then ask again."""

_STATUS = {"NotFoundError": 404, "ConflictError": 409, "FencedError": 409, "TokenError": 401, "StoreError": 503}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of the store contract.

    Attributes:
        params: Struct type of the parameters.
        result: Type of the result.
        positional: Names of the parameters that are passed by position.
        is_waiting: True if the method has the parameter ``wait_s``.
        is_repeatable: True if a repeated request is harmless.
    """

    name: str
    summary: str
    params: type[msgspec.Struct]
    result: Any
    positional: tuple[str, ...]
    is_waiting: bool
    is_repeatable: bool


def _method(name: str) -> Method:
    function = getattr(Store, name)
    hints = get_type_hints(function, include_extras=True)
    parameters = [item for item in inspect.signature(function).parameters.values() if item.name != "self"]
    fields = [
        (item.name, hints[item.name])
        if item.default is inspect.Parameter.empty
        else (item.name, hints[item.name], item.default)
        for item in parameters
    ]
    params = msgspec.defstruct(f"{name.title().replace('_', '')}Params", fields, kw_only=True, frozen=True)
    return Method(
        name=name,
        summary=(inspect.getdoc(function) or name).partition("\n")[0],
        params=params,
        result=hints["return"],
        positional=tuple(item.name for item in parameters if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD),
        is_waiting=any(item.name == "wait_s" for item in parameters),
        is_repeatable=name != "delete",
    )


METHODS: dict[str, Method] = {
    name: _method(name)
    for name, member in vars(Store).items()
    if not name.startswith("_") and inspect.iscoroutinefunction(member) and name != "close"
}


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as sent over HTTP: the exception's type and message.

    For an unknown id, ``kind`` and ``key`` say what was not found, and ``is_damaged`` that it cannot be read.
    """

    type: str
    message: str
    kind: str = ""
    key: str = ""
    is_damaged: bool = False


def fault_of(error: errors.AglError) -> Fault:
    """Return ``error`` as a :class:`Fault`."""
    found = error if isinstance(error, NotFoundError) else None
    return Fault(
        type=type(error).__name__,
        message=str(error),
        kind=found.kind if found else "",
        key=found.key if found else "",
        is_damaged=found is not None and found.is_damaged,
    )


def status_of(error: errors.AglError) -> int:
    """Return the HTTP status for ``error``."""
    return _STATUS.get(type(error).__name__, 400)


def error_of(fault: Fault) -> errors.AglError:
    """Return the exception that ``fault`` describes; an unknown type becomes a :class:`StoreError`."""
    if fault.type == "NotFoundError":
        hint = fault.message.partition("; ")[2]
        return NotFoundError(fault.kind, fault.key, hint, is_damaged=fault.is_damaged)
    found: object = getattr(errors, fault.type, None)
    if isinstance(found, type) and issubclass(found, errors.AglError):
        return found(fault.message)
    return StoreError(fault.message)
