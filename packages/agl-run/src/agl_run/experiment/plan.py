"""Everything that can be checked before the first rollout, checked; and what is then known about the experiment."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from agl import PluginManager
from agl.contracts import AlgorithmEntry, Store
from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, Resource
from agl_run.experiment.config import AlgorithmConfig, ExperimentConfig, RunnerConfig
from agl_run.experiment.dataset import as_tasks, check_hidden
from agl_run.experiment.finished import PREFIX, experiment_of
from agl_run.experiment.roles import check_patterns
from agl_run.runners.agent import BUILT_IN_PARAMETERS, AgentSpec, LoadedAgent
from agl_run.runners.setup import PLACEHOLDER_KEY, environment

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked experiment.

    Attributes:
        config: What was asked for.
        folder: What relative paths are relative to.
        manager: Resolves component names.
        agent: The agent.
        train: Training tasks; ``val`` validation tasks.
        resources: Initial resources that are not policies.
        store: A store object that was passed, else ``None`` and the URL in the configuration counts.
        workdir: Where checkpoints and metrics go.
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

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.config.experiment.name

    def renamed(self, name: str) -> "Plan":
        """The same experiment under another name and with a work directory of its own, which a dry run uses.

        It runs its attempts itself, because workers elsewhere know the experiment by its own name.
        """
        concurrency = self.config.runner.concurrency or RunnerConfig().concurrency
        section = msgspec.structs.replace(self.config.experiment, name=name)
        runner = msgspec.structs.replace(self.config.runner, concurrency=concurrency)
        config = msgspec.structs.replace(self.config, experiment=section, runner=runner)
        return replace(self, config=config, workdir=self.workdir / name)

    def entry(self, algorithm: AlgorithmConfig) -> AlgorithmEntry:
        """The registered record of an algorithm."""
        return self.manager.algorithm(algorithm.use)

    def needs_token_ids(self) -> bool:
        """Whether any algorithm trains on tokens."""
        return any(self.entry(algorithm).needs_token_ids for algorithm in self.config.algorithm)

    def label(self, name: str) -> str:
        """The label of the version that a resource starts from; ``""`` to start from what the experiment says."""
        policy = self.config.policy.get(name)
        return policy.label if policy is not None else str(self.config.resource.get(name, {}).get("label", ""))

    def trained_policies(self) -> set[str]:
        """Policies whose weights an algorithm tunes."""
        return {name for algorithm in self.config.algorithm for name in algorithm.resources} & set(self.config.policy)


def make_plan(
    config: ExperimentConfig,
    *,
    folder: Path,
    manager: PluginManager,
    agent: Any = None,
    train: Any = None,
    val: Any = None,
    resources: Mapping[str, Resource] | None = None,
    store: Store | None = None,
) -> Plan:
    """Check a configuration; arguments beside it replace what it says.

    Raises:
        ConfigError: Something is wrong; one paragraph with the next step.
        PluginError: A component is unknown or broken.
    """
    section = config.experiment
    spec = AgentSpec.of(section.agent if agent is None else agent, folder=str(folder))
    plan = Plan(
        config=config,
        folder=folder,
        manager=manager,
        agent=spec,
        train=as_tasks(section.train if train is None else train, folder=folder, name="train"),
        val=as_tasks(section.val if val is None else val, folder=folder, name="val"),
        resources={**_resources(config), **(resources or {})},
        store=store,
        workdir=folder / (section.workdir or f"runs/{section.name}"),
    )
    _check_section(plan)
    _check_tasks(plan)
    _check_components(plan)
    _check_roles(plan)
    _check_algorithms(plan)
    _check_agent(plan)
    return plan


def _resources(config: ExperimentConfig) -> dict[str, Resource]:
    found: dict[str, Resource] = {}
    for name, given in config.resource.items():
        table = {key: value for key, value in given.items() if key != "label"}
        if not isinstance(given.get("label", ""), str):
            raise ConfigError(f'[resource.{name}] label is {given["label"]!r}; write a name, such as "production"')
        if set(table) <= {"template", "engine"} and isinstance(table.get("template"), str):
            found[name] = PromptTemplate(template=table["template"], engine=table.get("engine", "f-string"))
        elif set(table) == {"value"}:
            found[name] = JsonResource(value=table["value"])
        else:
            raise ConfigError(
                f'[resource.{name}] has the keys {sorted(table)}; write template = "..." (and engine) for a prompt, '
                "or value = ... for anything else"
            )
    return found


def _check_section(plan: Plan) -> None:
    section, config = plan.config.experiment, plan.config
    for name in (section.name, *config.policy, *plan.resources, *(a.label for a in config.algorithm)):
        if not NAME.fullmatch(name):
            raise ConfigError(f"the name {name!r} may hold letters, digits, '_' and '-' only, for it is part of ids")
    if section.penalty and "penalise" not in (section.failed, section.missing_reward):
        raise ConfigError('penalty is ignored unless failed or missing_reward is "penalise"; set one, or remove it')
    if config.schedule.every != 1 and config.schedule.mode != "alternate":
        raise ConfigError(f'schedule.every is ignored in mode {config.schedule.mode!r}; use mode = "alternate"')
    _check_first(config)
    if config.runner.concurrency < 0:
        raise ConfigError("runner.concurrency must be at least 1, or 0 to leave every attempt to `agl worker`")
    if config.runner.max_attempts < 1 or config.schedule.every < 1:
        raise ConfigError("runner.max_attempts and schedule.every must be at least 1")
    if config.runner.timeout_s is not None and config.runner.timeout_s <= 0:
        raise ConfigError("runner.timeout_s must be above 0 seconds")
    if plan.agent.command and config.runner.use == "async":
        raise ConfigError('the agent is a command; set [runner] use = "command"')


def _check_first(config: ExperimentConfig) -> None:
    schedule, labels = config.schedule, [algorithm.label for algorithm in config.algorithm]
    if schedule.firsts and schedule.mode == "sequential":
        raise ConfigError(
            'schedule.first is ignored in mode "sequential", where the order in the file counts; '
            'use mode = "alternate" or "concurrent"'
        )
    for name in schedule.firsts:
        if name not in labels:
            near = get_close_matches(name, labels, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(labels)}"
            raise ConfigError(f"schedule.first names {name!r}, which is no algorithm; {hint}")


def _check_tasks(plan: Plan) -> None:
    section, algorithms = plan.config.experiment, plan.config.algorithm
    if not plan.train and not all(map(_learns_elsewhere, algorithms)):
        raise ConfigError("an algorithm needs training tasks; set [experiment] train to a JSON-lines file")
    if not (plan.train or plan.val or algorithms):
        raise ConfigError("there are no tasks; set [experiment] train or val to a JSON-lines file")
    if section.validate_every and not plan.val:
        raise ConfigError("validate_every is set and there are no validation tasks; set [experiment] val")
    check_hidden([*plan.train, *plan.val], section.hidden, name="train or val")


def _check_components(plan: Plan) -> None:
    config, manager = plan.config, plan.manager
    manager.runner(config.runner.use)
    for credit in (config.credit, *(algorithm.credit for algorithm in config.algorithm if algorithm.credit)):
        manager.credit(credit.use)
    for item in config.reward:
        manager.reward(item.use)
    for item in config.logger:
        manager.logger(item.use)
    for name in config.tracers:
        manager.tracer(name)
    for policy in config.policy.values():
        manager.policy(policy.use)
    both = set(config.policy) & set(plan.resources)
    if both:
        raise ConfigError(f"{sorted(both)} are both policies and resources; names must be unique")
    if config.gateway.use not in ("auto", "none"):
        manager.gateway(config.gateway.use)
    if config.gateway.use == "none" and (config.gateway.params or config.gateway.advertise):
        raise ConfigError('gateway.params and gateway.advertise are ignored with use = "none"; remove them')
    if plan.store is None:
        manager.store_entry(config.experiment.store.partition("://")[0])


def _check_roles(plan: Plan) -> None:
    """Policies that are chosen by who calls need to know who that is, and somebody to send the call there."""
    config = plan.config
    patterns = {name: policy.agents for name, policy in config.policy.items() if policy.agents}
    check_patterns(patterns)
    if not patterns:
        return
    first = next(iter(patterns))
    if config.gateway.use == "none":
        raise ConfigError(
            f"[policy.{first}] agents needs the gateway, which sends calls where they belong; "
            'remove gateway.use = "none"'
        )
    if config.runner.use == "command":
        raise ConfigError(
            f"[policy.{first}] agents needs to know which agent makes a call, and a command is a program that does not "
            f"say it; let the program ask for model = {first!r}, or run the agent from Python"
        )


def _check_algorithms(plan: Plan) -> None:
    labels: set[str] = set()
    owners: dict[str, str] = {}
    for algorithm in plan.config.algorithm:
        if algorithm.label in labels:
            raise ConfigError(f'two algorithms are called {algorithm.label!r}; give one a name = "..."')
        _check_pattern(algorithm)
        if not algorithm.resources:
            raise ConfigError(f"algorithm {algorithm.label!r} tunes nothing; set tunes to one of {_tunable(plan)}")
        _check_sources(plan, algorithm, earlier=labels)
        labels.add(algorithm.label)
        for name in algorithm.resources:
            _check_target(plan, algorithm, name)
            if not _takes_turns(plan, algorithm):
                continue
            other = owners.setdefault(name, algorithm.label)
            if other != algorithm.label:
                raise ConfigError(
                    f"algorithms {other!r} and {algorithm.label!r} would tune {name!r} at the same time (schedule mode "
                    f"{plan.config.schedule.mode!r}); let them tune different resources, name one of them in "
                    'schedule.first, or use mode = "sequential"'
                )


def _takes_turns(plan: Plan, algorithm: AlgorithmConfig) -> bool:
    """Whether an algorithm's steps come between or beside those of others."""
    schedule = plan.config.schedule
    return schedule.mode != "sequential" and algorithm.label not in schedule.firsts


def _check_pattern(algorithm: AlgorithmConfig) -> None:
    try:
        re.compile(algorithm.agents)
    except re.error as error:
        raise ConfigError(
            f"algorithm {algorithm.label!r}: agents = {algorithm.agents!r} is no regular expression: {error}"
        ) from None


def _check_sources(plan: Plan, algorithm: AlgorithmConfig, *, earlier: Collection[str]) -> None:
    if not algorithm.sources:
        return
    if not plan.entry(algorithm).shares:
        raise ConfigError(
            f"algorithm {algorithm.label!r} ({algorithm.use}) collects its own rollouts only; remove its source"
        )
    others = {other.label: other for other in plan.config.algorithm if other.label != algorithm.label}
    for source in algorithm.sources:
        if source.startswith(PREFIX):
            _check_experiment(plan, algorithm, source)
            continue
        if source not in others:
            near = get_close_matches(source, others, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the others are {sorted(others)}"
            raise ConfigError(f"algorithm {algorithm.label!r} has the source {source!r}, which is no other one; {hint}")
        if others[source].sources:
            raise ConfigError(
                f"algorithm {algorithm.label!r} has the source {source!r}, which itself learns from "
                f"{list(others[source].sources)} and pays for no rollouts; name an algorithm that collects"
            )
        if not _takes_turns(plan, algorithm) and (source not in earlier or _takes_turns(plan, others[source])):
            raise ConfigError(
                f"algorithm {algorithm.label!r} learns from {source!r}, which runs after it; put it behind {source!r}, "
                'or use mode = "alternate" or "concurrent" without naming it in schedule.first'
            )


def _check_experiment(plan: Plan, algorithm: AlgorithmConfig, source: str) -> None:
    """Refuse a source that is no other experiment, or that is mixed with algorithms."""
    if experiment_of(source) in ("", plan.name):
        raise ConfigError(
            f"algorithm {algorithm.label!r} has the source {source!r}, which names no other experiment; write "
            f"{PREFIX}NAME with one that agl runs lists, or an algorithm of this experiment"
        )
    if not _learns_elsewhere(algorithm):
        raise ConfigError(
            f"algorithm {algorithm.label!r} has both algorithms and other experiments as its source; use two "
            "algorithms, one for each"
        )


def _learns_elsewhere(algorithm: AlgorithmConfig) -> bool:
    """Whether all that it learns from is in other experiments, so that it needs no tasks."""
    return bool(algorithm.sources) and all(source.startswith(PREFIX) for source in algorithm.sources)


def _check_target(plan: Plan, algorithm: AlgorithmConfig, name: str) -> None:
    kinds = plan.entry(algorithm).tunes
    policy = plan.config.policy.get(name)
    if policy is not None:
        if "weights" not in kinds:
            raise ConfigError(f"algorithm {algorithm.label!r} tunes {' or '.join(kinds)}, and {name!r} is a policy")
        if not plan.manager.policy(policy.use).trains:
            raise ConfigError(
                f"algorithm {algorithm.label!r} tunes the weights of {name!r}, and a policy of use = {policy.use!r} "
                'takes none; use a policy that trains, such as "torch"'
            )
    elif name in plan.resources:
        kind = "prompt_template" if isinstance(plan.resources[name], PromptTemplate) else "json"
        if kind not in kinds:
            raise ConfigError(f"algorithm {algorithm.label!r} tunes {' or '.join(kinds)}, and {name!r} is a {kind}")
    else:
        near = get_close_matches(name, _tunable(plan), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {_tunable(plan)}"
        raise ConfigError(f"algorithm {algorithm.label!r} tunes {name!r}, which is no policy or resource; {hint}")


def _tunable(plan: Plan) -> list[str]:
    return sorted({*plan.config.policy, *plan.resources})


def load_agent(spec: AgentSpec) -> LoadedAgent:
    """The agent, imported with a placeholder for keys that are not set; raises :class:`ConfigError`."""
    missing = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY") if name not in os.environ]
    with environment(dict.fromkeys(missing, PLACEHOLDER_KEY)):  # a client made at the top of the module asks for one
        return spec.load()


def _check_agent(plan: Plan) -> None:
    if plan.agent.command:
        return
    loaded = load_agent(plan.agent)
    known = {*BUILT_IN_PARAMETERS, *plan.config.policy, *plan.resources}
    for parameter in loaded.parameters[1:]:
        if parameter not in known:
            near = get_close_matches(parameter, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"the agent needs the resource {parameter!r}, which the experiment lacks{hint} "
                f"Add [policy.{parameter}] or [resource.{parameter}]; there are {_tunable(plan)}"
            )
