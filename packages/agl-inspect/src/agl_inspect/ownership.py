"""Lets only one trainer at a time own an experiment in its store, across machines and folders, by a lease.

The store holds the owner's token and a beat, a number that the owner counts up while it lives. No clocks are compared:
a trainer that finds another owner watches the beat for the length of the lease, and takes over if the beat stands
still. The new token then fences the earlier owner, whose writes require its own token in the store.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from agl.contracts import Store
from agl.errors import ConfigError, FencedError, StoreError
from agl.schemas import Record
from agl_inspect.records.workers import host_id, worker_is_dead, worker_name

_LOG = logging.getLogger("agl_run.run")

LEASE_S = 15.0
"""Seconds without a beat after which another trainer may take an experiment over."""

BEAT_S = 4.0
"""Seconds between two beats of an owner."""

_LOOK_S = 0.2

_FENCED = frozenset(
    {
        *("enqueue", "claim", "cancel", "delete", "publish", "move_label", "save_scores", "save_state"),
        *("announce", "withdraw", "log_metrics"),
    }
)
"""Methods of a store that write, except those on attempts, because attempts have leases of their own."""


class Owner(Record, frozen=True, kw_only=True):
    """The token of a trainer that owns an experiment.

    Attributes:
        worker: Name of the trainer's process, different at every start.
        host: Host name of the trainer's machine.
        host_id: Digest that distinguishes machines and containers with the same host name.
        workdir: Folder of the trainer. A lock of the operating system keeps a second trainer out of it.
    """

    worker: str
    host: str
    host_id: str
    pid: int
    workdir: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host!r} (folder {self.workdir})"


@dataclass(frozen=True, kw_only=True)
class _Held:
    """The token and the beat of an experiment's owner, as the store holds them; both are empty without an owner."""

    token: bytes
    beat: bytes

    @property
    def owner(self) -> Owner:
        return msgspec.json.decode(self.token, type=Owner)


class Ownership:
    """Owns an experiment in its store: ``async with Ownership(store, name, workdir=folder) as own:``.

    Entering the context takes the experiment. If the previous owner was killed, this waits up to ``lease_s`` seconds,
    or not at all if the owner ran on this machine.

    ``title`` names the owned work in messages if the work is not an experiment.

    Attributes:
        store: The store for the owner to use. Once another trainer has taken over, its methods that write raise
            :class:`~agl.errors.FencedError`, except those that an attempt's lease guards.
        on_loss: Called once, with the error, when another trainer has taken over.

    Raises:
        ConfigError: Another trainer runs the experiment; the message names its process, machine and folder.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        workdir: Path,
        lease_s: float = LEASE_S,
        beat_s: float = BEAT_S,
        title: str = "",
    ) -> None:
        owner = Owner(
            worker=worker_name(),
            host=socket.gethostname(),
            host_id=host_id(),
            pid=os.getpid(),
            workdir=str(workdir.absolute()),
        )
        self.store = cast("Store", _OwnedStore(store, self))
        self._plain, self._name, self._lease_s, self._beat_s = store, name, lease_s, beat_s
        self._owner, self._token = owner, msgspec.json.encode(owner)
        self._key, self._beat_key = _keys(name)
        self._title = title or f"experiment {name!r}"
        self._beats = 0
        self._renewed_at = 0.0
        self._loss: FencedError | None = None
        self._beating: asyncio.Task[None] | None = None
        self.on_loss: Callable[[FencedError], None] = lambda _: None

    async def __aenter__(self) -> "Ownership":
        """Take the experiment, and start the beat."""
        while not await self._take():
            pass
        self._beating = asyncio.create_task(self._keep_beating())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Give the experiment up; if the store does not answer, the ownership ends with the lease."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._loss is None:
            try:
                await self._plain.save_state({self._key: b"", self._beat_key: b""}, expected={self._key: self._token})
            except FencedError:
                pass  # another trainer has just taken over
            except StoreError as error:
                _LOG.warning("the store could not record that %s has no trainer now: %s", self._title, error)

    async def check(self) -> None:
        """Raise :class:`FencedError` if another trainer took over; asks the store only if the last beat is too old."""
        if self._loss is not None:
            raise self._loss
        if time.monotonic() - self._renewed_at > self._lease_s / 2:
            await self._beat()

    async def save_state(
        self, states: Mapping[str, bytes], *, expected: Mapping[str, bytes] | None = None, **rest: Any
    ) -> None:
        """Call the store's ``save_state`` on the condition that the store still holds this owner's token.

        Raises :class:`FencedError` if another trainer took over, or if the store holds other values than ``expected``.
        """
        try:
            await self._plain.save_state(states, expected={**(expected or {}), self._key: self._token}, **rest)
        except FencedError as error:
            held = await _held(self._plain, self._name)
            if held.token == self._token:
                raise
            raise self._lose(held) from error

    async def _take(self) -> bool:
        """Try to take the experiment; returns false if its owner changed meanwhile."""
        held = await _held(self._plain, self._name)
        if held.token and not self._has_ended(held.owner) and not await self._outwait(held):
            return False
        states = {self._key: self._token, self._beat_key: b"0"}
        started = time.monotonic()
        try:
            await self._plain.save_state(states, expected={self._key: held.token})
        except FencedError:
            return False
        self._renewed_at = started
        return True

    def _has_ended(self, owner: Owner) -> bool:
        """Return true if an owner has certainly ended; false if it may still run.

        An owner of this trainer's own folder has ended, because this trainer holds the lock of the folder.
        """
        is_of_this_folder = (owner.host_id, owner.workdir) == (self._owner.host_id, self._owner.workdir)
        return is_of_this_folder or worker_is_dead(owner.worker)

    async def _outwait(self, held: _Held) -> bool:
        """Return true once the beat has stood still for the length of a lease, false as soon as the owner changes.

        Raises :class:`ConfigError` if the beat changes: the owner lives.
        """
        _LOG.warning(
            "%s ran %s and did not end it; waiting up to %g s for a sign of life",
            held.owner,
            self._title,
            self._lease_s,
        )
        end = time.monotonic() + self._lease_s
        while time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
            now = await _held(self._plain, self._name)
            if now.token != held.token:
                return False
            if now.beat != held.beat:
                raise ConfigError(
                    f"{self._title} runs already, by {held.owner} with the same store; wait for it, stop "
                    "it, or use another [experiment] name. To run its rollouts here too, use `agl worker`"
                )
        return True

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._beat()
            except FencedError:
                return
            except StoreError as error:
                _LOG.warning("the store could not record that %s still runs: %s", self._title, error)

    async def _beat(self) -> None:
        started = time.monotonic()
        self._beats += 1
        await self.save_state({self._beat_key: b"%d" % self._beats})
        self._renewed_at = started

    def _lose(self, held: _Held) -> FencedError:
        """Return the error to raise after the ownership was lost; the first call also calls ``on_loss``."""
        if self._loss is None:
            by = f"by {held.owner}" if held.token else "by a trainer that has ended since"
            self._loss = FencedError(
                f"{self._title} was taken over {by}, because this trainer gave its store no sign of life "
                f"for {self._lease_s:g} s, such as while it was stopped or cut off; it saves nothing more. Let the "
                "other trainer finish, or stop it and continue here with --resume (resume=True)"
            )
            self.on_loss(self._loss)
        return self._loss


async def is_owned(store: Store, name: str) -> bool:
    """Return true if an experiment has an owner, except one that has certainly ended on this machine."""
    held = await _held(store, name)
    return bool(held.token) and not worker_is_dead(held.owner.worker)


async def _held(store: Store, name: str) -> _Held:
    key, beat_key = _keys(name)
    states = await store.load_state(key)
    return _Held(token=states.get(key, b""), beat=states.get(beat_key, b""))


def _keys(name: str) -> tuple[str, str]:
    """Return the state keys of an experiment's owner and of the owner's beat."""
    return f"experiment/{name}/owner", f"experiment/{name}/owner/beat"


class _OwnedStore:
    """Implements :class:`agl.contracts.Store` by forwarding; methods that write first check the ownership."""

    def __init__(self, store: Store, ownership: Ownership) -> None:
        self._store, self._ownership = store, ownership

    def __repr__(self) -> str:
        return repr(self._store)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._store, name)
        if name not in _FENCED:
            return method
        if name == "save_state":
            method = self._ownership.save_state

        async def owned(*args: Any, **kwargs: Any) -> Any:
            await self._ownership.check()
            return await method(*args, **kwargs)

        return owned
