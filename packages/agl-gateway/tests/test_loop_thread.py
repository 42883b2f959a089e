import asyncio
import threading
import time

import pytest

from agl_gateway.processes.loop_thread import LoopThread


def test_threads_that_start_it_at_once_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    new_event_loop = asyncio.new_event_loop
    made: list[asyncio.AbstractEventLoop] = []

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        made.append(new_event_loop())
        return made[-1]

    thread = LoopThread("several")
    with monkeypatch.context() as patch:
        patch.setattr("agl_gateway.processes.loop_thread.asyncio.new_event_loop", slowly)
        starters = [threading.Thread(target=thread.start) for _ in range(4)]
        for starter in starters:
            starter.start()
        for starter in starters:
            starter.join()
    try:
        assert 1 == len(made)
    finally:
        asyncio.run(thread.stop())
