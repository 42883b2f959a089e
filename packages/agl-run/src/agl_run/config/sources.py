"""Experiments whose agent comes with a runner: ``agent = "verifiers:NAME"``.

The word before the colon is then a runner's name and no module's; every package may register such a runner.
"""

from pathlib import Path

from agl import PluginManager
from agl.errors import ConfigError, PluginError, UnknownComponentError
from agl_run.agents.agent import AgentSpec
from agl_run.agents.task_sets import AgentSource, TaskSets


def is_brought(agent: object, *, folder: Path, manager: PluginManager) -> bool:
    """Return true if an agent is named as one that a runner brings.

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
    """Return the error for a runner that some package has, installed or not; ``None`` if none is known to have it."""
    try:
        manager.runner(name)
    except UnknownComponentError as error:
        return None if "; available: " in str(error) else error
    except PluginError as error:
        return error
    return None


def tasks_of(agent: AgentSpec, manager: PluginManager) -> TaskSets:
    """Return the training and validation tasks that belong to an agent; none for one that no runner brings."""
    if not agent.source:
        return (), ()
    source: AgentSource = manager.resolve(manager.runner(agent.source))
    return source.tasks(agent)
