"""Runs environments made of a taskset, a harness and agents, which verifiers has from its release 0.4 on.

A harness is a separate program. It calls the model through verifiers' interception server, which runs in this process
and relays each call to the policy. The server never frees the clients that it creates for rollouts, so it is replaced
after a number of rollouts.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from agl.errors import ConfigError, RunError
from agl.schemas import Json, Reward
from agl_environments.verifiers.environment import Model, checked_reward, failure, json_tasks, module
from agl_run.programs import TaskSets

MAX_TASKS = 100_000
"""Largest number of tasks that are read from a taskset, which may yield tasks forever."""

ROLLOUTS_PER_SERVER = 200
"""Number of rollouts after which the interception server is replaced, to free its clients."""


@dataclass(kw_only=True, eq=False)
class _Serving:
    """A running environment with its servers, and the numbers of rollouts that began in it and that are active."""

    environment: Any
    context: Any
    begun: int = 0
    active: int = 0
    is_retired: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class TasksetEnvironment:
    """An environment that verifiers builds for a taskset, given by name."""

    def __init__(self, name: str, args: Mapping[str, Json]) -> None:
        self._name = name
        self._args = args
        self._environment = self._built()
        self._serving: _Serving | None = None
        self._lock = asyncio.Lock()

    def _built(self) -> Any:
        v1, loaders = module("verifiers.v1"), module("verifiers.v1.utils.loaders")
        given = self._args.get("taskset")
        taskset = cast("dict[str, Json]", given) if isinstance(given, dict) else {}
        data: dict[str, Json] = {**self._args, "taskset": {**taskset, "id": self._name}}
        try:
            environment = v1.load_environment(loaders.resolve_env_config(data))
            self._check_runtimes(environment.config, v1.PrimeConfig)
            return environment
        except ConfigError:
            raise
        except ValueError as error:  # pydantic's errors are ValueErrors
            raise ConfigError(
                f"the environment {self._name!r} refuses its configuration, which experiment.agent_args has: "
                f"{_on_one_line(error)}"
            ) from error
        except (Exception, SystemExit) as error:  # any error of the environment's own code
            raise ConfigError(
                f"{self._name!r} cannot be loaded as an environment of verifiers, which has a function "
                f"load_environment, or a taskset in its __all__: {type(error).__name__}: {_on_one_line(error)}"
            ) from error

    def _check_runtimes(self, config: Any, prime: type) -> None:
        """Raise ConfigError if a sandbox of Prime Intellect has no key; verifiers itself would end this process."""
        roles = [
            str(role) for role in cast("Any", type(config)).model_fields if isinstance(_runtime_of(config, role), prime)
        ]
        try:
            if roles:
                module("verifiers.v1.utils.prime").ensure_prime_auth()
        except SystemExit as error:
            raise ConfigError(
                f"the agent {roles[0]!r} of the environment {self._name!r} works in a sandbox of Prime Intellect, and "
                f"there is no key for it ({error}). Set PRIME_API_KEY, or choose another runtime: [experiment] "
                f'agent_args = {{ {roles[0]} = {{ runtime = {{ type = "docker" }} }} }}; "subprocess" runs it on this '
                "machine"
            ) from None

    def tasks(self) -> TaskSets:
        """Return the taskset's tasks, all for training; a taskset has no separate tasks for validation."""
        rows: list[Mapping[str, Any]] = []
        try:
            for task in self._environment.taskset.take(MAX_TASKS + 1):
                rows.append(task.data.model_dump(mode="json", exclude_none=True))
        except Exception as error:  # any error of the environment's own code
            raise ConfigError(
                f"the environment {self._name!r} cannot make its tasks: {type(error).__name__}: {error}"
            ) from error
        if len(rows) > MAX_TASKS:
            raise ConfigError(
                f"the environment {self._name!r} has more than {MAX_TASKS} tasks, perhaps without end; write as many "
                "as you need into a file, and name it as [experiment] train"
            )
        if not rows:
            raise ConfigError(
                f"the environment {self._name!r} has no tasks; check its configuration in experiment.agent_args"
            )
        return json_tasks(rows, name=self._name), []

    async def start(self) -> None:
        """Start the servers, so that errors in starting them show before the first rollout."""
        self._serving = await self._serve(self._environment)

    async def _serve(self, environment: Any) -> _Serving:
        context = environment.serving()
        try:
            await context.__aenter__()
        except Exception as error:  # any error of the environment's own code
            raise RunError(
                f"the environment {self._name!r} cannot start: {type(error).__name__}: {_on_one_line(error)}"
            ) from error
        return _Serving(environment=environment, context=context)

    async def play(self, task: Json, model: Model) -> Reward | None:
        """Run one episode and return its reward; ``None`` if the environment gave none."""
        v1 = module("verifiers.v1")
        client = v1.EvalClientConfig(base_url=model.routed_url, api_key_var="AGL_NO_KEY")
        context = v1.ModelContext(model=model.name, client=client, sampling=v1.Sampling(**model.sampling))
        async with self._served() as environment:
            episode = await environment.run_episode(self._task(environment, task), context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors and not episode.ok:
            raise failure(self._name, errors[-1].type, _on_one_line(errors[-1].message))
        return self._scored([trace for trace in episode.traces if trace.agent.trainable] or episode.traces)

    def _task(self, environment: Any, task: Json) -> Any:
        kind = environment.taskset.task_type()
        try:
            return kind(kind.data_type().model_validate(task), environment.taskset.config.task)
        except ValueError as error:
            raise RunError(
                f"the task {str(task)[:60]!r} is not a task of the environment {self._name!r}: {_on_one_line(error)}; "
                "leave train and val out of [experiment] to use its own tasks"
            ) from error

    def _scored(self, traces: Sequence[Any]) -> Reward | None:
        """Return the sum of the rewards of an episode's agents; with several agents, their names prefix the parts."""
        parts: dict[str, float | None] = {}
        weights: dict[str, float] = {}
        for number, trace in enumerate(traces):
            prefix = f"{trace.agent.name or number}." if len(traces) > 1 else ""
            for name, reward in trace.rewards.items():
                parts[prefix + name] = None if reward is None else reward.score
                weights[prefix + name] = 0.0 if reward is None else reward.weight
            for name, metric in trace.metrics.items():
                parts.setdefault(prefix + name, metric)
                weights.setdefault(prefix + name, 0.0)
        is_scored = any(reward is not None for trace in traces for reward in trace.rewards.values())
        value = sum(float(trace.reward) for trace in traces) if is_scored else None
        return checked_reward(value, parts, weights, name=self._name)

    @asynccontextmanager
    async def _served(self) -> AsyncGenerator[Any]:
        """Yield the environment for one rollout.

        A new environment replaces it after :data:`ROLLOUTS_PER_SERVER` rollouts; the old servers stop once their last
        rollout has ended.
        """
        async with self._lock:
            serving = self._serving
            if serving is None or serving.begun >= ROLLOUTS_PER_SERVER:
                self._serving = await self._serve(self._built())
                if serving is not None:
                    serving.is_retired = True
                    await self._release(serving)
                serving = self._serving
            serving.begun += 1
            serving.active += 1
        try:
            yield serving.environment
        finally:
            serving.active -= 1
            await self._release(serving)

    async def _release(self, serving: _Serving) -> None:
        if serving.is_retired and not serving.active:
            async with serving.lock:
                context, serving.context = serving.context, None
                if context is not None:
                    await context.__aexit__(None, None, None)

    async def stop(self) -> None:
        """Stop the servers."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.is_retired, serving.active = True, 0
            await self._release(serving)


def _runtime_of(config: Any, role: str) -> Any:
    return getattr(getattr(config, role), "runtime", None)


def _on_one_line(error: object) -> str:
    return " ".join(str(error).split())[:2000]
