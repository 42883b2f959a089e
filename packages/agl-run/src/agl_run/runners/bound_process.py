"""Runs programs that are stopped with their descendants: on request, and when this process ends in any way.

Each program runs below a keeper, a small process that watches this one; see :mod:`agl_run.runners.keeper`. If a keeper
is killed, its program dies with it and this process kills the program's session, but descendants in other sessions
survive. Windows has no keepers: there a program and its children are stopped only on request.
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
"""Seconds that a keeper gets in addition to the grace period before it is killed."""

_POLL_S = 0.01
"""Seconds between two checks of a process that was asked to end."""

_DRAIN_S = 0.2
"""Seconds in which the last output of an ended process can still be read."""

KEEPER = str(Path(__file__).with_name("keeper.py"))
"""The path of the keeper's script."""


class BoundProcess:
    """A running program that is stopped together with its descendants.

    Attributes:
        process: The keeper, or the program itself on Windows; its pipes are connected to the program.
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
    ) -> "BoundProcess":
        """Start a program.

        Args:
            words: The program and its arguments.
            environment: The program's whole environment.
            stops_rest: Whether descendants that outlive the program are stopped.
            has_session: Whether the program gets its own session, so that the terminal's signals do not reach it.
            options: Further arguments of :func:`asyncio.create_subprocess_exec`, such as its pipes.

        Raises:
            OSError: The program cannot be started.
        """
        if sys.platform == "win32":
            flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
            return await cls._spawn(words, None, is_leader=False, env=environment, creationflags=flags, **options)
        # The keeper sees the end of this process as the end of its socket, after ``kill -9`` too,
        # because the system closes it.
        ours, its = socket.socketpair()
        # The process id is a second sign: a forked child of ours may hold the socket open.
        numbers = (str(its.fileno()), str(os.getpid()), str(GRACE_S), "stop" if stops_rest else "leave")
        try:
            kept = await cls._spawn(
                # Isolated and without site packages: it starts in a few milliseconds and runs none
                # of the user's code.
                (sys.executable, "-I", "-S", KEEPER, *numbers, *words),
                ours,
                is_leader=has_session,
                env=environment,
                pass_fds=(its.fileno(),),
                start_new_session=has_session,
                **options,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            # Only our end may keep the socket pair open.
            its.close()
        try:
            await kept._require_start(words[0])
        except BaseException:
            await kept.kill()
            raise
        return kept

    @classmethod
    async def _spawn(
        cls, words: Sequence[str], control: socket.socket | None, *, is_leader: bool, **options: Any
    ) -> "BoundProcess":
        """Start a process; if the caller is cancelled, wait until the process has started, and kill it.

        asyncio itself waits forever if a start is cancelled before the pipes are connected.
        """
        # Shielded from cancellation until the pipes are connected; then the process can be killed
        # and waited for.
        starting = asyncio.create_task(asyncio.create_subprocess_exec(*words, **options))
        try:
            return cls(await asyncio.shield(starting), control, is_leader=is_leader)
        except asyncio.CancelledError:
            await asyncio.wait((starting,))
            if starting.exception() is None:
                await cls(starting.result(), control, is_leader=is_leader).kill()
            raise

    async def _require_start(self, name: str) -> None:
        assert self._control is not None  # noqa: S101  # made with one
        self._control.setblocking(False)
        # The keeper reports the error of exec by its number, because this process only sees the
        # keeper start.
        answer = await asyncio.get_running_loop().sock_recv(self._control, 16)
        if answer.isdigit():
            raise OSError(int(answer), os.strerror(int(answer)), name)
        # Without this watch, a killed keeper would leave a program that is never stopped.
        self._watch = asyncio.create_task(self._watch_keeper(self._control))

    async def _watch_keeper(self, control: socket.socket) -> None:
        """Wait for the keeper's end, and kill the rest of its session, which may hold the program's pipes open."""
        if not await asyncio.get_running_loop().sock_recv(control, 16):
            self._kill_keeper()

    @property
    def returncode(self) -> int | None:
        """The program's exit code, or minus the number of the signal that killed it; ``None`` while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Wait until the program ends, and return its exit code."""
        return await self.process.wait()

    async def stop(self) -> None:
        """Ask the program and its descendants to stop, and kill them after a grace period.

        Returns at once if the program has ended already.
        """
        await self._end(b"")

    async def kill(self) -> None:
        """Kill the program and its descendants; idempotent."""
        await self._end(b"k")

    async def _end(self, request: bytes) -> None:
        if self._control is not None:
            with suppress(OSError):
                # A byte asks for a kill at once; closing the socket asks for a stop with grace.
                self._control.send(request)
            if self._watch is not None:
                # The loop must forget the socket before it is closed, or a new socket of the same
                # number would be read.
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)  # its loop forgets the socket
            self._control.close()
        if self.returncode is None:
            if sys.platform == "win32":
                words = ["taskkill", "/F", "/T", "/PID", str(self.process.pid)]
                subprocess.run(words, check=False, capture_output=True)
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S + _SLACK_S):
                    await self._exit()
        # The keeper did not end by itself, or was killed: its session is all that is left to reach.
        if self.returncode is None or self.returncode == -9:
            self._kill_keeper()
            await self._exit()
        await self._close_pipes()

    async def _close_pipes(self) -> None:
        """Close the pipes; otherwise asyncio keeps them open for as long as a descendant holds their other ends."""
        transport: asyncio.SubprocessTransport = vars(self.process)["_transport"]  # a process has no close()
        pipes = [pipe for number in range(3) if (pipe := transport.get_pipe_transport(number)) is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                # What the program printed last may still be on its way.
                while not all(pipe.is_closing() for pipe in pipes):
                    await asyncio.sleep(_POLL_S)
        # A descendant that holds the other end would keep the pipes open for ever.
        transport.close()
        await asyncio.sleep(0)  # they close in the loop's next turn

    async def _exit(self) -> None:
        """Wait for the end of the process itself; ``wait`` may also wait for descendants that hold its pipes open."""
        while self.returncode is None:
            await asyncio.sleep(_POLL_S)

    def _kill_keeper(self) -> None:
        """Kill the keeper, and its whole session if the keeper is the session's leader."""
        if sys.platform == "win32":
            return
        with suppress(ProcessLookupError, PermissionError):
            if self._is_leader:
                # The keeper leads the session, so its process id names the group of everything
                # below that made no session of its own.
                os.killpg(self.process.pid, signal.SIGKILL)
            elif self.returncode is None:
                os.kill(self.process.pid, signal.SIGKILL)
