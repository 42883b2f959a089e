"""Removes old finished rollouts: for ``agl runs gc``, at the end of a run, and regularly in a store's server.

Versions, labels, scores, metrics, states and ledgers stay. So does every rollout of an experiment that runs or can
still be resumed, however old it is. Rollouts are removed in batches, the oldest first, each batch in one transaction,
so that the next removal continues one that was interrupted. If several servers serve a store, only one of them removes
rollouts at a time.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from agl.contracts import RolloutQuery, Store
from agl.errors import AglError, ConfigError, NotFoundError
from agl.schemas import Record, Rollout, RolloutStatus, from_json
from agl_inspect.ownership import Ownership, is_owned
from agl_inspect.presence import worker_name
from agl_inspect.records.sources import experiment_of
from agl_inspect.records.state import load_experiment, load_settings, unfinished_experiments
from agl_store_sqlite.sql.compaction import Compaction

FINISHED: tuple[RolloutStatus, ...] = ("succeeded", "failed", "cancelled")

LEAST_FREED = 1 << 20
"""The text about a removal mentions freed space only from this number of bytes on."""

_BATCH = 500
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


@dataclass(frozen=True, kw_only=True)
class RetentionLimits:
    """The limits for finished rollouts: their age, their number, and the size of the store.

    Rollouts that exceed both the age and the number are removed, the oldest first. If ``max_bytes`` is set, the removal
    stops as soon as the store is no larger.

    Attributes:
        older_than_s: Rollouts stay for this many seconds after they finished.
        keep: Number of the newest finished rollouts that stay whatever their age.
        max_bytes: Largest size of the store's data in bytes; ``None`` for no limit.
    """

    older_than_s: float = 0.0
    keep: int = 0
    max_bytes: int | None = None

    @classmethod
    def of(cls, older_than: float | None, keep: int | None, max_bytes: int | None = None) -> "RetentionLimits | None":
        """Make limits from three settings; ``None`` if all three are ``None``."""
        if older_than is None and keep is None and max_bytes is None:
            return None
        return cls(older_than_s=older_than or 0.0, keep=keep or 0, max_bytes=max_bytes)


class GarbageReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of a removal.

    Attributes:
        removed: Ids of the removed rollouts or, in a dry run, of the rollouts that would be removed.
        kept_for_experiments: Number of old rollouts that stay because an unfinished experiment needs them.
        is_dry_run: True if nothing was removed.
        compaction: The store's size before and after; ``None`` if nothing was removed, or if another process serves
            the store.
        size: Bytes of data in the store after the removal; ``None`` if there is no limit of size.
    """

    removed: list[str]
    kept_for_experiments: int
    is_dry_run: bool
    compaction: Compaction | None = None
    size: int | None = None


def parse_duration(text: str) -> float:
    """Parse a duration such as ``7d``, ``12h`` or ``90`` into seconds; raises :class:`ValueError` for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def parse_size(text: str) -> int:
    """Parse a size such as ``10GB``, ``500 MiB`` or ``4096`` into bytes; raises :class:`ValueError` for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|[kKMGT]i?)B?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 500MB, 10GB or 1TB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


async def remove_old(
    store: Store,
    query: RolloutQuery,
    limits: RetentionLimits,
    *,
    own: str = "",
    spares: Callable[[Rollout], bool] = lambda _: False,
    is_dry_run: bool = False,
) -> GarbageReport:
    """Remove the rollouts of a query that exceed the limits and that no experiment needs, the oldest first.

    Args:
        store: The store.
        query: Selects rollouts; only finished ones are removed.
        limits: The limits that a rollout must exceed to be removed.
        own: Name of the experiment that the caller owns; the ownership alone does not keep its rollouts.
        spares: Returns true for a rollout that stays in any case.
        is_dry_run: Only return the ids that would be removed; with ``max_bytes``, their number is an estimate.

    Raises:
        ConfigError: ``max_bytes`` is set, and the store does not know its size.
    """
    budget = _Budget(store, limits.max_bytes, is_dry_run=is_dry_run)
    query = replace(query, status=FINISHED, sort="finished_at", limit=_BATCH)
    before = time.time() - limits.older_than_s
    last = await _newest_beyond(store, query, limits.keep)
    removed: list[str] = []
    kept = 0
    while (
        last is not None
        and (most := await budget.most())
        and (page := await store.rollouts(replace(query, limit=most)))
    ):
        old = [rollout for rollout in page if _age(rollout) <= min(_age(last), (before, "\uffff"))]
        needed = await needed_experiments(store, {rollout.experiment for rollout in old}, own=own)
        chosen = [r.rollout_id for r in old if r.experiment not in needed and not spares(r)]
        kept += sum(rollout.experiment in needed for rollout in old)
        budget.spend(len(chosen))
        removed += chosen if is_dry_run else await delete_finished(store, chosen)
        if len(old) < len(page):
            break
        query = query.next(page[-1])
    size = None if is_dry_run else await budget.size()
    return GarbageReport(removed=removed, kept_for_experiments=kept, is_dry_run=is_dry_run, size=size)


class _Budget:
    """Computes how many rollouts may be removed before the store's size is measured again.

    The needed number follows from the mean size of the store's rollouts. Only half of it is removed between two
    measurements, because the oldest rollouts may be larger than the others.
    """

    def __init__(self, store: Store, max_bytes: int | None, *, is_dry_run: bool) -> None:
        self._store, self._max_bytes, self._is_dry_run = store, max_bytes, is_dry_run
        self._left = 0
        self._is_measured = False

    async def most(self) -> int:
        """Return how many rollouts may be removed next; 0 once the store is small enough."""
        if self._max_bytes is None:
            return _BATCH
        if self._left <= 0 and not (self._is_dry_run and self._is_measured):
            self._left = await self._needed()
            self._is_measured = True
        return min(_BATCH, self._left)

    def spend(self, count: int) -> None:
        """Record that ``count`` rollouts were removed."""
        self._left -= count

    async def size(self) -> int | None:
        """Return the bytes of the store's data; ``None`` if the size is not limited."""
        return None if self._max_bytes is None else await size_of(self._store)

    async def _needed(self) -> int:
        size = await self.size() or 0
        excess = size - (self._max_bytes or 0)
        if excess <= 0:
            return 0
        count = math.ceil(await self._store.count_rollouts(RolloutQuery()) * excess / size)
        return count if self._is_dry_run else max(1, count // 2)


async def size_of(store: Store) -> int:
    """Return the bytes of a store's data; raises :class:`ConfigError` if the store does not know its size."""
    size: Callable[[], Awaitable[int]] | None = getattr(store, "size", None)
    if size is None:
        raise ConfigError(f"{store!r} does not say its size; name the SQLite file or the database that is behind it")
    return await size()


async def compacted(store: Store, report: GarbageReport) -> GarbageReport:
    """Return freed space to the file system if the store can, and add the store's sizes to the report."""
    compact: Callable[[], Awaitable[Compaction]] | None = getattr(store, "compact", None)
    if compact is None or report.is_dry_run or not report.removed:
        return report
    return replace(report, compaction=await compact())


def removal_text(report: GarbageReport) -> str:
    """Describe how many rollouts were removed, and how much space that freed."""
    text = f"removed {len(report.removed)} old rollout{'s' if len(report.removed) > 1 else ''}"
    freed = report.compaction.before - report.compaction.after if report.compaction else 0
    if freed < LEAST_FREED:
        return f"{text}; new ones take their space"
    return f"{text} and freed {freed / (1 << 20):.1f} MiB"


def _age(rollout: Rollout) -> tuple[float, str]:
    """Return the key by which rollouts are sorted from oldest to newest."""
    return rollout.finished_at, rollout.rollout_id


async def _newest_beyond(store: Store, query: RolloutQuery, keep: int) -> Rollout | None:
    """Return the newest of the rollouts that ``keep`` does not protect; ``None`` if it protects all of them."""
    query = replace(query, is_newest_first=True)
    while page := await store.rollouts(replace(query, limit=min(keep + 1, _BATCH))):
        if len(page) > keep:
            return page[keep]
        keep -= len(page)
        query = query.next(page[-1])
    return None


async def needed_experiments(store: Store, experiments: Iterable[str], *, own: str = "") -> set[str]:
    """Return those of the given experiments whose rollouts must all stay.

    The rollouts stay if their experiment runs or can be resumed, or if an experiment that can be resumed has an
    algorithm that learns from them.

    Args:
        store: The store.
        experiments: Names of the experiments to check.
        own: Name of the experiment that the caller owns; the ownership alone does not keep its rollouts.
    """
    unfinished = await unfinished_experiments(store)
    sources = {source for name in unfinished for source in await _sources_of(store, name)}
    needed = unfinished | sources
    return {name for name in experiments if name in needed or (name != own and await is_owned(store, name))}


async def _sources_of(store: Store, name: str) -> set[str]:
    """Return the experiments from which an experiment's algorithms learned in their last steps."""
    record = await load_experiment(store, name)
    settings = {} if record is None else await load_settings(store, record)
    lists = [text for key, text in settings.items() if key.endswith(".source") and text.startswith("[")]
    return {experiment_of(source) for text in lists for source in from_json(text, list[str])} - {""}


async def delete_finished(store: Store, rollout_ids: Sequence[str]) -> Sequence[str]:
    """Delete finished rollouts; return the given ids without those that another process had deleted before."""
    while rollout_ids:
        try:
            await store.delete(rollout_ids)
        except NotFoundError as error:
            if error.key not in rollout_ids:
                raise
            rollout_ids = [rollout_id for rollout_id in rollout_ids if rollout_id != error.key]
        else:
            break
    return rollout_ids


EVERY_S = 3600.0
"""Seconds between two removals."""

_TURN = ".retention"
"""The name under which servers take turns to remove rollouts; no experiment can have it."""

_LOG = logging.getLogger("agl_run.run")


@asynccontextmanager
async def retaining(
    store: Store, limits: RetentionLimits | None, *, say: Callable[[str], None], every_s: float = EVERY_S
) -> AsyncGenerator[None]:
    """Remove rollouts that exceed the limits, now and every ``every_s`` seconds while the context is open.

    If several servers do so, only one of them removes rollouts at a time. The store is not compacted, because that
    would delay recording; new rollouts reuse the freed space.
    """
    if limits is None:
        yield
        return
    task = asyncio.create_task(_keep_removing(store, limits, say=say, every_s=every_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep_removing(store: Store, limits: RetentionLimits, *, say: Callable[[str], None], every_s: float) -> None:
    while True:
        try:
            report = await _in_turn(store, limits)
        except AglError as error:
            _LOG.warning("old rollouts could not be removed, which is tried again in %g s: %s", every_s, error)
        else:
            if report is not None and report.removed:
                say(f"retention: {removal_text(report)}")
        await asyncio.sleep(every_s)


async def _in_turn(store: Store, limits: RetentionLimits) -> GarbageReport | None:
    """Remove rollouts that exceed the limits; return ``None`` if another server is removing them."""
    async with taking_turns(store, _TURN, title="the removal of old rollouts") as own:
        return None if own is None else await remove_old(own, RolloutQuery(), limits)


@asynccontextmanager
async def taking_turns(store: Store, turn: str, *, title: str) -> AsyncGenerator[Store | None]:
    """Let only one process at a time do a certain piece of work on a store.

    Yields the store to work on, or ``None`` if another process is doing the work. After a process that was killed
    during its turn, entering the context may wait until the lease of that turn ends.

    Args:
        store: The store.
        turn: The name of the work; it begins with a full stop, so that no experiment has this name.
        title: The name of the work in messages.
    """
    own = Ownership(store, turn, workdir=Path(worker_name()), title=title)
    async with AsyncExitStack() as stack:
        found = None
        with suppress(ConfigError):
            found = (await stack.enter_async_context(own)).store
        yield found
