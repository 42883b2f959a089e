"""The trainer and the runner with the arguments of Agent Lightning, on :class:`agl_run.Trainer`."""

import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import msgspec

import agl_lightning
from agl import PluginManager
from agl.contracts import Store, TracerEntry
from agl.errors import ConfigError, RunError
from agl.schemas import LLM, Episode, Mode, PromptTemplate
from agl_lightning.adapters import TracerTraceToTriplet
from agl_lightning.algorithms import APO, MAIN_LLM, VERL, Baseline
from agl_lightning.components import (
    ClientServerExecutionStrategy,
    DevTaskLoader,
    DummyTracer,
    SharedMemoryExecutionStrategy,
)
from agl_lightning.types import AttemptedRollout, attempted
from agl_run import Agent, DevResult, ExperimentConfig, FitResult, Quiet
from agl_run.engine import ALWAYS_ON, Plan, as_tasks, open_store, run_blocking
from agl_run.engine import Trainer as Engine

T = TypeVar("T")

_STRATEGIES = {"shm": SharedMemoryExecutionStrategy, "cs": ClientServerExecutionStrategy}


class Trainer:
    """Runs an agent on tasks and lets an algorithm learn from it.

    Every argument of :class:`agl_run.Trainer` is accepted besides those below.

    Args:
        algorithm: ``APO(...)``, ``VERL(...)``, ``Baseline()``, or an algorithm of this project.
        n_runners: Attempts at once; ``n_workers`` is the same.
        max_rollouts: Tasks that ``dev`` runs at most; ``max_tasks`` is the same.
        adapter: ``{"agent_match": "write|rewrite"}`` or an adapter; ``triplet_exporter`` is the same.
        initial_resources: Resources by name.
        store: A store or its URL; by default the file ``runs/agl.db``.
        tracer: Ignored: the tracers of the installed adapters whose frameworks the program has imported are on.
        strategy: Used only for its number of concurrent attempts, if it has one.
        dev: Whether ``fit`` only runs :meth:`dev`.
        settings: Any argument of :class:`agl_run.Trainer`.

    Raises:
        ConfigError: An argument has no counterpart here; the message says what to write instead.
    """

    def __init__(
        self,
        *,
        algorithm: Any = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
        max_rollouts: int | None = None,
        max_tasks: int | None = None,
        adapter: Any = None,
        triplet_exporter: Any = None,
        initial_resources: Mapping[str, Any] | None = None,
        store: Any = None,
        tracer: Any = None,
        strategy: Any = None,
        dev: bool = False,
        **settings: Any,
    ) -> None:
        algorithm, adapter, tracer = _by_path(algorithm), _by_path(adapter), _by_path(tracer)
        _refuse(settings, tracer)
        self.algorithm = algorithm() if isinstance(algorithm, type) else algorithm
        runners = _runners_of(strategy)
        self.n_runners = n_runners or n_workers or runners
        self.max_rollouts = max_rollouts or max_tasks
        self.adapter = _adapter(adapter if adapter is not None else triplet_exporter)
        self.initial_resources = dict(initial_resources or {})
        self.store = store
        self._is_dev = dev
        self._settings = settings
        self._made()  # so that a wrong argument is reported at once

    @property
    def config(self) -> ExperimentConfig:
        """The configuration of the experiment, as an experiment file would hold it."""
        return self._made().config

    def fit(
        self,
        agent: Agent | None = None,
        train_dataset: Any = None,
        *,
        val_dataset: Any = None,
        dev_dataset: Any = None,
        resume: bool = False,
    ) -> FitResult | DevResult:
        """Train from the beginning or, with ``resume``, continue the interrupted run; blocks.

        With ``Trainer(dev=True)`` and with :class:`Baseline` it runs :meth:`dev` instead.
        """
        if self._is_dev and dev_dataset is not None:
            return self.dev(agent, dev_dataset=dev_dataset)
        if self._is_dev or isinstance(self.algorithm, Baseline):
            return self.dev(agent, train_dataset, val_dataset=val_dataset, dev_dataset=dev_dataset)
        if self.max_rollouts:
            raise ConfigError(
                f"Trainer got max_rollouts={self.max_rollouts}, which limits dev() and no training; set the length of "
                "the training in the algorithm: trainer.total_training_steps of VERL, budget= of APO"
            )
        trainer, train = self._made(agent), _readable(train_dataset)
        result = trainer.fit(agent, train, _readable(val_dataset), resume=resume, fresh=not resume)
        tuned: Any = self.algorithm
        if isinstance(tuned, APO):
            tuned.best = run_blocking(lambda: _prompt(trainer.plan(agent, train), result))
        return result

    def dev(
        self,
        agent: Agent | None = None,
        train_dataset: Any = None,
        *,
        val_dataset: Any = None,
        dev_dataset: Any = None,
    ) -> DevResult:
        """Run the agent on every task without training; blocks. Tasks of ``val_dataset`` have the mode ``val``."""
        found: list[Episode] = []
        for trainer, tasks, mode in self._trials(agent, train_dataset, dev_dataset, val_dataset):
            found += trainer.dev(agent, tasks, tasks=len(tasks), mode=mode).episodes
        return DevResult(episodes=tuple(found))

    async def dev_async(
        self, agent: Agent | None = None, train_dataset: Any = None, *, mode: Mode = "train"
    ) -> DevResult:
        """Run the agent on every task without training, within the event loop of an async program."""
        tasks = self._tasks(train_dataset)
        return await self._made(agent).dev_async(agent, tasks, tasks=len(tasks), mode=mode)

    def _trials(self, agent: Any, train: Any, dev: Any, val: Any) -> Iterator[tuple[Engine, list[Any], Mode]]:
        """Yield a trainer, tasks and their mode for each data set of each epoch."""
        modes: tuple[tuple[Any, Mode], ...] = ((train, "train"), (dev, "train"), (val, "val"))
        # Read once, because an iterator gives its tasks only once.
        given: list[tuple[Any, list[Any], Mode]] = [(data, self._tasks(data), mode) for data, mode in modes]
        epochs = self.algorithm.n_epochs if isinstance(self.algorithm, Baseline) else 1
        left = sum(len(every) for _, every, _ in given) * epochs
        if not left:
            raise ConfigError("dev() got no task; give it a list as train_dataset, dev_dataset or val_dataset")
        left = min(left, self.max_rollouts or left)
        for data, every, mode in given * epochs:
            tasks = every[:left]
            left -= len(tasks)
            if tasks:
                yield self._made(agent, data.resources if isinstance(data, DevTaskLoader) else None), tasks, mode

    def _tasks(self, data: Any) -> list[Any]:
        if isinstance(data, DevTaskLoader):
            return data.tasks
        return as_tasks(_readable(data), folder=Path(self._settings.get("folder", ".")), name="the data set")

    def _made(self, agent: Any = None, resources: Mapping[str, Any] | None = None) -> Engine:
        resources = self.initial_resources if resources is None else resources
        manager = self._settings.get("plugins") or PluginManager.from_environment(
            disabled=self._settings.get("disabled_plugins", ())
        )
        settings: dict[str, Any] = {"tracers": _imported(manager), "plugins": manager, **self._settings}
        if isinstance(self.algorithm, VERL):
            resources = {name: value for name, value in resources.items() if name != MAIN_LLM}
            settings.setdefault("policies", {MAIN_LLM: self.algorithm.policy()})
            settings.setdefault("validate_every", max(int(self.algorithm.trainer.get("test_freq") or 0), 0))
        if self.store is not None:
            settings["store"] = self.store
        return Engine(
            algorithm=_algorithms(self.algorithm, resources),
            n_runners=self.n_runners,
            adapter={"agent_match": self.adapter.agent_match or getattr(agent, "trained_agents", None) or ""},
            initial_resources={name: _resource(value, name) for name, value in resources.items()},
            **settings,
        )


class LitAgentRunner(Generic[T]):
    """Runs an agent on one task after the other: ``await runner.step(task)`` within ``with runner.run_context(...)``.

    Args:
        tracer: Ignored, as by the trainer.
        settings: Settings of Agent Lightning's polling, which nothing needs here.
    """

    def __init__(self, tracer: Any = None, **settings: Any) -> None:
        self.tracer = tracer
        self.settings = settings
        self._agent: Agent | None = None
        self._store: Store | None = None

    @contextmanager
    def run_context(self, *, agent: Agent, store: Store, hooks: Any = None) -> Generator[Self]:
        """Choose the agent to run and the store for its rollouts, for the body of a ``with`` statement.

        Raises:
            ConfigError: ``hooks`` are given.
        """
        if hooks:
            raise ConfigError(
                "run_context got hooks=, which have no counterpart here; read the recording after the step with "
                "await store.query_spans(rollout.rollout_id), see docs/reference/hooks.md"
            )
        self._agent, self._store = agent, store
        try:
            yield self
        finally:
            self._agent = self._store = None

    async def step(
        self,
        input: T,
        *,
        resources: Mapping[str, Any] | None = None,
        mode: Mode = "train",  # Agent Lightning's name
    ) -> AttemptedRollout:
        """Run the agent on one task, and return the rollout.

        Raises:
            ConfigError: The method is called outside of ``run_context``.
            RunError: The agent raised; the message has its error.
        """
        if self._agent is None:
            raise ConfigError("step() has no agent; call it in `with runner.run_context(agent=..., store=...):`")
        trainer = Trainer(initial_resources=resources, store=self._store, progress=Quiet())
        result = await trainer.dev_async(self._agent, [input], mode=mode)
        (episode,) = result.episodes
        if episode.attempt is not None and episode.attempt.error is not None:
            error = episode.attempt.error
            raise RunError(f"the agent raised {error.type}: {error.message}")
        return attempted(episode.rollout)


def _refuse(settings: dict[str, Any], tracer: Any) -> None:
    """Refuse arguments that have no counterpart; removes those whose value has no effect from ``settings``."""
    replaced = {
        "hooks": "take finished rollouts by an exporter of a plugin, agl_exporters, named in exporters=, see "
        "docs/reference/hooks.md",
        "llm_proxy": "leave it out: every trainer starts its own gateway; give models in policies= or in "
        "initial_resources=, see docs/how-to/serve.md",
        "port": "leave it out: the trainer and its workers find each other in the store, see docs/how-to/workers.md",
    }
    for name, remedy in replaced.items():
        if settings.pop(name, None):
            raise ConfigError(f"Trainer got {name}=, which has no counterpart here; {remedy}")
    if not settings.pop("daemon", True):
        raise ConfigError("Trainer got daemon=False, and starts no process that could outlive it; leave daemon= out")
    kind: type = tracer if isinstance(tracer, type) else type(tracer)
    if tracer is not None and not issubclass(kind, DummyTracer):
        raise ConfigError(
            f"Trainer got the tracer {kind.__name__}; name tracers of this project with tracers=['langchain'], or "
            "write one as in docs/tutorial/tracer.md"
        )


def _by_path(given: Any) -> Any:
    """Return what an import path of Agent Lightning names, such as ``agentlightning.algorithm.Baseline``."""
    if not (isinstance(given, str) and given.startswith("agentlightning.")):
        return given
    return getattr(agl_lightning, given.rpartition(".")[2])


def _runners_of(strategy: Any) -> int:
    if isinstance(strategy, str | Mapping):
        given: dict[str, Any] = {"type": strategy} if isinstance(strategy, str) else dict(cast("Any", strategy))
        if (kind := _STRATEGIES.get(given.pop("type", ""))) is not None:
            strategy = kind(**given)
    elif strategy is None:
        strategy = ClientServerExecutionStrategy()  # refuses a role that the environment names
    if isinstance(strategy, SharedMemoryExecutionStrategy):
        return strategy.n_runners
    raise ConfigError(
        f"Trainer got the strategy {strategy!r}; leave it out, and write runner='process' for attempts in processes of "
        "their own, or start `agl worker` on other machines, see docs/how-to/workers.md"
    )


def _adapter(given: Any) -> Any:
    if given is None:
        return TracerTraceToTriplet()
    if isinstance(given, Mapping):
        return TracerTraceToTriplet(**cast("Mapping[str, Any]", given))
    made = given() if isinstance(given, type) else given
    if hasattr(made, "agent_match"):
        return made
    raise ConfigError(
        f"Trainer got the adapter {type(made).__name__}; here algorithms read episodes, and an adapter only selects "
        "agents: write adapter={'agent_match': 'write|rewrite'}, see docs/how-to/roles.md"
    )


def _algorithms(given: Any, resources: Mapping[str, Any]) -> Any:
    if given is None or isinstance(given, Baseline):
        return ()
    if isinstance(given, APO):
        return cast("APO[Any]", given).config_for(resources)
    if isinstance(given, VERL):
        return given.config
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [_algorithms(item, resources) for item in cast("Sequence[Any]", given)]
    return given


def _resource(given: Any, name: str) -> Any:
    """Return a resource; in a model, the API key is replaced by the name of an environment variable that holds it.

    Experiments store their resources, and must not store keys.
    """
    if not isinstance(given, LLM):
        return given
    own = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE") or "https://api.openai.com/v1"
    is_own = given.endpoint.rstrip("/") == own.rstrip("/")
    variable = next((key for key, value in os.environ.items() if given.api_key and value == given.api_key), "")
    if given.api_key and not variable:
        raise ConfigError(
            f"the LLM {name!r} has an api_key that no environment variable holds, and keys are never written into an "
            "experiment; put it into a variable and name it: LLM(endpoint=..., model=..., api_key_env='MY_KEY')"
        )
    if is_own and not variable and not given.api_key_env and os.environ.get("OPENAI_API_KEY"):
        variable = "OPENAI_API_KEY"
    return msgspec.structs.replace(given, api_key="", api_key_env=given.api_key_env or variable)


def _imported(manager: PluginManager) -> tuple[str, ...]:
    """Return the names of installed tracers whose framework the program has imported, one per factory."""
    found: dict[str, str] = {}
    for entry in manager.entries("tracer"):
        frameworks = entry.frameworks if isinstance(entry, TracerEntry) and entry.name not in ALWAYS_ON else ()
        if any(name in sys.modules for name in frameworks):
            found.setdefault(str(entry.factory), entry.name)
    return tuple(found.values())


def _readable(data: Any) -> Any:
    """Return a data set that can be iterated several times; ``data`` may be an iterator or have only an index."""
    if isinstance(data, Iterator):
        return list(cast("Iterator[Any]", data))
    if data is None or hasattr(data, "__iter__"):
        return data
    return [data[index] for index in range(len(data))]


async def _prompt(plan: Plan, result: FitResult) -> PromptTemplate | None:
    """Return the live version of the prompt that the first algorithm tuned; ``None`` if it is not a prompt."""
    name = plan.config.algorithm[0].tunes[0]
    store = plan.store or open_store(plan)
    try:
        found = (await store.resource(name, result.resources[name])).resource
    finally:
        if plan.store is None:
            await store.close()
    return found if isinstance(found, PromptTemplate) else None
