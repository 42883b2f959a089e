"""Lets one trainer own an experiment in its store, on whichever machine or in whichever folder, by a lease.

The store holds the owner's token and a beat that counts while the owner lives. No clocks are compared: a trainer that
finds another owner watches the beat for the length of the lease, and takes over if it stands still. The token then
fences the earlier owner: everything that it saves is saved only over its own token.
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
"""Methods that write, except those of attempts, which have leases of their own."""


class Owner(Record, frozen=True, kw_only=True):
    """The token of a trainer that owns an experiment.

    Attributes:
        worker: Name of its process, different at every start.
        host: Name of its machine; ``host_id`` tells machines of the same name apart.
        workdir: Its folder; a lock of the operating system keeps two trainers out of one folder.
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
    """An experiment's owner and its beat, as the store holds them; empty without an owner."""

    token: bytes
    beat: bytes

    @property
    def owner(self) -> Owner:
        return msgspec.json.decode(self.token, type=Owner)


class Ownership:
    """Owns an experiment in its store: ``async with Ownership(store, name, workdir=folder) as own:``.

    Entering it takes the experiment. This takes up to ``lease_s`` seconds if an owner elsewhere was killed, and no time
    if it was killed on this machine.

    ``title`` names the owned work in messages, if it is no experiment.

    Attributes:
        store: The store, for the owner: once another trainer has taken over, methods that write raise
            :class:`~agl.errors.FencedError`, except those that an attempt's lease guards.
        on_loss: Called once with the error when another trainer has taken over.

    Raises:
        ConfigError: Another trainer runs the experiment; named by process, machine and folder.
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
        """Take the experiment, and begin to beat."""
        while not await self._take():
            pass
        self._beating = asyncio.create_task(self._keep_beating())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Give the experiment back; a store that does not answer leaves it to the lease."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._loss is None:
            try:
                await self._plain.save_state({self._key: b"", self._beat_key: b""}, expected={self._key: self._token})
            except FencedError:
                pass  # taken over just now
            except StoreError as error:
                _LOG.warning("the store could not record that %s has no trainer now: %s", self._title, error)

    async def check(self) -> None:
        """Raise :class:`FencedError` if another trainer took over; asks the store if the last beat is long ago."""
        if self._loss is not None:
            raise self._loss
        if time.monotonic() - self._renewed_at > self._lease_s / 2:
            await self._beat()

    async def save_state(
        self, states: Mapping[str, bytes], *, expected: Mapping[str, bytes] | None = None, **rest: Any
    ) -> None:
        """Save with the store's ``save_state``, over this owner's token only."""
        try:
            await self._plain.save_state(states, expected={**(expected or {}), self._key: self._token}, **rest)
        except FencedError as error:
            held = await _held(self._plain, self._name)
            if held.token == self._token:
                raise
            raise self._lose(held) from error

    async def _take(self) -> bool:
        """Take the experiment; returns false if it changed hands meanwhile."""
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
        """Return true if an owner has certainly ended, on this machine; false if unknown."""
        is_of_this_folder = (owner.host_id, owner.workdir) == (self._owner.host_id, self._owner.workdir)
        return is_of_this_folder or worker_is_dead(owner.worker)

    async def _outwait(self, held: _Held) -> bool:
        """Return true once the beat has stood still for the length of a lease, false if the owner changes."""
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
        """Note the loss, call ``on_loss`` the first time, and return the error to raise."""
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
    """Return true if an experiment has a trainer, unless that has certainly ended on this machine."""
    held = await _held(store, name)
    return bool(held.token) and not worker_is_dead(held.owner.worker)


async def _held(store: Store, name: str) -> _Held:
    key, beat_key = _keys(name)
    states = await store.load_state(key)
    return _Held(token=states.get(key, b""), beat=states.get(beat_key, b""))


def _keys(name: str) -> tuple[str, str]:
    """Return the keys of an experiment's owner and of its beat."""
    return f"experiment/{name}/owner", f"experiment/{name}/owner/beat"


class _OwnedStore:
    """Implements :class:`agl.contracts.Store` for an owner, by the store's own methods."""

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
