"""Patches the process while rollouts are active, and restores it afterwards.

The patches are process-wide and shared by rollouts, so users are counted: the first active rollout applies them, the
last one restores the originals. Only this module of the core holds process-wide state, because the things that it
patches are process-wide.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias, cast

Undo: TypeAlias = Callable[[], None]
"""Reverts the changes of the function that returned it; call it once."""

ScopeMaker: TypeAlias = Callable[[Any], AbstractContextManager[None]]
"""Makes a tracer's context around one attempt; called with the :class:`~agl.tracing.ActiveAttempt`."""


@dataclass
class _State:
    lock: Lock = field(default_factory=Lock)
    users: list[object] = field(default_factory=list[object])
    undo: list[Undo] = field(default_factory=list[Undo])
    scopes: list[ScopeMaker] = field(default_factory=list[ScopeMaker])
    made: dict[tuple[Any, str], tuple[Any, Any]] = field(default_factory=dict[tuple[Any, str], tuple[Any, Any]])


_STATE = _State()


def hold(user: object) -> None:
    """Patch the process for ``user``, and keep ``user`` alive until :func:`release`."""
    with _STATE.lock:
        if not _STATE.users:
            _apply()
        _STATE.users.append(user)


def release(user: object) -> None:
    """End :func:`hold`; the last user restores the originals."""
    with _STATE.lock:
        _STATE.users.remove(user)
        if not _STATE.users:
            _revert()


def around_attempts(make: ScopeMaker) -> Undo:
    """Enter ``make(attempt)`` around every attempt that starts from now on, until the returned function is called."""
    with _STATE.lock:
        _STATE.scopes.append(make)

    def undo() -> None:
        with _STATE.lock:
            _STATE.scopes.remove(make)

    return undo


def enter_scopes(stack: ExitStack, attempt: object) -> None:
    """Enter the registered scopes on ``stack``."""
    for make in tuple(_STATE.scopes):
        stack.enter_context(make(attempt))


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Set ``owner.name`` to ``make(original)``; the returned function restores the original object itself.

    A later foreign patch on top stays in place; the one below it is idle outside rollouts.
    """
    original = cast("Any", vars(owner)[name])
    replacement = _replacement(owner, name, original, make)
    setattr(owner, name, replacement)

    def undo() -> None:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    return undo


def _replacement(owner: Any, name: str, original: Any, make: Callable[[Any], Any]) -> Any:
    """``make(original)``, cached for the same original."""
    wrapped, replacement = _STATE.made.get((owner, name), (None, None))
    if wrapped is not original:
        replacement = make(original)
        _STATE.made[owner, name] = (original, replacement)
    return replacement


def _apply() -> None:
    from agl.tracing import _threads as threads
    from agl.tracing._wire import hook as wire

    _STATE.undo.extend(threads.install())
    _STATE.undo.append(wire.install())


def _revert() -> None:
    while _STATE.undo:
        _STATE.undo.pop()()
