"""Makes a plan from a configuration, with every check that needs no rollout."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from agl import PluginManager
from agl.algorithms import AlgorithmConfig
from agl.contracts import AlgorithmEntry, Store, StoreEntry, Upstream
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Json, JsonResource, PromptTemplate, Resource
from agl.tracing import upstreams_for
from agl_inspect.records.names import MAX_NAME, NAME
from agl_inspect.records.sources import PREFIX, experiment_of
from agl_inspect.records.validations import FEWEST_TASKS
from agl_inspect.stores import check_store_url
from agl_run.agents.agent import BUILT_IN_PARAMETERS, Agent, AgentSpec
from agl_run.agents.importing import OtherModuleError, make_importable
from agl_run.checks.frameworks import check_frameworks
from agl_run.config.agent import HARNESS, agent_of, tasks_of, with_runner
from agl_run.config.dataset import Tasks, as_tasks, check_hidden
from agl_run.config.retention import limits_of
from agl_run.config.sections import (
    PAST,
    ExperimentConfig,
    ExperimentSection,
    GatewayConfig,
    PolicyConfig,
    ResourceConfig,
)
from agl_run.deliver.exporting import check_different
from agl_run.parts.rewards import check_known
from agl_run.plan import VALIDATION, Plan, load_agent
from agl_run.watch.sampling import check_rules
from agl_run.worker.cluster_share import with_fleet


def make_plan(
    config: ExperimentConfig,
    *,
    folder: Path,
    manager: PluginManager,
    agent: Agent | None = None,
    train: Tasks | None = None,
    val: Tasks | None = None,
    store: Store | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
) -> Plan:
    """Check a configuration and return its plan; the optional arguments replace settings of the configuration.

    Raises:
        ConfigError: A setting is wrong; the message names the next step.
        PluginError: A component is unknown or broken.
    """
    section = config.experiment
    # The agent decides about the runner, and the runner about the fleet, so they are found in this
    # order.
    spec = agent_of(section, folder, manager, given=agent)
    config, fleet = with_fleet(_with_targets(config, manager), manager)
    config = with_runner(config, spec)
    _check_agents_runner(config, spec, manager)
    train, val = section.train if train is None else train, section.val if val is None else val
    # A runner's own tasks are read only if the experiment names no tasks, because some are
    # downloaded.
    if isinstance(train, str) and isinstance(val, str) and not (train or val):
        train, val = tasks_of(spec, manager)
    plan = Plan(
        config=config,
        folder=folder,
        manager=manager,
        agent=spec,
        train=as_tasks(train, folder=folder, name="train"),
        val=as_tasks(val, folder=folder, name="val"),
        resources={name: _resource(name, given) for name, given in config.resource.items()},
        store=store,
        rewards=rewards or {},
        workdir=folder / section.workdir / section.name,
        fleet=fleet,
    )
    # From cheap to dear: names and numbers first, imports of the user's code last.
    _check_section(plan)
    _check_tasks(plan)
    _check_validation(plan)
    _check_components(plan)
    _check_roles(plan)
    _check_algorithms(plan)
    _check_agent(plan)
    check_known(plan)  # after the agent, whose module may hold rewards and is imported with placeholders for keys
    return plan


def _check_agents_runner(config: ExperimentConfig, agent: AgentSpec, manager: PluginManager) -> None:
    """Refuse an agent that belongs to another runner than the experiment's, or that its runner does not have."""
    if not agent.source:
        return
    if config.runner.use != agent.source:
        raise ConfigError(
            f"runner.use is {config.runner.use!r}, and the agent {agent.identity!r} comes with the runner "
            f"{agent.source!r}; remove [runner] use"
        )
    manager.resolve(manager.runner(agent.source)).check(agent)


def _with_targets(config: ExperimentConfig, manager: PluginManager) -> ExperimentConfig:
    """Set ``tunes`` of every algorithm that names no target, if exactly one resource is of a kind that it can tune."""
    algorithms = (
        msgspec.structs.replace(
            algorithm, tunes=algorithm.tunes or _only_target(config, manager.algorithm(algorithm.use))
        )
        for algorithm in config.algorithm
    )
    return msgspec.structs.replace(config, algorithm=tuple(algorithms))


def _only_target(config: ExperimentConfig, entry: AlgorithmEntry) -> tuple[str, ...]:
    found = [name for name, kind in _kinds(config).items() if kind in entry.tunes]
    return tuple(found) if len(found) == 1 else ()


def _kinds(config: ExperimentConfig) -> dict[str, str]:
    """Map the name of each resource and policy to its kind: ``json``, ``prompt_template`` or ``weights``."""
    kinds = {name: "json" if given.template is None else "prompt_template" for name, given in config.resource.items()}
    return kinds | dict.fromkeys(config.policy, "weights")


def _resource(name: str, given: ResourceConfig) -> Resource:
    is_prompt, is_value = given.template is not None, given.value is not msgspec.UNSET
    if is_prompt == is_value or (is_value and given.engine != ResourceConfig().engine):
        raise ConfigError(
            f'[resource.{name}]: write template = "..." (and engine) for a prompt, or value = ... for anything else'
        )
    if given.template is not None:
        return PromptTemplate(template=given.template, engine=given.engine)
    return JsonResource(value=given.value)


def _check_section(plan: Plan) -> None:
    section, config = plan.config.experiment, plan.config
    for algorithm in config.algorithm:
        if ":" in algorithm.use:
            raise ConfigError(
                f"[[algorithm]] use = {algorithm.use!r} names a class; use the name under which a plugin registers it, "
                "see the tutorial 'Write an algorithm'. A loss or an estimator of your own needs no plugin: "
                "objective.loss and estimator take 'module:name'"
            )
    for name in (section.name, *config.policy, *plan.resources, *(a.name for a in config.algorithm)):
        if len(name) > MAX_NAME:
            raise ConfigError(
                f"the name {name[:30]!r}... has {len(name)} characters, and {MAX_NAME} are allowed, because it is part "
                "of ids and of a folder's name; shorten it"
            )
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"the name {name!r} may hold letters, digits, '_' and '-' only, because it is part of ids; write "
                f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name).strip('-') or 'a-name'!r}"
            )
    if any(algorithm.name == VALIDATION for algorithm in config.algorithm):
        raise ConfigError(f"an algorithm is called {VALIDATION!r}, a name reserved for validation; rename it")
    # A setting that is ignored is refused, here and below: its author believes that it works.
    if section.penalty and section.failed == section.missing_reward == "drop":
        raise ConfigError(
            f"experiment.penalty is {section.penalty:g}, and penalty is ignored if failed and missing_reward are "
            '"drop"; change one, or remove it'
        )
    if config.schedule.every != 1 and config.schedule.mode != "alternate":
        raise ConfigError(f'schedule.every is ignored in mode {config.schedule.mode!r}; use mode = "alternate"')
    _check_first(config)
    _check_runner(plan)
    limits_of(config.retention)
    _check_workdir(plan)


def _check_workdir(plan: Plan) -> None:
    for path in (plan.workdir, *plan.workdir.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"checkpoints and metrics go to {str(plan.workdir)!r}, and {path.name!r} is a file; set [experiment] "
                "workdir to another directory, or move the file away"
            )


def _check_runner(plan: Plan) -> None:
    runner = plan.config.runner
    if plan.agent.command and runner.use == "async":
        raise ConfigError('the agent is a command; set [runner] use = "command"')
    if (runner.use == HARNESS) != bool(plan.agent.harness):
        raise ConfigError(
            f"runner.use is {runner.use!r}, and the agent is {plan.agent.identity!r}; a harness, as in [experiment] "
            'harness = "pi", and the runner "harness" go together, so remove one of the two'
        )
    if plan.agent.harness and plan.config.gateway.use == "none":
        raise ConfigError(
            "a harness is a program of its own, and only the gateway can record its model calls; remove [gateway] "
            'use = "none"'
        )
    if runner.use == "command" and not plan.agent.command:
        raise ConfigError(
            f'runner.use is "command", and the agent {plan.agent.identity!r} is not a command; write a command as an '
            'array of words, such as agent = ["python", "agent.py"], or set [runner] use = "async"'
        )


def _check_first(config: ExperimentConfig) -> None:
    schedule, names = config.schedule, [algorithm.name for algorithm in config.algorithm]
    if schedule.first and schedule.mode == "sequential":
        raise ConfigError(
            'schedule.first is ignored in mode "sequential", where the order in the file counts; '
            'use mode = "alternate" or "concurrent"'
        )
    for name in schedule.first:
        if name not in names:
            hint = did_you_mean(name, names, otherwise=f"there are {sorted(names)}")
            raise ConfigError(f"schedule.first names {name!r}, which is not an algorithm; {hint}")


def _check_tasks(plan: Plan) -> None:
    section, algorithms = plan.config.experiment, plan.config.algorithm
    if plan.takes_conversations:
        return
    if not plan.train and not all(map(_needs_no_tasks, algorithms)):
        raise ConfigError("an algorithm needs training tasks; set [experiment] train to a JSON-lines file")
    if not (plan.train or plan.val or algorithms):
        raise ConfigError("there are no tasks; set [experiment] train or val to a JSON-lines file")
    check_hidden([*plan.train, *plan.val], section.hidden, name="train or val")
    if section.group_key:
        _check_group_key(plan.train, section.group_key, name="train")
        _check_group_key(plan.val, section.group_key, name="val")


def _check_group_key(tasks: Sequence[Json], key: str, *, name: str) -> None:
    """Refuse a dataset with a task that lacks the group key."""
    for number, task in enumerate(tasks, start=1):
        fields = cast("dict[str, Json]", task) if isinstance(task, dict) else {}
        if fields.get(key) is None:
            hint = did_you_mean(
                key, sorted(set(fields) - {key}), otherwise="give it to every task, or remove group_key"
            )
            raise ConfigError(
                f"experiment.group_key is {key!r}, which task {number} of {name} lacks: "
                f"{str(cast('Any', task))[:80]}; {hint}"
            )


def _check_validation(plan: Plan) -> None:
    """Refuse validation settings that have no effect because there are no validation tasks."""
    section, default = plan.config.experiment, ExperimentSection()
    settings = ["validate_every"]
    if section.train or not plan.train:  # Trainer.dev gets training tasks only, whatever fit gets
        settings += ["validation_limit", "final"]
    for name in settings:
        value = getattr(section, name)
        if not plan.val and value != getattr(default, name):
            raise ConfigError(
                f"experiment.{name} is {value!r}, and there are no validation tasks; set [experiment] val to a "
                "JSON-lines file, or remove it"
            )
    if section.on_collapse == default.on_collapse or not plan.config.algorithm:
        return
    count = len(plan.val[: section.validation_limit or None])
    if not section.validate_every:
        raise ConfigError(
            f"experiment.on_collapse is {section.on_collapse!r}, and only validations between the steps show a "
            "collapse; set validate_every, or remove it"
        )
    # With fewer tasks, the evidence can never be strong enough, and the guard would never act.
    if count < FEWEST_TASKS:
        raise ConfigError(
            f"experiment.on_collapse is {section.on_collapse!r}, and a collapse shows from {FEWEST_TASKS} validation "
            f"tasks on, and there are {count}; give more of them (val, validation_limit), or remove it"
        )


def _check_opponents(policies: Mapping[str, PolicyConfig]) -> None:
    opponents = {name: policy.params.get("of") for name, policy in policies.items() if policy.use == PAST}
    for name, of in opponents.items():
        others = policies.keys() - opponents.keys()
        if of is not None and of not in others:
            hint = did_you_mean(str(of), others, otherwise=f"there are {sorted(others)}")
            raise ConfigError(f"[policy.{name}] of = {of!r} is no policy with versions of its own; {hint}")
        if list(opponents.values()).count(of) > 1:
            raise ConfigError(f"several policies have use = {PAST!r} and of = {of!r}; keep one of them")


def _check_components(plan: Plan) -> None:
    config, manager = plan.config, plan.manager
    runner = manager.runner(config.runner.use)
    # A harness can look at tasks and workspaces before a container is started.
    if plan.agent.harness and (check := getattr(manager.resolve(runner), "check", None)):
        check(plan.agent, [*plan.train, *plan.val], plan.config.runner.params)
    for credit in (config.credit, *(algorithm.credit for algorithm in config.algorithm if algorithm.credit)):
        manager.credit(credit.use)
    for name in config.tracers:
        manager.tracer(name)
    # After the tracers are known to exist, and without importing their frameworks.
    check_frameworks(plan)
    for policy in config.policy.values():
        manager.policy(policy.use)
    check_rules(config.policy, trained=plan.trained_policies())
    _check_opponents(config.policy)
    both = set(config.policy) & set(plan.resources)
    if both:
        raise ConfigError(
            f"{sorted(both)} are both policies and resources; names must be unique, so rename one of each"
        )
    for exporter in config.exporter:
        manager.exporter(exporter.use)
    check_different(plan)
    if config.gateway.use not in ("auto", "none"):
        manager.gateway(config.gateway.use)
    _check_gateway(config.gateway)
    if plan.store is None:
        check_store_url(config.experiment.store, plan.folder)
        manager.store_entry(config.experiment.store.partition("://")[0])
    else:
        kind = type(plan.store)
        manager.check(StoreEntry(name=kind.__name__, factory=kind))


def _check_gateway(gateway: GatewayConfig) -> None:
    if gateway.use == "none" and (gateway.params or gateway.advertise or gateway.ca or gateway.process is True):
        raise ConfigError(
            'gateway.params, gateway.advertise, gateway.ca and gateway.process are ignored with use = "none"; remove '
            "them"
        )


def _check_roles(plan: Plan) -> None:
    """Refuse ``[policy.NAME] agents`` without a gateway, or with a runner that cannot name the calling agent."""
    config = plan.config
    patterns = {name: policy.agents for name, policy in config.policy.items() if policy.agents}
    check_patterns(patterns)
    if not patterns:
        return
    first = next(iter(patterns))
    if config.gateway.use == "none":
        raise ConfigError(
            f'[policy.{first}] agents needs the gateway, which routes calls by agent; remove gateway.use = "none"'
        )
    if plan.agent.is_program:
        raise ConfigError(
            f"[policy.{first}] agents needs to know which agent makes a call, and a command is a program that does not "
            f"say it; let the program ask for model = {first!r}, or run the agent from Python"
        )


def _check_algorithms(plan: Plan) -> None:
    names: set[str] = set()
    owners: dict[str, str] = {}
    for algorithm in plan.config.algorithm:
        if algorithm.name in names:
            raise ConfigError(f'two algorithms are called {algorithm.name!r}; give one a name = "..."')
        _check_pattern(f"algorithm {algorithm.name!r}:", algorithm.agents)
        if not algorithm.tunes:
            raise ConfigError(f"algorithm {algorithm.name!r} tunes nothing; set tunes to one of {_tunable(plan)}")
        _check_sources(plan, algorithm, earlier=names)
        names.add(algorithm.name)
        for name in algorithm.tunes:
            _check_target(plan, algorithm, name)
            # Sequential algorithms may tune the same resource: the later one continues from the
            # earlier one.
            if not _takes_turns(plan, algorithm):
                continue
            other = owners.setdefault(name, algorithm.name)
            if other != algorithm.name:
                raise ConfigError(
                    f"algorithms {other!r} and {algorithm.name!r} would tune {name!r} at the same time (schedule mode "
                    f"{plan.config.schedule.mode!r}); let them tune different resources, name one of them in "
                    'schedule.first, or use mode = "sequential"'
                )


def _takes_turns(plan: Plan, algorithm: AlgorithmConfig) -> bool:
    """Return true if the algorithm's steps alternate with, or run at the same time as, those of other algorithms."""
    schedule = plan.config.schedule
    return schedule.mode != "sequential" and algorithm.name not in schedule.first


def _check_pattern(owner: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{owner} agents = {pattern!r} is not a regular expression: {error}; list names as in 'write|rewrite'"
        ) from None


def _check_sources(plan: Plan, algorithm: AlgorithmConfig, *, earlier: Collection[str]) -> None:
    if not algorithm.source:
        return
    if not plan.entry(algorithm).shares:
        raise ConfigError(
            f"algorithm {algorithm.name!r} ({algorithm.use}) collects its own rollouts only; remove its source"
        )
    if given := [key for key in ("tasks_per_step", "group_size") if key in algorithm.params]:
        raise ConfigError(
            f"algorithm {algorithm.name!r} learns from {list(algorithm.source)} and collects nothing, so "
            f"{' and '.join(given)} would be ignored; remove it, or remove the source"
        )
    others = {other.name: other for other in plan.config.algorithm if other.name != algorithm.name}
    for source in algorithm.source:
        if source.startswith(PREFIX):
            _check_experiment(plan, algorithm, source)
            continue
        if source not in others:
            hint = did_you_mean(source, others, otherwise=f"the others are {sorted(others) or 'none'}")
            raise ConfigError(
                f"algorithm {algorithm.name!r} has the source {source!r}, and no other algorithm has that name; {hint}"
            )
        # Only an algorithm that collects has rollouts of its own to share.
        if others[source].source:
            raise ConfigError(
                f"algorithm {algorithm.name!r} has the source {source!r}, which itself learns from "
                f"{list(others[source].source)} and pays for no rollouts; name an algorithm that collects"
            )
        if not _takes_turns(plan, algorithm) and (source not in earlier or _takes_turns(plan, others[source])):
            raise ConfigError(
                f"algorithm {algorithm.name!r} learns from {source!r}, which runs after it; put it behind {source!r}, "
                'or use mode = "alternate" or "concurrent" without naming it in schedule.first'
            )


def _check_experiment(plan: Plan, algorithm: AlgorithmConfig, source: str) -> None:
    """Refuse a source ``experiment:NAME`` that names no other experiment, or that stands next to algorithms."""
    if experiment_of(source) in ("", plan.name):
        raise ConfigError(
            f"algorithm {algorithm.name!r} has the source {source!r}, which names no other experiment; write "
            f"{PREFIX}NAME with one that agl runs lists, or an algorithm of this experiment"
        )
    if not _needs_no_tasks(algorithm):
        raise ConfigError(
            f"algorithm {algorithm.name!r} has both algorithms and other experiments as its source; use two "
            "algorithms, one for each"
        )


def _needs_no_tasks(algorithm: AlgorithmConfig) -> bool:
    """Return true if the algorithm learns only from other experiments, and therefore needs no tasks."""
    return bool(algorithm.source) and all(source.startswith(PREFIX) for source in algorithm.source)


def _check_target(plan: Plan, algorithm: AlgorithmConfig, name: str) -> None:
    wanted, found = plan.entry(algorithm).tunes, _kinds(plan.config)
    if name not in found:
        hint = did_you_mean(name, _tunable(plan), otherwise=f"there are {_tunable(plan)}")
        raise ConfigError(
            f"algorithm {algorithm.name!r} tunes {name!r}, which is neither a policy nor a resource; {hint}"
        )
    if found[name] not in wanted:
        fitting = sorted(other for other, kind in found.items() if kind in wanted)
        remedy = f"set tunes to one of {fitting}" if fitting else "add one of that kind, or use another algorithm"
        kind = found[name].replace("weights", "policy")
        raise ConfigError(
            f"algorithm {algorithm.name!r} tunes {' or '.join(wanted)}, and {name!r} is a {kind}; {remedy}"
        )
    policy = plan.config.policy.get(name)
    if policy is not None and not plan.manager.policy(policy.use).trains:
        raise ConfigError(
            f"algorithm {algorithm.name!r} tunes the weights of {name!r}, and a policy of use = {policy.use!r} "
            'takes none; use a policy that trains, such as "torch"'
        )


def _tunable(plan: Plan) -> list[str]:
    return sorted({*plan.config.policy, *plan.resources})


def _check_agent(plan: Plan) -> None:
    if not plan.agent.is_imported:
        make_importable(str(plan.folder))  # for losses of its own, as where the agent comes from there
        return
    try:
        loaded = load_agent(plan.agent)
    except OtherModuleError:
        return  # a runner in this process refuses it, and one with processes of its own imports the right one there
    runner = plan.manager.resolve(plan.manager.runner(plan.config.runner.use))
    # A runner declares the parameters that it fills itself, such as a sandbox, as ``provides``.
    known = {*BUILT_IN_PARAMETERS, *plan.config.policy, *plan.resources, *getattr(runner, "provides", ())}
    # The first parameter is the task, whatever its name is.
    for parameter in loaded.parameters[1:]:
        if parameter not in known:
            near = did_you_mean(parameter, known)
            raise ConfigError(
                f"the agent needs the resource {parameter!r}, which the experiment lacks{f'; {near}' if near else '.'} "
                f"Add [policy.{parameter}] or [resource.{parameter}]; there are {_tunable(plan)}"
            )


def check_patterns(patterns: Mapping[str, str]) -> None:
    """Refuse ``agents`` patterns, given by policy name, that are invalid or that name the same agent twice.

    Only whole names are compared. Expressions can overlap in other ways; if two match a call, the gateway refuses it.

    Raises:
        ConfigError: A pattern is not a regular expression, or two policies claim one agent; the message names them.
    """
    for policy, pattern in patterns.items():
        _check_pattern(f"[policy.{policy}]", pattern)
    upstreams = [Upstream(name=policy, base_url="", agents=pattern) for policy, pattern in patterns.items()]
    # Whole names are compared; where expressions overlap, the gateway refuses the call itself.
    for name in (name for pattern in patterns.values() for name in pattern.split("|")):
        claimed = [upstream.name for upstream in upstreams_for(upstreams, names=[name])]
        if len(claimed) > 1:
            first, second = sorted(claimed, key=list(patterns).index)[:2]
            raise ConfigError(
                f"[policy.{first}] and [policy.{second}] both take the calls of agent {name!r} "
                f"(agents = {patterns[first]!r} and {patterns[second]!r}); let one policy name it"
            )
