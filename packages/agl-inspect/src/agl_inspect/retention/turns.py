"""Removes old finished rollouts by itself while a store is served; of several servers of a store one at a time."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agl.contracts import RolloutQuery, Store
from agl.errors import AglError, ConfigError
from agl_inspect.records.hosts import worker_name
from agl_inspect.retention.ownership import Ownership
from agl_inspect.retention.removal import GarbageReport, RetentionLimits, removal_text, remove_old

EVERY_S = 3600.0
"""Seconds between two removals."""

_TURN = ".retention"
"""The name under which servers take turns; no experiment can have it."""

_LOG = logging.getLogger("agl_run.run")


@asynccontextmanager
async def retaining(
    store: Store, limits: RetentionLimits | None, *, say: Callable[[str], None], every_s: float = EVERY_S
) -> AsyncGenerator[None]:
    """Remove what exceeds the limits at the start and every ``every_s`` seconds; of several servers one at a time.

    Files are not written anew, which would hold up what is being recorded: new rollouts take the space.
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
    """Remove what exceeds the limits; returns ``None`` while another server does."""
    async with taking_turns(store, _TURN, title="the removal of old rollouts") as own:
        return None if own is None else await remove_old(own, RolloutQuery(), limits)


@asynccontextmanager
async def taking_turns(store: Store, turn: str, *, title: str) -> AsyncGenerator[Store | None]:
    """Let one process at a time do something with a store: yields the store for it, or ``None`` while another does it.

    A process that was killed is outwaited for as long as its lease lasts.

    Args:
        store: The store.
        turn: The name of what is done, which begins with a full stop, so that no experiment has it.
        title: The same in words, for messages.
    """
    own = Ownership(store, turn, workdir=Path(worker_name()), title=title)
    is_taken = False
    with suppress(ConfigError):
        await own.__aenter__()
        is_taken = True
    try:
        yield own.store if is_taken else None
    finally:
        if is_taken:
            await own.__aexit__()
