"""A program in a process of its own: its answers, its ends, and the errors that its owner gets."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agl import owned_process
from agl.errors import CaptureError
from agl.owned_process import Message, OwnedProcess, Restarts
from agl_testing.waiting import eventually

PROGRAM = """
import asyncio, os
from agl.owned_process import run_owned
sys_path_of_tests = os.environ["OWNED_TESTS"]
import sys
sys.path.insert(0, sys_path_of_tests)
from test_owned_process import Line

async def main(listener, owner):
    async for order in owner.orders():
        if order.text == "silence":
            continue
        owner.say(Line(number=order.number, text=f"{order.text} by {os.getpid()}"))
        if order.text == "stop":
            return

run_owned(main, order=Line)
"""


class Line(Message, frozen=True, kw_only=True, omit_defaults=True):
    text: str


@asynccontextmanager
async def running(program: str = PROGRAM, **options: Any) -> AsyncIterator[OwnedProcess[Line, Line]]:
    process = OwnedProcess[Line, Line](
        (sys.executable, "-c", program),
        name="the program",
        note=Line,
        error=CaptureError,
        begin=lambda: Line(text="begin"),
        take=lambda _: None,
        environment={"OWNED_TESTS": str(Path(__file__).parent)},
        **{"beat": lambda: Line(text="beat")} | options,
    )
    try:
        first = await process.start(socket.create_server(("127.0.0.1", 0)))
        assert f"begin by {process.pid}" == first.text
        yield process
    finally:
        await process.stop(Line(text="stop"), within_s=30)


async def test_a_program_that_is_killed_is_started_again_and_its_open_orders_have_no_answer() -> None:
    async with running() as process:
        killed = process.pid
        assert f"one by {killed}" == (await process.ask(Line(text="one"))).text
        open_order = asyncio.create_task(process.ask(Line(text="silence")))
        await asyncio.sleep(0.1)
        os.kill(killed, signal.SIGKILL)
        assert await open_order is None

        await eventually(lambda: process.restarts and process.pid)

        assert "ended with -9" in process.last_words
        await eventually(lambda: process.pid != killed)
    assert 0 == process.pid


async def test_a_program_that_does_not_answer_is_ended_and_started_again() -> None:
    async with running(beat=lambda: Line(text="silence"), health_s=0.2) as process:
        await eventually(lambda: process.restarts)


async def test_an_owner_that_gives_up_learns_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_process, "FIRST_PAUSE_S", 0.001)
    errors: list[Exception] = []
    async with running(give_up=errors.append) as process:
        process.program = (sys.executable, "-c", "raise SystemExit('no disk')")
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: errors)
        assert str(errors[0]).endswith("ended with 1: no disk")
        assert owned_process.QUICK_ENDS - 1 == process.restarts


async def test_a_program_that_does_not_start_is_an_error() -> None:
    with pytest.raises(CaptureError, match=r"the program \d+ ended with 1: no disk"):
        async with running("raise SystemExit('no disk')"):
            pass


def test_pauses_grow_up_to_a_limit_however_often_a_program_ends() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(ran_s=0.0) for _ in range(3000)]

    assert [0.1, 0.2, 0.4] == pauses[:3]
    assert 30.0 == pauses[-1]
    assert 0.1 == restarts.pause_s(ran_s=60.0)
