"""Programs that end with their descendants: on request, and when this process ends, by ``kill -9`` as well.

Each program runs below a keeper, a small process that watches this one; see :mod:`agl_run.runners.keeper`. A keeper
that is killed takes its program with it, and this process kills the program's session; descendants in sessions of their
own then go on. Windows has no keepers: there a program and its children are stopped on request only.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 2.0
"""Seconds between asking a program to stop and killing it."""

_SLACK_S = 4.0
"""Seconds beyond the grace after which a keeper that does not end is killed itself."""

KEEPER = str(Path(__file__).with_name("keeper.py"))
"""The keeper's script."""


class KeptProcess:
    """A running program; what it prints is read from ``process``.

    Attributes:
        process: The keeper, or the program itself on Windows; its pipes are the program's.
    """

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket | None, *, is_leader: bool) -> None:
        self.process = process
        self._control = control
        self._is_leader = is_leader
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stops_rest: bool = True,
        has_session: bool = True,
        **options: Any,
    ) -> "KeptProcess":
        """Start a program.

        Args:
            words: The program and its arguments.
            environment: Its whole environment.
            stops_rest: Whether descendants that outlive the program are stopped.
            has_session: Whether it gets a session of its own, so that signals of the terminal do not reach it.
            options: More arguments of :func:`asyncio.create_subprocess_exec`, such as its pipes.

        Raises:
            OSError: It cannot be started.
        """
        if sys.platform == "win32":
            flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
            process = await asyncio.create_subprocess_exec(*words, env=environment, creationflags=flags, **options)
            return cls(process, None, is_leader=False)
        ours, its = socket.socketpair()
        numbers = (str(its.fileno()), str(os.getpid()), str(GRACE_S), "stop" if stops_rest else "leave")
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", KEEPER, *numbers, *words),
                env=environment,
                pass_fds=(its.fileno(),),
                start_new_session=has_session,
                **options,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        kept = cls(process, ours, is_leader=has_session)
        try:
            await kept._require_start(words[0])
        except BaseException:
            await kept.kill()
            raise
        return kept

    async def _require_start(self, name: str) -> None:
        assert self._control is not None  # noqa: S101  # made with one
        self._control.setblocking(False)
        answer = await asyncio.get_running_loop().sock_recv(self._control, 16)
        if answer.isdigit():
            raise OSError(int(answer), os.strerror(int(answer)), name)
        self._watch = asyncio.create_task(self._watch_keeper(self._control))

    async def _watch_keeper(self, control: socket.socket) -> None:
        """Kill what a keeper that was killed left behind; it holds the program's pipes open."""
        if not await asyncio.get_running_loop().sock_recv(control, 16):
            self._kill_keeper()

    @property
    def returncode(self) -> int | None:
        """The program's exit code, minus the signal that killed it, or ``None`` while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Wait for the program's end."""
        return await self.process.wait()

    async def stop(self) -> None:
        """Ask the program and its descendants to stop, then kill them; returns at once if it has ended."""
        await self._end(b"")

    async def kill(self) -> None:
        """Kill the program and its descendants; idempotent."""
        await self._end(b"k")

    async def _end(self, request: bytes) -> None:
        if self._control is not None:
            with suppress(OSError):
                self._control.send(request)
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)  # its loop forgets the socket
            self._control.close()
        if self.returncode is None:
            if sys.platform == "win32":
                words = ["taskkill", "/F", "/T", "/PID", str(self.process.pid)]
                subprocess.run(words, check=False, capture_output=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), GRACE_S + _SLACK_S)
        if self.returncode is None or self.returncode == -9:
            self._kill_keeper()
            await self.process.wait()

    def _kill_keeper(self) -> None:
        """Kill the keeper and the session below it, where anything was beyond it."""
        if sys.platform == "win32":
            return
        with suppress(ProcessLookupError, PermissionError):
            if self._is_leader:
                os.killpg(self.process.pid, signal.SIGKILL)
            elif self.returncode is None:
                os.kill(self.process.pid, signal.SIGKILL)
