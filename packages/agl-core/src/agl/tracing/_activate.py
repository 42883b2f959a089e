"""Makes an attempt current, so that running code and the threads it starts belong to the attempt's rollout.

While at least one rollout is active in the process, threads and executors are patched to carry context variables, and
HTTP clients are watched; after the last rollout the originals are restored. ``asyncio`` tasks and ``asyncio.to_thread``
carry context variables without a patch; ``threading.Thread``, ``ThreadPoolExecutor.submit`` and
``loop.run_in_executor`` do not. A worker thread of an executor never inherits a rollout: each submitted function runs
in the context of its submitter. A thread that outlives its rollout, and a ``multiprocessing.pool.ThreadPool`` that
rollouts share, keep the context of the rollout that started them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import Context, copy_context
from functools import wraps
from threading import Thread, Timer
from typing import Any

from agl.tracing import _patches
from agl.tracing._context import CURRENT, ENTERED, ActiveAttempt, current
from agl.tracing._patches import Undo, patch


class activate:  # noqa: N801  # used like a function: with agl.tracing.activate(attempt)
    """Make ``attempt`` current in the body of a ``with`` statement, and patch the process as needed.

    Activations may nest, and may overlap between tasks and threads; enter and leave an activation in the same context.
    Spans and unread streams that are open when the body ends are recorded as incomplete. An activation that is never
    left stays active for the rest of the process.
    """

    def __init__(self, attempt: ActiveAttempt) -> None:
        self._attempt = attempt
        self._stack = ExitStack()

    def __enter__(self) -> ActiveAttempt:
        # Whatever was entered is left again if a later step raises, such as a tracer's scope.
        with self._stack as stack:
            _patches.hold(self, _install)
            stack.callback(_patches.release, self)
            stack.callback(ENTERED.reset, ENTERED.set(None))
            stack.callback(CURRENT.reset, CURRENT.set(self._attempt))
            # Runs before the context variable is reset, while the attempt is still current.
            stack.callback(self._attempt.spans.abandon_all)
            _patches.enter_scopes(stack, self._attempt)
            # From here on __exit__ closes it.
            self._stack = stack.pop_all()
        return self._attempt

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _install() -> list[Undo]:
    # Imported here, because code that never enters a rollout does not pay for the readers of model calls.
    from agl.tracing._wire.hook import install

    # Other instrumentation may have given Timer a start of its own, which would go past that of Thread.
    starts = [patch(kind, "start", _start) for kind in (Thread, Timer) if "start" in vars(kind)]
    return [patch(ThreadPoolExecutor, "submit", _submit), *starts, install()]


def _submit(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(original)
    def submit(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # Outside a rollout the originals run, even while another thread is inside one.
        if current() is None:
            return original(self, fn, *args, **kwargs)
        # In an empty context, so that a worker thread started here inherits no rollout.
        return Context().run(original, self, copy_context().run, fn, *args, **kwargs)

    return submit


def _start(original: Callable[[Thread], None]) -> Callable[[Thread], None]:
    @wraps(original)
    def start(self: Thread) -> None:
        # A thread whose run was replaced already, by a user or by us, is left alone.
        if current() is None or "run" in vars(self):
            return original(self)
        # On the object and not on the class: subclasses override run, and this must come around
        # theirs.
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
        # Breaks the cycle between the thread and its replaced method.
        vars(thread).pop("run", None)
        context.run(run)

    return carried
