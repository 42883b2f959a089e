"""Turns a reward that the experiment brings itself (a function, an instance or a class) into a reward emitter.

The experiment names the reward as ``module:attribute``, or the trainer was given the object. Rewards of plugins have
factories and do not need this module.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl.contracts import GroupRewardEmitter, RewardEmitter, RewardEntry
from agl.errors import AglError, ConfigError, RunError, UnknownComponentError
from agl.schemas import Json, Rollout, Span
from agl_run.agents.importing import import_attribute, place_of
from agl_run.plan import Plan

_EXAMPLE = "def {name}(rollout, spans, *, tolerance=0.0)"


def given_rewards(rewards: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions, instances and classes among a trainer's rewards, by name.

    Names in the sequence are left out.

    Raises:
        ConfigError: Two rewards have the same name.
    """
    found: dict[str, Callable[..., Any]] = {}
    for reward in filter(callable, rewards):
        name = name_of(reward)
        if name in found:
            raise ConfigError(
                f"two rewards are called {name!r}, and rewards are recorded by name; give them functions or classes "
                "of different names"
            )
        found[name] = reward
    return found


def name_of(reward: Callable[..., Any]) -> str:
    """Return the name of a function or class, or the name of an instance's class."""
    return getattr(reward, "__name__", "") or type(reward).__name__


def check_known(plan: Plan) -> None:
    """Check that every reward of the experiment exists, without building any.

    Raises:
        ConfigError: ``module:attribute`` cannot be imported.
        PluginError: No plugin has a reward of this name.
    """
    for item in plan.config.reward:
        if not is_own(plan, item.use):
            _check_registered(plan, item.use)
        elif item.use not in plan.rewards:
            import_attribute(item.use, str(plan.folder), kind="reward")


def _check_registered(plan: Plan, name: str) -> None:
    try:
        plan.manager.reward(name)
    except UnknownComponentError as error:
        if not (plan.folder / f"{name}.py").is_file():
            raise
        raise ConfigError(f"{error}. For a reward of {name}.py write '{name}:NAME', its function or class") from None


def is_own(plan: Plan, name: str) -> bool:
    """Return true if the reward is the experiment's own, not a plugin's."""
    return ":" in name or name in plan.rewards


def build_own(plan: Plan, name: str, params: Mapping[str, Json]) -> RewardEmitter:
    """Build the emitter of a reward that the experiment brings itself.

    A class is instantiated with the parameters; a function or an instance gets them as keyword arguments of every call.

    Raises:
        ConfigError: The reward cannot be imported, or cannot be called with a rollout and its spans.
    """
    found = plan.rewards.get(name)
    target = import_attribute(name, str(plan.folder), kind="reward") if found is None else found
    if inspect.isclass(target):
        return _emitter(name, _instance(plan, name, target, params), {})
    return _emitter(name, target, params)


def _instance(plan: Plan, name: str, target: Any, params: Mapping[str, Json]) -> Any:
    try:
        return plan.manager.build(RewardEntry(name=name, factory=target), **params)
    except AglError:
        raise
    except Exception as error:  # the experiment's own class may raise anything
        raise ConfigError(f"{_raised(name, error, plan.folder)} when it was made; correct its __init__") from error


def named(name: str, emitter: RewardEmitter, *, folder: Path) -> RewardEmitter:
    """Wrap an emitter so that its errors name the reward, as in ``the reward 'judge:score' raised KeyError: 'x'``.

    An emitter that compares rollouts is returned as it is, so that it can still be recognised.
    """
    if isinstance(emitter, GroupRewardEmitter):
        return emitter

    async def awaited(value: Awaitable[Any]) -> Any:
        with _naming(name, folder):
            return await value

    def emit(rollout: Rollout, spans: Sequence[Span]) -> Any:
        with _naming(name, folder):
            value: Any = emitter(rollout, spans)
            return awaited(value) if inspect.isawaitable(value) else value

    return emit


@contextmanager
def _naming(name: str, folder: Path) -> Generator[None]:
    try:
        yield
    except AglError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a reward may raise anything
        raise RunError(_raised(name, error, folder)) from error


def _raised(name: str, error: BaseException, folder: Path) -> str:
    place = place_of(error, folder)
    return f"the reward {name!r} raised {type(error).__name__}: {error}" + (f" at {place}" if place else "")


def _emitter(name: str, reward: Callable[..., Any], params: Mapping[str, Json]) -> RewardEmitter:
    if not callable(reward):  # a module has other attributes, and instances of a class need not be callable
        raise ConfigError(
            f"the reward {name!r} is of the type {type(reward).__name__}, which cannot be called; name a function, "
            f"{_EXAMPLE.format(name='score')}, or a class with such a __call__"
        )
    _check_arguments(name, reward, params)
    return functools.partial(reward, **params) if params else reward


def _check_arguments(name: str, reward: Callable[..., Any], params: Mapping[str, Json]) -> None:
    """Refuse a reward that cannot be called with a rollout, its spans and the parameters."""
    try:
        signature = inspect.signature(reward)
    except ValueError:  # builtins have no signature
        return
    problem = "its first arguments are the rollout and its spans" if "task" in list(signature.parameters)[:2] else ""
    try:
        # Tried before the run: a reward with a wrong signature would fail every rollout after its
        # agent was paid for.
        signature.bind("rollout", "spans", **params)
    except TypeError as error:
        problem = str(error)
    if problem:
        takes = ", ".join(str(parameter).partition(":")[0] for parameter in signature.parameters.values())
        example = _EXAMPLE.format(name=name.rpartition(":")[2])
        raise ConfigError(
            f"the reward {name!r} takes ({takes}) and cannot be called with the rollout, its spans and "
            f"{_shown(params)}: {problem}. Write {example}: rollout.task is the task with its hidden keys, spans are "
            "the records of the attempt, and every further argument is a keyword that params gives or that has a "
            "default"
        )


def _shown(params: Mapping[str, Json]) -> str:
    return f"the params {', '.join(params)}" if params else "no params"
