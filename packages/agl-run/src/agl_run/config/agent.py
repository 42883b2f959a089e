"""Finds an experiment's agent: the user's own, a coding harness, or an agent that a runner brings.

``[experiment] harness = "pi"`` replaces ``agent``. This module only reads the configuration; the runner ``harness`` of
the package agl-harness runs the harness.
"""

from pathlib import Path

import msgspec

from agl import PluginManager
from agl.errors import ConfigError, PluginError, UnknownComponentError
from agl_run.agents.agent import Agent, AgentSource, AgentSpec, TaskSets
from agl_run.config.sections import ASYNC, ExperimentConfig, ExperimentSection

HARNESS = "harness"
"""The runner of coding harnesses."""


def with_runner(config: ExperimentConfig, agent: AgentSpec) -> ExperimentConfig:
    """Set the runner that the agent requires, unless the experiment names a runner itself."""
    use = HARNESS if agent.harness else agent.source
    # ``async`` is the default, so here it means that no runner was chosen.
    if not use or config.runner.use != ASYNC:
        return config
    return msgspec.structs.replace(config, runner=msgspec.structs.replace(config.runner, use=use))


def agent_of(
    section: ExperimentSection, folder: Path, manager: PluginManager, *, given: Agent | None = None
) -> AgentSpec:
    """Return the specification of an experiment's agent, or of the agent ``given`` in its place.

    Raises:
        ConfigError: The experiment names no agent, or both an agent and a harness; or it sets a workspace without a
            harness, or arguments for an agent that takes none.
        PluginError: The agent's runner is not installed.
    """
    agent = section.agent if given is None else given
    # Checked first, because a runner's name before the colon looks like a module's name.
    if is_brought(agent, folder=folder, manager=manager):
        if given is None and (section.harness or section.workspace):
            raise ConfigError(f"experiment.agent is {agent!r}, so remove experiment.harness and experiment.workspace")
        source, _, name = str(agent).partition(":")
        return AgentSpec(source=source, name=name, args=section.agent_args, folder=str(folder))
    if section.agent_args:
        raise ConfigError(
            f"experiment.agent_args has {', '.join(section.agent_args)}, and only an agent that a runner brings, such "
            'as agent = "verifiers:NAME", takes arguments; remove it, or give the agent a task or a resource with '
            "these values"
        )
    if given is not None:
        return AgentSpec.of(given, folder=str(folder))
    if section.agent and section.harness:
        raise ConfigError(
            f"experiment.agent is {section.agent!r} and experiment.harness is {section.harness!r}; keep one of them"
        )
    if section.workspace and not section.harness:
        raise ConfigError(
            "experiment.workspace is what a coding harness works in, and the experiment has none; add harness = "
            '"NAME", one that `agl harness list` shows, or remove workspace'
        )
    if section.harness:
        return AgentSpec(harness=section.harness, workspace=section.workspace, folder=str(folder))
    if not section.agent:
        raise ConfigError(
            'the experiment has no agent; write agent = "module:attribute", such as "agent:solve", a command as an '
            'array of words: agent = ["python", "agent.py"], or a coding harness: harness = "pi"'
        )
    return AgentSpec.of(section.agent, folder=str(folder))


def is_brought(agent: object, *, folder: Path, manager: PluginManager) -> bool:
    """Return true if an agent is written as ``RUNNER:NAME``, with a runner that brings agents.

    Raises:
        ConfigError: A module of the experiment has the same name as the runner.
        PluginError: The runner's package is not installed, disabled or broken.
    """
    if not isinstance(agent, str) or ":" not in agent:
        return False
    prefix = agent.partition(":")[0]
    own = next((path for path in (folder / f"{prefix}.py", folder / prefix / "__init__.py") if path.is_file()), None)
    if not any(entry.name == prefix for entry in manager.entries("runner")):
        problem = None if own or not prefix.isidentifier() else _home_of(prefix, manager)
        if problem is not None:
            raise problem
        return False
    if not isinstance(manager.resolve(manager.runner(prefix)), AgentSource):
        return False
    if own:
        raise ConfigError(
            f"the agent {agent!r} may be the runner {prefix!r}'s or in {own.relative_to(folder)}; rename that module, "
            f"which would also hide the installed package {prefix}"
        )
    return True


def _home_of(name: str, manager: PluginManager) -> PluginError | None:
    """Return the error for a known runner that cannot be used; ``None`` if no known package has such a runner."""
    try:
        manager.runner(name)
    except UnknownComponentError as error:
        # The message lists the available components only if no known package has this name.
        return None if "; available: " in str(error) else error
    except PluginError as error:
        return error
    return None


def tasks_of(agent: AgentSpec, manager: PluginManager) -> TaskSets:
    """Return the training and validation tasks of an agent that a runner brings; both are empty for other agents."""
    if not agent.source:
        return (), ()
    source: AgentSource = manager.resolve(manager.runner(agent.source))
    return source.tasks(agent)
