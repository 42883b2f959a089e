"""The trainer behind ``agl run`` and ``agl.Trainer(...).fit(...)``, for scripts, notebooks and async programs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agl import PluginManager
from agl.algorithms import AlgorithmConfig, ComponentConfig, algorithm, component
from agl.contracts import Store
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import LLM, JsonResource, Mode, PromptTemplate, Resource
from agl_run.agents.agent import Agent
from agl_run.checks.planning import make_plan
from agl_run.config.dataset import Tasks
from agl_run.config.sections import (
    ASYNC,
    ExperimentConfig,
    ExperimentSection,
    GatewayConfig,
    PolicyConfig,
    ResourceConfig,
    RetentionConfig,
    RunnerConfig,
    ScheduleConfig,
    listed,
    policy,
    validated,
)
from agl_run.display.progress import Progress, default_progress
from agl_run.parts.rewards import given_rewards, name_of
from agl_run.plan import Plan, store_url_of
from agl_run.run.blocking import Work, require_blocking, run_beside, run_blocking
from agl_run.watch.failures import warn_of_failures

if TYPE_CHECKING:  # fit imports the whole engine, which a check of the settings does not need
    from agl_run.run.fit import DevResult, FitResult

GivenReward = str | ComponentConfig | Callable[..., Any]
"""Accepted forms of a reward: a registered name, a component, a function, an instance or a class."""


class Trainer:
    """Runs an agent on tasks and lets algorithms learn from it.

    Each argument corresponds to a section of an experiment file. It is the record of that section, or a string if a
    name is enough.

    Args:
        algorithm: One algorithm or several: ``agl.GRPO(tunes="main_llm")`` or a registered name.
        n_runners: Attempts at once; the same as the runner's ``concurrency``.
        adapter: ``{"agent_match": "write|rewrite"}``: the agents whose calls train, unless the algorithm names them.
        initial_resources: Resources by name; an ``LLM`` becomes a policy whose server runs elsewhere.
        policies: Model servers by resource name: ``{"main_llm": agl_run.policy("torch", model=...)}``.
        store: URL or store object.
        name: The experiment's name.
        runner: A runner's name, such as ``"process"``, or settings: ``agl_run.runner("process", timeout_s=60)``.
        credit: A credit's name, such as ``"episode"``, or a component with parameters:
            ``agl.algorithms.component("turn", gamma=0.9)``.
        rewards: Reward emitters: functions of the rollout and its spans, classes whose instances are such functions,
            names, or components.
        tracers: Names of tracers, such as ``("langchain",)``, which record the agent or node behind each call.
        schedule: ``sequential``, ``alternate`` or ``concurrent``, or a ``ScheduleConfig``, whose ``every``
            sets the steps in a turn, and ``first`` the algorithms that run to their end before the others.
        gateway: ``auto``, ``none``, or a ``GatewayConfig``.
        exporters: Destinations of finished rollouts, or of the run's metrics: names, such as ``"tensorboard"``, or
            components, such as ``agl.algorithms.component("otlp", endpoint="http://127.0.0.1:6006")``.
        retention: Which old rollouts ``fit`` removes after its end, such as ``RetentionConfig(older_than="30d")``.
        disabled_plugins: Names of plugins or distributions to leave out; ignored if ``plugins`` is given.
        progress: Shows the progress; by default a summary of the run in a terminal, and plain lines elsewhere.
        plugins: The plugin manager; by default one with the installed plugins.
        folder: Base of relative paths.
        settings: Any further key of the ``[experiment]`` section, such as ``seed`` or ``hidden``.

    Raises:
        ConfigError: An argument is unknown or has the wrong type. Missing arguments are reported by ``fit`` and
            ``dev``, before the first rollout.
    """

    def __init__(  # noqa: PLR0913  # keyword-only; each is a section of the experiment file
        self,
        *,
        algorithm: str | AlgorithmConfig | Sequence[str | AlgorithmConfig] = (),
        n_runners: int | None = None,
        adapter: Mapping[str, str] | None = None,
        initial_resources: Mapping[str, Resource | ResourceConfig] | None = None,
        policies: Mapping[str, str | PolicyConfig] | None = None,
        store: str | Store = "sqlite:///runs/agl.db",
        name: str = "experiment",
        runner: str | RunnerConfig = ASYNC,
        credit: str | ComponentConfig = "episode",
        rewards: GivenReward | Sequence[GivenReward] = (),
        tracers: str | Sequence[str] = (),
        schedule: str | ScheduleConfig = "sequential",
        gateway: str | GatewayConfig = "auto",
        exporters: str | ComponentConfig | Sequence[str | ComponentConfig] = (),
        retention: RetentionConfig = RetentionConfig(),  # noqa: B008  # frozen
        disabled_plugins: str | Sequence[str] = (),
        progress: Progress | None = None,
        plugins: PluginManager | None = None,
        folder: str | Path = ".",
        **settings: Any,
    ) -> None:
        resources = dict(initial_resources or {})
        # An ``LLM`` that is passed as a resource is a model server, and so it becomes a policy.
        served = {key: _served(value) for key, value in resources.items() if isinstance(value, LLM)}
        # One record in the end, whether it comes from Python or from a file, so both are checked by
        # the same rules.
        self._config = validated(
            ExperimentConfig(
                experiment=_section(settings, name=name, store=store if isinstance(store, str) else "memory://"),
                runner=_runner(runner, n_runners),
                policy={**served, **{key: _policy(key, value) for key, value in (policies or {}).items()}},
                resource={key: _resource(key, value) for key, value in resources.items() if key not in served},
                algorithm=tuple(_algorithm(item, adapter or {}) for item in _several(algorithm)),
                schedule=ScheduleConfig(mode=schedule) if isinstance(schedule, str) else schedule,  # pyright: ignore[reportArgumentType]  # validated() says which modes there are
                credit=_component(credit),
                reward=tuple(_reward(item) for item in _several(rewards)),
                gateway=GatewayConfig(use=gateway) if isinstance(gateway, str) else gateway,
                exporter=tuple(_component(item) for item in _several(exporters)),
                retention=retention,
                tracers=listed(tracers),
                plugins={"disabled": listed(disabled_plugins)} if disabled_plugins else {},
            )
        )
        self._store = None if isinstance(store, str) else store
        # Objects cannot be written into a configuration; it names them, and they travel next to it.
        self._rewards = given_rewards(_several(rewards))
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
        """Make the trainer that an experiment file describes.

        Args:
            config: The experiment, as :func:`load_config` reads it.
            folder: The file's folder.
            plugins: The plugin manager; by default one with the installed plugins that the experiment does not disable.
            progress: Shows the progress; by default a summary of the run in a terminal, and plain lines elsewhere.
        """
        trainer = cls(
            algorithm=config.algorithm,
            initial_resources=config.resource,
            policies=config.policy,
            runner=config.runner,
            credit=config.credit,
            rewards=config.reward,
            tracers=config.tracers,
            schedule=config.schedule,
            gateway=config.gateway,
            exporters=config.exporter,
            retention=config.retention,
            disabled_plugins=config.plugins.get("disabled", ()),
            progress=progress,
            plugins=plugins,
            folder=folder,
            **msgspec.structs.asdict(config.experiment),
        )
        trainer._config = msgspec.structs.replace(trainer._config, learn=config.learn)
        return trainer

    @property
    def config(self) -> ExperimentConfig:
        """The experiment as a file would describe it."""
        return self._config

    def plan(
        self, agent: Agent | None = None, train_dataset: Tasks | None = None, val_dataset: Tasks | None = None
    ) -> Plan:
        """Run all checks that need nothing to be started, and return the plan; :meth:`fit` explains the arguments."""
        disabled = self._config.plugins.get("disabled", ())
        return make_plan(
            self._config,
            folder=self._folder,
            manager=self._manager or PluginManager.from_environment(disabled=disabled),
            agent=agent,
            train=train_dataset,
            val=val_dataset,
            store=self._store,
            rewards=self._rewards,
        )

    def fit(
        self,
        agent: Agent | None = None,
        train_dataset: Tasks | None = None,
        val_dataset: Tasks | None = None,
        *,
        resume: bool = False,
        fresh: bool = False,
    ) -> "FitResult":
        """Run the experiment to its end; blocks until then, in a script or a notebook.

        Args:
            agent: A function, a ``LitAgent``, ``"module:attribute"`` or a command.
            train_dataset: Training tasks, a data frame with one task per row, or the path of a JSON-lines, CSV or
                Parquet file.
            val_dataset: Validation tasks, in one of the same forms.
            resume: Continue a stopped experiment, or a finished one that was given more steps.
            fresh: Start an experiment that ran before from its beginning.

        Raises:
            RunError: All rollouts failed, or all rollouts of training tasks; its message names the commonest errors.
            ConfigError: The experiment cannot run, or the event loop of an async program runs in this thread; use
                :meth:`fit_async` there.
        """
        # Before the plan, which imports the agent: the mistake is in the call.
        require_blocking("fit")
        return run_blocking(self._fit(self.plan(agent, train_dataset, val_dataset), resume=resume, fresh=fresh))

    async def fit_async(
        self,
        agent: Agent | None = None,
        train_dataset: Tasks | None = None,
        val_dataset: Tasks | None = None,
        *,
        resume: bool = False,
        fresh: bool = False,
    ) -> "FitResult":
        """Run the experiment like :meth:`fit` without blocking the event loop of an async program.

        The agent runs on another event loop in another thread. Cancelling this coroutine abandons the current step and
        stops the experiment, which can be resumed.
        """
        return await run_beside(self._fit(self.plan(agent, train_dataset, val_dataset), resume=resume, fresh=fresh))

    def _fit(self, plan: Plan, *, resume: bool, fresh: bool) -> "Work[FitResult]":
        from agl_run.run.fit import fit_plan

        return lambda: fit_plan(plan, progress=self._progress or default_progress(), resume=resume, fresh=fresh)

    def dev(
        self,
        agent: Agent | None = None,
        train_dataset: Tasks | None = None,
        *,
        tasks: int = 3,
        record_as: str = "",
        mode: Mode = "test",
    ) -> "DevResult":
        """Run the agent on a few tasks without training; blocks until the end, in a script or a notebook.

        The result has the calls, rewards and rows of each rollout, the errors of failed rollouts, and the reason for
        each call that is in no row; the errors are also logged as a warning. The rollouts are recorded as another
        experiment, so a trainer may run at the same time.

        Args:
            agent: A function, a ``LitAgent``, ``"module:attribute"`` or a command.
            train_dataset: Training tasks, a data frame with one task per row, or the path of a JSON-lines, CSV or
                Parquet file.
            tasks: Number of tasks to run.
            record_as: Name of the rollouts' experiment; by default ``NAME-dev``.
            mode: Mode of the rollouts; it decides which method of a ``LitAgent`` runs them.

        Raises:
            ConfigError: The experiment cannot run, or the event loop of an async program runs in this thread; use
                :meth:`dev_async` there.
        """
        require_blocking("dev")
        return run_blocking(self._dev(self.plan(agent, train_dataset), tasks, record_as, mode))

    async def dev_async(
        self,
        agent: Agent | None = None,
        train_dataset: Tasks | None = None,
        *,
        tasks: int = 3,
        record_as: str = "",
        mode: Mode = "test",
    ) -> "DevResult":
        """Run the agent on a few tasks like :meth:`dev` without blocking the event loop of an async program."""
        return await run_beside(self._dev(self.plan(agent, train_dataset), tasks, record_as, mode))

    def _dev(self, plan: Plan, tasks: int, record_as: str, mode: Mode) -> "Work[DevResult]":
        from agl_run.run.fit import dev_plan

        async def work() -> "DevResult":
            progress = self._progress or default_progress()
            result = await dev_plan(plan, progress=progress, tasks=tasks, record_as=record_as, mode=mode)
            warn_of_failures(result.episodes, store_url=store_url_of(plan))
            return result

        return work


def _section(settings: dict[str, Any], *, name: str, store: str) -> ExperimentSection:
    # The section's own fields are the list of settings, so a new key needs no change here.
    known = ExperimentSection.__struct_fields__
    for key in settings:
        if key not in known:
            arguments = [*known, *(Trainer.__init__.__kwdefaults__ or ())]
            hint = did_you_mean(key, arguments, otherwise=f"settings of an experiment are {', '.join(known)}")
            hint = f"n_workers is n_runners: write n_runners={settings[key]!r}" if key == "n_workers" else hint
            raise ConfigError(f"Trainer got the unknown argument {key!r}; {hint}")
    fields: dict[str, Any] = {"agent": "", **settings, "name": name, "store": store}
    return ExperimentSection(**fields)


def _served(llm: LLM) -> PolicyConfig:
    return policy(
        "openai",
        base_url=llm.endpoint,
        model=llm.model,
        api_key_env=llm.api_key_env,
        sampling_parameters=llm.sampling_parameters,
    )


def _policy(name: str, given: str | PolicyConfig) -> PolicyConfig:
    if isinstance(given, LLM):  # a common slip
        raise ConfigError(
            f"policies[{name!r}] is {given!r:.60}; policies are model servers, such as agl_run.policy('torch', "
            "model=...), and an agl.LLM that runs elsewhere belongs to initial_resources"
        )
    return PolicyConfig(use=given) if isinstance(given, str) else given


def _resource(name: str, given: Resource | ResourceConfig) -> ResourceConfig:
    if isinstance(given, PromptTemplate | JsonResource):
        return ResourceConfig.of(given)
    if isinstance(given, ResourceConfig):
        return given
    raise ConfigError(
        f"the resource {name!r} is {given!r}; write agl.PromptTemplate(template=...) for a prompt, and "
        f"agl.schemas.JsonResource(value=...) for another value. Weights belong to a policy: "
        f'policies={{{name!r}: agl_run.policy("torch", model=...)}}'
    )


def _runner(given: str | RunnerConfig, n_runners: int | None) -> RunnerConfig:
    found = RunnerConfig(use=given) if isinstance(given, str) else given
    return found if n_runners is None else msgspec.structs.replace(found, concurrency=n_runners)


def _algorithm(given: str | AlgorithmConfig, adapter: Mapping[str, str]) -> AlgorithmConfig:
    unknown = sorted(set(adapter) - {"agent_match"})
    if unknown:
        raise ConfigError(f"adapter has unknown keys {unknown}; it takes agent_match, a regular expression")
    config = algorithm(given) if isinstance(given, str) else given
    if not isinstance(config, AlgorithmConfig):  # pyright: ignore[reportUnnecessaryIsInstance]  # agl.GRPO without a call is a common slip
        raise ConfigError(f"algorithm is {given!r}; call it, as in agl.GRPO(...), or write its name")
    return msgspec.structs.replace(config, agents=config.agents or adapter.get("agent_match", ""))


def _component(given: str | ComponentConfig) -> ComponentConfig:
    return component(given) if isinstance(given, str) else given


def _reward(given: GivenReward) -> ComponentConfig:
    if callable(given):
        return component(name_of(given))
    if isinstance(given, str | ComponentConfig):  # pyright: ignore[reportUnnecessaryIsInstance]  # a number is a common slip
        return _component(given)
    raise ConfigError(
        f"rewards has {given!r}; give a function of the rollout and its spans, a class whose instances are such "
        "functions, a registered name, or agl.algorithms.component(...)"
    )


def _several(given: Any) -> tuple[Any, ...]:
    """Return the items as a tuple; a single item may be given without a sequence."""
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # the caller's types say it
