"""Runs a plan: the whole experiment with validation before and after, or a few tasks without training."""

import logging
import time
from collections.abc import Sequence

import msgspec

from agl.contracts import ExperimentRecord
from agl.schemas import Episode, Mode, Record
from agl_run.experiment import state as saved
from agl_run.experiment.build import build_rewards, check_algorithms
from agl_run.experiment.config import ScheduleConfig
from agl_run.experiment.continuation import Beginning, begin, is_of_another_agent
from agl_run.experiment.drive import DrivenAlgorithm, Driver
from agl_run.experiment.failures import error_of
from agl_run.experiment.finished import experiment_of
from agl_run.experiment.plan import TRIAL, VALIDATION, Plan
from agl_run.experiment.progress import Progress
from agl_run.experiment.result_text import Rows, as_html, as_text, episode_rows, pairs, reward_text
from agl_run.experiment.retention import retain_after_run
from agl_run.experiment.schedule import run_schedule
from agl_run.experiment.session import Session
from agl_run.experiment.unused import unused_credits
from agl_run.experiment.waiting import told

_LOG = logging.getLogger("agl_run.experiment")


class FitResult(Record, frozen=True, kw_only=True):
    """The result of :meth:`Trainer.fit`.

    Attributes:
        experiment: The experiment's name.
        before: Validation reward before the first step, ``None`` without validation tasks.
        after: Validation reward at the end, ``None`` without validation tasks.
        best: The highest validation reward, those before, after and between included; ``None`` without any.
        best_step: Steps of all algorithms together that were taken before the best one; of equals, before the last.
        steps: Steps of each algorithm, by its name.
        resources: The live version of every resource, by name.
        workdir: The folder of checkpoints and metrics.
        seconds: Wall time of this process's part.
        failed: Rollouts of this process's part that failed.
        errors: Their most frequent errors with counts, ``""`` if none failed.
    """

    experiment: str
    before: float | None = None
    after: float | None = None
    best: float | None = None
    best_step: int = 0
    steps: dict[str, int] = {}
    resources: dict[str, str] = {}
    workdir: str = ""
    seconds: float = 0.0
    failed: int = 0
    errors: str = ""

    def __repr__(self) -> str:
        return as_text(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table(), has_head=False)

    def _table(self) -> tuple[str, Rows]:
        failed = (("failed", f"{self.failed} rollouts: {self.errors}"),) if self.failed else ()
        rows = (
            ("validation reward", reward_text(self.before, self.after, self.best, self.best_step)),
            ("steps", pairs(self.steps)),
            ("resources", pairs(self.resources)),
            ("folder", self.workdir),
            ("seconds", f"{self.seconds:.0f}"),
            *failed,
        )
        return f"FitResult of {self.experiment!r}", rows


class DevResult(Record, frozen=True, kw_only=True):
    """The result of :meth:`Trainer.dev`.

    Attributes:
        episodes: One recorded episode for each task.
    """

    episodes: tuple[Episode, ...] = ()

    @property
    def errors(self) -> dict[str, str]:
        """The error of each rollout that failed, by its id: the type and the first line of the message."""
        failed = [episode for episode in self.episodes if episode.rollout.status != "succeeded"]
        return {episode.rollout.rollout_id: error_of(episode.rollout, episode.attempt) for episode in failed}

    def __repr__(self) -> str:
        return as_text(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table(), has_head=True)

    def _table(self) -> tuple[str, Rows]:
        return f"DevResult with {len(self.episodes)} rollouts", episode_rows(self.episodes)


async def fit_plan(plan: Plan, *, progress: Progress, resume: bool, fresh: bool) -> FitResult:
    """Run the experiment to its end.

    Raises:
        RunError: Every rollout failed, or every one on training tasks.
    """
    started = time.monotonic()
    session = Session(plan)
    try:
        build_rewards(plan)  # here and below: report what is wrong before a policy loads its model
        with told(f"importing {_algorithms(plan)}", say=progress.say):
            await check_algorithms(plan)
        store = await session.open_store()
        beginning = await begin(store, plan, resume=resume, fresh=fresh)
        driver, turns = await _start(session, beginning, progress)
        for text in unused_credits(plan):
            _LOG.warning("%s", text)
        before, after = await _run(driver, turns)
        driver.reports.sampling.conclude()
        driver.reports.patterns.conclude()
        driver.reports.failures.conclude()
        best, best_step = await _best(driver, before, after)
        result = FitResult(
            experiment=plan.name,
            before=before,
            after=after,
            best=best,
            best_step=best_step,
            steps={c.name: (await driver.load(c)).step for c in plan.config.algorithm},
            resources=session.live.versions(),
            workdir=str(plan.workdir),
            seconds=time.monotonic() - started,
            failed=driver.reports.failures.counts.failed,
            errors=driver.reports.failures.counts.errors,
        )
        await _retain(driver)
        return result
    finally:
        progress.close()
        await session.close()


async def _retain(driver: Driver) -> None:
    """Remove the old rollouts that the configuration names, once everything is saved."""
    config = driver.session.plan.config
    await retain_after_run(
        driver.session.store,
        config.retention,
        name=driver.name,
        run=driver.state.run,
        sources={experiment_of(source) for algorithm in config.algorithm for source in algorithm.source} - {""},
        say=driver.progress.say,
    )


def _algorithms(plan: Plan) -> str:
    names = [config.name for config in plan.config.algorithm]
    return f"the algorithm{'s' if len(names) > 1 else ''} {', '.join(names)}"


async def dev_plan(
    plan: Plan, *, progress: Progress, tasks: int, record_as: str = "", mode: Mode = "test"
) -> DevResult:
    """Run the agent on a few tasks, as the experiment ``record_as`` or ``NAME-dev``."""
    name = plan.name
    plan = plan.renamed(record_as or f"{name}{TRIAL}")
    session = Session(plan)
    try:
        store = await session.open_store()
        previous = await saved.load_experiment(store, name)
        if previous is not None and is_of_another_agent(previous, plan):
            previous = None
        state = ExperimentRecord(
            name=plan.name, run=previous.run if previous else 1, live=previous.live if previous else {}
        )
        await session.start(state, say=progress.say)
        for key, resource in plan.resources.items():
            if session.live.current(key).resource != resource:
                progress.say(_other_text(key, session.live.current(key).version))
        driver = Driver(session, state, progress=progress, is_trial=True)
        chosen = list(plan.train or plan.val)[:tasks]
        config = plan.config.algorithm[0] if plan.config.algorithm else None
        collect = driver.collector(f"dev-{time.time_ns() // 1_000_000}", config)
        collected = await collect(chosen, step=0, mode=mode, keeps_all=True)
        driver.reports.patterns.conclude()
        return DevResult(episodes=collected.episodes)
    finally:
        progress.close()
        await session.close()


def _other_text(name: str, version: str) -> str:
    return (
        f"{name}: the trial uses the version {version}, which the experiment has reached or a label points at, and not "
        "what the experiment's file says, which differs; to try the file's, give the experiment another name: "
        "--set experiment.name=NAME"
    )


async def _start(session: Session, beginning: Beginning, progress: Progress) -> tuple[Driver, list[DrivenAlgorithm]]:
    """Start every part and let the algorithms check their needs; only then the experiment counts as started."""
    try:
        await session.start(beginning.state, say=progress.say)
        driver = Driver(session, beginning.state, progress=progress)
        turns = [
            DrivenAlgorithm(driver, config, beginning.reopened.get(config.name) or await driver.load(config))
            for config in session.plan.config.algorithm
        ]
        await _begin(turns, session.plan.config.schedule)
    except BaseException:
        await beginning.take_back(session.store)
        raise
    await beginning.mark_started(session.store)
    return driver, turns


async def _run(driver: Driver, turns: Sequence[DrivenAlgorithm]) -> tuple[float | None, float | None]:
    """Validate, run the schedule, validate again, and mark the experiment as finished."""
    plan = driver.session.plan
    configs = plan.config.algorithm
    before = await _validate_first(driver, turns)
    every = plan.config.experiment.validate_every
    validated, newest = 0, before

    async def after_step() -> None:
        nonlocal validated, newest
        if every and driver.state.turn % every == 0:
            validated, newest = driver.state.turn, await driver.validate(driver.state.turn)

    if not configs and plan.train:
        await driver.record(plan.train)
    await run_schedule(turns, plan.config.schedule, after_step=after_step)
    after = newest if validated == driver.state.turn else await driver.validate(driver.state.turn)
    finished = msgspec.structs.replace(driver.state, status="finished", live=driver.session.live.versions())
    await saved.save(driver.session.store, finished)
    return before, after


async def _best(driver: Driver, before: float | None, after: float | None) -> tuple[float | None, int]:
    """Return the run's highest validation reward and the steps before it, those of an earlier process included."""
    every, turn = driver.session.plan.config.experiment.validate_every, driver.state.turn
    logged = await driver.session.store.metrics(driver.name, name="reward", run=driver.state.run) if every else []
    found = {m.step: m.value for m in logged if m.algorithm == VALIDATION}
    scores: dict[int, float | None] = {**found, 0: before, turn: after}
    known = [(value, step) for step, value in scores.items() if value is not None]
    return max(known, default=(None, 0))


async def _begin(turns: Sequence[DrivenAlgorithm], schedule: ScheduleConfig) -> None:
    """Let the algorithms check their needs before the first rollout costs anything."""
    able = _able_to_begin(turns, schedule)
    try:
        for turn in turns:
            if turn not in able and not turn.is_finished:
                await turn.check()
        for turn in able:
            await turn.begin()
    except BaseException:
        await _end(turns)
        raise


async def _validate_first(driver: Driver, turns: Sequence[DrivenAlgorithm]) -> float | None:
    try:
        return await driver.validate(0)
    except BaseException:
        await _end(turns)
        raise


async def _end(turns: Sequence[DrivenAlgorithm]) -> None:
    for turn in turns:
        await turn.end()


def _able_to_begin(turns: Sequence[DrivenAlgorithm], schedule: ScheduleConfig) -> list[DrivenAlgorithm]:
    """Return the algorithms that can be set up now, because no earlier one changes their resources."""
    waiting = [turn for turn in turns if not turn.is_finished]
    if schedule.mode == "sequential":
        return waiting[:1]
    first = [turn for turn in waiting if turn.name in schedule.first]
    changing = {name for turn in first for name in turn.tunes}
    rest = [turn for turn in waiting if turn not in first and changing.isdisjoint(turn.tunes)]
    return [*first[:1], *rest]
