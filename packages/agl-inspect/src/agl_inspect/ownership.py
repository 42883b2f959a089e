"""Lets only one trainer at a time own an experiment in its store, across machines and folders, by a lease.

The lease is the trainer's presence in the store, which the trainer renews while it lives. No clocks are compared: a
trainer that finds another owner waits for the length of a lease, and takes over if the owner's presence is not renewed.
The new presence then fences the earlier owner, whose writes require that the store still holds its own.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from agl.contracts import Presence, Store
from agl.errors import ConfigError, FencedError, StoreError
from agl.schemas import Json
from agl_inspect.presence import (
    BEAT_S,
    OWNER,
    host_of,
    is_of_this_machine,
    pid_of,
    renew,
    worker_is_dead,
    worker_name,
)

_LOG = logging.getLogger("agl_run.run")

LEASE_S = 15.0
"""Seconds without a renewal after which another trainer may take an experiment over."""

_LOOK_S = 0.2

_FENCED = frozenset(
    {
        *("enqueue", "claim", "cancel", "delete", "publish", "move_label", "save_scores", "save_state"),
        *("announce", "withdraw", "log_metrics"),
    }
)
"""Methods of a store that write; methods on attempts are not among them, because attempts have their own leases."""


class Ownership:
    """Owns an experiment in its store: ``async with Ownership(store, name, workdir=folder) as own:``.

    Entering the context takes the experiment. If the previous owner was killed, this waits up to ``lease_s`` seconds,
    or not at all if the owner ran on this machine.

    ``title`` names the owned work in messages if the work is not an experiment.

    Attributes:
        store: The store for the owner to use. Once another trainer has taken over, its methods that write raise
            :class:`~agl.errors.FencedError`, except those that an attempt's lease guards.
        name: The name of the experiment.
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
        self.store = cast("Store", _OwnedStore(store, self))
        self.name = name
        self._plain, self._lease_s, self._beat_s = store, lease_s, beat_s
        self._workdir = str(workdir.absolute())
        self._lease = Presence(experiment=name, member=OWNER, session=worker_name(), since=time.time(), lease_s=lease_s)
        self._details: Mapping[str, Json] = {}
        self._title = title or f"experiment {name!r}"
        self._renewed_at = 0.0
        self._loss: FencedError | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.on_loss: Callable[[FencedError], None] = lambda _: None

    async def __aenter__(self) -> "Ownership":
        """Take the experiment, and start to renew the lease."""
        while not await self._take():
            pass
        self._renewing = asyncio.create_task(renew(self._renew, every_s=self._beat_s, title=self._title))
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Give the experiment up; if the store does not answer, the ownership ends when the lease does."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            await self.check()
            await self._plain.withdraw(self.name, [OWNER])
        except FencedError:
            pass  # the lease belongs to the trainer that took over
        except StoreError as error:
            _LOG.warning("the store could not record that %s has no trainer now: %s", self._title, error)

    async def announce(self, details: Mapping[str, Json]) -> None:
        """Store the addresses and settings that workers need to join, in place of earlier ones."""
        self._details = details
        await self._renew()

    async def check(self) -> None:
        """Raise :class:`FencedError` if another trainer has taken over; the store is asked at most every half lease."""
        if self._loss is not None:
            raise self._loss
        if time.monotonic() - self._renewed_at > self._lease_s / 2:
            await self._renew()

    async def save_state(self, states: Mapping[str, bytes], *, leases: Sequence[Presence] = (), **rest: Any) -> None:
        """Call the store's ``save_state`` on the condition that the store still holds this owner's lease.

        Raises :class:`FencedError` if another trainer took over, or if the store holds other values than expected.
        """
        try:
            await self._plain.save_state(states, leases=(*leases, self._lease), **rest)
        except FencedError as error:
            held = await self._held()
            if held is not None and held.session == self._lease.session:
                raise
            raise self._lose(held) from error

    async def _held(self) -> Presence | None:
        """Return the presence that the store holds for the experiment's trainer; ``None`` without a trainer."""
        return next(iter(await self._plain.presences(self.name, member=OWNER)), None)

    async def _take(self) -> bool:
        """Try to take the experiment; return false if the owner in the store changed meanwhile."""
        held = await self._held()
        if held is not None and not self._has_ended(held) and not await self._outwait(held):
            return False
        try:
            await self._write(replaces=held.session if held is not None else "")
        except FencedError:
            return False
        return True

    async def _renew(self) -> None:
        try:
            await self._write(replaces=self._lease.session)
        except FencedError as error:
            raise self._lose(await self._held()) from error

    async def _write(self, *, replaces: str) -> None:
        started = time.monotonic()
        details = {**self._details, "workdir": self._workdir}
        await self._plain.announce(replace(self._lease, details=details), replaces=replaces)
        self._renewed_at = started

    def _has_ended(self, owner: Presence) -> bool:
        """Return true if an owner has certainly ended, false if it may still run.

        An owner in this trainer's own folder has ended, because this trainer holds the lock of the folder.
        """
        is_of_this_folder = is_of_this_machine(owner.session) and owner.details.get("workdir") == self._workdir
        return is_of_this_folder or worker_is_dead(owner.session)

    async def _outwait(self, held: Presence) -> bool:
        """Wait for the length of a lease; return true if the presence was not renewed, false once the owner changes.

        Raises :class:`ConfigError` if the presence is renewed, because its owner is running.
        """
        _LOG.warning(
            "%s ran %s and did not end it; waiting up to %g s for a sign of life",
            _shown(held),
            self._title,
            self._lease_s,
        )
        end = time.monotonic() + self._lease_s
        while time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
            now = await self._held()
            if now is None or now.session != held.session:
                return False
            if now.seen_at != held.seen_at:
                raise ConfigError(
                    f"{self._title} runs already, by {_shown(held)} with the same store; wait for it, stop "
                    "it, or use another [experiment] name. To run its rollouts here too, use `agl worker`"
                )
        return True

    def _lose(self, held: Presence | None) -> FencedError:
        """Return the error for the loss of the experiment; on the first call, also call ``on_loss``."""
        if self._loss is None:
            by = f"by {_shown(held)}" if held is not None else "by a trainer that has ended since"
            self._loss = FencedError(
                f"{self._title} was taken over {by}, because this trainer gave its store no sign of life "
                f"for {self._lease_s:g} s, such as while it was stopped or cut off; it saves nothing more. Let the "
                "other trainer finish, or stop it and continue here with --resume (resume=True)"
            )
            self.on_loss(self._loss)
        return self._loss


async def is_owned(store: Store, name: str) -> bool:
    """Return true if an experiment has an owner; an owner that has certainly ended on this machine does not count."""
    return any(not worker_is_dead(owner.session) for owner in await store.presences(name, member=OWNER))


def _shown(owner: Presence) -> str:
    name, folder = owner.session, owner.details.get("workdir", "")
    return f"process {pid_of(name)} on {host_of(name)!r} (folder {folder})"


class _OwnedStore:
    """A store that forwards all calls to another one; methods that write first check the ownership."""

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
