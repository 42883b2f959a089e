"""Starts an OpenEnv server for a worker with a command, and restarts it if it dies."""

import asyncio
import os
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress

import aiohttp

from agl.errors import ConfigError
from agl_environments.openenv.session import OpenEnvError
from agl_run.programs import BoundProcess, PrintedText

_PAUSE_S = 0.1
"""Seconds between checks of a server that is starting."""

_SHOWN = 2000
"""Number of characters from the end of a server's output that an error shows."""


class StartedServer:
    """A server that a command starts on a port of this machine, and that is restarted if it has died when needed.

    Args:
        words: The command; ``{port}`` is replaced by the port, which is also in the variable ``PORT``.
        folder: The command's working directory; ``""`` for the current one.
        start_s: Seconds that the server may take to start.
        client: The HTTP client that checks whether the server answers.
    """

    def __init__(self, words: Sequence[str], *, folder: str, start_s: float, client: aiohttp.ClientSession) -> None:
        if not any("{port}" in word for word in words):
            raise ConfigError(
                f'the command {shlex.join(words)!r} of the OpenEnv server has no {{port}}; write the port as "{{port}}"'
                ', such as command = ["uvicorn", "my_env.server:app", "--port", "{port}"], so that every worker has '
                "its own"
            )
        self._words = words
        self._folder = folder
        self._start_s = start_s
        self._client = client
        self._lock = asyncio.Lock()
        self._kept: BoundProcess | None = None
        self._reader: asyncio.Task[None] | None = None
        self._printed = PrintedText()
        self._url = ""

    async def url(self) -> str:
        """Start the server unless it is running, and return its base URL.

        Raises:
            OpenEnvError: The server does not start.
        """
        async with self._lock:
            if self._kept is None or self._kept.returncode is not None:
                await self.stop()
                await self._start()
        return self._url

    async def _start(self) -> None:
        port = _free_port()
        words = [word.replace("{port}", str(port)) for word in self._words]
        self._printed, self._url = PrintedText(), f"http://127.0.0.1:{port}"
        try:
            self._kept = await BoundProcess.start(
                words,
                environment={**os.environ, "PORT": str(port)},
                cwd=self._folder or None,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
        except OSError as error:
            raise OpenEnvError(f"the OpenEnv server cannot be started: {shlex.join(words)}: {error}") from error
        assert self._kept.process.stdout is not None  # noqa: S101  # a pipe
        self._reader = asyncio.create_task(self._printed.read(self._kept.process.stdout))
        try:
            await self._answering(words)
        except BaseException:
            await self.stop()
            raise

    async def _answering(self, words: Sequence[str]) -> None:
        """Wait until the server answers a request with any status; raises OpenEnvError if the server does not start."""
        assert self._kept is not None  # noqa: S101  # just started
        with suppress(TimeoutError):
            async with asyncio.timeout(self._start_s):
                while self._kept.returncode is None:
                    with suppress(aiohttp.ClientError, OSError):
                        async with self._client.get(f"{self._url}/health"):
                            return
                    await asyncio.sleep(_PAUSE_S)
        code = self._kept.returncode
        what = f"did not answer within {self._start_s:g} s" if code is None else f"ended with exit code {code}"
        said = self._printed.text().strip()[-_SHOWN:] or "it printed nothing"
        raise OpenEnvError(f"the OpenEnv server {what} after its start by {shlex.join(words)}: {said}")

    async def stop(self) -> None:
        """Stop the server and all processes that it started."""
        if self._kept is not None:
            await self._kept.stop()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._kept = self._reader = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
