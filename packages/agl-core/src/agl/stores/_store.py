"""The store contract, implemented once over the tables of a backend, which runs transactions."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from agl.contracts import Change
from agl.schemas import Claim
from agl.stores import _blobs as stored_blobs
from agl.stores import _operations as operations
from agl.stores._queries import check_page
from agl.stores._tables import Reads, Tables
from agl.stores._values import check_ids, copied
from agl.stores._wake_up import WakeUp

if TYPE_CHECKING:
    from types import CoroutineType

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Work(Generic[T_co]):
    """One writing operation with its arguments.

    A store may choose by the operation's name which rows to load.

    Attributes:
        undo: Takes the operation's answer and returns the work that undoes the operation if its caller was cancelled;
            ``None`` if it need not be undone.
    """

    act: Callable[..., T_co]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    undo: "Callable[[Any], Work[None]] | None" = None

    def do(self, tables: Tables) -> T_co:
        """Run the operation and return its answer."""
        return self.act(tables, *self.args, **self.kwargs)


class Backend(Protocol):
    """Runs transactions of a database for any number of threads and event loops at once.

    Every transaction decides overdue attempts first, by :func:`agl.stores.expire`.

    Attributes:
        shown_url: The store's address for people, without passwords.
        queued: Wakes waiters after a transaction that queued rollouts, in this process or elsewhere.
        changed: Wakes waiters after a transaction that put something on the change feed.
    """

    shown_url: str
    queued: WakeUp
    changed: WakeUp

    async def write(self, work: Work[T]) -> T:
        """Run ``work`` and return its answer after the commit; if the caller is cancelled meanwhile, undo the work."""
        ...

    async def read(self, look: Callable[[Reads], T]) -> T:
        """Run ``look`` in a reading transaction and return its answer."""
        ...

    async def close(self) -> None:
        """Finish open transactions, release everything and wake all waiters.

        Later calls raise :class:`~agl.errors.StoreError`.
        """


def _writes(
    act: Callable[Concatenate[Tables, P], T],
) -> "Callable[Concatenate[TableStore, P], CoroutineType[Any, Any, T]]":
    """Make a store's method that runs the operation ``act`` in a writing transaction."""

    @wraps(act)
    async def method(self: "TableStore", *args: P.args, **kwargs: P.kwargs) -> T:
        check_ids((*args, *kwargs.values()))
        # Copied, so that what is stored never aliases what the caller holds.
        given = tuple(copied(each) for each in args)
        named = {name: copied(each) for name, each in kwargs.items()}
        # As a value and not as a closure: a store in another process, or in batches, carries out
        # the same operation by its name.
        return await self.backend.write(Work(act=act, args=given, kwargs=named))

    return method


def _reads(
    look: Callable[Concatenate[Reads, P], T],
) -> "Callable[Concatenate[TableStore, P], CoroutineType[Any, Any, T]]":
    """Make a store's method that reads, with the tables' own method of the same name if there is one, else ``look``."""

    @wraps(look)
    async def method(self: "TableStore", *args: P.args, **kwargs: P.kwargs) -> T:
        check_page(kwargs, *args)
        name = look.__name__
        # A database may have its own query, such as for counting.
        return await self.backend.read(lambda reads: getattr(reads, name, partial(look, reads))(*args, **kwargs))

    return method


class TableStore:
    """A :class:`agl.contracts.Store` over a backend. It also waits, and undoes the claims of a cancelled caller.

    ``restore(recordings, moves=...)`` is not part of the contract: it adds rollouts of another store with their
    attempts and spans, and label moves, without changing them. A rollout that this store already has is left unchanged.

    Attributes:
        backend: Runs the transactions; closed with the store.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend.shown_url!r})"

    enqueue = _writes(operations.enqueue)
    renew = _writes(operations.renew)
    finish = _writes(operations.finish)
    cancel = _writes(operations.cancel)
    _delete = _writes(operations.delete)
    rollouts = _reads(Reads.rollouts)
    count_rollouts = _reads(operations.count_rollouts)
    statistics = _reads(Reads.statistics)
    attempts = _reads(Reads.attempts)
    recordings = _reads(operations.recordings)
    restore = _writes(operations.restore)
    save_blobs = _writes(stored_blobs.save_blobs)
    blobs = _reads(stored_blobs.blobs)
    append_spans = _writes(operations.append_spans)
    spans = _reads(Reads.spans)
    cursor = _reads(Reads.cursor)
    publish = _writes(operations.publish)
    resource = _reads(operations.resource)
    resources = _reads(Reads.resources)
    move_label = _writes(operations.move_label)
    label_moves = _reads(operations.label_moves)
    labels = _reads(operations.labels)
    save_scores = _writes(operations.save_scores)
    scores = _reads(operations.scores)
    save_state = _writes(operations.save_state)
    load_state = _reads(operations.load_state)
    experiments = _reads(operations.experiments)
    trained = _reads(operations.trained)
    announce = _writes(operations.announce)
    withdraw = _writes(operations.withdraw)
    presences = _reads(operations.presences)
    log_metrics = _writes(operations.log_metrics)
    metrics = _reads(Reads.metrics)

    async def delete(self, rollout_ids: Sequence[str]) -> int:
        """See :meth:`agl.contracts.Store.delete`."""
        count = await self._delete(rollout_ids)
        settled, after = 0, b""
        while settled < stored_blobs.SWEPT:
            checks = await self.backend.read(partial(stored_blobs.loose, after=after))
            if not checks:
                break
            settled += await self.backend.write(Work(act=stored_blobs.drop, args=(checks,)))
            after = checks[-1].key
        return count

    async def claim(
        self,
        *,
        worker: str,
        limit: int = 1,
        lease_s: float = 60.0,
        wait_s: float = 0.0,
        experiment: str | None = None,
        claim_id: str = "",
    ) -> list[Claim]:
        """See :meth:`agl.contracts.Store.claim`."""
        check_page({"limit": limit})
        how = {"worker": worker, "limit": limit, "lease_s": lease_s, "experiment": experiment, "claim_id": claim_id}
        # Without a claim_id nobody can ask for the attempts again, so a caller that was cancelled
        # gives them back.
        work = Work(act=operations.claim, kwargs=how, undo=None if claim_id else _unclaim)
        return await _until_found(lambda: self.backend.write(work), self.backend.queued, wait_s)

    async def changes(self, *, after: int = 0, limit: int = 1000, wait_s: float = 0.0) -> list[Change]:
        """See :meth:`agl.contracts.Store.changes`."""
        check_page({"limit": limit, "after": after})
        look = partial(self.backend.read, lambda reads: reads.changes(after, limit))
        return await _until_found(look, self.backend.changed, wait_s)

    async def close(self) -> None:
        """See :meth:`agl.contracts.Store.close`."""
        await self.backend.close()


def _unclaim(claims: Sequence[Claim]) -> Work[None]:
    return Work(act=operations.unclaim, args=(claims,))


async def _until_found(look: Callable[[], Awaitable[list[T]]], wake_up: WakeUp, wait_s: float) -> list[T]:
    """Call ``look`` now and after every wake-up until it finds something or ``wait_s`` seconds are over."""
    end = time.monotonic() + wait_s
    while True:
        # Read before looking: a ring between looking and waiting then ends the wait at once.
        seen = wake_up.count
        found = await look()
        left_s = end - time.monotonic()
        if found or left_s <= 0:
            return found
        await wake_up.wait(seen, left_s)
