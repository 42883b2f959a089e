"""Shows a running experiment in its sinks, without delaying the experiment.

The store is the queue: each reading sends a sink all data of the run that this process has not sent to it yet. So a
sink that was unreachable misses nothing, and a resumed run fills the gaps of the one before. If a metric of a step
arrives later than the others, it is sent in a further row for that step.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from agl.contracts import Sink, SinkOutcome, SinkRow, SinkRun, SinkTable, Store, shortened
from agl.errors import AglError, FencedError
from agl.hints import count_of
from agl.tracing import redact
from agl_inspect.records.shelf import run_key
from agl_run.deliver.sink_contents import read_rows, read_tables, shown_config
from agl_run.parts.build import build_sinks
from agl_run.plan import Plan

if TYPE_CHECKING:
    from agl.schemas import Json

_LOG = logging.getLogger("agl_run.run")

END_S = 30.0
"""Seconds that an experiment waits at its end for data that its sinks have not received yet."""

PAUSE_S = 2.0
"""Shortest pause in seconds between two readings of the store."""

SHARE = 20
"""The pause after a reading is at least this many times as long, so that readings take at most 5 % of the time."""

TABLES_S = 60.0
"""Shortest pause in seconds between two updates of the tables; each update sends whole tables."""

LONGEST_PAUSE_S = 60.0
"""Longest pause in seconds after an error; the first pause is :data:`PAUSE_S`, and each is twice the previous one."""

_LONGEST_PROBLEM = 1000


@dataclass(frozen=True, kw_only=True)
class SinkSource:
    """A run of an experiment in its store.

    Attributes:
        plan: The experiment.
        store: The store of the experiment.
        store_url: The store's URL without passwords; ``""`` if the store has none to show.
        run: The number of the run.
    """

    plan: Plan
    store: Store
    store_url: str
    run: int

    @property
    def end_key(self) -> str:
        """The key of the run's outcome among the states in the store."""
        return run_key(self.plan.name, self.run, "sinks/end")

    async def described(self, sink: str) -> SinkRun:
        """Return the description of the run for a sink.

        The run's id ends with a random suffix, which is saved in the store so that a resumed run has the same id.
        """
        plan, key = self.plan, run_key(self.plan.name, self.run, f"sinks/{sink}/id")
        known = (await self.store.load_state(key)).get(key)
        if known is None:
            # Services keep the ids of runs forever, so the same name in another store must not
            # collide.
            known = secrets.token_hex(4).encode()
            await self.store.save_state({key: known})
        return SinkRun(
            id=f"{plan.name}-{self.run}-{known.decode()}",
            name=f"{plan.name}-{self.run}",
            experiment=plan.name,
            run=self.run,
            agent=plan.agent.identity,
            config=shown_config(plan.config),
            folder=str(plan.workdir),
        )


class Sinks:
    """All sinks of a run: ``async with Sinks(source, say=...) as sinks:``; set ``summary`` before the block ends.

    Args:
        source: The run.
        say: Called with a line for each sink at the end.
        end_s: Seconds to wait at the end; ``None`` for no limit.

    Attributes:
        summary: Final values of the run by name, which the sinks show.
        end: The run's outcome; if not set, it follows from the summary and from the exception that ended the run.
        has_all: True if every sink received everything; set at the end.
    """

    def __init__(self, source: SinkSource, *, say: Callable[[str], None], end_s: float | None = END_S) -> None:
        self._source, self._say, self._end_s = source, say, end_s
        self._running: list[_Sinking] = []
        self.summary: dict[str, Json] = {}
        self.end: SinkOutcome | None = None
        self.has_all = False

    async def __aenter__(self) -> "Sinks":
        """Start a background task for each sink; the run does not wait for the sinks."""
        found = [(name, sink, await self._source.described(name)) for name, sink in build_sinks(self._source.plan)]
        self._running = [_Sinking(self._source, sink, run, name=name) for name, sink, run in found]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Send the remaining data to all sinks at once, within the time limit, and show a line for each sink."""
        status = "finished" if kind is None else "failed" if issubclass(kind, Exception) else "stopped"
        why = _problem(error) if status == "failed" and isinstance(error, Exception) else ""
        end = self.end or SinkOutcome(status=status, summary=self.summary, error=why, time=time.time())
        # All at once, so the limit holds for the slowest and not for the sum.
        lines = await asyncio.gather(*(one.conclude(end, within_s=self._end_s) for one in self._running))
        for line in filter(None, lines):
            self._say(line)
        self.has_all = all(lines)
        if self._running and self.end is None:
            with suppress(AglError):  # without it a later `agl run --sync` knows less
                # Saved for ``agl run --sync``, which may write the end days later.
                await self._source.store.save_state({self._source.end_key: msgspec.json.encode(end)})

    def wake(self) -> None:
        """Tell every sink's task that the store has new metrics."""
        for one in self._running:
            one.wake()

    def alert(self) -> None:
        """Tell every sink's task that the store has a new alert, so that the tables are sent at once."""
        for one in self._running:
            one.alert()


class _Sinking:
    """Sends a run's data from the store to one sink."""

    def __init__(self, source: SinkSource, sink: Sink, run: SinkRun, *, name: str) -> None:
        self._store, self._store_url = source.store, source.store_url
        self._sink, self._run, self._name = sink, run, name
        self._thread = OwnThread(f"agl-{name}")
        self._news, self._ending = asyncio.Event(), asyncio.Event()
        self._has_begun, self._is_reported = False, False
        # What this process has given, by step; the names matter because some numbers of a step come
        # later.
        self._given: dict[tuple[str, int], set[str]] = {}
        self._known = 0
        self._tables: Sequence[SinkTable] = ()
        # The first tables are written at once.
        self._tables_at = -TABLES_S
        self._has_alert = False
        self._written = ""
        self._end = SinkOutcome(status="stopped")
        self._task = asyncio.create_task(self._follow())

    def wake(self) -> None:
        """Wake the task, because the store has new metrics."""
        self._news.set()

    def alert(self) -> None:
        """Wake the task, because the store has a new alert."""
        self._has_alert = True
        self._news.set()

    async def conclude(self, end: SinkOutcome, *, within_s: float | None) -> str:
        """Send the remaining data within a time limit.

        Returns a line that says what was written; if data are missing, logs a warning and returns ``""``.
        """
        self._end = end
        self._ending.set()
        self._news.set()
        await asyncio.wait({self._task}, timeout=within_s)
        # A task that was cut off by the limit has not given all.
        has_all = self._task.done() and self._task.result()
        self._task.cancel()
        self._thread.close()
        if has_all:
            written = self._written or count_of(len(self._given), "step")
            return f"{self._name}: {written} written to {self._sink.destination}"
        _LOG.warning(
            "%s: %d of the run's %d known steps and its end were not written to %s; the store has them all, and "
            "`agl run --sync` with the experiment's file writes them",
            *(self._name, self._known - len(self._given), self._known, self._sink.destination),
        )
        return ""

    async def _follow(self) -> bool:
        """Send new data until the run ends; return true if the sink has received everything."""
        pause = PAUSE_S
        while True:
            is_last, has_failed = self._ending.is_set(), False
            # Cleared before the reading: metrics that arrive during the reading set it again.
            self._news.clear()
            try:
                wait_s, pause = await self._give(is_last=is_last), PAUSE_S
            except FencedError:
                return False  # another trainer took over, and gives the rest
            except Exception as error:  # noqa: BLE001  # isolation point: the experiment goes on
                self._tell_once(error)
                self._news.set()
                # After an error nothing is known about what arrived, so everything is given again;
                # sinks take rows twice.
                self._has_begun, self._has_alert, self._tables = False, True, ()
                self._given.clear()
                has_failed, wait_s, pause = True, pause, min(2 * pause, LONGEST_PAUSE_S)
            if is_last:
                return not has_failed
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    # The pause ends early with the run.
                    await self._ending.wait()
            await self._news.wait()

    async def _give(self, *, is_last: bool) -> float:
        """Send new data, and at last the run's outcome; return the seconds to wait until the next reading."""
        sink, run = self._sink, self._run
        started = time.monotonic()
        # The whole run is read each time, because earlier processes of the run wrote some of it.
        every = await read_rows(self._store, run.experiment, run.run)
        seconds = time.monotonic() - started
        self._known = len(every)
        if not self._has_begun:
            # Libraries of such services block and keep state per thread, so each sink has one of
            # its own.
            await self._thread.call(lambda: sink.begin(run))
            self._has_begun = True
        rows = [row for row in map(self._rest, every) if row.metrics]
        if rows:
            await self._thread.call(lambda: sink.log(rows))
            for row in rows:
                self._given.setdefault((row.algorithm, row.step), set()).update(row.metrics)
        if is_last or self._has_alert or started - self._tables_at > max(TABLES_S, SHARE * seconds):
            self._has_alert = False
            await self._give_tables()
        if is_last:
            await self._thread.call(self._give_end)
        # The pause grows with the reading, so a long run costs its store at most 5 %.
        return max(PAUSE_S, SHARE * seconds)

    def _rest(self, row: SinkRow) -> SinkRow:
        """Return the row without the metrics that the sink has already received."""
        given = self._given.get((row.algorithm, row.step), ())
        return msgspec.structs.replace(row, metrics={key: row.metrics[key] for key in row.metrics if key not in given})

    def _give_end(self) -> None:
        self._written = self._sink.end(self._end) or ""

    async def _give_tables(self) -> None:
        """Send the tables that have changed since the last update."""
        sink, run = self._sink, self._run
        tables = await read_tables(self._store, run.experiment, run.run, store_url=self._store_url)
        changed = [table for table in tables if table not in self._tables]
        if changed:
            await self._thread.call(lambda: sink.show(changed))
        self._tables, self._tables_at = tables, time.monotonic()

    def _tell_once(self, error: Exception) -> None:
        if not self._is_reported:
            self._is_reported = True
            _LOG.warning(
                "%s: %s; the experiment goes on, and its numbers are written when this works again",
                *(self._name, _problem(error)),
                exc_info=_LOG.isEnabledFor(logging.DEBUG),
            )


def _problem(error: Exception) -> str:
    text = str(error) if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
    return shortened(redact(text), _LONGEST_PROBLEM)


class OwnThread:
    """Runs functions one after the other in one dedicated thread; call ``close`` at the end."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread and re-raise its error; ``work`` runs on even if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def run() -> None:
            failure: BaseException | None = None
            try:
                work()
            # Some libraries exit the interpreter when they cannot log in.
            except (Exception, SystemExit) as error:  # noqa: BLE001  # raised again where it is awaited
                failure = error if isinstance(error, Exception) else RuntimeError(f"the library exits: {error}")
            with suppress(RuntimeError):  # the loop is closed, so no caller is waiting
                loop.call_soon_threadsafe(settle, failure)

        self._calls.put(run)
        await done

    def close(self) -> None:
        """End the thread once the queued functions have run."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
