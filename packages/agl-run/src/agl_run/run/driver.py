"""Drives the algorithms: sets each up, takes its steps, saves its state, and refuses to train a rollout twice."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import (
    Algorithm,
    AlgorithmContext,
    CheckedAlgorithm,
    Credit,
    ExperimentRecord,
    Metric,
    Policy,
    ReversibleAlgorithm,
    StepReport,
)
from agl.errors import AglError, ConfigError
from agl.hints import did_you_mean
from agl.schemas import Episode, Json, Resource, ResourceVersion
from agl_inspect.advice import AlertKind, Suggestion, keep_alert
from agl_inspect.records import (
    AlgorithmState,
    Validations,
    deferred,
    experiment_of,
    failures_of,
    files_of,
    load_algorithm,
    rewards_of,
    save_progress,
    saved_marks,
    step_line,
    trained_rollouts,
    version_of_step,
)
from agl_inspect.rollouts import StepTallies, TrainingRecord, keep_tallies, save_training
from agl_run.config.settings import changed_settings, training_settings
from agl_run.display.progress import Progress
from agl_run.display.run_view import AlgorithmView, RunView
from agl_run.parts.counterfactual import check_replays
from agl_run.parts.waiting import StepTimes, steps_in_all, told
from agl_run.plan import VALIDATION
from agl_run.run.collector import Collector, RunReports
from agl_run.run.recorded import SourceReader, Sources
from agl_run.run.saving import Collecting, SaveFn, to_end
from agl_run.run.session import Session
from agl_run.watch.agent_patterns import PatternReport
from agl_run.watch.agreement import AgreementPolicy
from agl_run.watch.failures import FailureReport
from agl_run.watch.sampling import SamplingReport
from agl_run.watch.step_shares import StepShares
from agl_run.watch.step_watch import StepWatch

ENDS_SOON_S = 1.0
"""Seconds for which a run that stops says nothing, because a step that waits for rollouts ends at once."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a run.

    Attributes:
        turn: Steps of all algorithms together until then.
        versions: The versions that were live, by name.
        states: The states of the algorithms, by name.
    """

    turn: int
    versions: Mapping[str, str]
    states: Mapping[str, AlgorithmState]


class Driver:
    """One run of an experiment's algorithms within a session.

    Args:
        session: The running experiment.
        state: The experiment's state at the start.
        progress: Shows the progress.
        is_trial: Missed model calls are reported only, even if the settings say that they end the run.

    Attributes:
        reports: The reports on the run's rollouts.
        validations: The run's validations; load them first.
        view: The numbers of the run that a display shows.
        on_logged: Called when the store has new numbers.
        on_alert: Called when the store has a new alert.
    """

    def __init__(
        self, session: Session, state: ExperimentRecord, *, progress: Progress, is_trial: bool = False
    ) -> None:
        self.session = session
        self.state = state
        self.progress = progress
        url, names = session.store_url, [config.name for config in session.plan.config.algorithm]
        self.view = RunView(algorithms={name: AlgorithmView(name=name) for name in names})
        self.reports = RunReports(
            failures=FailureReport(store_url=url),
            agreement=AgreementPolicy(session.plan.config.experiment, is_trial=is_trial, store_url=url),
            sampling=SamplingReport(store_url=url),
            patterns=PatternReport(),
            view=self.view,
            steps=StepTallies(),
            shares=StepShares(session.worker.places, is_judged=bool(session.plan.config.reward)),
            store_url=url,
        )
        self.validations = Validations(
            session.store,
            name=session.plan.name,
            run=state.run,
            tasks=self.validation_tasks,
            train=session.plan.train,
            agent=session.plan.agent.identity,
            tuned=frozenset(name for algorithm in session.plan.config.algorithm for name in algorithm.tunes),
        )
        self._replays: dict[str, Mapping[str, float]] = {}
        self._waiting: list[tuple[DrivenAlgorithm, StepReport]] = []
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._due: deque[Moment] = deque()
        self.validated: Sequence[Episode] = ()
        self.on_logged: Callable[[], None] = lambda: None
        self.on_alert: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.session.plan.name

    @property
    def validation_tasks(self) -> Sequence[Json]:
        """The tasks of a validation."""
        plan = self.session.plan
        return plan.val[: plan.config.experiment.validation_limit or None]

    def credit(self, algorithm: AlgorithmConfig) -> Credit:
        """Build an algorithm's credit assignment, its own or the experiment's.

        Raises:
            ConfigError: It replays rollouts, and the runner cannot.
        """
        plan = self.session.plan
        config = algorithm.credit or plan.config.credit
        credit: Credit = plan.manager.build(plan.manager.credit(config.use), **config.params)
        check_replays(plan, credit)
        return credit

    def collector(self, name: str, algorithm: AlgorithmConfig | None, *, credit: Credit | None = None) -> Collector:
        """Make a collector whose rollout ids contain ``name``."""
        session = self.session
        if session.worker.failure is None:
            raise AglError("the worker is not running")
        return Collector(
            plan=session.plan,
            run=self.state.run,
            caller=name,
            store=session.store,
            feed=session.feed,
            live=session.live.versions,
            progress=lambda done, total, text: self.progress.update(f"{name} rollouts", done, total, text),
            algorithm=algorithm,
            failure=session.worker.failure,
            reports=self.reports,
            credit=credit,
            log=lambda step, values: self._note_replays(name, step, values),
        )

    async def _note_replays(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Show the counts of replays, and keep them for the step's report."""
        self._replays[name] = values
        failed = f", {values['replays_failed']:.0f} of them failed" if values["replays_failed"] else ""
        calls = f", {values['replay_calls']:.0f} model calls"
        self.progress.say(f"{name} step {step}: {values['replays']:.0f} further rollouts for the credit{calls}{failed}")

    async def load(self, algorithm: AlgorithmConfig) -> AlgorithmState:
        """Return an algorithm's state, saved or waiting to be saved, or a new one before its first step."""
        for turn, _ in reversed(self._waiting):
            if turn.name == algorithm.name:
                return turn.state
        found = await load_algorithm(self.session.store, self.name, self.state.run, algorithm.name)
        return found or AlgorithmState()

    @property
    def can_wait(self) -> bool:
        """True if steps may wait to be saved: algorithms side by side are never all between two steps."""
        config = self.session.plan.config
        return config.schedule.mode != "concurrent" or len(config.algorithm) == 1

    def waiting(self, turn: "DrivenAlgorithm | None" = None) -> int:
        """Return the number of steps that wait to be saved, of all algorithms or of one."""
        return sum(turn is None or turn is each for each, _ in self._waiting)

    async def commit(self, turn: "DrivenAlgorithm", report: StepReport, *, is_stopping: bool) -> StepReport:
        """Log a step's metrics, save it with all that waits unless it may wait too, then tell the observers.

        Returns the report with the metrics that the algorithm does not see.

        The metrics come first: a step that is saved is not repeated, so a kill in between would lose them. Those of a
        step that is repeated replace them.
        """
        name = turn.name
        metrics = {
            **self._replays.pop(name, {}),
            **self.reports.sampling.take(name),
            **self.reports.shares.take(name),
            **report.metrics,
        }
        report = msgspec.structs.replace(report, metrics=metrics)
        async with self._lock:
            number = self.state.turn + 1
            await self._log(name, report, turn=number)
            self.state = msgspec.structs.replace(self.state, turn=number)
            self._waiting.append((turn, report))
            is_validated = self.is_validated(number)
            if await turn.save(must=is_stopping or report.is_finished or is_validated):
                await self._save_waiting(besides=turn)
            if is_validated:
                self._due.append(await self.now())
        async with self._changed:
            self._changed.notify_all()
        self._tell(name, report, turn=number)
        return report

    async def now(self) -> Moment:
        """Return the present moment."""
        states = {algorithm.name: await self.load(algorithm) for algorithm in self.session.plan.config.algorithm}
        return Moment(turn=self.state.turn, versions=dict(self.session.live.versions()), states=states)

    def take_due(self) -> Moment | None:
        """Remove and return the first moment of which a validation is due, ``None`` without one."""
        return self._due.popleft() if self._due else None

    def is_validated(self, turn: int) -> bool:
        """Return true if a validation follows so many steps, whose versions must be on disk."""
        every = self.session.plan.config.experiment.validate_every
        return bool(turn and every and turn % every == 0 and self.validation_tasks)

    async def save_waiting(self) -> bool:
        """Save all steps that wait; returns false if an algorithm cannot, because its last step was interrupted."""
        async with self._lock:
            return not self._waiting or await self._save_waiting()

    async def _save_waiting(self, *, besides: "DrivenAlgorithm | None" = None) -> bool:
        """Save the algorithms whose steps wait, ``besides`` one that has just done so, then all steps at once."""
        turns = dict.fromkeys(turn for turn, _ in self._waiting)
        for turn in turns:
            if turn is not besides and not await turn.save(must=True):
                return False
        live = [self.session.live.current(name) for turn in turns for name in turn.tunes]
        self.state = msgspec.structs.replace(self.state, live=self.session.live.versions())
        await save_progress(
            self.session.store,
            self.state,
            algorithms={turn.name: turn.state for turn in turns},
            trained={(turn.name, report.step): report.trained for turn, report in self._waiting if report.trained},
            others=saved_marks(self.name, self.state.run, live),
        )
        self._waiting.clear()
        return True

    async def go_back(self, algorithms: Mapping[str, AlgorithmState], *, others: Mapping[str, bytes]) -> None:
        """Save the live versions and the states of algorithms that went back to them, with ``others`` by key."""
        async with self._lock:
            self.state = msgspec.structs.replace(self.state, live=self.session.live.versions())
            await save_progress(self.session.store, self.state, algorithms=algorithms, others=others)

    async def changed(self) -> None:
        """Return once any algorithm has finished a step."""
        async with self._changed:
            await self._changed.wait()

    async def alert(self, kind: AlertKind, found: Suggestion, *, key: str) -> None:
        """Keep what a rule found in the run, once for each key, and let observers and sinks tell it."""
        if await keep_alert(self.session.store, self.name, self.state.run, kind, found, key=key):
            facts = msgspec.structs.asdict(found)
            manager = self.session.plan.manager
            manager.notify("agl_alert_raised", experiment=self.name, run=self.state.run, kind=kind, **facts)
            self.on_alert()

    def recorded(self, algorithm: AlgorithmConfig, collector: Collector) -> SourceReader:
        """Make the reader of an algorithm's sources."""
        plan = self.session.plan
        sources = Sources(
            experiment=plan.name,
            run=self.state.run,
            algorithms=tuple(source for source in algorithm.source if not experiment_of(source)),
            experiments=tuple(filter(None, map(experiment_of, algorithm.source))),
            tunes=algorithm.tunes,
            waits=plan.config.schedule.mode == "concurrent",
        )
        return SourceReader(
            sources,
            store=self.session.store,
            collector=collector,
            state=self._state_of,
            current=self.session.live.current,
            changed=self.changed,
        )

    async def _state_of(self, name: str) -> AlgorithmState:
        return await self.load(next(each for each in self.session.plan.config.algorithm if each.name == name))

    async def _log(self, name: str, report: StepReport, *, turn: int) -> None:
        """Log a step's metrics to the store; ``turn`` counts the steps of all algorithms."""
        now, place = time.time(), self._place(name, turn)
        metrics = [
            Metric(step=report.step, name=key, value=value, time=now, **place) for key, value in report.metrics.items()
        ]
        if metrics:
            await self.session.store.log_metrics(metrics)
            self.on_logged()

    def _tell(self, name: str, report: StepReport, *, turn: int) -> None:
        """Call the observers of a step."""
        plan = self.session.plan
        plan.manager.notify("agl_step_finished", report=report, workdir=plan.workdir, **self._place(name, turn))

    def _place(self, name: str, turn: int) -> dict[str, Any]:
        return {"experiment": self.name, "run": self.state.run, "algorithm": name, "experiment_step": turn}

    async def record(self, tasks: Sequence[Json]) -> None:
        """Run every task once and show a summary, for an experiment without an algorithm."""
        collected = await self.collector("record", None)(tasks, step=1, mode="test")
        await keep_tallies(self.session.store, self.state, self.reports.steps.take("record", step=1, uses={}))
        rewards = [episode.reward for episode in collected.episodes if episode.reward is not None]
        failed = sum(episode.rollout.status != "succeeded" for episode in collected.episodes)
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        self.progress.update("record rollouts", 0, 0)
        self.progress.say(f"recorded {len(tasks)} rollouts, {failed} failed{mean}")

    def view_validations(self) -> None:
        """Show the newest validation and the best one."""
        if found := self.validations.all():
            best = self.validations.best
            self.view.validation, self.view.best = (found[-1].turn, found[-1].mean), (best.turn, best.mean)

    async def validate_first(self) -> float | None:
        """Return the mean reward before the first step; ``None`` where it was not measured then."""
        tasks, known = self.validation_tasks, self.validations.at(0)
        if known is None:
            return None if self.state.turn else await self.validate(await self.now())
        self.validated = await self.collector(VALIDATION, None).collected_before(len(tasks), step=0, mode="val")
        return known.mean

    async def validate(self, moment: Moment) -> float | None:
        """Return the mean reward of a moment's versions on the validation tasks, ``None`` without any.

        A rollout that failed or has no reward counts 0.
        """
        tasks, step = self.validation_tasks, moment.turn
        if not tasks:
            return None
        if (known := self.validations.at(step)) is not None:
            return known.mean
        collector, states = self.collector(VALIDATION, None), moment.states
        versions = await collector.pinned_before(step=step, mode="val") or moment.versions
        files = files_of([await self.session.store.resource(*version) for version in versions.items()], states)
        self.validations.begin(files)
        episodes = (await collector(tasks, step=step, mode="val", resources=versions)).episodes
        if not step:
            self.validated = episodes
        reward, failed = fmean(rewards_of(episodes)), failures_of(episodes)
        report = StepReport(step=step, metrics={"reward": reward, "failed": float(failed)})
        tallies = self.reports.steps.take(VALIDATION, step=step, uses={})
        await keep_tallies(self.session.store, self.state, tallies)
        await self._log(VALIDATION, report, turn=step)  # first: a validation that is known is not repeated
        await self.validations.add(turn=step, versions=versions, steps=files, episodes=episodes, states=states)
        self._tell(VALIDATION, report, turn=step)
        self.view_validations()
        self.progress.update(f"{VALIDATION} rollouts", 0, 0)
        note = f" ({failed} of {len(tasks)} failed)" if failed else ""
        self.progress.say(f"validation reward after step {step}: {reward:.3f}{note}")
        return reward


class DrivenAlgorithm:
    """One algorithm in a schedule: sets it up when its turn comes, steps it, saves its state."""

    def __init__(self, driver: Driver, config: AlgorithmConfig, state: AlgorithmState) -> None:
        self._driver = driver
        self._config = config
        self._state = state
        self._save: SaveFn | None = None
        self._collecting = Collecting()
        self._credit = driver.credit(config)
        self._settings = training_settings(driver.session.plan.config, config)
        self._algorithm: Algorithm | None = None
        self._trained: set[str] = set()
        self._published: list[str] = []
        manager = driver.session.plan.manager
        self._total = steps_in_all(manager.resolve(manager.algorithm(config.use)), config.params)
        self._times = StepTimes()
        self._watch = StepWatch(config.name)
        self.is_finished = state.is_finished
        self._view = driver.view.algorithms[config.name]
        self._view.step, self._view.total, self._view.is_finished = state.step, self._total, state.is_finished

    @property
    def name(self) -> str:
        """Its name within the experiment."""
        return self._config.name

    @property
    def steps(self) -> int:
        """Steps so far, including those before a restart."""
        return self._state.step

    @property
    def tunes(self) -> tuple[str, ...]:
        """Names of the resources that it tunes."""
        return self._config.tunes

    @property
    def state(self) -> AlgorithmState:
        """Its state after the last step."""
        return self._state

    async def save(self, *, must: bool) -> bool:
        """Let the algorithm write what its state names; returns true once it has, see ``defer`` of its context."""
        return self._save is None or await self._save(must)

    async def check(self) -> None:
        """Let the algorithm check its needs before its turn; builds and closes it."""
        algorithm = self._build()
        try:
            if isinstance(algorithm, CheckedAlgorithm):
                await algorithm.check(self._context())
        finally:
            await algorithm.close()

    async def begin(self) -> None:
        """Build, set up and restore the algorithm, once."""
        if self._algorithm is not None:
            return
        session, name = self._driver.session, self._config.name
        self._algorithm = algorithm = session.algorithm(self._config)
        with told(f"setting up the algorithm {name}", say=self._driver.progress.say):
            await algorithm.setup(self._context())
        if self._state.step:
            await algorithm.restore(self._state.state)
            changed = ", ".join(changed_settings(self._state.settings, self._settings))
            other = f" with other settings: {changed}" if changed else ""
            self._driver.progress.say(f"{name}: continues after step {self._state.step}{other}")
        self._trained = await trained_rollouts(session.store, self._driver.name, self._driver.state.run, name)
        self._times = StepTimes()
        self._view.has_begun = True
        self._driver.progress.update(f"{name} steps", self._state.step, self._total)

    async def step(self) -> None:
        """Take one step; raises :class:`AglError` if it trains a rollout twice.

        A step that is cancelled while others wait to be saved is only interrupted where it collects: in the middle of
        an update the weights would belong to no step.
        """
        if self._algorithm is None:
            raise AglError("begin() was not called")
        name = self._config.name
        self._published.clear()
        report, is_stopping = await self._report(self._algorithm)
        if report.step != self._state.step + 1 and not (report.is_finished and report.step == self._state.step):
            raise AglError(
                f"algorithm {name!r} reported step {report.step} after step {self._state.step}; "
                "steps count from 1 and continue after a restore. This is a defect of the algorithm"
            )
        twice = self._trained.intersection(report.trained)
        if twice:
            raise AglError(
                f"algorithm {name!r} trained {sorted(twice)[0]!r} a second time. This is a defect of the algorithm"
            )
        self._trained.update(report.trained)
        self._state = AlgorithmState(
            step=report.step,
            is_finished=report.is_finished,
            stop_reason=report.stop_reason,
            state=dict(self._algorithm.state()),
            settings=self._settings,
        )
        await self._keep_uses(report)
        report = msgspec.structs.replace(report, published=tuple(self._published) or report.published, uses={})
        whole = await to_end(self._driver.commit(self, report, is_stopping=is_stopping))
        self.is_finished = report.is_finished
        self._driver.progress.update(f"{name} rollouts", 0, 0)
        left = self._times.ended(left=0 if report.is_finished else self._total - report.step)
        self._view.stepped(report, left=left)
        self._driver.progress.update(f"{name} steps", report.step, self._total, left)
        line = step_line(
            name,
            report.step,
            metrics=report.metrics,
            has_published=bool(report.published),
            total=self._total,
            ending=(report.stop_reason, left),
        )
        self._driver.progress.say(line)
        for found in self._watch.add(whole):
            self._driver.progress.say(f"{name}: {found.evidence}. To change that: {found.change}")
            await self._driver.alert("suggestion", found, key=name)
        if is_stopping:
            raise asyncio.CancelledError

    async def _report(self, algorithm: Algorithm) -> tuple[StepReport, bool]:
        """Take a step; returns its report, and true if the run was stopped meanwhile."""
        step = asyncio.ensure_future(algorithm.step())
        try:
            return await asyncio.shield(step), False
        except asyncio.CancelledError:
            if not self._driver.waiting():
                step.cancel()
                return await step, True
            patience = ENDS_SOON_S if self._collecting.is_under_way else 0.0
            self._collecting.stop()
            telling = asyncio.get_running_loop().call_later(patience, self._tell_stopping, step)
            try:
                return await step, True
            finally:
                telling.cancel()

    def _tell_stopping(self, step: "asyncio.Task[StepReport]") -> None:
        """Say that a step goes on although the run stops: it is in its update."""
        if not step.done():
            self._driver.progress.say(
                f"stopping {self.name} once it has ended its update and saved it; stop it again to end at once, "
                "and --resume repeats what is not saved"
            )

    @property
    def can_go_back(self) -> bool:
        """True if the algorithm, which has begun, can continue from an earlier state."""
        return isinstance(self._algorithm, ReversibleAlgorithm)

    async def go_back(self, state: AlgorithmState | None, *, rate: float) -> AlgorithmState:
        """Let the algorithm, which has begun, continue from an earlier state with smaller steps; returns its new state.

        The live versions must be those of that state already. ``None`` is the state before its first step.
        """
        if not isinstance(self._algorithm, ReversibleAlgorithm):
            raise AglError(f"algorithm {self.name!r} cannot go back to an earlier state")
        await self._algorithm.go_back({} if state is None else state.state, rate=rate)
        self._state = msgspec.structs.replace(self._state, state=dict(self._algorithm.state()))
        return self._state

    def stopped(self, reason: str) -> AlgorithmState:
        """Return the state of the algorithm as one that ended for ``reason`` before its last step."""
        return msgspec.structs.replace(self._state, is_finished=True, stop_reason=reason)

    async def end(self) -> None:
        """Save what waits to be saved, and release the algorithm."""
        await self._save_last()
        self._view.has_begun = False
        self._driver.progress.update(f"{self._config.name} rollouts", 0, 0)
        self._driver.progress.update(self._config.name, 0, 0)
        self._driver.progress.update(f"{self._config.name} steps", 0, 0)
        algorithm, self._algorithm = self._algorithm, None
        if algorithm is not None:
            await algorithm.close()

    async def _keep_uses(self, report: StepReport) -> None:
        """Store what the step did with each call, and its sums, before it is saved: no saved step lacks them."""
        driver, algorithm, step = self._driver, self._config.name, report.step
        records = {
            rollout_id: TrainingRecord(
                experiment=driver.name, run=driver.state.run, algorithm=algorithm, step=step, calls=calls
            )
            for rollout_id, calls in report.uses.items()
        }
        await save_training(driver.session.store, records)
        tallies = driver.reports.steps.take(algorithm, step=step, uses=report.uses)
        await keep_tallies(driver.session.store, driver.state, tallies)

    async def _save_last(self) -> None:
        """Save the steps that wait where a run ends before its time; says how many are repeated if that fails."""
        driver, waiting = self._driver, self._driver.waiting()
        if self._algorithm is None or not self._driver.waiting(self):
            return
        problem = "an update was interrupted"
        try:
            if await to_end(driver.save_waiting()):
                return
        except (AglError, OSError) as error:  # why the run ends is told, and not that it could not be saved either
            problem = str(error)
        count = "the last step is" if waiting == 1 else f"the last {waiting} steps are"
        driver.progress.say(f"{count} not saved ({problem}); --resume repeats them with the rollouts that they had")

    def _build(self) -> Algorithm:
        manager = self._driver.session.plan.manager
        return manager.build(manager.algorithm(self._config.use), **self._config.params)

    def _context(self) -> AlgorithmContext:
        driver, config = self._driver, self._config
        session = driver.session
        plan = session.plan
        collector = driver.collector(config.name, config, credit=self._credit)
        return AlgorithmContext(
            experiment=plan.name,
            name=config.name,
            tunes=config.tunes,
            train=plan.train,
            val=plan.val,
            validation=len(driver.validation_tasks),
            validated=lambda: driver.validated,
            seed=plan.config.experiment.seed,
            workdir=_make_folder(plan.workdir / f"run-{driver.state.run}" / config.name),
            folder=plan.folder,
            store=session.store,
            credit=self._credit,
            collect=self._collecting.watched(collector),
            sources=config.source,
            recorded=self._collecting.watched(driver.recorded(config, collector)),
            publish=self._publish,
            propose=self._propose,
            kept=lambda: driver.validations.kept(config.name),
            live=session.live.versions,
            endpoint=session.endpoint,
            current=session.live.current,
            policy=self._policy,
            progress=self._work,
            say=lambda text: driver.progress.say(f"{config.name}: {text}"),
            clock=time.time,
            defer=self._defer if driver.can_wait else None,
            agents=config.agents,
        )

    def _defer(self, save: SaveFn) -> None:
        self._save = save

    def _work(self, done: int, total: int, text: str) -> None:
        """Show what the algorithm does within a step."""
        self._view.work = (done, total, text)
        self._driver.progress.update(self._config.name, done, total, text)

    def _policy(self, name: str) -> Policy:
        policies = self._driver.session.policies
        if name not in policies:
            hint = did_you_mean(name, policies, otherwise=f"there are {sorted(policies)}")
            raise ConfigError(f"there is no policy {name!r}; {hint}")
        return policies[name]

    async def _publish(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None = None
    ) -> ResourceVersion:
        driver = self._driver
        waits = {} if self._save is None else deferred(driver.name, driver.state.run)
        version = self._version(name, resource, step=step, metadata={**(metadata or {}), **waits})
        version = await self._driver.session.publish(version)
        self._published.append(f"{name}@{version.version}")
        return version

    async def _propose(
        self,
        name: str,
        resource: Resource,
        *,
        step: int,
        key: str,
        parent: str = "",
        metadata: Mapping[str, Json] | None = None,
    ) -> ResourceVersion:
        version = self._version(name, resource, step=step, metadata={**(metadata or {}), "candidate": True})
        named = msgspec.structs.replace(version, version=f"{version.version}-{key}", parent=parent or version.parent)
        return await self._driver.session.live.publish(named)

    def _version(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None
    ) -> ResourceVersion:
        driver, config = self._driver, self._config
        if name not in config.tunes:
            raise ConfigError(f"algorithm {config.name!r} may not publish {name!r}; it tunes {config.tunes}")
        return ResourceVersion(
            name=name,
            version=version_of_step(driver.name, driver.state.run, config.name, step),
            resource=resource,
            parent=driver.session.live.current(name).version,
            algorithm=config.name,
            step=step,
            created_at=time.time(),
            metadata=dict(metadata or {}),
        )


def _make_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
