"""The trainer: what ``agl run`` and ``agl.Trainer(...).fit(...)`` do, from a script, a notebook or an async program."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agl import PluginManager
from agl.algorithms import AlgorithmSpec, Spec
from agl.contracts import ExperimentRecord, Logger, Store
from agl.errors import ConfigError
from agl.schemas import LLM, Episode, Json, Record, Resource
from agl_run.experiment import state as saved
from agl_run.experiment.build import check_algorithms
from agl_run.experiment.config import (
    AlgorithmConfig,
    ComponentConfig,
    ExperimentConfig,
    ExperimentSection,
    GatewayConfig,
    PolicyConfig,
    RunnerConfig,
    ScheduleConfig,
)
from agl_run.experiment.continuation import begin
from agl_run.experiment.drive import DrivenAlgorithm, Driver
from agl_run.experiment.plan import Plan, make_plan
from agl_run.experiment.progress import Progress, default_progress
from agl_run.experiment.schedule import run_schedule
from agl_run.experiment.session import Session

T = TypeVar("T")


class FitResult(Record, frozen=True, kw_only=True):
    """What an experiment reached.

    Attributes:
        experiment: Its name.
        before: Validation reward before the first step, ``None`` without validation tasks.
        after: Validation reward at the end.
        steps: Steps of each algorithm.
        resources: The live version of every resource.
        workdir: Where checkpoints and metrics are.
        seconds: Wall time of this process's part.
    """

    experiment: str
    before: float | None = None
    after: float | None = None
    steps: dict[str, int] = {}
    resources: dict[str, str] = {}
    workdir: str = ""
    seconds: float = 0.0

    def __await__(self) -> Generator[Any, None, "FitResult"]:
        """Let ``await trainer.fit(...)`` read the same in a notebook, where it has already run."""
        yield from ()
        return self


class DevResult(Record, frozen=True, kw_only=True):
    """What a dry run recorded: its episodes, for a person to look at."""

    episodes: tuple[Episode, ...] = ()

    def __await__(self) -> Generator[Any, None, "DevResult"]:
        """Let ``await trainer.dev(...)`` read the same in a notebook."""
        yield from ()
        return self


class Trainer:
    """Runs an agent on tasks and lets algorithms learn from it.

    Args:
        algorithm: One algorithm or several: ``agl.GRPO(tunes="main_llm")`` or a registered name.
        n_runners: Attempts at once.
        adapter: ``{"agent_match": "write|rewrite"}``: whose calls train, where the algorithm does not say it.
        initial_resources: Resources by name; an ``LLM`` becomes a policy that runs elsewhere.
        policies: Model servers by resource name: ``{"main_llm": agl.Policy("torch", model=...)}``.
        store: URL or store object.
        name: The experiment's name.
        runner: ``async``, ``process`` or a :func:`agl.Runner`.
        credit: Name or :func:`agl.Credit`.
        rewards: Names or specifications of reward emitters.
        tracers: Names of tracers, such as ``("langchain",)``: who made each call, in the words of a framework.
        schedule: ``sequential``, ``alternate`` or ``concurrent``, or a ``ScheduleConfig``, whose ``every`` and
            ``first`` say how many steps make a turn and who runs to its end before the others.
        progress: What the person sees; bars or lines by default.
        plugins: The plugin manager; by default one with the installed plugins.
        folder: What relative paths are relative to.
        settings: Any further key of the ``[experiment]`` section, such as ``seed`` or ``hidden``.

    Raises:
        ConfigError: At ``fit`` or ``dev``, before the first rollout.
    """

    def __init__(  # noqa: PLR0913  # keyword-only; each is a section of the experiment file
        self,
        *,
        algorithm: str | AlgorithmSpec | Sequence[str | AlgorithmSpec] = (),
        n_runners: int | None = None,
        adapter: Mapping[str, str] | None = None,
        initial_resources: Mapping[str, Resource] | None = None,
        policies: Mapping[str, Spec] | None = None,
        store: str | Store = "sqlite:///runs/agl.db",
        name: str = "experiment",
        runner: str | Spec = "async",
        credit: str | Spec = "episode",
        rewards: Sequence[str | Spec] = (),
        tracers: Sequence[str] = (),
        schedule: str | ScheduleConfig = "sequential",
        gateway: str = "auto",
        progress: Progress | None = None,
        plugins: PluginManager | None = None,
        folder: str | Path = ".",
        runner_settings: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        specs = (algorithm,) if isinstance(algorithm, str | AlgorithmSpec) else tuple(algorithm)
        llms = {key: value for key, value in (initial_resources or {}).items() if isinstance(value, LLM)}
        served = {**{key: _served(value) for key, value in llms.items()}, **(policies or {})}
        section = _section(settings, name=name, store=store if isinstance(store, str) else "memory://")
        self._config = ExperimentConfig(
            experiment=section,
            runner=_runner(runner, n_runners, runner_settings or {}),
            policy={key: _policy(key, spec) for key, spec in served.items()},
            algorithm=tuple(_algorithm(spec, adapter or {}, tunable=list(served)) for spec in specs),
            schedule=schedule if isinstance(schedule, ScheduleConfig) else _schedule(schedule),
            credit=_component(credit),
            reward=tuple(_component(item) for item in rewards),
            tracers=tuple(tracers),
            gateway=GatewayConfig(use=gateway),
        )
        self._resources = {key: value for key, value in (initial_resources or {}).items() if key not in llms}
        self._store = None if isinstance(store, str) else store
        self._manager = plugins
        self._progress = progress
        self._folder = Path(folder)

    @classmethod
    def from_config(
        cls,
        config: ExperimentConfig,
        *,
        folder: str | Path = ".",
        plugins: PluginManager | None = None,
        progress: Progress | None = None,
    ) -> "Trainer":
        """The trainer that an experiment file describes; ``folder`` is the file's."""
        trainer = cls(plugins=plugins, progress=progress, folder=folder)
        trainer._config = config
        return trainer

    @property
    def config(self) -> ExperimentConfig:
        """The experiment as it would stand in a file."""
        return self._config

    def plan(self, agent: Any = None, train_dataset: Any = None, val_dataset: Any = None) -> Plan:
        """Check everything that can be checked without starting anything."""
        disabled = self._config.plugins.get("disabled", ())
        manager = self._manager or PluginManager.from_environment(disabled=disabled)
        return make_plan(
            self._config,
            folder=self._folder,
            manager=manager,
            agent=agent,
            train=train_dataset,
            val=val_dataset,
            resources=self._resources,
            store=self._store,
        )

    def fit(
        self,
        agent: Any = None,
        train_dataset: Iterable[Json] | str | Path | None = None,
        val_dataset: Iterable[Json] | str | Path | None = None,
        *,
        resume: bool = False,
        fresh: bool = False,
    ) -> Any:
        """Run the experiment to its end and return a :class:`FitResult`.

        In a notebook it blocks the cell; in an async program it returns an awaitable that runs beside the program.

        Args:
            agent: A function, a ``LitAgent``, ``"module:attribute"`` or a command.
            train_dataset: Tasks, or the path of a JSON-lines file.
            val_dataset: Likewise.
            resume: Continue an experiment that was stopped, or a finished one that has more steps to take by now.
            fresh: Start an experiment that ran before from its beginning.
        """
        plan = self.plan(agent, train_dataset, val_dataset)
        return run_anywhere(lambda: self._fit(plan, resume=resume, fresh=fresh))

    def dev(
        self,
        agent: Any = None,
        train_dataset: Iterable[Json] | str | Path | None = None,
        *,
        tasks: int = 3,
        record_as: str = "",
    ) -> Any:
        """Run the agent on a few tasks without training; returns a :class:`DevResult`.

        Shows what would be recorded: calls, rewards, rows, and why a call would reach none. The rollouts belong to an
        experiment of their own, ``record_as`` or ``NAME-dev``, so that a trainer may run at the same time.
        """
        plan = self.plan(agent, train_dataset)
        return run_anywhere(lambda: self._dev(plan, tasks, record_as))

    async def _fit(self, plan: Plan, *, resume: bool, fresh: bool) -> FitResult:
        started = time.monotonic()
        progress = self._progress or default_progress()
        session = Session(plan)
        loggers: list[Logger] = []
        try:
            await check_algorithms(plan)  # wrong parameters are told before the experiment counts as started
            store = await session.open_store()
            state = await begin(store, plan, resume=resume, fresh=fresh)
            loggers = _loggers(plan)
            await session.start(state, say=progress.say)
            driver = Driver(session, state, progress=progress, loggers=loggers)
            before, after = await _run(driver)
            steps = {c.label: (await driver.load(c)).step for c in plan.config.algorithm}
            return FitResult(
                experiment=plan.name,
                before=before,
                after=after,
                steps=steps,
                resources=session.live.versions(),
                workdir=str(plan.workdir),
                seconds=time.monotonic() - started,
            )
        finally:
            progress.close()
            await session.close()
            for logger in loggers:
                logger.close()

    async def _dev(self, plan: Plan, tasks: int, record_as: str) -> DevResult:
        progress = self._progress or default_progress()
        name = plan.name
        plan = plan.renamed(record_as or f"{name}-dev")
        session = Session(plan)
        try:
            store = await session.open_store()
            previous = await saved.load_experiment(store, name)
            state = ExperimentRecord(
                name=plan.name, run=previous.run if previous else 1, live=previous.live if previous else {}
            )
            await session.start(state)
            driver = Driver(session, state, progress=progress, loggers=())
            chosen = list(plan.train or plan.val)[:tasks]
            config = plan.config.algorithm[0] if plan.config.algorithm else None
            collect = driver.collector(f"dev-{time.time_ns() // 1_000_000}", config)
            collected = await collect(chosen, step=0, mode="test")
            return DevResult(episodes=collected.episodes)
        finally:
            progress.close()
            await session.close()


def _loggers(plan: Plan) -> list[Logger]:
    manager = plan.manager
    configs = plan.config.logger or (ComponentConfig(use="jsonl"),)
    return [
        manager.build(manager.logger(item.use), experiment=plan.name, workdir=plan.workdir, **item.params)
        for item in configs
    ]


async def _run(driver: Driver) -> tuple[float | None, float | None]:
    """Validate, run the schedule, validate again, and mark the experiment as finished."""
    plan = driver.session.plan
    configs = plan.config.algorithm
    states = [await driver.load(config) for config in configs]
    turns = [DrivenAlgorithm(driver, config, state) for config, state in zip(configs, states, strict=True)]
    before = await _check_and_validate(driver, turns)
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


async def _check_and_validate(driver: Driver, turns: Sequence[DrivenAlgorithm]) -> float | None:
    """Let the algorithms check what they need before the first rollout is paid, then validate."""
    able = _able_to_begin(turns, driver.session.plan.config.schedule)
    try:
        for turn in turns:
            if turn not in able and not turn.is_finished:
                await turn.check()
        for turn in able:
            await turn.begin()
        return await driver.validate(0)
    except BaseException:
        for turn in turns:
            await turn.end()
        raise


def _able_to_begin(turns: Sequence[DrivenAlgorithm], schedule: ScheduleConfig) -> list[DrivenAlgorithm]:
    """Who comes first, and everybody else who does not have to wait for what an earlier one leaves."""
    waiting = [turn for turn in turns if not turn.is_finished]
    if schedule.mode == "sequential":
        return waiting[:1]
    first = [turn for turn in waiting if turn.label in schedule.firsts]
    changing = {name for turn in first for name in turn.resources}
    rest = [turn for turn in waiting if turn not in first and changing.isdisjoint(turn.resources)]
    return [*first[:1], *rest]


def run_anywhere(work: Callable[[], Coroutine[Any, Any, T]]) -> T | Awaitable[T]:
    """Run a coroutine to its end from any program.

    Without a running loop: here, on a new loop. In a notebook: on a loop in another thread, blocking. In an async
    program: likewise, but returning an awaitable, whose cancellation cancels the work.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    runner = _ThreadRun(work)
    if is_in_notebook():
        return runner.wait()
    return asyncio.ensure_future(runner.wait_async(), loop=loop)


def is_in_notebook() -> bool:
    """Tell if a notebook's kernel runs this code; a program that only drives notebooks imports ipykernel too."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class _ThreadRun:
    """A coroutine that runs on an event loop of its own in a thread."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._ready = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="agl-trainer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def main() -> Any:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.ensure_future(self._work())
            self._ready.set()
            return await self._task

        try:
            self._result = asyncio.run(main())
        except BaseException as error:  # noqa: BLE001  # raised again where the result is asked for
            self._error = error
        finally:
            self._ready.set()

    def _cancel(self) -> None:
        self._ready.wait()
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)

    def wait(self) -> Any:
        """Block until it ends; an interrupt stops it first."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.2)
        except KeyboardInterrupt:
            self._cancel()
            self._thread.join()
            raise
        return self._outcome()

    async def wait_async(self) -> Any:
        """Wait without blocking the loop; cancelling stops the work."""
        try:
            await asyncio.to_thread(self._thread.join)
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.to_thread(self._thread.join)
            raise
        return self._outcome()

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def _section(settings: dict[str, Any], *, name: str, store: str) -> ExperimentSection:
    known = set(ExperimentSection.__struct_fields__)
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigError(f"Trainer got unknown arguments {unknown}; settings of an experiment are {sorted(known)}")
    return msgspec.convert({"agent": "", **settings, "name": name, "store": store}, ExperimentSection)


def _served(llm: LLM) -> Spec:
    params = {"base_url": llm.endpoint, "model": llm.model, "api_key_env": llm.api_key_env}
    return Spec(kind="policy", name="openai", params={**params, "sampling_parameters": llm.sampling_parameters})


def _policy(name: str, spec: Spec) -> PolicyConfig:
    params = dict(spec.params)
    table = {"use": spec.name, **{key: params.pop(key) for key in ("aliases", "agents", "label") if key in params}}
    try:
        return msgspec.convert({**table, "params": params}, PolicyConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {name!r}: {error}") from None


def _runner(runner: str | Spec, n_runners: int | None, settings: Mapping[str, Any]) -> RunnerConfig:
    spec = Spec(kind="runner", name=runner) if isinstance(runner, str) else runner
    table = {**settings, "use": spec.name, "params": dict(spec.params)}
    if n_runners is not None:
        table["concurrency"] = n_runners
    try:
        return msgspec.convert(table, RunnerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"runner settings: {error}") from None


def _algorithm(spec: str | AlgorithmSpec, adapter: Mapping[str, str], *, tunable: list[str]) -> AlgorithmConfig:
    spec = AlgorithmSpec(name=spec) if isinstance(spec, str) else spec
    unknown = sorted(set(adapter) - {"agent_match"})
    if unknown:
        raise ConfigError(f"adapter has unknown keys {unknown}; it takes agent_match, a regular expression")
    tunes = spec.tunes or (tuple(tunable) if len(tunable) == 1 else ())
    agents = spec.agents or adapter.get("agent_match", "")
    return AlgorithmConfig(
        use=spec.name,
        tunes=tunes,
        name=spec.label,
        agents=agents,
        source=spec.source,
        credit=None if spec.credit is None else _component(spec.credit),
        params=dict(spec.params),
    )


def _schedule(mode: str) -> ScheduleConfig:
    try:
        return msgspec.convert({"mode": mode}, ScheduleConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"schedule: {error}") from None


def _component(spec: str | Spec) -> ComponentConfig:
    if isinstance(spec, str):
        return ComponentConfig(use=spec)
    return ComponentConfig(use=spec.name, params=dict(spec.params))
