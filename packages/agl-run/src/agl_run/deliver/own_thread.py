"""A thread for a library whose calls block, and which may hang: nothing waits for it when the program ends."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue


class OwnThread:
    """Runs calls one after the other in one thread; call ``close`` at the end."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, work: Callable[[], None]) -> None:
        """Return when ``work`` is done, or raise what it raises; a caller that is cancelled leaves it to the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def run() -> None:
            failure: BaseException | None = None
            try:
                work()
            except (Exception, SystemExit) as error:  # noqa: BLE001  # raised again where it is awaited
                failure = error if isinstance(error, Exception) else RuntimeError(f"the library exits: {error}")
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, failure)

        self._calls.put(run)
        await done

    def close(self) -> None:
        """Let the thread end after the calls that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
