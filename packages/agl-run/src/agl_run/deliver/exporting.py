"""Sends the finished rollouts of a running experiment to an exporter, without delaying the experiment.

The store's change feed is the queue: a background task follows the feed at the exporter's speed, so nothing accumulates
in memory however slow the other system is. The position in the feed is saved in the store after every batch, so that a
restarted experiment continues where the last one stopped.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from agl.contracts import Change, Exporter, Recording, RolloutQuery, Store
from agl.errors import ConfigError, ExportError, FencedError, NotFoundError
from agl.hints import count_of
from agl.schemas import TERMINAL_ROLLOUT
from agl.stores import read_recordings
from agl_run.plan import Plan

_LOG = logging.getLogger("agl_run.run")

FLUSH_S = 5.0
"""Seconds that an experiment waits at its end for unsent rollouts to be sent."""

WAIT_S = 20.0
"""Longest wait in seconds for one read of the change feed; a change ends the wait early."""

BATCH = 16
"""The most rollouts that are sent in one batch."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""First and longest pause in seconds before a failed batch is sent again; each pause is twice the previous one."""


def check_different(plan: Plan) -> None:
    """Raise :class:`ConfigError` if two exporters have the same name, because their saved positions would collide."""
    counts = Counter(exporter.use for exporter in plan.config.exporter)
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"[[exporter]] use = {name!r} stands {count} times, and each exporter may stand once; remove the "
                "others, and let a collector pass the rollouts on to several systems"
            )


class Exporting:
    """Sends an experiment's finished rollouts while the context is open: ``async with Exporting(...):``.

    The first batch begins at the saved position, or at the end of the feed for an exporter that is new to the
    experiment. After a temporary error the batch is sent again, with growing pauses, for as long as the experiment
    runs. A batch that the other system refuses is skipped, and so is a single rollout on which the exporter raises.
    The first error of each kind is logged, and skipped rollouts are counted.

    Args:
        store: The experiment's store, opened as its owner.
        exporter: The destination; closed at the end.
        experiment: The name of the experiment.
        name: The name of the exporter.
        say: Called at the end with a line that says how many rollouts were sent.
    """

    def __init__(
        self,
        store: Store,
        exporter: Exporter,
        *,
        experiment: str,
        name: str,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._exporter, self._experiment, self._name = store, exporter, experiment, name
        self._say = say
        self._key = f"experiment/{experiment}/exporter/{name}"
        self._cursor = 0
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Exporting":
        """Find the position in the change feed, and start the background task that sends rollouts."""
        # Read before the saved position: a store that was replaced has a shorter feed, and the
        # position is cut to it.
        newest = await self._store.cursor()
        saved = (await self._store.load_state(self._key)).get(self._key)
        # An exporter that is new to an experiment begins now; its past may be large and is exported
        # by ``agl data``.
        self._cursor = newest if saved is None else min(int(saved), newest)
        if saved is None:
            await self._save()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Send the remaining rollouts within the time limit, count the unsent ones, and close the exporter."""
        self._ending.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=FLUSH_S)
            # True if the task had not ended by itself within the limit.
            is_late = self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._conclude(left=await self._count_left() if is_late else 0)
        await self._exporter.close()

    async def _follow(self) -> None:
        try:
            while changes := await self._next():
                await self._take(changes)
        except FencedError:
            pass  # another trainer took over, and sends the rest
        except Exception:  # noqa: BLE001  # isolation point: the experiment goes on
            _LOG.exception("the exporter %s stopped, and the experiment goes on without it", self._name)

    async def _next(self) -> Sequence[Change]:
        """Wait for changes and return them; the result is empty after the experiment's end and its last change."""
        # The end of the experiment interrupts the wait for changes, which may take 20 seconds.
        ending = asyncio.create_task(self._ending.wait())
        try:
            while not self._ending.is_set():
                reading = asyncio.create_task(self._changes(wait_s=WAIT_S))
                await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done() and (changes := reading.result()):
                    return changes
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            # After the end of the experiment the feed is read once more, so that the last rollouts
            # are sent.
            return await self._changes(wait_s=0)
        finally:
            ending.cancel()

    async def _changes(self, *, wait_s: float) -> Sequence[Change]:
        return await self._store.changes(after=self._cursor, wait_s=wait_s)

    async def _take(self, changes: Sequence[Change]) -> None:
        """Send the rollouts whose end is among the changes, and save the position in the feed after every batch."""
        ends = [change for change in changes if self._is_end(change)]
        for start in range(0, len(ends), BATCH):
            batch = ends[start : start + BATCH]
            if recordings := await self._read([change.key for change in batch]):
                await self._deliver(recordings)
            # Saved after each batch and not before: after a kill a batch is sent twice rather than
            # never.
            self._cursor = batch[-1].cursor
            await self._save()
        # Other changes need no save; they are skipped again after a restart.
        self._cursor = changes[-1].cursor

    def _is_end(self, change: Change) -> bool:
        is_own = change.kind == "rollout" and change.experiment == self._experiment
        return is_own and change.status in TERMINAL_ROLLOUT

    async def _deliver(self, recordings: Sequence[Recording]) -> None:
        """Send recordings, again after temporary errors, until the exporter accepts or refuses them.

        If the exporter raises any other error, the recordings are sent one by one.
        """
        pause = FIRST_PAUSE_S
        while True:
            try:
                await self._exporter.export(recordings)
            except ExportError as error:
                self._tell_once(error)
                if not error.is_passing:
                    self._counts["refused"] += len(recordings)
                    return
                # The other system knows best when it will answer.
                await self._pause(max(pause, error.retry_after_s))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except Exception:  # noqa: BLE001  # isolation point: the exporter's own mistake costs only what it breaks on
                # One bad rollout must not cost the fifteen others of its batch.
                return await self._single_out(recordings)
            else:
                self._counts["sent"] += len(recordings)
                return

    async def _single_out(self, recordings: Sequence[Recording]) -> None:
        """After an error of the exporter, deliver several recordings one by one, or skip a single one."""
        if len(recordings) > 1:
            for each in recordings:
                await self._deliver([each])
            return
        self._counts["broken"] += 1
        if self._counts["broken"] == 1:
            _LOG.exception(
                "the exporter %s broke on rollout %s; the experiment goes on, and such rollouts are left out",
                self._name,
                recordings[0].rollout.rollout_id,
            )

    def _tell_once(self, error: ExportError) -> None:
        kind = "passing" if error.is_passing else "refused"
        if kind not in self._logged:
            self._logged.add(kind)
            rest = "the rollouts are sent when it answers" if error.is_passing else "such rollouts are left out"
            _LOG.warning("%s: %s; the experiment goes on, and %s", self._name, error, rest)

    async def _read(self, rollout_ids: Sequence[str]) -> list[Recording]:
        """Read rollouts with all their spans; rollouts that have been removed in the meantime are left out."""
        query = RolloutQuery(ids=tuple(rollout_ids), limit=len(rollout_ids))
        try:
            return [each async for each in read_recordings(self._store, query, spans="all")]
        except NotFoundError:
            one_by_one = [await self._read([each]) for each in rollout_ids] if len(rollout_ids) > 1 else []
            return [recording for found in one_by_one for recording in found]

    async def _pause(self, seconds: float) -> None:
        """Wait before a failed batch is sent again; once the experiment is ending, only for the shortest pause."""
        if self._ending.is_set():
            await asyncio.sleep(min(seconds, FIRST_PAUSE_S))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _save(self) -> None:
        await self._store.save_state({self._key: b"%d" % self._cursor})

    async def _count_left(self) -> int:
        count, cursor = 0, self._cursor
        while changes := await self._store.changes(after=cursor):
            count += sum(map(self._is_end, changes))
            cursor = changes[-1].cursor
        return count

    async def _conclude(self, *, left: int) -> None:
        """Show how many rollouts were sent, and log how many were refused, skipped or left over."""
        sent, refused = self._counts["sent"], self._counts["refused"]
        if sent and self._say is not None:
            self._say(f"{self._name}: {count_of(sent, 'rollout')} sent to {self._exporter.destination}")
        if refused:
            _LOG.warning("%s: %s refused by %s", self._name, count_of(refused, "rollout"), self._exporter.destination)
        if broken := self._counts["broken"]:
            text = "%s: %s not sent, because the exporter broke on them"
            _LOG.warning(text, self._name, count_of(broken, "rollout"))
        if left:
            _LOG.warning(
                "%s: %s not sent to %s within %g s after the end; they are sent when the experiment runs again",
                *(self._name, count_of(left, "rollout"), self._exporter.destination, FLUSH_S),
            )
