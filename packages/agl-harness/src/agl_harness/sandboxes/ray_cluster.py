"""Local sandboxes on the nodes of a Ray cluster: each is in an actor, which Ray places by the resources it needs.

The harness and this Python must be installed on the nodes, at the same paths as here. Files travel through Ray's object
store. If an actor or the node dies, the sandbox is gone, and the attempt is repeated.
"""

import asyncio
import contextlib
import io
import os
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from agl.errors import ConfigError
from agl.hints import pip_install
from agl.schemas import new_span_id
from agl_harness.sandboxes.contract import (
    NO_LIMITS,
    WORKSPACE,
    Finished,
    Limits,
    Purpose,
    Sandbox,
    SandboxError,
    bytes_of,
    checked_path,
    write_by_upload,
)
from agl_harness.sandboxes.isolation import Kind
from agl_harness.sandboxes.local import LocalSandbox, LocalSandboxes, copy_files

_NAMESPACE = "agl-sandboxes"
_AT_ONCE = 64
"""Number of requests that an actor handles concurrently."""

_ITEM = "item"
"""The name, in an archive, of the file or folder that is transferred."""


class RaySandboxes:
    """Creates sandboxes on the nodes of a Ray cluster.

    Args:
        base: Unused, because the sandboxes' files are in ``folder`` on the nodes.
        hidden: Folders that programs in a sandbox do not see, on every node.
        readable: Files and folders within hidden ones that programs in a sandbox may read.
        address: The cluster's address for :func:`ray.init`; by default the cluster that ``RAY_ADDRESS`` names or that
            this machine belongs to, or else a new one on this machine.
        num_cpus: CPUs that a sandbox reserves on a node.
        memory: Memory that a sandbox reserves on a node, such as ``4GB``.
        resources: Further resources that a sandbox reserves on a node, by name.
        folder: The folder for sandboxes on the nodes; by default in the nodes' folder for temporary files.
        isolation: The isolation on the nodes: ``bwrap``, ``none``, or ``auto`` for bubblewrap if it works.
        wait_s: Seconds to wait for a node with enough free resources.
    """

    has_images = False

    def __init__(
        self,
        *,
        base: Path,
        hidden: Sequence[Path] = (),
        readable: Sequence[Path] = (),
        address: str = "",
        num_cpus: float = 1.0,
        memory: str = "",
        resources: Mapping[str, float] | None = None,
        folder: str = "",
        isolation: Kind = "auto",
        wait_s: float = 600.0,
    ) -> None:
        self._address = address
        self._wanted: dict[str, float] = {"CPU": num_cpus, "memory": bytes_of(memory), **(resources or {})}
        self._options = {"num_cpus": num_cpus, "memory": bytes_of(memory) or None, "resources": dict(resources or {})}
        self._place = {
            "folder": folder,
            "hidden": [str(path) for path in hidden],
            "readable": [str(path) for path in readable],
            "isolation": isolation,
        }
        self._wait_s = wait_s
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Connect to the cluster.

        Raises:
            ConfigError: Ray is not installed, the cluster cannot be reached, or no node is large enough for a sandbox.
        """
        async with self._starting:
            ray = _ray()
            if not ray.is_initialized():
                await asyncio.to_thread(self._connect, ray)
            self._check_room(ray)

    async def close(self) -> None:
        """Do nothing: other parts of this process may use the cluster, and sandboxes end with the process."""

    def _connect(self, ray: Any) -> None:
        try:
            ray.init(address=self._address or None, log_to_driver=False, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the Ray cluster {self._address or 'of this machine'!r} cannot be reached: {error}"
            ) from error

    def _check_room(self, ray: Any) -> None:
        """Raise ConfigError if no node is large enough for a sandbox, which would otherwise wait forever."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        wanted = {name: amount for name, amount in self._wanted.items() if amount}
        if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
            raise ConfigError(
                f"no node of the Ray cluster has what a sandbox asks for ({asked}); lower it in sandbox_params, or "
                "add a node that has it"
            )

    async def create(self, name: str) -> Sandbox:
        """Create an empty sandbox on a node with enough free resources."""
        return await self._make(name, task="", places={})

    async def create_for(
        self, name: str, *, task: Path, places: Mapping[str, str], purpose: Purpose = "agent"
    ) -> Sandbox:
        """Create a sandbox for a task on a node with enough free resources."""
        return await self._make(name, task=str(task), places=places)

    async def attach(self, address: str) -> "RaySandbox":
        """Return the sandbox with the given address, which may come from another process of the cluster."""
        await self.start()
        actor, _, inner = address.removeprefix("ray:").partition("/")
        try:
            handle = _ray().get_actor(actor, namespace=_NAMESPACE)
        except ValueError as error:
            raise SandboxError(f"the sandbox {address} is gone") from error
        return RaySandbox(handle, actor, inner, PurePosixPath(await _ask(handle.root.remote(inner))))

    async def _make(self, name: str, *, task: str, places: Mapping[str, str]) -> Sandbox:
        await self.start()
        actor = f"{checked_path(name).name}-{new_span_id()}"
        kind = _ray().remote(_Box)
        handle = kind.options(
            **self._options, name=actor, namespace=_NAMESPACE, max_restarts=0, max_concurrency=_AT_ONCE
        ).remote(self._place)
        try:
            async with asyncio.timeout(self._wait_s):
                root = await _ask(handle.create.remote(actor, task, dict(places)))
        except BaseException as error:
            _kill(handle)
            if isinstance(error, TimeoutError):
                text = f"no node of the Ray cluster had room for a sandbox within {self._wait_s:g} s"
                raise SandboxError(text) from error
            raise
        return RaySandbox(handle, actor, actor, PurePosixPath(root))


class RaySandbox:
    """A sandbox on a node of a Ray cluster; see :class:`agl_harness.Sandbox`."""

    def __init__(self, handle: Any, actor: str, inner: str, root: PurePosixPath) -> None:
        self._handle = handle
        self._actor = actor
        self._inner = inner
        self._root = root

    @property
    def address(self) -> str:
        """The name of the sandbox's actor, and the sandbox's name in the actor."""
        return f"ray:{self._actor}/{self._inner}"

    @property
    def root(self) -> PurePosixPath:
        """The sandbox's folder on its node."""
        return self._root

    async def exec(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: bytes = b"",
        folder: str = WORKSPACE,
        limits: Limits = NO_LIMITS,
    ) -> Finished:
        """Run a command to its end, and then end every process that it started."""
        given = {"environment": dict(environment), "stdin": stdin, "folder": folder, "limits": limits}
        return await _ask(self._handle.exec.remote(self._inner, list(words), given))

    async def read(self, path: str) -> bytes:
        """Return a file's content."""
        return await _ask(self._handle.read.remote(self._inner, path))

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and create its parent folders."""
        await write_by_upload(self, path, data)

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or the contents of a folder into the sandbox."""
        checked_path(path)
        await _ask(self._handle.put.remote(self._inner, await asyncio.to_thread(_packed, source), path))

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or the contents of a folder out of the sandbox."""
        packed = await _ask(self._handle.take.remote(self._inner, path))
        with tempfile.TemporaryDirectory(prefix="agl-ray-") as folder:
            found = await asyncio.to_thread(_unpack, packed, Path(folder))
            await asyncio.to_thread(copy_files, found, target)

    async def snapshot(self) -> Sandbox:
        """Return a new sandbox with a copy of the workspace, on the same node."""
        inner, root = await _ask(self._handle.snapshot.remote(self._inner))
        return RaySandbox(self._handle, self._actor, inner, PurePosixPath(root))

    async def close(self) -> None:
        """End all programs in the sandbox, and remove it; closing an actor's first sandbox also ends the actor."""
        with contextlib.suppress(SandboxError):
            await _ask(self._handle.close.remote(self._inner))
        if self._inner == self._actor:
            _kill(self._handle)


class _Box:
    """The actor: holds a local sandbox on its node, and the sandbox's copies."""

    def __init__(self, place: Mapping[str, Any]) -> None:
        base = place["folder"] or str(Path(tempfile.gettempdir(), f"agl-sandboxes-{os.getuid()}"))
        self._sandboxes = LocalSandboxes(
            base=Path(base),
            hidden=[Path(path) for path in place["hidden"]],
            readable=[Path(path) for path in place["readable"]],
            isolation=place["isolation"],
        )
        self._open: dict[str, LocalSandbox] = {}
        self._sandboxes.remove_abandoned()

    async def create(self, name: str, task: str, places: dict[str, str]) -> str:
        if task:
            self._open[name] = await self._sandboxes.create_for(name, task=Path(task), places=places)
        else:
            self._open[name] = await self._sandboxes.create(name)
        return str(self._open[name].root)

    async def root(self, name: str) -> str:
        return str(self._of(name).root)

    async def exec(self, name: str, words: list[str], given: dict[str, Any]) -> Finished:
        return await self._of(name).exec(words, **given)

    async def snapshot(self, name: str) -> tuple[str, str]:
        copy = await self._of(name).snapshot()
        assert isinstance(copy, LocalSandbox)  # noqa: S101  # made by one
        self._open[Path(copy.address).name] = copy
        return Path(copy.address).name, copy.address

    async def close(self, name: str) -> None:
        sandbox = self._open.pop(name, None)
        if sandbox is not None:
            await sandbox.close()

    async def read(self, name: str, path: str) -> bytes:
        return await self._of(name).read(path)

    async def take(self, name: str, path: str) -> bytes:
        """Return an archive of a file or folder."""
        with tempfile.TemporaryDirectory(prefix="agl-ray-") as folder:
            await self._of(name).download(path, Path(folder, _ITEM))
            return await asyncio.to_thread(_packed, Path(folder, _ITEM))

    async def put(self, name: str, packed: bytes, path: str) -> None:
        """Unpack an archive's file or folder to a path in the sandbox."""
        with tempfile.TemporaryDirectory(prefix="agl-ray-") as folder:
            await self._of(name).upload(await asyncio.to_thread(_unpack, packed, Path(folder)), path)

    def _of(self, name: str) -> LocalSandbox:
        if name not in self._open:
            raise SandboxError(f"the sandbox {name} is gone")
        return self._open[name]


async def _ask(reference: Any) -> Any:
    """Wait for an actor's answer; raises the sandbox's own errors, or :class:`SandboxError` if the actor died."""
    ray = _ray()
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):
            raise cause from None
        raise SandboxError(f"the sandbox's actor failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise SandboxError(f"the sandbox's actor is gone: {error}") from error


def _kill(handle: Any) -> None:
    with contextlib.suppress(Exception):
        _ray().kill(handle)


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError(f"the sandbox 'ray' needs Ray; run: {pip_install('agl-harness[ray]')}") from error


def _packed(source: Path) -> bytes:
    """Return a tar archive of a file or folder; links stay links, and sockets, pipes and devices are left out."""

    def plain(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return item if item.isfile() or item.isdir() or item.issym() or item.islnk() else None

    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.add(source, arcname=_ITEM, filter=plain)
    return target.getvalue()


def _unpack(packed: bytes, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="tar")
    return folder / _ITEM
