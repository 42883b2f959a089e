"""The plan of an experiment: its agent, tasks, resources and plugins, ready to run."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from agl import PluginManager
from agl.algorithms import AlgorithmConfig
from agl.contracts import AlgorithmEntry, Store
from agl.errors import AglError, ConfigError
from agl.schemas import Json, Resource
from agl_inspect.stores import located
from agl_run.access.tokens import PLACEHOLDER_KEY
from agl_run.agents.agent import AgentSpec, LoadedAgent
from agl_run.config.sections import ExperimentConfig, RunnerConfig
from agl_run.fleet import Fleet
from agl_run.runners.setup import environment, without_proxy

VALIDATION = "validate"
"""The caller's name for validation, in rollout ids and metrics; no algorithm may have it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An experiment with all objects that its configuration names.

    Attributes:
        config: The configuration.
        folder: Base of relative paths.
        manager: The plugin manager, which finds components by name.
        agent: The agent.
        train: Training tasks.
        val: Validation tasks.
        resources: Initial resources that are not policies.
        store: The store object that was passed; ``None`` to open the URL in the configuration.
        workdir: Folder for checkpoints and metrics.
        rewards: Functions, instances and classes that were passed as rewards, by name.
        fleet: Places workers and algorithms on other machines, in which case ``config.runner`` describes the runner
            of each worker; ``None`` if the runner runs on this machine.
    """

    config: ExperimentConfig
    folder: Path
    manager: PluginManager
    agent: AgentSpec
    train: Sequence[Json]
    val: Sequence[Json]
    resources: Mapping[str, Resource]
    store: Store | None
    workdir: Path
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    fleet: Fleet | None = None

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.config.experiment.name

    def renamed(self, name: str) -> "Plan":
        """Copy the plan under another name, with a work directory of its own, for a dry run.

        The copy runs its attempts in this process, because workers elsewhere look for the original name.
        """
        # Workers elsewhere look for the original name, so the copy runs its attempts itself.
        concurrency = self.config.runner.concurrency or RunnerConfig().concurrency
        section = msgspec.structs.replace(self.config.experiment, name=name)
        runner = msgspec.structs.replace(self.config.runner, concurrency=concurrency)
        config = msgspec.structs.replace(self.config, experiment=section, runner=runner)
        return replace(self, config=config, workdir=self.workdir / name, fleet=None)

    @property
    def takes_conversations(self) -> bool:
        """True if the tasks come from served conversations: the file is for `agl learn`, and names no tasks."""
        return bool(self.config.learn) and not (self.train or self.val)

    def entry(self, algorithm: AlgorithmConfig) -> AlgorithmEntry:
        """Return the entry by which an algorithm is registered."""
        return self.manager.algorithm(algorithm.use)

    def needs_token_ids(self) -> bool:
        """Return true if any algorithm trains on tokens."""
        return any(self.entry(algorithm).needs_token_ids for algorithm in self.config.algorithm)

    def label(self, name: str) -> str:
        """Return the label of the version that a resource starts from; ``""`` for the experiment's own value."""
        given = self.config.policy.get(name) or self.config.resource.get(name)
        return given.label if given is not None else ""

    def trained_policies(self) -> set[str]:
        """Return the policies whose weights an algorithm tunes."""
        return {name for algorithm in self.config.algorithm for name in algorithm.tunes} & set(self.config.policy)

    def policies_trained_on(self, collecting: AlgorithmConfig) -> list[str]:
        """Return the policies that train on an algorithm's rollouts, also those of algorithms that share them."""
        name = collecting.name
        learning = [each for each in self.config.algorithm if name == each.name or name in each.source]
        return sorted({policy for each in learning for policy in each.tunes} & set(self.config.policy))


def placeholder_keys() -> AbstractContextManager[None]:
    """Set placeholders for missing API keys, and exempt this machine from the environment's proxy.

    Some modules create an API client on import. That fails without a key, and the client decides then whether calls to
    the gateway on this machine go through the proxy.
    """
    # Clients are often made at import and refuse to be without a key; the attempt's own replaces it
    # in every call.
    missing = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY") if name not in os.environ]
    # A client also decides then which calls go through a proxy, and the gateway is on this machine.
    return environment({**dict.fromkeys(missing, PLACEHOLDER_KEY), **without_proxy("http://127.0.0.1")})


def load_agent(spec: AgentSpec) -> LoadedAgent:
    """Import the agent, with placeholders for missing API keys; raises :class:`ConfigError` if it cannot be used."""
    try:
        with placeholder_keys():
            return spec.load()
    except AglError:
        raise
    except Exception as error:  # an agent's class may raise anything when its instance is made
        problem = f"{type(error).__name__}: {error}"
        if "is not a callable object" in problem:
            problem = "it is neither a function nor a class with a method rollout"
        raise ConfigError(
            f"the agent {spec.identity!r} cannot be used: {problem}; name a function, such as "
            "def solve(task), or a class with a method rollout(task, resources, rollout) that is made without arguments"
        ) from error


def store_url_of(plan: Plan) -> str:
    """Return the URL of the experiment's store; a relative SQLite path is joined to the experiment's folder."""
    return located(plan.config.experiment.store, plan.folder)
