"""Experiments whose agent is a coding harness: ``[experiment] harness = "pi"`` in the place of ``agent``.

The runner ``harness`` of the package agl-harness runs it; here is only what makes the configuration one.
"""

from pathlib import Path

import msgspec

from agl.errors import ConfigError
from agl_run.experiment.config import ASYNC, ExperimentConfig, ExperimentSection
from agl_run.runners.agent import AgentSpec

HARNESS = "harness"
"""The runner of coding harnesses."""


def with_harness(config: ExperimentConfig) -> ExperimentConfig:
    """Set the runner of an experiment with a harness that names none."""
    if not config.experiment.harness or config.runner.use != ASYNC:
        return config
    return msgspec.structs.replace(config, runner=msgspec.structs.replace(config.runner, use=HARNESS))


def agent_of(section: ExperimentSection, folder: Path) -> AgentSpec:
    """Return the agent of an experiment.

    Raises:
        ConfigError: It names none, or both an agent and a harness, or a workspace that nothing works in.
    """
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
