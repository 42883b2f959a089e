"""Runs environments that have ``load_environment``: single-turn, multi-turn, with tools, and with stateful tools.

Verifiers has such environments up to its release 0.3. An environment runs its rollout in this process with an OpenAI
client, and scores it with a rubric of weighted reward functions.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

from agl.errors import ConfigError, RunError
from agl.schemas import Json, Reward
from agl.tracing import open_span
from agl_environments.verifiers.environment import Model, checked_reward, failure, json_tasks, module
from agl_run.programs import TaskSets

_RAISED: ContextVar[list[tuple[str, Exception]] | None] = ContextVar("raised", default=None)
"""Names and errors of the reward functions that failed, or returned no number, while a rollout is scored."""


class ClassicEnvironment:
    """An environment returned by a package's ``load_environment``."""

    def __init__(self, name: str, environment: Any) -> None:
        for attribute in ("rollout", "rubric", "get_dataset"):
            if not hasattr(environment, attribute):
                raise ConfigError(
                    f"load_environment of {name!r} returned {type(environment).__name__}, which is not an environment "
                    "of verifiers; let it return one, such as vf.SingleTurnEnv(...)"
                )
        if getattr(environment, "requires_group_rollouts", False):
            raise ConfigError(
                f"the environment {name!r} scores rollouts of a task together (a reward function takes states, "
                "completions or the like), and rollouts are scored one by one here; use an environment whose reward "
                "functions take one rollout"
            )
        self._name = name
        self._environment = environment
        self._client: Any = None
        for rubric in _rubrics(environment.rubric):
            rubric.funcs = [_noticed(function) for function in rubric.funcs]
        if hasattr(environment, "call_tool"):
            environment.call_tool = _recorded(environment.call_tool)

    def tasks(self) -> TaskSets:
        """Return the rows of the environment's training and evaluation datasets."""
        train = self._rows(self._environment.build_dataset, "training")
        val = self._rows(self._environment.build_eval_dataset, "evaluation")
        if not (train or val):
            raise ConfigError(
                f"the environment {self._name!r} has no tasks: its datasets are empty; check its arguments in "
                "experiment.agent_args, or set [experiment] train and val to files of tasks"
            )
        return train, val

    def _rows(self, build: Callable[[], Any], kind: str) -> list[Json]:
        try:
            rows = build()
        except Exception as error:  # any error of the environment's own function
            raise ConfigError(
                f"the environment {self._name!r} cannot make its {kind} dataset: {type(error).__name__}: {error}"
            ) from error
        return [] if rows is None else json_tasks(rows, name=self._name)

    async def start(self) -> None:
        """Create the OpenAI client that all rollouts share."""
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(base_url="http://localhost/v1", api_key="none")

    async def play(self, task: Json, model: Model) -> Reward | None:
        """Run one rollout and return its reward; ``None`` if the environment does not score rollouts."""
        clients = module("verifiers.clients.openai_chat_completions_client")
        row = cast("dict[str, Json]", task) if isinstance(task, dict) else {}
        if "prompt" not in row:
            raise RunError(
                f"the task {str(cast('object', task))[:60]!r} has no 'prompt', and tasks of {self._name!r} are "
                "rows of its dataset; leave train and val out of [experiment] to use these"
            )
        client = clients.OpenAIChatCompletionsClient(
            self._client.with_options(base_url=model.base_url, api_key=model.key or "none")
        )
        state = await self._environment.rollout(
            {"example_id": 0, **row}, client, model.name, {"n": 1, "extra_body": {}, **model.sampling}
        )
        try:
            error = state.get("error")
            if error is not None:
                cause = error.__cause__ or error
                raise failure(self._name, type(error).__name__, f"{_of(cause, error)}{error}") from error
            return await self._scored(state)
        finally:
            await self._environment.rubric.cleanup(state)

    async def _scored(self, state: Any) -> Reward | None:
        if not getattr(self._environment, "score_rollouts", True):
            return None
        rubric = self._environment.rubric
        raised: list[tuple[str, Exception]] = []
        token = _RAISED.set(raised)
        try:
            await rubric.score_rollout(state)
        finally:
            _RAISED.reset(token)
        if raised:
            name, error = raised[0]
            raise RunError(
                f"the reward function {name!r} of the environment {self._name!r} raised {type(error).__name__}: {error}"
            ) from error
        parts = cast("Mapping[str, float]", state.get("metrics") or {})
        return checked_reward(state.get("reward"), parts, _weights(rubric), name=self._name)

    async def stop(self) -> None:
        """Release the environment's resources, and close the client."""
        if self._client is not None:
            await self._client.close()
        await self._environment._teardown()  # has no public counterpart; verifiers itself calls it only at exit


def _of(cause: BaseException, error: BaseException) -> str:
    """Return the cause of an error, as a prefix for its message; ``""`` if the cause adds no information."""
    return "" if cause is error or str(cause) in str(error) else f"{type(cause).__name__}: {cause}: "


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield a rubric, or the rubrics in a group, at any depth."""
    inner: list[Any] = getattr(rubric, "rubrics", [])
    if not inner:
        yield rubric
    for one in inner:
        yield from _rubrics(one)


def _weights(rubric: Any) -> dict[str, float]:
    """Return the weights of reward functions by name; weights with the same name are added."""
    found: dict[str, float] = {}
    for one in _rubrics(rubric):
        for function, weight in zip(one.funcs, one.weights, strict=False):
            name = str(getattr(function, "__name__", function))
            found[name] = found.get(name, 0.0) + float(weight)
    return found


def _noticed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function to record an error or a value that is not a number, for which the rubric takes 0."""
    if not hasattr(function, "__name__"):
        return function

    def note(error: Exception) -> None:
        raised = _RAISED.get()
        if raised is not None:
            raised.append((function.__name__, error))

    @functools.wraps(function)
    async def noticed(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            note(error)
            raise

    return noticed


def _recorded(call_tool: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an environment's ``call_tool`` to record each call as a span."""

    @functools.wraps(call_tool)
    async def recorded(tool_name: str, tool_args: dict[str, Any], tool_call_id: str, *args: Any, **kwargs: Any) -> Any:
        with open_span(tool=tool_name, arguments=tool_args, call_id=tool_call_id) as span:
            message = await call_tool(tool_name, tool_args, tool_call_id, *args, **kwargs)
            span.set(result=getattr(message, "content", message))
        return message

    return recorded
