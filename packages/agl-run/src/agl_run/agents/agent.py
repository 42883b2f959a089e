"""Agents and the way they are called: functions, classes with rollout methods, and commands."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from agl import LitAgent
from agl.errors import ConfigError
from agl.schemas import LLM, Json, Mode, NamedResources, PromptTemplate, Rollout
from agl_run.agents.importing import import_attribute

BUILT_IN_PARAMETERS = ("task", "resources", "rollout", "llm", "prompt_template")
"""Parameter names that an agent function may have without a resource of that name."""

_ONLY = {"llm": LLM, "prompt_template": PromptTemplate}
"""The type of resource that each of these parameter names stands for, if exactly one resource has that type."""

_RUNS = ("rollout", "rollout_async")
_TRAINS = ("training_rollout", "training_rollout_async", *_RUNS)
_VALIDATES = ("validation_rollout", "validation_rollout_async", *_RUNS)
_METHODS: dict[Mode, Sequence[str]] = {"train": _TRAINS, "val": _VALIDATES, "test": _VALIDATES}
"""The names of a ``LitAgent``'s rollout methods to try in each mode; the first one that the class defines is used."""


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """The specification of an agent: an import path, an object, a command, a coding harness, or a name in a runner.

    Attributes:
        path: ``"module:attribute"``; importable in a child process.
        target: The object itself: a function, a ``LitAgent``, or a ``LitAgent`` class.
        command: Program and arguments; ``{task}`` in an argument is replaced by a file with the task's JSON.
        harness: Name or file of a coding harness, which the runner ``harness`` runs.
        workspace: The folder or git tree that a harness gets a copy of.
        source: The name of the runner that brings the agent, as in ``agent = "SOURCE:NAME"``; see
            :class:`AgentSource`.
        name: The name of the agent in the runner ``source``.
        args: The arguments with which the runner ``source`` makes the agent.
        folder: First entry of ``sys.path`` when importing ``path``, working directory of a command, and folder to
            which a harness's files are relative; ``""`` for the current directory.
    """

    path: str = ""
    target: Callable[..., Any] | None = None
    command: tuple[str, ...] = ()
    harness: str = ""
    workspace: str = ""
    source: str = ""
    name: str = ""
    args: Mapping[str, Json] = field(default_factory=dict[str, Json])
    folder: str = ""

    @classmethod
    def of(cls, agent: Any, *, folder: str = "") -> "AgentSpec":
        """Return the specification of an agent that is given in any accepted form."""
        if isinstance(agent, AgentSpec):
            return agent
        if isinstance(agent, str):
            return cls(path=agent, folder=folder)
        if isinstance(agent, list | tuple):
            return cls(command=tuple(str(part) for part in agent), folder=folder)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  # any sequence of words
        if callable(agent) or hasattr(agent, "rollout"):
            return cls(target=cast("Callable[..., Any]", agent), path=_import_path(agent), folder=folder)
        raise ConfigError(
            f"an agent is a function, a LitAgent, 'module:attribute' or a command, not {type(agent).__name__}"
        )

    @property
    def identity(self) -> str:
        """The agent's name in the record of its experiment.

        It is ``module:attribute`` without the module's packages, ``SOURCE:NAME``, ``harness NAME``, or the command.
        A function has the same identity in the script that defines it and when it is imported elsewhere.
        """
        if self.is_program:
            return f"harness {self.harness}" if self.harness else " ".join(self.command)
        if self.source:
            return f"{self.source}:{self.name}"
        module, _, name = (self.path or _path_of(self.target)).partition(":")
        return f"{module.rpartition('.')[2]}:{name}"

    @property
    def is_program(self) -> bool:
        """True if the agent is a command or a coding harness, not Python code to import."""
        return bool(self.command or self.harness)

    @property
    def is_imported(self) -> bool:
        """True if the agent is an object, or a path to import."""
        return not (self.is_program or self.source)

    def load(self) -> "LoadedAgent":
        """Import the agent, and make an instance if it is a class."""
        # An object that was passed counts before its path, which may name another version of it on
        # disk.
        target: Any = self.target if self.target is not None else import_attribute(self.path, self.folder)
        if inspect.isclass(target):
            target = cast("Any", target())
        if hasattr(target, "rollout") and not inspect.isfunction(target):
            # Chosen once for each mode, not in every rollout.
            methods = {mode: _method(target, names) for mode, names in _METHODS.items()}
            return LoadedAgent(
                call=lambda one, resources: methods[one.mode](one.visible_task, resources, one.for_agent),
                is_async=all(map(inspect.iscoroutinefunction, methods.values())),
            )
        is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(getattr(target, "__call__", None))  # noqa: B004  # not a test for callability
        return _bind(target, is_async=is_async)


Agent: TypeAlias = Callable[..., Any] | LitAgent[Any] | str | Sequence[str] | AgentSpec
"""A function, a ``LitAgent`` or its class, ``"module:attribute"``, or a command as a sequence of words."""


@dataclass(frozen=True, kw_only=True)
class LoadedAgent:
    """An agent that is ready to be called.

    Attributes:
        call: Runs the agent on a rollout with its resources.
        is_async: Whether ``call`` returns a coroutine.
        parameters: The names of the function's required parameters, or of its first parameter if all have defaults;
            empty for a ``LitAgent``.
    """

    call: Callable[[Rollout, NamedResources], Any]
    is_async: bool
    parameters: tuple[str, ...] = ()


def _method(agent: Any, names: Sequence[str]) -> Callable[..., Any]:
    owner = cast("Any", type(agent))
    own = (name for name in names if getattr(owner, name, None) is not LitAgent[Any].rollout)
    return getattr(agent, next((name for name in own if hasattr(agent, name)), "rollout"))


def _import_path(target: Any) -> str:
    owner = _named(target)
    # Neither a function of a script nor one within a function can be imported by another process.
    if owner.__module__ == "__main__" or "<" in owner.__qualname__ or "." in owner.__qualname__:
        return ""
    return f"{owner.__module__}:{owner.__qualname__}"


def _named(target: Any) -> Any:
    """Return the agent's function or class; for an instance, its class."""
    return cast("Any", target if inspect.isclass(target) or inspect.isfunction(target) else type(target))


def _path_of(target: Any) -> str:
    """Return ``module:name`` for an agent object; for a module ``__main__``, the script's name is used."""
    owner = _named(target)
    script: str = getattr(sys.modules["__main__"], "__file__", None) or "__main__"
    return f"{Path(script).stem if owner.__module__ == '__main__' else owner.__module__}:{owner.__qualname__}"


def _bind(function: Callable[..., Any], *, is_async: bool) -> LoadedAgent:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        parameters = []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variadic]
    # A function whose parameters all have defaults still gets the task.
    if not needed and any(p.kind not in variadic for p in parameters):
        needed = parameters[:1]
    optional = [p for p in parameters if p not in needed and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def call(rollout: Rollout, resources: NamedResources) -> Any:
        values = [(p, _value(p.name, rollout, resources, is_first=p is needed[0])) for p in needed]
        positional = [value for p, value in values if p.kind is not p.KEYWORD_ONLY]
        named = {p.name: value for p, value in values if p.kind is p.KEYWORD_ONLY}
        # A default is for calls outside of an experiment; a resource that has the parameter's name replaces it.
        for p in optional:
            if (value := _resource(p.name, resources)) is not None:
                is_text = isinstance(p.default, str) and isinstance(value, PromptTemplate)
                named[p.name] = value.template if is_text else value
        return function(*positional, **named)

    return LoadedAgent(call=call, is_async=is_async, parameters=tuple(p.name for p in needed))


def _value(name: str, rollout: Rollout, resources: Mapping[str, Any], *, is_first: bool) -> Any:
    if name == "task":
        return rollout.visible_task
    if name == "resources":
        return dict(resources)
    if name == "rollout":
        return rollout.for_agent
    if (value := _resource(name, resources)) is not None:
        return value
    if name in _ONLY:
        found = _of_kind(_ONLY[name], resources)
        raise ConfigError(
            f"the agent's parameter {name!r} needs exactly one {_ONLY[name].__name__} among the resources, found "
            f"{found}; name the parameter after the resource it wants"
        )
    if is_first:
        return rollout.visible_task
    raise ConfigError(
        f"the agent's parameter {name!r} is neither task, resources, rollout, llm, prompt_template nor one of the "
        f"resources {sorted(resources)}; rename it or give it a default"
    )


def _resource(name: str, resources: Mapping[str, Any]) -> Any:
    """Return the resource for a parameter of an agent function; ``None`` if no resource fits.

    A resource of the parameter's name comes first, then, for ``llm`` and ``prompt_template``, the only one of that
    kind.
    """
    if name not in resources and name in _ONLY and len(found := _of_kind(_ONLY[name], resources)) == 1:
        return resources[found[0]]
    return resources.get(name)


def _of_kind(kind: type, resources: Mapping[str, Any]) -> list[str]:
    return [key for key, value in resources.items() if isinstance(value, kind)]


TaskSets: TypeAlias = tuple[Sequence[Json], Sequence[Json]]
"""A pair of training tasks and validation tasks."""


@runtime_checkable
class AgentSource(Protocol):
    """A runner class that brings its own agents; both methods are static and are called before a runner is built."""

    @staticmethod
    def check(agent: AgentSpec) -> None:
        """Check that the runner has the agent ``agent.name`` and that this agent accepts ``agent.args``.

        Raises:
            ConfigError: The agent is missing or refuses the arguments; the message says what to install or to write.
        """
        ...

    @staticmethod
    def tasks(agent: AgentSpec) -> TaskSets:
        """Return the agent's own tasks; called only if the experiment names no tasks.

        Raises:
            ConfigError: The tasks cannot be loaded.
        """
        ...
