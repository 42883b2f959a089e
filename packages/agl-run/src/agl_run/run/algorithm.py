"""Drives one algorithm of a schedule.

It sets the algorithm up, takes its steps, saves its state, and refuses to train a rollout twice.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import Algorithm, AlgorithmContext, CheckedAlgorithm, Policy, ReversibleAlgorithm, StepReport
from agl.errors import AglError, ConfigError
from agl.hints import did_you_mean
from agl.schemas import Json, Resource, ResourceVersion
from agl_inspect.records.metrics import step_line, version_of_step
from agl_inspect.records.state import AlgorithmState, deferral, trained_rollouts
from agl_inspect.rollouts.training import TrainingRecord, save_training
from agl_run.config.training_settings import changed_settings, training_settings
from agl_run.parts.waiting import StepTimes, steps_in_all, waiting_for
from agl_run.run.driver import Driver
from agl_run.run.recorded import SourceReader
from agl_run.run.saving import Collecting, SaveFn, to_end

ENDS_SOON_S = 1.0
"""Seconds between a stop and the message about it; a step that only waits for rollouts ends before that."""


class DrivenAlgorithm:
    """One algorithm in a schedule: sets it up when its turn comes, takes its steps, and saves its state.

    Attributes:
        name: The algorithm's name within the experiment.
        tunes: Names of the resources that the algorithm tunes.
        state: The algorithm's state after its last step.
        is_finished: True if the algorithm takes no further step.
    """

    def __init__(self, driver: Driver, config: AlgorithmConfig, state: AlgorithmState) -> None:
        self._driver = driver
        self._config = config
        self.name, self.tunes = config.name, config.tunes
        self.state = state
        # Set by an algorithm that lets its steps wait; ``None`` means that every step is saved at
        # once.
        self._save: SaveFn | None = None
        self._collecting = Collecting()
        self._credit = driver.credit(config)
        self._settings = training_settings(driver.running.plan.config, config)
        self._algorithm: Algorithm | None = None
        # The ids of all rollouts that this algorithm has ever trained on, those before a restart
        # included.
        self._trained: set[str] = set()
        self._published: list[str] = []
        manager = driver.running.plan.manager
        self._total = steps_in_all(manager.resolve(manager.algorithm(config.use)), config.params)
        self._times = StepTimes()
        self.is_finished = state.is_finished
        self._view = driver.view.algorithms[config.name]
        self._view.step, self._view.total, self._view.is_finished = state.step, self._total, state.is_finished

    @property
    def steps(self) -> int:
        """The number of steps so far, including those before a restart."""
        return self.state.step

    async def save(self, *, must: bool) -> bool:
        """Ask the algorithm to write the files to which its state refers; see ``defer`` of its context.

        Args:
            must: Whether the algorithm has to write the files now.

        Returns:
            True if the files are written, false if the algorithm puts this off.
        """
        return self._save is None or await self._save(must)

    async def check(self) -> None:
        """Build the algorithm, let it check its requirements before its first step, and close it."""
        algorithm = self._build()
        try:
            # Algorithms whose turn is later are checked now, so that a night's run does not end at
            # the second one's typing mistake.
            if isinstance(algorithm, CheckedAlgorithm):
                await algorithm.check(self._context())
        finally:
            await algorithm.close()

    async def begin(self) -> None:
        """Build, set up and restore the algorithm; has no effect when called again."""
        if self._algorithm is not None:
            return
        running, name = self._driver.running, self.name
        self._algorithm = algorithm = running.algorithm(self._config)
        # Setting up may load a model, which takes minutes and would look like a hang.
        with waiting_for(f"setting up the algorithm {name}", say=self._driver.progress.say):
            await algorithm.setup(self._context())
        # A state without a step is a new one; there is nothing to restore, and algorithms need not
        # handle that.
        if self.state.step:
            changed = ", ".join(changed_settings(self.state.settings, self._settings))
            other = f" with other settings: {changed}" if changed else ""
            self._driver.progress.say(f"{name}: continues after step {self.state.step}{other}")
            # It may say that it falls back to an older state, so it speaks last.
            await algorithm.restore(self.state.state)
        # The ledger is read from the store and not from the state, so an algorithm cannot lose it.
        self._trained = await trained_rollouts(running.store, self._driver.name, self._driver.state.run, name)
        if self._trained:
            self._driver.patterns.has_trained(name)
        self._times = StepTimes()
        self._view.has_begun = True
        self._driver.progress.update(f"{name} steps", self.state.step, self._total)

    async def step(self) -> None:
        """Take one step; raises :class:`AglError` if it trains a rollout twice.

        A stop during the very last step lets the run end, unless its result is still to be validated.
        If the step is cancelled while earlier steps wait to be saved, it is interrupted only where it collects
        rollouts; interrupting an update would leave weights that belong to no step.
        """
        if self._algorithm is None:
            raise AglError("begin() was not called")
        driver = self._driver
        # What the step publishes is collected while it runs, because reports of older algorithms
        # name it incompletely.
        self._published.clear()
        # A stop in here may let the step end, see the method; its report is then saved like any
        # other.
        own, is_stopping = await self._report(self._algorithm)
        # Checked before anything is stored: a defect must not reach the ledger.
        self._check(own)
        self._trained.update(own.trained)
        self.state = AlgorithmState(
            step=own.step,
            is_finished=own.is_finished,
            stop_reason=own.stop_reason,
            # A copy, because the algorithm continues to change its own state.
            state=dict(self._algorithm.state()),
            settings=self._settings,
        )
        report = await self._measured(own)
        # A commit that is cut in half would leave metrics without a state, so a cancellation waits
        # for its end.
        await to_end(driver.commit(self, report, is_stopping=is_stopping))
        self.is_finished = own.is_finished
        await self._show(report, own.metrics)
        if is_stopping and await self._is_more_to_do():
            raise asyncio.CancelledError

    async def _is_more_to_do(self) -> bool:
        plan = self._driver.running.plan
        states = [await self._driver.load(config) for config in plan.config.algorithm]
        return bool(plan.val) or not all(state.is_finished for state in states)

    def _check(self, report: object) -> None:
        """Raise :class:`AglError` if a step returns no report, is out of order, or trains a rollout a second time."""
        name = self.name
        if not isinstance(report, StepReport):
            raise AglError(f"algorithm {name!r} returned {type(report).__name__} from step; return an agl.StepReport")
        if report.step != self.state.step + 1 and not (report.is_finished and report.step == self.state.step):
            raise AglError(
                f"algorithm {name!r} reported step {report.step} after step {self.state.step}; "
                "steps count from 1 and continue after a restore. This is a defect of the algorithm"
            )
        # Training a rollout twice biases the gradient silently; it can only come from a defect, and
        # so it ends the run.
        if twice := self._trained.intersection(report.trained):
            raise AglError(
                f"algorithm {name!r} trained {sorted(twice)[0]!r} a second time. This is a defect of the algorithm"
            )

    async def _measured(self, report: StepReport) -> StepReport:
        """Store how a step used each call, and return the step's report with the observers' metrics added."""
        driver, name = self._driver, self.name
        records = {
            rollout_id: TrainingRecord(
                experiment=driver.name, run=driver.state.run, algorithm=name, step=report.step, calls=calls
            )
            for rollout_id, calls in report.uses.items()
        }
        # Before the step is saved: ``agl why`` must never lack what a saved step did.
        await save_training(driver.running.store, records)
        # The algorithm's own number wins where both have one of a name.
        metrics = {**await driver.measure(name, step=report.step, uses=report.uses), **report.metrics}
        published = tuple(self._published) or report.published
        # The uses are in the store by now, and large.
        return msgspec.structs.replace(report, metrics=metrics, published=published, uses={})

    async def _show(self, report: StepReport, metrics: Mapping[str, float]) -> None:
        """Show a step with the algorithm's own metrics, and pass the report with all metrics to the observers."""
        name, progress = self.name, self._driver.progress
        progress.update(f"{name} rollouts", 0, 0)
        left = self._times.ended(left=0 if report.is_finished else self._total - report.step)
        self._view.left = left
        progress.update(f"{name} steps", report.step, self._total, left)
        line = step_line(
            name,
            report.step,
            metrics=metrics,
            has_published=bool(report.published),
            total=self._total,
            ending=(report.stop_reason, left),
        )
        progress.say(line)
        for observer in self._driver.observers:
            await observer.step(report, algorithm=name)

    async def _report(self, algorithm: Algorithm) -> tuple[StepReport, bool]:
        """Take one step; return its report, and whether the run was stopped during the step."""
        step = asyncio.ensure_future(algorithm.step())
        try:
            # Shielded, so that a stop reaches this method first and decides what becomes of the
            # step.
            return await asyncio.shield(step), False
        except asyncio.CancelledError:
            # Nothing is lost by an interruption: the step is repeated with the rollouts that it has
            # collected.
            if not self._driver.waiting():
                step.cancel()
                return await step, True
            # Waiting rollouts are cancelled below, and then the step ends at once and needs no
            # message.
            patience = ENDS_SOON_S if self._collecting.is_under_way else 0.0
            self._collecting.stop()
            # The update of a large model takes minutes; without a word a person would stop the run
            # a second time.
            telling = asyncio.get_running_loop().call_later(patience, self._tell_stopping, step)
            try:
                return await step, True
            finally:
                telling.cancel()

    def _tell_stopping(self, step: "asyncio.Task[StepReport]") -> None:
        """Show that the run will stop after the current step's update, unless the step has just ended."""
        if not step.done():
            self._driver.progress.say(
                f"stopping {self.name} once it has ended its update and saved it; stop it again to end at once, "
                "and --resume repeats what is not saved"
            )

    @property
    def can_go_back(self) -> bool:
        """True if the algorithm, once begun, can continue from an earlier state."""
        return isinstance(self._algorithm, ReversibleAlgorithm)

    async def go_back(self, state: AlgorithmState | None, *, rate: float) -> AlgorithmState:
        """Let the algorithm continue from an earlier state with smaller steps, and return its new state.

        The algorithm must have begun, and the live versions must already be those of the earlier state. ``None``
        stands for the state before the first step.
        """
        if not isinstance(self._algorithm, ReversibleAlgorithm):
            raise AglError(f"algorithm {self.name!r} cannot go back to an earlier state")
        await self._algorithm.go_back({} if state is None else state.state, rate=rate)
        self.state = msgspec.structs.replace(self.state, state=dict(self._algorithm.state()))
        return self.state

    def stopped(self, reason: str) -> AlgorithmState:
        """Return the algorithm's state, marked as finished early for ``reason``."""
        return msgspec.structs.replace(self.state, is_finished=True, stop_reason=reason)

    async def end(self) -> None:
        """Save the algorithm's unsaved steps, and close it."""
        await self._save_last()
        self._view.has_begun = False
        self._driver.progress.update(f"{self.name} rollouts", 0, 0)
        self._driver.progress.update(self.name, 0, 0)
        self._driver.progress.update(f"{self.name} steps", 0, 0)
        # Cleared before the close, so that a second call does nothing.
        algorithm, self._algorithm = self._algorithm, None
        if algorithm is not None:
            await algorithm.close()

    async def _save_last(self) -> None:
        """Save the unsaved steps of a run that ends early; if that fails, show how many steps will be repeated."""
        driver, waiting = self._driver, self._driver.waiting()
        if self._algorithm is None or not self._driver.waiting(self):
            return
        problem = "an update was interrupted"
        try:
            # A run that ends early still tries to save its steps; see agl_run.run.saving.
            if await to_end(driver.save_waiting()):
                return
        except (AglError, OSError) as error:  # the error that ends the run matters more than this one
            problem = str(error)
        lost = "the last step is" if waiting == 1 else f"the last {waiting} steps are"
        again = "it with the rollouts that it had" if waiting == 1 else "them with the rollouts that they had"
        driver.progress.say(f"{lost} not saved ({problem}); --resume repeats {again}")

    def _build(self) -> Algorithm:
        manager = self._driver.running.plan.manager
        return manager.build(manager.algorithm(self._config.use), **self._config.params)

    def _context(self) -> AlgorithmContext:
        driver, config = self._driver, self._config
        running = driver.running
        plan = running.plan
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
            store=running.store,
            credit=self._credit,
            collect=self._collecting.watched(collector),
            sources=config.source,
            recorded=self._collecting.watched(SourceReader(driver, config, collector)),
            publish=self._publish,
            propose=self._propose,
            kept=lambda: driver.validations.kept(config.name) | running.kept(config.name),
            live=running.live.versions,
            endpoint=running.endpoint,
            current=running.live.current,
            policy=self._policy,
            progress=self._work,
            say=lambda text: driver.progress.say(f"{config.name}: {text}"),
            clock=time.time,
            defer=self._defer if driver.can_wait else None,
            reads=collector.read_pictures,
            agents=config.agents,
        )

    def _defer(self, save: SaveFn) -> None:
        self._save = save

    def _work(self, done: int, total: int, text: str) -> None:
        """Show the algorithm's progress within a step."""
        self._view.work = (done, total, text)
        self._driver.progress.update(self.name, done, total, text)

    def _policy(self, name: str) -> Policy:
        policies = self._driver.running.policies
        if name not in policies:
            hint = did_you_mean(name, policies, otherwise=f"there are {sorted(policies)}")
            raise ConfigError(f"there is no policy {name!r}; {hint}")
        return policies[name]

    async def _publish(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None = None
    ) -> ResourceVersion:
        driver = self._driver
        # The mark says that the version has no files yet; the save of its step removes it.
        waits = {} if self._save is None else deferral(driver.name, driver.state.run)
        version = self._version(name, resource, step=step, metadata={**(metadata or {}), **waits})
        version = await self._driver.running.publish(version)
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
        # A candidate is stored and never live: only the contest of the algorithm's validation
        # publishes it.
        version = self._version(name, resource, step=step, metadata={**(metadata or {}), "candidate": True})
        named = msgspec.structs.replace(version, version=f"{version.version}-{key}", parent=parent or version.parent)
        return await self._driver.running.live.publish(named)

    def _version(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None
    ) -> ResourceVersion:
        driver, config = self._driver, self._config
        # The schedule relies on ``tunes`` to keep two algorithms from one resource.
        if name not in config.tunes:
            raise ConfigError(f"algorithm {config.name!r} may not publish {name!r}; it tunes {config.tunes}")
        return ResourceVersion(
            name=name,
            version=version_of_step(driver.name, driver.state.run, config.name, step),
            resource=resource,
            parent=driver.running.live.current(name).version,
            algorithm=config.name,
            step=step,
            created_at=time.time(),
            metadata=dict(metadata or {}),
        )


def _make_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
