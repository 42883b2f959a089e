"""Sandboxes in Harbor's environments: Docker, Podman, Apptainer, Kubernetes, and clouds.

Harbor needs Python 3.12 and many packages. It therefore runs in a separate program, in any Python that has it; see
:mod:`agl_harness.sandboxes.harbor_server`. A sandbox's address includes the socket of that program, so that rewards
find the sandbox.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from agl.errors import ConfigError
from agl.schemas import new_span_id
from agl_harness.harbor_tasks.layout import PLACES
from agl_harness.sandboxes.contract import (
    HOME,
    NO_LIMITS,
    TEMPORARY,
    WORKSPACE,
    Finished,
    Limits,
    PathError,
    Purpose,
    Sandbox,
    SandboxError,
    checked_path,
    write_by_upload,
)

_ROOT = PurePosixPath("/agl")
_OF_THIS_MACHINE = frozenset({"PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"})
"""Variables with paths of this machine, which do not exist in an image."""

_START_S = 120.0
_LIMIT = 64 << 20
_MISSING = "missing"


class HarborSandboxes:
    """Creates sandboxes in Harbor's environments.

    Args:
        base: Unused, because the backend stores no files on this machine.
        hidden: Unused, because an image has no files of this machine.
        readable: Unused, because an image has no files of this machine.
        environment: Harbor's name for the type of environment, or ``module:class`` for your own type.
        python: Path of a Python that has ``harbor``; by default the running one.
        image: The image for workspaces that are not Harbor tasks.
        kwargs: Parameters of the environment's class.
    """

    has_images = True

    def __init__(
        self,
        *,
        base: Path,
        hidden: Sequence[Path] = (),
        readable: Sequence[Path] = (),
        environment: str = "docker",
        python: str = "",
        image: str = "",
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._python = python or sys.executable
        self._image = image
        self._settings = {"environment": environment, "image": image, "kwargs": dict(kwargs or {})}
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._found = ""

    async def start(self) -> None:
        """Start the program that holds the environments, unless it is running.

        Raises:
            ConfigError: The Python does not have ``harbor``, or cannot start it.
        """
        async with self._starting:
            if self._server is not None and await self._server.answers():
                return
            if self._python == sys.executable and importlib.util.find_spec("harbor") is None:
                raise ConfigError(
                    "the sandbox 'harbor' needs the package harbor, which needs Python 3.12: install it there, and "
                    'name that Python, as in sandbox_params = { python = "/opt/harbor/bin/python" }'
                )
            if self._server is not None:
                await self._server.end()
            self._server = await _Server.start(self._python, self._settings)

    async def close(self) -> None:
        """End the program that holds the environments, and all environments with it."""
        server, self._server = self._server, None
        if server is not None:
            await server.end()

    async def create(self, name: str) -> Sandbox:
        """Create an empty sandbox from the parameter ``image``; raises :class:`ConfigError` if it is not set."""
        if not self._image:
            raise ConfigError(
                "the sandbox 'harbor' has no image for a workspace that is no Harbor task; name one with "
                'sandbox_params = { image = "python:3.13" }'
            )
        return await self._make(name, task="", places={WORKSPACE: str(_ROOT / WORKSPACE)}, purpose="agent")

    async def create_for(
        self, name: str, *, task: Path, places: Mapping[str, str], purpose: Purpose = "agent"
    ) -> Sandbox:
        """Create a sandbox from a task's image."""
        return await self._make(name, task=str(task), places=places, purpose=purpose)

    async def attach(self, address: str) -> "HarborSandbox":
        """Return the sandbox with the given address; raises :class:`SandboxError` if it is gone."""
        try:
            socket, name, places = json.loads(address.removeprefix("harbor:"))
        except ValueError:
            raise SandboxError(f"{address!r} is not the address of a Harbor sandbox") from None
        sandbox = HarborSandbox(socket, name, places)
        await sandbox.ask("attach")
        self._found = socket
        return sandbox

    async def _make(self, name: str, *, task: str, places: Mapping[str, str], purpose: Purpose) -> Sandbox:
        if self._server is not None or not self._found:
            await self.start()
        socket = self._server.socket if self._server is not None else self._found
        inner = f"{checked_path(name).name}-{new_span_id()}"
        own = {HOME: str(_ROOT / HOME), TEMPORARY: str(_ROOT / TEMPORARY), **places}
        sandbox = HarborSandbox(socket, inner, own)
        work = own[WORKSPACE]
        folders = [place for name, place in own.items() if not name.startswith(f"{PLACES}/")]  # places may be files
        links = {} if PurePosixPath(work).is_relative_to(_ROOT) else {str(_ROOT / WORKSPACE): work}
        await sandbox.ask("create", task=task, purpose=purpose, folders=folders, links=links)
        return sandbox


class HarborSandbox:
    """A sandbox in one of Harbor's environments; see :class:`agl_harness.Sandbox`."""

    def __init__(self, socket: str, name: str, places: Mapping[str, str]) -> None:
        self._socket = socket
        self._name = name
        self._places = dict(places)

    @property
    def address(self) -> str:
        """The socket of the program that holds the environment, the sandbox's name there, and its folders."""
        return "harbor:" + json.dumps([self._socket, self._name, self._places])

    @property
    def root(self) -> PurePosixPath:
        """The sandbox's root, as programs in the sandbox see it."""
        return _ROOT

    async def exec(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: bytes = b"",
        folder: str = WORKSPACE,
        limits: Limits = NO_LIMITS,
    ) -> Finished:
        """Run a command to its end; of ``limits`` only the time counts, as the environment limits other resources."""
        given = f"{TEMPORARY}/stdin-{new_span_id()}" if stdin else ""
        if given:
            await self.write(given, stdin)
        answer = await self.ask(
            "exec",
            words=list(words),
            cwd=self._place(folder),
            env={name: value for name, value in environment.items() if name not in _OF_THIS_MACHINE},
            stdin=self._place(given) if given else "",
            seconds=limits.seconds,
        )
        exceeded: Literal["", "seconds"] = "seconds" if answer.get("exceeded") else ""
        return Finished(
            code=answer["code"],
            output=answer["output"],
            errors=answer["errors"],
            exceeded=exceeded,
            detail=answer.get("detail", ""),
        )

    async def read(self, path: str) -> bytes:
        """Return a file's content."""
        place = await self._inside(path)
        with tempfile.TemporaryDirectory(prefix="agl-read-") as folder:
            target = Path(folder, "file")
            await self.ask("download", source=place, target=str(target))
            return await asyncio.to_thread(target.read_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and create its parent folders."""
        await write_by_upload(self, path, data)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or the contents of a folder into the sandbox."""
        await self.ask("upload", source=str(source), target=await self._inside(path))

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or the contents of a folder out of the sandbox."""
        await self.ask("download", source=await self._inside(path), target=str(target))

    async def close(self) -> None:
        """End all programs in the sandbox, and remove it."""
        with contextlib.suppress(SandboxError):
            await self.ask("close")

    def _place(self, path: str) -> str:
        inside = checked_path(path)
        for name, place in self._places.items():
            if inside.is_relative_to(name):
                return str(PurePosixPath(place, inside.relative_to(name)))
        return str(_ROOT / inside)

    async def _inside(self, path: str) -> str:
        """Return the absolute path in the environment; raises :class:`PathError` if a link leads out of the sandbox."""
        place = self._place(path)
        top = next((found for found in self._places.values() if PurePosixPath(place).is_relative_to(found)), str(_ROOT))
        script = 'readlink -m -- "$1" "$2" 2>/dev/null || { readlink -f -- "$1"; readlink -f -- "$2"; }'
        done = await self.exec(["sh", "-c", script, "sh", top, place], environment={}, folder=TEMPORARY)
        real = [PurePosixPath(line) for line in done.output.splitlines()]
        if len(real) > 2 or (len(real) == 2 and not real[1].is_relative_to(real[0])):  # lines: the folder, the path
            raise PathError(f"the path {path!r} leads out of the sandbox by a link; remove that link")
        return place

    async def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request to the program that holds the environment, and return the response.

        Raises:
            FileNotFoundError: A file or program does not exist.
            SandboxError: The program or the environment is gone or failed.
        """
        line = json.dumps({"do": do, "name": self._name, **request}).encode() + b"\n"
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=_LIMIT)
        except OSError as error:
            raise SandboxError(f"the sandbox {self._name} is gone: {error}") from error
        try:
            writer.write(line)
            await writer.drain()
            answer = cast("dict[str, Any]", json.loads(await reader.readline() or b'{"error": "it ended"}'))
        except (OSError, ValueError) as error:
            raise SandboxError(f"the sandbox {self._name} is gone: {error}") from error
        finally:
            writer.close()
        if "error" not in answer:
            return answer
        if answer.get("kind") == _MISSING:
            raise FileNotFoundError(answer["error"])
        raise SandboxError(f"the sandbox {self._name} failed: {answer['error']}")


class _Server:
    """The program that holds the environments; it ends when its standard input closes, as when this process ends."""

    def __init__(
        self, process: asyncio.subprocess.Process, socket: str, folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self._process = process
        self.socket = socket
        self._folder = folder

    async def answers(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self.socket)
        except OSError:
            return False
        writer.close()
        return True

    @classmethod
    async def start(cls, python: str, settings: Mapping[str, Any]) -> "_Server":
        folder = tempfile.TemporaryDirectory(prefix="agl-harbor-")
        socket = str(Path(folder.name, "socket"))
        program = str(Path(__file__).with_name("harbor_server.py"))
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, program, socket, json.dumps(settings)),
                stdin=pipe,
                stdout=pipe,
                stderr=None,
                env=dict(os.environ),
            )
        except OSError as error:
            folder.cleanup()
            raise ConfigError(f"the Python {python!r} of the sandbox 'harbor' cannot be started: {error}") from error
        assert process.stdout is not None  # noqa: S101  # started with pipes
        try:
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if line.strip() != b"ready":
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            folder.cleanup()
            raise ConfigError(
                f"the Python {python!r} has no working harbor, as it says on standard error; run: {python} -m pip "
                "install 'harbor>=0.18'"
            )
        return cls(process, socket, folder)

    async def end(self) -> None:
        """End the program, which first stops its environments; kills it if that takes too long."""
        assert self._process.stdin is not None  # noqa: S101  # started with pipes
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_START_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._folder.cleanup()
