"""Drives a run: commits the steps of its algorithms, validates between them, and calls its observers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import (
    CallUse,
    Credit,
    ExperimentRecord,
    Metric,
    StepReport,
)
from agl.hints import count_of
from agl.schemas import Episode, Json
from agl_inspect.advice.suggestions import AlertKind, Suggestion, add_alert
from agl_inspect.records.state import AlgorithmState, load_algorithm, save_progress, saved_marks
from agl_inspect.records.validations import Validations, failures_of, files_of, rewards_of
from agl_run.display.progress import Progress
from agl_run.display.run_view import AlgorithmView, RunView
from agl_run.display.summary import LiveSummary
from agl_run.parts.counterfactual import check_replays
from agl_run.plan import VALIDATION
from agl_run.run.collector import Collector
from agl_run.run.running_experiment import RunningExperiment
from agl_run.watch.agent_patterns import PatternReport
from agl_run.watch.agreement import AgreementReport
from agl_run.watch.arrival import ArrivalReport
from agl_run.watch.failures import FailureReport
from agl_run.watch.gold import GoldWatch
from agl_run.watch.observers import StepShares, StepWatch, TallyObserver
from agl_run.watch.sampling import SamplingReport

if TYPE_CHECKING:
    from agl_run.run.algorithm import DrivenAlgorithm
    from agl_run.watch.observers import Observer


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of a run at one moment, from which a validation starts.

    Attributes:
        turn: The number of steps that all algorithms together have taken until this moment.
        versions: The live versions, by resource.
        states: The states of the algorithms, by name.
    """

    turn: int
    versions: Mapping[str, str]
    states: Mapping[str, AlgorithmState]


class Driver:
    """One run of an experiment's algorithms while the experiment is running.

    Args:
        running: The running experiment.
        state: The experiment's state at the start.
        progress: Shows the progress.
        is_trial: If true, missed model calls are only reported, even if the settings say that they end the run.

    Attributes:
        observers: The observers of the run, in the order in which they are called.
        failures: The observer that counts failed rollouts.
        patterns: The observer of patterns that match no agent.
        agreement: The observer of model calls that are missing from the records.
        validations: The run's validations; load them first.
        view: The numbers of the run that a display shows.
        validated: The episodes of the validation before the first step.
        on_logged: Called when the store has new metrics.
        on_alert: Called when the store has a new alert.
    """

    def __init__(
        self, running: RunningExperiment, state: ExperimentRecord, *, progress: Progress, is_trial: bool = False
    ) -> None:
        self.running = running
        self.state = state
        self.progress = progress
        url, names = running.store_url, [config.name for config in running.plan.config.algorithm]
        self.view = RunView(algorithms={name: AlgorithmView(name=name) for name in names})
        if isinstance(progress, LiveSummary):
            progress.watch(self.view)
        self.failures, self.patterns = FailureReport(store_url=url), PatternReport(running.plan)
        self.agreement = AgreementReport(running.plan.config.experiment, is_trial=is_trial, store_url=url)
        # The order counts: shares and tallies are measured before reports may raise and end the
        # run.
        self.observers: Sequence[Observer] = (
            StepShares(running.worker.slots.most, is_judged=bool(running.plan.config.reward)),
            TallyObserver(running.store, state),
            SamplingReport(store_url=url),
            self.failures,
            self.patterns,
            ArrivalReport(running.plan, live=running.live, is_trial=is_trial),
            self.agreement,
            self.view,
            GoldWatch(running.store, state),
            StepWatch(self._suggest),
        )
        self.validations = Validations(
            running.store,
            name=running.plan.name,
            run=state.run,
            tasks=self.validation_tasks,
            train=running.plan.train,
            agent=running.plan.agent.identity,
            tuned=frozenset(name for algorithm in running.plan.config.algorithm for name in algorithm.tunes),
        )
        # Counts of replays arrive while a step collects and are logged with its report.
        self._replays: dict[str, Mapping[str, float]] = {}
        # Steps that are done in this process and not saved yet, oldest first; see
        # agl_run.run.saving.
        self._waiting: list[tuple[DrivenAlgorithm, StepReport]] = []
        # Algorithms that run side by side commit one at a time, so that the turn counts without
        # gaps.
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._due: deque[Moment] = deque()
        self.validated: Sequence[Episode] = ()
        self.on_logged: Callable[[], None] = lambda: None
        self.on_alert: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.running.plan.name

    @property
    def validation_tasks(self) -> Sequence[Json]:
        """The tasks on which validations run."""
        plan = self.running.plan
        return plan.val[: plan.config.experiment.validation_limit or None]

    def credit(self, algorithm: AlgorithmConfig) -> Credit:
        """Build the credit of the algorithm's own settings, or else the experiment's credit.

        Raises:
            ConfigError: The credit replays rollouts, and the runner cannot replay.
        """
        plan = self.running.plan
        config = algorithm.credit or plan.config.credit
        credit: Credit = plan.manager.build(plan.manager.credit(config.use), **config.params)
        check_replays(plan, credit)
        return credit

    def collector(self, name: str, algorithm: AlgorithmConfig | None, *, credit: Credit | None = None) -> Collector:
        """Make a collector whose rollout ids contain ``name``."""
        return Collector(
            self.running,
            run=self.state.run,
            caller=name,
            algorithm=algorithm,
            observers=self.observers,
            tally=self.view.tally(name),
            progress=lambda done, total, text: self.progress.update(f"{name} rollouts", done, total, text),
            credit=credit,
            log=lambda step, values: self._note_replays(name, step, values),
        )

    async def _note_replays(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Show how many replays a step ran, and remember their metrics for the step's report."""
        self._replays[name] = values
        failed = f", {values['replays_failed']:.0f} of them failed" if values["replays_failed"] else ""
        calls = f", {count_of(round(values['replay_calls']), 'model call')}"
        replays = count_of(round(values["replays"]), "further rollout")
        self.progress.say(f"{name} step {step}: {replays} for the credit{calls}{failed}")

    async def load(self, algorithm: AlgorithmConfig) -> AlgorithmState:
        """Return an algorithm's newest state, saved or not; before its first step, return a new state."""
        # A waiting state is newer than the saved one.
        for turn, _ in reversed(self._waiting):
            if turn.name == algorithm.name:
                return turn.state
        found = await load_algorithm(self.running.store, self.name, self.state.run, algorithm.name)
        return found or AlgorithmState()

    @property
    def can_wait(self) -> bool:
        """True if steps may stay unsaved for a while.

        Steps of concurrent algorithms may not, because those algorithms are never all between two steps.
        """
        config = self.running.plan.config
        return config.schedule.mode != "concurrent" or len(config.algorithm) == 1

    def waiting(self, turn: "DrivenAlgorithm | None" = None) -> int:
        """Return the number of unsaved steps, of all algorithms or only of ``turn``."""
        return sum(turn is None or turn is each for each, _ in self._waiting)

    async def measure(
        self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]] | None = None
    ) -> dict[str, float]:
        """Return the metrics of a step that observers and replays add to those of the algorithm."""
        found = dict(self._replays.pop(caller, {}))
        for observer in self.observers:
            found |= await observer.measure(caller, step=step, uses=uses or {})
        return found

    async def _suggest(self, algorithm: str, found: Suggestion) -> None:
        """Show a suggestion about an algorithm, and store it as an alert."""
        self.progress.say(f"{algorithm}: {found.evidence}. To change that: {found.change}")
        await self.alert("suggestion", found, key=algorithm)

    async def commit(self, turn: "DrivenAlgorithm", report: StepReport, *, is_stopping: bool) -> None:
        """Log a step's metrics, save it with all unsaved steps before it, and call the plugins' observers.

        The algorithm may put off saving, in which case nothing is saved. Metrics are logged first, because a kill after
        the save would lose them: a saved step is not repeated. A repeated step replaces its earlier metrics.
        """
        async with self._lock:
            # The turn counts the steps of all algorithms; validations and plots are placed by it.
            number = self.state.turn + 1
            await self._log(turn.name, report, turn=number)
            self.state = msgspec.structs.replace(self.state, turn=number)
            # Appended before the algorithm is asked to save, because its save covers this step as
            # well.
            self._waiting.append((turn, report))
            # A validation pins rollouts to the present versions, which must survive a kill, so the
            # step may not wait.
            is_validated = self.is_validated(number)
            # The algorithm's files are written first and the store's record second: a kill in
            # between repeats a step, and never leaves a record whose weights are missing.
            if await turn.save(must=is_stopping or report.is_finished or is_validated):
                # One write of the store saves every waiting step together, so none of them can be
                # saved without the others.
                await self._save_waiting(besides=turn)
            if is_validated:
                # The moment is taken under the lock: another algorithm may publish before the
                # validation begins.
                self._due.append(await self.now())
        async with self._changed:
            # Algorithms that learn from this one's rollouts wait for whole steps.
            self._changed.notify_all()
        # Outside of the lock, because plugins may take their time, and after the save, because they
        # must not report a step that is repeated.
        self._notify(turn.name, report, turn=number)

    async def now(self) -> Moment:
        """Return the present state of the run."""
        states = {algorithm.name: await self.load(algorithm) for algorithm in self.running.plan.config.algorithm}
        return Moment(turn=self.state.turn, versions=dict(self.running.live.versions()), states=states)

    def take_due(self) -> Moment | None:
        """Remove and return the earliest moment that is due for a validation; ``None`` if no validation is due."""
        return self._due.popleft() if self._due else None

    def is_validated(self, turn: int) -> bool:
        """Return true if a validation is due after ``turn`` steps, so that the versions of then must be saved."""
        every = self.running.plan.config.experiment.validate_every
        return bool(turn and every and turn % every == 0 and self.validation_tasks)

    async def save_waiting(self) -> bool:
        """Save all unsaved steps; return false if an algorithm cannot save because its last step was interrupted."""
        async with self._lock:
            return not self._waiting or await self._save_waiting()

    async def _save_waiting(self, *, besides: "DrivenAlgorithm | None" = None) -> bool:
        """Save the algorithms with unsaved steps, except ``besides``, which has just saved; then save all steps."""
        # Each algorithm once, in the order of its first waiting step.
        turns = dict.fromkeys(turn for turn, _ in self._waiting)
        for turn in turns:
            if turn is not besides and not await turn.save(must=True):
                return False
        # The versions that were published while steps waited have their files now, and are marked
        # so.
        live = [self.running.live.current(name) for turn in turns for name in turn.tunes]
        self.state = msgspec.structs.replace(self.state, live=self.running.live.versions())
        await save_progress(
            self.running.store,
            self.state,
            algorithms={turn.name: turn.state for turn in turns},
            trained={(turn.name, report.step): report.trained for turn, report in self._waiting if report.trained},
            others=saved_marks(self.name, self.state.run, live),
        )
        # Only after the write: if it fails, the steps still wait and are tried again at the end.
        self._waiting.clear()
        return True

    async def go_back(self, algorithms: Mapping[str, AlgorithmState], *, others: Mapping[str, bytes]) -> None:
        """After a rollback, save the live versions, the new states of ``algorithms``, and ``others`` by key."""
        async with self._lock:
            self.state = msgspec.structs.replace(self.state, live=self.running.live.versions())
            await save_progress(self.running.store, self.state, algorithms=algorithms, others=others)

    async def changed(self) -> None:
        """Return once any algorithm has finished a step."""
        async with self._changed:
            await self._changed.wait()

    async def alert(self, kind: AlertKind, found: Suggestion, *, key: str) -> None:
        """Store a finding about the run, once per key, and pass it to plugins and sinks."""
        # The store decides whether an alert is new, so a resumed run does not report it twice.
        if await add_alert(self.running.store, self.name, self.state.run, kind, found, key=key):
            facts = msgspec.structs.asdict(found)
            manager = self.running.plan.manager
            manager.notify("agl_alert_raised", experiment=self.name, run=self.state.run, kind=kind, **facts)
            self.on_alert()

    async def _log(self, name: str, report: StepReport, *, turn: int) -> None:
        """Log a step's metrics to the store; ``turn`` is the number of steps of all algorithms together."""
        now, place = time.time(), self._place(name, turn)
        metrics = [
            Metric(step=report.step, name=key, value=value, time=now, **place) for key, value in report.metrics.items()
        ]
        if metrics:
            await self.running.store.log_metrics(metrics)
            self.on_logged()

    def _notify(self, name: str, report: StepReport, *, turn: int) -> None:
        """Call the plugins' hook for a finished step."""
        plan = self.running.plan
        plan.manager.notify("agl_step_finished", report=report, workdir=plan.workdir, **self._place(name, turn))

    def _place(self, name: str, turn: int) -> dict[str, Any]:
        return {"experiment": self.name, "run": self.state.run, "algorithm": name, "experiment_step": turn}

    async def record(self, tasks: Sequence[Json]) -> None:
        """Run every task once and show a summary, for an experiment without an algorithm."""
        collected = await self.collector("record", None)(tasks, step=1, mode="test")
        await self.measure("record", step=1)
        rewards = [episode.reward for episode in collected.episodes if episode.reward is not None]
        failed = sum(episode.rollout.status != "succeeded" for episode in collected.episodes)
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        self.progress.update("record rollouts", 0, 0)
        self.progress.say(f"recorded {count_of(len(tasks), 'rollout')}, {failed} failed{mean}")

    def view_validations(self) -> None:
        """Copy the newest and the best validation to the display's view."""
        if found := self.validations.all():
            best = self.validations.best
            self.view.validation, self.view.best = (found[-1].turn, found[-1].mean), (best.turn, best.mean)

    async def validate_first(self) -> float | None:
        """Return the mean validation reward before the first step; ``None`` if it was not measured before that step."""
        tasks, known = self.validation_tasks, self.validations.at(0)
        if known is None:
            return None if self.state.turn else await self.validate(await self.now())
        self.validated = await self.collector(VALIDATION, None).first_validation(len(tasks))
        return known.mean

    async def validate(self, moment: Moment) -> float | None:
        """Validate the versions of a moment, and return their mean reward; ``None`` if there are no validation tasks.

        A rollout that failed or has no reward counts as 0. A validation that is known already is not repeated.
        """
        tasks, step = self.validation_tasks, moment.turn
        if not tasks:
            return None
        if (known := self.validations.at(step)) is not None:
            return known.mean
        collector, states = self.collector(VALIDATION, None), moment.states
        # An interrupted validation continues with the versions to which its first rollouts were
        # pinned.
        versions = await collector.validated_versions(step=step) or moment.versions
        files = files_of([await self.running.store.resource(*version) for version in versions.items()], states)
        # From now on the files of these versions are protected, even if the algorithm deletes old
        # checkpoints.
        self.validations.begin(files)
        episodes = (await collector(tasks, step=step, mode="val", resources=versions)).episodes
        if not step:
            self.validated = episodes
        reward, failed = fmean(rewards_of(episodes)), failures_of(episodes)
        report = StepReport(step=step, metrics={"reward": reward, "failed": float(failed)})
        # Measured for its side effect on tallies; validation has no report of an algorithm to add
        # the numbers to.
        await self.measure(VALIDATION, step=step)
        await self._log(VALIDATION, report, turn=step)  # first: a validation that is known is not repeated
        # Added last, because its presence marks the validation as complete.
        await self.validations.add(turn=step, versions=versions, steps=files, episodes=episodes, states=states)
        self._notify(VALIDATION, report, turn=step)
        self.view_validations()
        self.progress.update(f"{VALIDATION} rollouts", 0, 0)
        unrewarded = sum(one.rollout.status == "succeeded" and one.reward is None for one in episodes)
        counts = ((failed, "failed"), (unrewarded, "without a reward"))
        notes = [f"{count} of {len(tasks)} {kind}" for count, kind in counts if count]
        note = f" ({', '.join(notes)})" if notes else ""
        self.progress.say(f"validation reward after step {step}: {reward:.3f}{note}")
        return reward
