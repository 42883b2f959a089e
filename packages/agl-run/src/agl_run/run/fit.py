"""Runs a plan: the whole experiment with validation before and after, or a few tasks without training."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Episode, Json, Mode, Record
from agl_inspect.records.names import TRIAL, error_of
from agl_inspect.records.sources import experiment_of
from agl_inspect.records.state import AlgorithmState, last_versions, save_progress
from agl_inspect.records.validations import after_step
from agl_run.checks.notices import unused_credits
from agl_run.config.retention import retain_after_run
from agl_run.config.sections import ScheduleConfig
from agl_run.deliver.sinking import Sinks, SinkSource
from agl_run.display.progress import Progress
from agl_run.display.result_text import Rows, as_html, as_text, episode_rows, pairs, reward_text
from agl_run.parts.build import build_rewards, check_algorithms
from agl_run.parts.waiting import waiting_for
from agl_run.plan import Plan
from agl_run.run.algorithm import DrivenAlgorithm
from agl_run.run.collapse import CollapseError, CollapseGuard
from agl_run.run.driver import Driver, Moment
from agl_run.run.finalists import Choice, choose
from agl_run.run.resume import Beginning, begin
from agl_run.run.running_experiment import RunningExperiment
from agl_run.run.schedule import run_schedule
from agl_run.run.trial import Tasks, trial

_LOG = logging.getLogger("agl_run.run")


class FitResult(Record, frozen=True, kw_only=True):
    """The result of :meth:`Trainer.fit`.

    Attributes:
        experiment: The experiment's name.
        before: Validation reward before the first step; ``None`` without validation tasks.
        after: Validation reward of the versions that are live at the end, measured on fresh rollouts if fresh rollouts
            chose the versions; ``None`` without validation tasks.
        last: Validation reward after the last step, which differs from ``after`` if earlier versions are live.
        kept_step: If earlier versions than the last are live: the number of steps of all algorithms before them;
            otherwise ``None``.
        best: The highest reward of all validations, first and last included; ``None`` without any.
        best_step: The number of steps of all algorithms before the validation with the reward ``best``; the latest one
            if several have that reward.
        steps: Steps of each algorithm, by its name.
        resources: The live version of every resource, by name.
        workdir: The folder of checkpoints and metrics.
        seconds: Wall time in this process; time before a resume is not included.
        failed: Number of rollouts that failed in this process.
        errors: The most frequent errors of the failed rollouts, with counts; ``""`` if none failed.
    """

    experiment: str
    before: float | None = None
    after: float | None = None
    last: float | None = None
    kept_step: int | None = None
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

    def _other_rewards(self) -> list[tuple[float | None, str]]:
        if self.kept_step is not None:
            return [(self.last, f"after the last step; the versions {after_step(self.kept_step)} are live")]
        return [] if self.best == self.after else [(self.best, f"best, {after_step(self.best_step)}")]

    def _table(self) -> tuple[str, Rows]:
        failed = (("failed", f"{count_of(self.failed, 'rollout')}: {self.errors}"),) if self.failed else ()
        rows = (
            ("validation reward", reward_text(self.before, self.after, self._other_rewards())),
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
        episodes: One recorded episode per task.
    """

    episodes: tuple[Episode, ...] = ()

    @property
    def errors(self) -> dict[str, str]:
        """Errors of the failed rollouts, by rollout id: the error's type and the first line of its message."""
        failed = [episode for episode in self.episodes if episode.rollout.status != "succeeded"]
        return {episode.rollout.rollout_id: error_of(episode.rollout, episode.attempt) for episode in failed}

    def __repr__(self) -> str:
        return as_text(*self._table())

    def _repr_html_(self) -> str:
        return as_html(*self._table(), has_head=True)

    def _table(self) -> tuple[str, Rows]:
        return f"DevResult with {count_of(len(self.episodes), 'rollout')}", episode_rows(self.episodes)


async def fit_plan(plan: Plan, *, progress: Progress, resume: bool, fresh: bool) -> FitResult:
    """Run the experiment to its end, from its start or from where it was stopped.

    Raises:
        ConfigError: The experiment has no tasks, because it is a file of `agl learn`.
        RunError: All rollouts failed, or all rollouts of training tasks.
    """
    started = time.monotonic()
    if plan.takes_conversations:
        raise ConfigError(
            "the tasks of this file come from served conversations; run agl learn FILE, or set [experiment] train to a "
            "JSON-lines file"
        )
    running = RunningExperiment(plan)
    turns: list[DrivenAlgorithm] = []
    async with AsyncExitStack() as stack:
        # Pushed in the reverse order of their ends: first the algorithms end and report unsaved
        # steps, then the display, then the parts that the algorithms used.
        stack.push_async_callback(running.close)
        stack.callback(progress.close)
        stack.push_async_callback(_end, turns)
        build_rewards(plan)  # here and below: report what is wrong before a policy loads its model
        with waiting_for(f"importing {_algorithms(plan)}", say=progress.say):
            await check_algorithms(plan)
        # The first thing that touches the store, and that another trainer can make fail.
        store = await running.open_store()
        # The record says ``running`` from here on, so that workers that read it do not leave.
        beginning = await begin(store, plan, resume=resume, fresh=fresh)
        driver = await _start(running, beginning, progress, turns=turns)
        # Said after the start, because a refused run has a better message to show.
        for text in unused_credits(plan):
            _LOG.warning("%s", text)
        source = SinkSource(plan=plan, store=running.store, store_url=running.store_url, run=driver.state.run)
        async with Sinks(source, say=progress.say) as sinks:
            # Sinks read the store themselves; the driver only wakes them when there is new data.
            driver.on_logged, driver.on_alert = sinks.wake, sinks.alert
            result = await _fit(driver, turns)
            sinks.summary = _summary(result)
        # Last of all: until everything is saved, old rollouts may still be needed.
        await _retain(driver)
        return msgspec.structs.replace(result, seconds=time.monotonic() - started)


async def _end(turns: Sequence[DrivenAlgorithm]) -> None:
    for turn in turns:
        await turn.end()


async def _fit(driver: Driver, turns: Sequence[DrivenAlgorithm]) -> FitResult:
    """Run the experiment from its start or from where it stopped, end the observers, and return the result."""
    before, choice = await _run(driver, turns)
    for observer in driver.observers:
        observer.end()
    plan = driver.running.plan
    found = {one.turn: one.mean for one in driver.validations.all()} | ({} if before is None else {0: before})
    best, best_step = max(((mean, turn) for turn, mean in found.items()), default=(None, 0))
    return FitResult(
        experiment=plan.name,
        before=before,
        after=choice and choice.reward,
        last=found.get(driver.state.turn),
        kept_step=None if choice is None or choice.is_last else choice.turn,
        best=best,
        best_step=best_step,
        steps={c.name: (await driver.load(c)).step for c in plan.config.algorithm},
        resources=driver.running.live.versions(),
        workdir=str(plan.workdir),
        failed=driver.failures.counts.failed,
        errors=driver.failures.counts.errors,
    )


def _summary(result: FitResult) -> dict[str, Json]:
    """Return the numbers and the live versions of a result that sinks show in a run's summary."""
    rewards = {"before": result.before, "after": result.after, "best": result.best}
    measured = {f"reward_{when}": value for when, value in rewards.items() if value is not None}
    best = {} if result.best is None else {"best_step": result.best_step}
    steps = {f"steps/{name}": count for name, count in result.steps.items()}
    versions = {f"version/{name}": version for name, version in result.resources.items()}
    return {**measured, **best, **steps, **versions, "failed_rollouts": result.failed}


async def _retain(driver: Driver) -> None:
    """Remove old rollouts according to ``[retention]``."""
    config = driver.running.plan.config
    await retain_after_run(
        driver.running.store,
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
    async with trial(plan, record_as=record_as or f"{plan.name}{TRIAL}", progress=progress) as driver:
        episodes = await Tasks(driver).run(list(plan.train or plan.val)[:tasks], mode=mode)
        return DevResult(episodes=tuple(episodes))


async def _start(
    running: RunningExperiment, beginning: Beginning, progress: Progress, *, turns: list[DrivenAlgorithm]
) -> Driver:
    """Start all parts, let the algorithms check their requirements, and then mark the experiment as started.

    The algorithms are appended to ``turns`` even if one of them refuses; the caller must end them.
    """
    try:
        # Any failure up to the mark below leaves the experiment as if it had not been started.
        await running.start(beginning.state, say=progress.say)
        driver = Driver(running, beginning.state, progress=progress)
        await driver.validations.load()
        driver.view_validations()
        for config in running.plan.config.algorithm:
            turns.append(
                DrivenAlgorithm(driver, config, beginning.reopened.get(config.name) or await driver.load(config))
            )
        await _begin(turns, running.plan.config.schedule)
    except BaseException:
        # If a finished experiment was to continue and is refused, its record says finished again.
        await beginning.take_back(running.store)
        raise
    # The reopened states are saved here, together with the record: a resume after a kill sees both
    # or neither.
    await beginning.mark_started(running.store)
    return driver


async def _run(driver: Driver, turns: Sequence[DrivenAlgorithm]) -> tuple[float | None, Choice | None]:
    """Validate, run the schedule, validate again, make the chosen versions live, and mark the run as finished.

    Returns the validation reward before the first step, and the choice of versions.
    """
    plan = driver.running.plan
    before = await driver.validate_first()
    if not plan.config.algorithm and plan.train:
        await driver.record(plan.train)
    stopped = await _take_steps(driver, turns)
    if driver.state.turn:
        await driver.validate(await driver.now())
    # Saved besides the chosen versions: a run that is extended later continues from its last step,
    # not from its best.
    last = driver.running.live.versions()
    choice = await choose(driver)
    # ``finished`` is written after the choice, so that a kill in between chooses again and does not
    # skip it.
    finished = msgspec.structs.replace(driver.state, status="finished", live=driver.running.live.versions())
    kept = last_versions(driver.name, driver.state.run).states({"": dict(last)})
    await save_progress(driver.running.store, finished, algorithms=stopped, others=kept)
    return before, choice


async def _take_steps(driver: Driver, turns: Sequence[DrivenAlgorithm]) -> dict[str, AlgorithmState]:
    """Run the schedule with its validations; return the states of algorithms that were stopped by a collapse."""
    # The guard counts rollbacks over restarts; otherwise a run that is resumed often could go back
    # forever.
    plan, guard = driver.running.plan, CollapseGuard(driver, turns)
    await guard.load()
    # One validation at a time: two would share the slots, and the later one could end first.
    validating = asyncio.Lock()

    async def validate(moment: Moment) -> None:
        await driver.validate(moment)
        await guard.check(moment.turn)

    async def after_step() -> None:
        async with validating:  # algorithms side by side wait for each other's validations
            while moment := driver.take_due():
                await validate(moment)

    try:
        # A kill between a step and its validation leaves the validation out; it is known in the
        # store if it was made.
        if driver.is_validated(driver.state.turn):  # a run that was killed may have missed what follows its last step
            await validate(await driver.now())
        await run_schedule(turns, plan.config.schedule, after_step=after_step)
    except CollapseError as error:
        driver.progress.say(f"{error}; the run stops")
        # A collapse is an ordinary end: the best versions are still chosen, and the reason is in
        # each state.
        return {turn.name: turn.stopped(str(error)) for turn in turns if turn.steps and not turn.is_finished}
    return {}


async def _begin(turns: Sequence[DrivenAlgorithm], schedule: ScheduleConfig) -> None:
    """Set up the algorithms that can begin now, and only check the others, before any rollout runs."""
    # Setting up takes memory, so algorithms whose turn is later are only checked.
    able = _able_to_begin(turns, schedule)
    for turn in turns:
        if turn not in able and not turn.is_finished:
            await turn.check()
    for turn in able:
        await turn.begin()


def _able_to_begin(turns: Sequence[DrivenAlgorithm], schedule: ScheduleConfig) -> list[DrivenAlgorithm]:
    """Return the algorithms that can be set up now, because no earlier algorithm changes the resources they tune."""
    waiting = [turn for turn in turns if not turn.is_finished]
    # The second of a sequence starts from weights that the first has yet to make.
    if schedule.mode == "sequential":
        return waiting[:1]
    first = [turn for turn in waiting if turn.name in schedule.first]
    changing = {name for turn in first for name in turn.tunes}
    rest = [turn for turn in waiting if turn not in first and changing.isdisjoint(turn.tunes)]
    return [*first[:1], *rest]
