"""Carries context variables into threads and executors that are started inside a rollout.

``asyncio`` tasks and ``asyncio.to_thread`` carry them already; ``threading.Thread``, ``ThreadPoolExecutor.submit``
and with it ``loop.run_in_executor`` do not. A worker thread of an executor never inherits the rollout that started
it: only each submitted function runs in its submitter's context. A thread that outlives its rollout, or a
``multiprocessing.pool.ThreadPool`` shared between rollouts, keeps the context of the rollout that started it.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import wraps
from threading import Thread
from typing import Any

from agl.tracing._context import current
from agl.tracing._patches import Undo, patch


def install() -> list[Undo]:
    """Patch; the returned functions undo it."""
    return [patch(ThreadPoolExecutor, "submit", _submit), patch(Thread, "start", _start)]


def _submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if current() is None:
            return original(self, fn, *args, **kwargs)
        # In an empty context, so that a worker thread started here inherits no rollout.
        return Context().run(original, self, copy_context().run, fn, *args, **kwargs)

    return submit


def _start(original: Callable[[Thread], None]) -> Callable[[Thread], None]:
    @wraps(original)
    def start(self: Thread) -> None:
        if current() is None or "run" in vars(self):
            return original(self)
        vars(self)["run"] = _run_in(copy_context(), self)
        try:
            return original(self)
        except BaseException:
            vars(self).pop("run", None)
            raise

    return start


def _run_in(context: Context, thread: Thread) -> Callable[[], None]:
    run = thread.run

    def carried() -> None:
        vars(thread).pop("run", None)
        context.run(run)

    return carried
