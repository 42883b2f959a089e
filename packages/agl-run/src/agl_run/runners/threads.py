"""Threads for agents that are plain functions."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AgentThreads(Executor):
    """Runs every call in a daemon thread of its own.

    An agent may block in a call that nothing interrupts. The threads of a ``ThreadPoolExecutor`` would then hold up the
    end of the process until that call returns.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Start ``fn`` at once; the number of calls that run at a time is the caller's to bound."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
                future.set_exception(error)
            else:
                future.set_result(value)

        threading.Thread(target=run, name="agl-agent", daemon=True).start()
        return future
