"""Separates the connections of event loops that share an ``httpx`` client, while rollouts run.

A connection belongs to the event loop that opened it. Agents that are plain functions run in threads, and each thread
calls asynchronous clients on its own loop (``Runner.run_sync``, ``asyncio.run``). The client is often shared by the
whole process: the OpenAI Agents SDK and LangChain share theirs, and programs keep one in a module. This module gives
the client's connection pool a copy, called a twin, for each loop; the pool's limits then count per loop.

When a client that nobody closed is garbage-collected, its twins are closed, each in the loop that opened it.
Otherwise asyncio would close only the sockets, and the client's own finaliser (the OpenAI and Anthropic SDKs have one)
would end the connections later, perhaps in the loop of another thread. By then their file descriptors may belong to new
connections, which would wait for an answer until they time out.

The module covers ``httpx`` and ``httpx2``, through the pools of ``httpcore`` and ``httpcore2``; clients of other
libraries, such as ``aiohttp``, are not changed. Outside of rollouts nothing changes.
"""

import asyncio
import copy
import importlib
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib.util import find_spec
from typing import Any, TypeAlias

from agl.tracing import Undo, current, patch

_MODULES = ("httpcore", "httpcore2")
_TWINS = "_agl_twins"
_IS_TWIN = "_agl_is_twin"
_CLOSING = "_agl_closing"
_STATE = {"_connections", "_requests", "_optional_thread_lock"}
"""The changing attributes of a connection pool; httpcore has no public way to copy a pool without them."""

_Twins: TypeAlias = dict[asyncio.AbstractEventLoop, Any]


def separate_loops() -> Undo:
    """Give each event loop its own connections from now on, until the returned function is called."""
    undo: list[Undo] = []
    for name in _MODULES:
        if find_spec(name) is not None:
            pool = importlib.import_module(name).AsyncConnectionPool
            # On the class: clients that exist already are covered as well.
            undo += [patch(pool, "handle_async_request", _request), patch(pool, "aclose", _close)]

    def revert() -> None:
        while undo:
            undo.pop()()

    return revert


def _request(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def handle_async_request(self: Any, request: Any) -> Any:
        # Outside of a rollout the program's own use of its client is left alone.
        pool = self if current() is None else _twin(self)
        return await original(pool, request)

    return handle_async_request


def _close(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    async def aclose(self: Any) -> None:
        twins: _Twins = self.__dict__.get(_TWINS, {})
        loop = _running_loop()
        # The twin of this loop can be awaited here; those of others close in theirs.
        twin = twins.pop(loop, None) if loop is not None else None
        _close_all(twins)
        if twin is not None:
            await original(twin)
        await original(self)

    return aclose


def _close_all(twins: _Twins) -> None:
    """Let each running loop close its own connections; those of a closed loop end with their sockets."""
    while twins:
        loop, twin = twins.popitem()
        with suppress(RuntimeError, AttributeError):  # the loop is closed, or not one of asyncio's
            # A connection may only be closed by the loop that opened it.
            loop.call_soon_threadsafe(_close_soon, loop, twin)


def _close_soon(loop: asyncio.AbstractEventLoop, twin: Any) -> None:
    # The loop holds tasks weakly; without a reference the closing could be collected half way.
    setattr(twin, _CLOSING, loop.create_task(twin.aclose()))


def _twin(pool: Any) -> Any:
    """Return the pool's twin for the running loop, and forget the twins of closed loops.

    Without a running asyncio loop, or if another release of httpcore has different attributes, the pool itself is
    returned.
    """
    loop = _running_loop()
    # Another release of httpcore may keep other state, and then nothing is changed rather than
    # broken.
    if loop is None or hasattr(pool, _IS_TWIN) or not pool.__dict__.keys() >= _STATE:
        return pool
    twins = _twins(pool)
    if loop not in twins:
        # Threads that call ``asyncio.run`` make a loop per call, and the table must not grow with
        # them.
        for other in [one for one in list(twins) if one.is_closed()]:
            twins.pop(other, None)
        twins[loop] = _copy(pool)
    return twins[loop]


def _twins(pool: Any) -> _Twins:
    """Return the table of the pool's twins; the twins are closed when the pool is garbage-collected."""
    fresh: _Twins = {}
    # ``setdefault`` is atomic, so two threads agree on one table.
    twins: _Twins = pool.__dict__.setdefault(_TWINS, fresh)
    if twins is fresh:
        # At the end of the interpreter the loops are gone; the sockets close with the process.
        weakref.finalize(pool, _close_all, twins).atexit = False
    return twins


def _copy(pool: Any) -> Any:
    # A shallow copy shares the settings: limits, TLS context, proxies.
    twin = copy.copy(pool)
    twin.__dict__.pop(_TWINS, None)
    setattr(twin, _IS_TWIN, True)
    twin._connections, twin._requests = [], []
    twin._optional_thread_lock = type(pool._optional_thread_lock)()
    return twin


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running asyncio loop; ``None`` without one or under another library such as trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
