"""Agents as Agent Lightning writes them: subclasses of :class:`LitAgent`, and functions marked with ``@rollout``.

Their rollouts have ``rollout.attempt``, and the ``llm`` of a marked function has the attempt's identity in its
``endpoint``, for clients of every kind with any key.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import msgspec

import agl
from agl import schemas
from agl.errors import ConfigError
from agl.schemas import LLM, PromptTemplate
from agl_lightning.types import AttemptedRollout, Triplet, attempted

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_METHODS = ("rollout", "training_rollout", "validation_rollout")


class LitAgent(agl.LitAgent[T]):
    """An agent as a class, with any of ``rollout``, ``training_rollout`` and ``validation_rollout``.

    Their async forms are called ``rollout_async`` and so on.

    Args:
        trained_agents: Regular expression for the names of agents whose calls train; used if the trainer's adapter has
            no ``agent_match``.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        for name in _METHODS:
            for method in (name, f"{name}_async"):
                if method in vars(cls):
                    setattr(cls, method, _given(vars(cls)[method], convert=_attempted))


def rollout(function: Any = None, /, *, strip_proxy: bool = True) -> Any:
    """Mark a function, sync or async, as an agent; it takes a task and ``llm``, ``prompt_template`` or ``rollout``.

    Args:
        function: The function; it stays callable.
        strip_proxy: Put the attempt's identity into the endpoint of ``llm``; without it, call ``get_base_url``.
    """

    def mark(marked: F) -> F:
        return _as_agent(_given(marked, convert=_routed if strip_proxy else _attempted))

    return mark if function is None else mark(function)


def llm_rollout(function: Any = None, /, *, strip_proxy: bool = True) -> Any:
    """Mark a function of ``task`` and ``llm`` as an agent; see :func:`rollout`."""

    def mark(marked: F) -> F:
        return rollout(strip_proxy=strip_proxy)(_with_parameter(marked, "llm"))

    return mark if function is None else mark(function)


def prompt_rollout(function: Any = None, /) -> Any:
    """Mark a function of ``task`` and ``prompt_template`` as an agent; see :func:`rollout`."""
    if function is None:
        return prompt_rollout
    return rollout(_with_parameter(function, "prompt_template"))


def _with_parameter(function: F, name: str) -> F:
    found = list(inspect.signature(function).parameters)
    if name not in found:
        raise ConfigError(
            f"the agent {function.__qualname__} has the parameters {found}, and this decorator fills {name!r}; name "
            "one of them so, or mark the function with rollout, which goes by the names"
        )
    return function


def _as_agent(function: F) -> F:
    """Give a function the methods that marked functions have in Agent Lightning, by which scripts try an agent."""
    kinds = {"llm": LLM, "prompt_template": PromptTemplate}
    wanted = inspect.signature(function).parameters
    is_async = inspect.iscoroutinefunction(function)

    def run(task: Any, resources: Mapping[str, Any], rollout: Any) -> Any:
        filled = {name: value for name, value in (("resources", resources), ("rollout", rollout)) if name in wanted}
        for name in kinds.keys() & wanted.keys():
            filled[name] = next(given for given in resources.values() if isinstance(given, kinds[name]))
        return function(task, **filled)

    marked: Any = function
    marked.is_async = lambda: is_async
    setattr(marked, "rollout_async" if is_async else "rollout", run)
    return function


def _given(function: F, *, convert: Callable[[Any], Any]) -> F:
    """Wrap a function so that it gets each argument converted; of triplets that it returns the last reward counts."""

    @wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        return _result(function(*map(convert, args), **{name: convert(value) for name, value in settings.items()}))

    @wraps(function)
    async def call_async(*args: Any, **settings: Any) -> Any:
        given = {name: convert(value) for name, value in settings.items()}
        return _result(await function(*map(convert, args), **given))

    return cast("F", call_async if inspect.iscoroutinefunction(function) else call)


def _result(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(isinstance(each, Triplet) for each in cast("Any", value)):
        return cast("Any", value)
    rewards = [each.reward for each in cast("list[Triplet]", value) if each.reward is not None]
    return rewards[-1] if rewards else None


def _attempted(value: Any) -> Any:
    is_plain = isinstance(value, schemas.Rollout) and not isinstance(value, AttemptedRollout)
    return attempted(value) if is_plain else value


def _routed(value: Any) -> Any:
    running = agl.current()
    if isinstance(value, LLM) and running is not None:
        url = value.get_base_url(running.rollout_id, running.attempt_id)
        return msgspec.structs.replace(value, endpoint=url)
    return _attempted(value)
