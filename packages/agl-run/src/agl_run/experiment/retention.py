"""Removes old finished rollouts, for ``agl runs gc`` and at the end of a run; :mod:`.retaining` does it for servers.

Versions, labels, scores, metrics, states and ledgers stay. So does every rollout of an experiment that runs or can
still be resumed, however old it is. Each batch is one transaction of the store, the oldest rollouts first: a removal
that stops in the middle is continued by the next one.
"""

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from agl.contracts import RolloutQuery, Store
from agl.errors import AglError, ConfigError, NotFoundError
from agl.schemas import Record, Rollout, RolloutStatus
from agl_run.experiment.config import RetentionConfig
from agl_run.experiment.ownership import is_owned
from agl_run.experiment.state import unfinished_experiments
from agl_run.sql import Compaction

FINISHED: tuple[RolloutStatus, ...] = ("succeeded", "failed", "cancelled")

LEAST_FREED = 1 << 20
"""Bytes from which the space that a removal gave back is worth a word."""

_BATCH = 500
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, kw_only=True)
class RetentionLimits:
    """The age and number from which finished rollouts are old; one that exceeds both is removed.

    Attributes:
        older_than_s: Seconds since the rollout finished.
        keep: Number of the newest finished rollouts, which stay whatever their age.
    """

    older_than_s: float = 0.0
    keep: int = 0

    @classmethod
    def of(cls, older_than: float | None, keep: int | None) -> "RetentionLimits | None":
        """Return the limits of two settings, ``None`` if neither is set."""
        return None if older_than is None and keep is None else cls(older_than_s=older_than or 0.0, keep=keep or 0)


class GarbageReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of a removal: removed ids (or those to remove), and the number kept for running experiments.

    Attributes:
        compaction: The store's size before and after; ``None`` if nothing was removed, or where another process serves
            the store.
    """

    removed: list[str]
    kept_for_experiments: int
    is_dry_run: bool
    compaction: Compaction | None = None


def parse_duration(text: str) -> float:
    """Parse a duration such as ``7d``, ``12h`` or ``90`` into seconds; raises :class:`ValueError` for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no duration; write 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def limits_of(config: RetentionConfig) -> RetentionLimits | None:
    """Return the limits that a section sets, ``None`` if nothing is to be removed.

    Raises:
        ConfigError: A value cannot be used; names it.
    """
    try:
        older_than = parse_duration(config.older_than) if config.older_than else None
    except ValueError as error:
        raise ConfigError(f"retention.older_than: {error}") from None
    if config.keep is not None and config.keep < 0:
        raise ConfigError(f"retention.keep is {config.keep}; write 0 or more")
    limits = RetentionLimits.of(older_than, config.keep)
    if limits is None and config != RetentionConfig():
        raise ConfigError('[retention] needs a limit: write older_than = "30d", keep = 1000, or both')
    return limits


async def remove_old(
    store: Store,
    query: RolloutQuery,
    limits: RetentionLimits,
    *,
    own: str = "",
    spares: Callable[[Rollout], bool] = lambda _: False,
    is_dry_run: bool = False,
) -> GarbageReport:
    """Remove the rollouts of a query that exceed the limits and that no experiment needs.

    Args:
        store: The store.
        query: Selects rollouts; only finished ones are removed.
        limits: The age and number from which they are old.
        own: Name of the experiment that the caller owns.
        spares: Returns true for a rollout that stays in any case.
        is_dry_run: Only return what would be removed.
    """
    query = replace(query, status=FINISHED, sort="finished_at", limit=_BATCH)
    before = time.time() - limits.older_than_s
    last = await _newest_beyond(store, query, limits.keep)
    removed: list[str] = []
    kept = 0
    while last is not None and (page := await store.rollouts(query)):
        old = [rollout for rollout in page if _age(rollout) <= min(_age(last), (before, "\uffff"))]
        needed = await needed_experiments(store, {rollout.experiment for rollout in old}, own=own)
        chosen = [r.rollout_id for r in old if r.experiment not in needed and not spares(r)]
        kept += sum(rollout.experiment in needed for rollout in old)
        removed += chosen if is_dry_run else await delete_finished(store, chosen)
        if len(old) < len(page):
            break
        query = query.next(page[-1])
    return GarbageReport(removed=removed, kept_for_experiments=kept, is_dry_run=is_dry_run)


async def compacted(store: Store, report: GarbageReport) -> GarbageReport:
    """Return the space of what was removed to the system, where the store can, and note its size in the report."""
    compact: Callable[[], Awaitable[Compaction]] | None = getattr(store, "compact", None)
    if compact is None or report.is_dry_run or not report.removed:
        return report
    return replace(report, compaction=await compact())


async def retain_after_run(
    store: Store, config: RetentionConfig, *, name: str, run: int, sources: Iterable[str], say: Callable[[str], None]
) -> None:
    """Remove what the section of a run that has ended calls old, and say so; trouble is said, and ends nothing.

    Args:
        store: The store, as the run's owner has it.
        config: The section.
        name: The experiment's name.
        run: The number of the run, whose rollouts stay.
        sources: Experiments that this one learns from, whose rollouts stay.
        say: Shows one line.
    """
    limits = limits_of(config)
    if limits is None:
        return
    query = RolloutQuery(experiment=name if config.experiments == "own" else None)
    prefix, others = f"{name}-{run}-", frozenset(sources)

    def spares(rollout: Rollout) -> bool:
        is_current = rollout.experiment == name and rollout.rollout_id.startswith(prefix)
        return is_current or rollout.experiment in others

    try:
        report = await compacted(store, await remove_old(store, query, limits, own=name, spares=spares))
    except AglError as error:
        say(f"retention: old rollouts could not be removed, and the next run tries again: {error}")
        return
    if report.removed:
        say(f"retention: {removal_text(report)}")


def removal_text(report: GarbageReport) -> str:
    """Return the number of removed rollouts and the space that they leave, in words."""
    text = f"removed {len(report.removed)} old rollout{'s' if len(report.removed) > 1 else ''}"
    freed = report.compaction.before - report.compaction.after if report.compaction else 0
    if freed < LEAST_FREED:
        return f"{text}; new ones take their space"
    return f"{text} and freed {freed / (1 << 20):.1f} MiB"


def _age(rollout: Rollout) -> tuple[float, str]:
    """Return a rollout's place in the order of the query; lower is older."""
    return rollout.finished_at, rollout.rollout_id


async def _newest_beyond(store: Store, query: RolloutQuery, keep: int) -> Rollout | None:
    """Return the newest rollout behind the ``keep`` newest ones, ``None`` if there is none."""
    query = replace(query, is_newest_first=True)
    while page := await store.rollouts(replace(query, limit=min(keep + 1, _BATCH))):
        if len(page) > keep:
            return page[keep]
        keep -= len(page)
        query = query.next(page[-1])
    return None


async def needed_experiments(store: Store, experiments: Iterable[str], *, own: str = "") -> set[str]:
    """Return those of the experiments that can be resumed or that run, of which all rollouts stay.

    Args:
        store: The store.
        experiments: Names of experiments.
        own: Name of the experiment that the caller owns, which counts as one that does not run.
    """
    unfinished = await unfinished_experiments(store)
    return {name for name in experiments if name in unfinished or (name != own and await is_owned(store, name))}


async def delete_finished(store: Store, rollout_ids: Sequence[str]) -> Sequence[str]:
    """Delete finished rollouts except those that another process has deleted; returns the ids of the others."""
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
