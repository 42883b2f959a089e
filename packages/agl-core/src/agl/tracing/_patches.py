"""Patches the process while rollouts are active, and restores it afterwards.

The patches affect the whole process and are shared by rollouts: the first active rollout applies them, and the last one
restores the originals. Therefore this module has process-wide state, as no other module of the core does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from types import FunctionType
from typing import Any, ClassVar, TypeAlias, cast

from agl.contracts import Tracer
from agl.tracing._context import current

Undo: TypeAlias = Callable[[], None]
"""Reverts the changes of the function that returned it; call it once."""

ScopeMaker: TypeAlias = Callable[[Any], AbstractContextManager[None]]
"""A function that takes an :class:`~agl.tracing.ActiveAttempt` and returns a context manager to enter around it."""


@dataclass
class _State:
    lock: Lock = field(default_factory=Lock)
    users: list[object] = field(default_factory=list[object])
    undo: list[Undo] = field(default_factory=list[Undo])
    scopes: list[ScopeMaker] = field(default_factory=list[ScopeMaker])
    # Replacements are kept: patching again and again must not stack wrappers on a foreign patch.
    made: dict[tuple[Any, str], tuple[Any, Any]] = field(default_factory=dict[tuple[Any, str], tuple[Any, Any]])


_STATE = _State()


def hold(user: object, apply: Callable[[], Iterable[Undo]]) -> None:
    """Keep the patches applied for ``user`` until :func:`release`; for the first user, ``apply`` makes them."""
    with _STATE.lock:
        # Counted and not nested: rollouts overlap, and the last one to end need not be the first
        # that began.
        if not _STATE.users:
            _STATE.undo.extend(apply())
        _STATE.users.append(user)


def release(user: object) -> None:
    """Let go of the patches for ``user``, which ends :func:`hold`; after the last user the originals are restored."""
    with _STATE.lock:
        _STATE.users.remove(user)
        while _STATE.undo and not _STATE.users:
            _STATE.undo.pop()()


def around_attempts(make: ScopeMaker) -> Undo:
    """Enter ``make(attempt)`` around every attempt that starts from now on, until the returned function is called."""
    with _STATE.lock:
        _STATE.scopes.append(make)

    def undo() -> None:
        with _STATE.lock:
            _STATE.scopes.remove(make)

    return undo


def enter_scopes(stack: ExitStack, attempt: object) -> None:
    """Enter the context managers of :func:`around_attempts` for an attempt on ``stack``."""
    # A copy: a tracer may be installed or removed by another thread meanwhile.
    for make in tuple(_STATE.scopes):
        stack.enter_context(make(attempt))


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Replace ``owner.name`` by ``make(original)``; the returned function restores the original object.

    If other code has patched the attribute since, both patches stay in place; ours is idle outside rollouts.
    """
    # From vars and not by getattr, which would return a bound or inherited method.
    original = cast("Any", vars(owner)[name])
    replacement = _replacement(owner, name, original, make)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Somebody else patched on top: removing theirs would be a surprise, and ours does nothing
        # outside rollouts.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    return undo


def patch_subclasses(base: type[Any], wrappers: Mapping[str, Callable[[Any], Any]], *, besides: str = "") -> Undo:
    """Patch methods of every subclass of ``base``, including subclasses that are defined later.

    Args:
        base: The class; its own methods stay as they are.
        wrappers: Maps a method's name to ``make`` of :func:`patch`; each class is patched where it defines the method.
        besides: The top-level package whose classes are left alone, such as the framework's own.
    """
    undo: list[Undo] = []
    former: Any = vars(base).get("__init_subclass__")
    is_watching = True

    def watch(kind: type[Any]) -> None:
        if is_watching and kind.__module__.partition(".")[0] != besides:
            undo.extend(patch(kind, name, make) for name, make in wrappers.items() if name in vars(kind))

    def watch_new(kind: type[Any], **settings: Any) -> None:
        (super(base, kind).__init_subclass__ if former is None else former.__get__(None, kind))(**settings)
        watch(kind)

    for kind in _subclasses(base):
        watch(kind)
    # Python calls __init_subclass__ for every class that is defined later.
    hook = classmethod(watch_new)
    setattr(base, "__init_subclass__", hook)  # noqa: B010  # its type has no room for a class method

    def forget() -> None:
        nonlocal is_watching
        is_watching = False
        if vars(base)["__init_subclass__"] is hook:
            delattr(base, "__init_subclass__") if former is None else setattr(base, "__init_subclass__", former)
        # In reverse order, as each undo expects to find its own replacement.
        while undo:
            undo.pop()()

    return forget


def around(enter: Callable[[Any], AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """Return a ``make`` for :func:`patch` that enters ``enter(self)`` around each call of a method inside a rollout."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with nullcontext() if current() is None else enter(self):
                return original(self, *args, **options)

        return call

    return make


def around_async(enter: Callable[[Any], AbstractContextManager[Any]]) -> Callable[[Any], Any]:
    """Return a ``make`` for :func:`patch` like :func:`around`, for coroutine methods."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        async def call(self: Any, *args: Any, **options: Any) -> Any:
            with nullcontext() if current() is None else enter(self):
                return await original(self, *args, **options)

        return call

    return make


class SharedTracer(Tracer):
    """A tracer whose changes to its framework are shared by all of its instances.

    The first instance that is installed makes the changes, the last one that is uninstalled undoes them. Derive from
    this class and write :meth:`observe`.
    """

    _installed: ClassVar[set["SharedTracer"]]
    _undo: ClassVar[list[Undo]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # On each class, because different frameworks share nothing.
        cls._installed, cls._undo = set(), []

    def observe(self) -> Iterable[Undo]:
        """Import the framework and patch it; after each change, yield a function that reverts the change."""
        raise NotImplementedError(f"{type(self).__name__} must override observe()")

    def install(self) -> None:
        """Observe the framework from now on; idempotent."""
        if not self._installed:
            # One by one, so that the changes before one that fails are known to uninstall().
            for undo in self.observe():
                self._undo.append(undo)
        self._installed.add(self)

    def uninstall(self) -> None:
        """Restore the framework when the last tracer of this class is uninstalled; idempotent."""
        self._installed.discard(self)
        while self._undo and not self._installed:
            self._undo.pop()()


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _replacement(owner: Any, name: str, original: Any, make: Callable[[Any], Any]) -> Any:
    """Return ``make(original)``, cached per attribute while the original stays the same."""
    wrapped, replacement = _STATE.made.get((owner, name), (None, None))
    if wrapped is not original:
        # By its type: a wrapper of wrapt says that it is an instance of what it wraps.
        replacement = make(original if type(original) is FunctionType else _bound_at_each_call(original))
        _STATE.made[owner, name] = (original, replacement)
    return replacement


def _bound_at_each_call(original: Any) -> Callable[..., Any]:
    """Wrap a descriptor in a function that binds it to ``self`` at each call, as an attribute lookup would.

    Other instrumentation, such as wrapt, puts wrappers into classes that get their object only by this binding.
    """

    @wraps(original)
    def call(self: Any, /, *args: Any, **options: Any) -> Any:
        return original.__get__(self, type(self))(*args, **options)

    return call
