"""The configuration of an experiment: frozen records, read from a TOML file or built in Python.

:class:`ExperimentConfig` is a whole experiment, and each section of the file has its own record; the records of
algorithms, rewards and credit are in :mod:`agl.algorithms`. :func:`policy` and :func:`runner` build a section with the
component's own parameters next to its settings, as in a file.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec
from msgspec import Meta

from agl.algorithms import AlgorithmConfig, ComponentConfig, PlacementConfig
from agl.hints import check_value
from agl.schemas import MAX_ATTEMPTS, Json, JsonResource, PromptTemplate, Record
from agl_run.config.learning import LearnSettings

EXAMPLES = {
    "agent": 'write "module:attribute", such as agent = "agent:solve", or a command as an array of words: '
    'agent = ["python", "agent.py"]',
    "older_than": 'write a duration in quotes, such as older_than = "30d"',
    "plugins": 'write plugins = { disabled = ["NAME"] }, the only key of it',
    "process": 'write process = true, process = false, or process = "auto"',
    "reward_weights": "write the weights by reward: reward_weights = { NAME = 1.0 }",
    "timeout_s": "write a number of seconds without quotes, such as timeout_s = 60",
    "use": 'write a name in quotes, such as use = "NAME"',
}
"""Advice by key, for keys whose type alone does not show what to write."""

ASYNC = "async"
"""The default runner."""


class RunnerConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[runner]``: how attempts run.

    Attributes:
        use: ``async``, ``process``, ``command`` or a runner of a plugin.
        concurrency: Attempts that run at once in the experiment's own process, or in each worker if the runner places
            workers; 0 leaves all attempts to ``agl worker``.
        is_adaptive: Whether the attempts at once follow the load of the model servers, up to ``concurrency``; only in
            the experiment's own process.
        timeout_s: Time limit of one attempt in seconds.
        max_attempts: The most attempts of a rollout that may fail or exceed their time limit; see ``retry_on``.
        max_losses: How many times a rollout that has lost its worker is tried again. After one more loss the rollout
            fails, because it may itself be the cause.
        retry_on: Outcomes that lead to another attempt: ``failed``, ``timeout``, or both; by default neither.
        resources: The cluster share of each worker; only for a runner that places workers, such as ``ray``.
        params: Further arguments of the runner.
    """

    use: str = ASYNC
    concurrency: Annotated[
        int, Meta(ge=0, description="it must be at least 1, or 0 to leave every attempt to `agl worker`")
    ] = 8
    is_adaptive: bool = False
    timeout_s: (
        Annotated[float, Meta(gt=0, description="it must be above 0 seconds, or be left out for no limit")] | None
    ) = None
    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS, description=f"choose between 1 and {MAX_ATTEMPTS}")] = 3
    max_losses: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS, description=f"choose between 0 and {MAX_ATTEMPTS}")] = 20
    retry_on: tuple[Literal["failed", "timeout"], ...] = ()
    resources: PlacementConfig | None = None
    params: dict[str, Json] = {}


PAST = "past"
"""The ``use`` of a policy that answers with versions of another one."""


class PolicyConfig(Record, frozen=True, kw_only=True):
    """``[policy.NAME]``: a model server; keys that are not listed here are arguments of the policy.

    Attributes:
        use: ``openai``, ``torch``, or a policy of a plugin.
        aliases: Model names (patterns) that agents use for the policy, besides NAME and the name of its model.
        agents: Regular expression over the whole names of agents, nodes and roles: their calls go to this policy,
            whatever model name their code sends.
        label: Start from the version of the weights with this label; without such a version, start from ``model``.
        sampling: Treatment of calls that ask for less than the full distribution (top-p, penalties, temperature 0) in
            rollouts that train the policy: ``override`` the parameters, ``refuse`` the call, or ``keep`` them.
        params: The policy's own arguments.
    """

    use: str
    aliases: tuple[str, ...] = ()
    agents: str = ""
    label: str = ""
    sampling: Literal["override", "refuse", "keep"] = "override"
    params: dict[str, Json] = {}


class ResourceConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[resource.NAME]``: a prompt (``template``) or any JSON value (``value``); exactly one of the two is given.

    Attributes:
        template: The text of a prompt.
        engine: How the prompt's placeholders are written; see :class:`agl.PromptTemplate`.
        value: Any JSON value.
        label: Start from the version with this label; without such a version, start from ``template`` or ``value``.
    """

    template: str | None = None
    engine: Literal["f-string", "jinja", "plain"] = "f-string"
    value: Json = msgspec.UNSET
    label: str = ""

    @classmethod
    def of(cls, resource: PromptTemplate | JsonResource) -> "ResourceConfig":
        """Return the section ``[resource.NAME]`` that describes the resource."""
        if isinstance(resource, PromptTemplate):
            return cls(template=resource.template, engine=resource.engine)
        return cls(value=resource.value)


class ScheduleConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[schedule]``: the order in which algorithms take their steps.

    Attributes:
        mode: ``sequential``: one algorithm after the other; ``alternate``: each takes ``every`` steps in turn;
            ``concurrent``: all at the same time.
        every: The number of steps in a turn.
        first: Algorithms that run to their end before all others start, in the order of the file.
    """

    mode: Literal["sequential", "alternate", "concurrent"] = "sequential"
    every: Annotated[int, Meta(ge=1, description="it must be at least 1")] = 1
    first: tuple[str, ...] = ()


class GatewayConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway]``: the proxy that records calls; ``use = "none"`` records them in the agent's process instead.

    Attributes:
        use: ``auto``, ``none``, or a gateway of a plugin.
        advertise: Host name or URL at which other machines reach the gateway; by default the address it listens at.
        ca: PEM file with the certificate authorities that workers and agents trust for the gateway; by default the
            file in ``AGL_CA_FILE``, else the system's authorities.
        process: Whether the gateway runs in a process of its own; ``auto`` does so for more than 64 attempts at once,
            or if no attempt runs here (``concurrency = 0``), provided that the store allows it.
        params: Further arguments of the gateway.
    """

    use: str = "auto"
    advertise: str = ""
    ca: str = ""
    process: Literal["auto"] | bool = "auto"
    params: dict[str, Json] = {}


class RetentionConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[retention]``: which old rollouts a run removes after its end; without a limit it removes none.

    Attributes:
        older_than: Age from which a finished rollout is old, such as ``30d``; see ``agl runs gc``.
        keep: Number of the newest finished rollouts that are kept whatever their age.
        max_size: Size of the store's data, such as ``10GB``; below it no rollout is removed.
        experiments: ``own`` for rollouts of earlier runs of this experiment, ``all`` for rollouts of every experiment
            in the store.
    """

    older_than: str = ""
    keep: Annotated[int, Meta(ge=0, description="write 0 or more")] | None = None
    max_size: str = ""
    experiments: Literal["own", "all"] = "own"


class ExperimentSection(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[experiment]``: the agent, its tasks and the store.

    Attributes:
        agent: ``module:attribute``, a command as a list of words, or ``RUNNER:NAME`` for an agent that a runner brings,
            such as ``verifiers:NAME``.
        agent_args: Arguments of an agent that a runner brings.
        harness: Coding harness to run instead of an agent: a name that ``agl harness list`` shows, or a TOML file.
        workspace: Folder, or ``git:FOLDER@REVISION``, that a harness gets a copy of in every rollout. ``{KEY}`` stands
            for a field of the task; a task's own ``workspace`` takes precedence.
        name: Name of the experiment, which its rollouts, states and metrics carry.
        store: URL of the store.
        train: JSON-lines, CSV or Parquet file of training tasks, a file with one JSON array of them, or tasks that a
            package reads, such as ``harbor:FOLDER``.
        val: Validation tasks, given in the same ways as ``train``.
        seed: Seed of all random choices.
        hidden: Keys of a task that only reward emitters see.
        group_key: Key of a task that is its identity for group baselines; by default the whole task.
        workdir: Folder for checkpoints and metrics; each experiment gets a subfolder with its name.
        validate_every: Steps between validations; 0 validates only before the first step and after the last.
        validation_limit: The most validation tasks that are used; 0 for all.
        final: The versions that are live at the end: the ``best`` validated ones, or the ``last`` ones.
        on_collapse: Reaction to two validations in a row that are worse than the best one with evidence of 100 to 1:
            ``rollback`` to the best versions with smaller steps, ``stop``, or ``continue``.
        failed: Treatment of a failed rollout: ``drop`` leaves it out of training, ``penalise`` trains on it with the
            reward ``penalty``. ``overflow`` trains on those whose last call was cut at a token limit or did not fit
            into the context, with ``penalty`` or the lowest reward of the step if that is lower, and leaves out others.
        missing_reward: Treatment of a rollout without a reward: ``drop`` or ``penalise``, as for ``failed``.
        penalty: The reward of rollouts that train without one of their own.
        unseen_calls: Treatment of a rollout with model calls that were noticed but not recorded: ``drop``
            leaves it out, ``error`` ends the run, ``accept`` trains on the recorded calls.
        unattributed_calls: Treatment of a rollout with recorded calls outside of the framework's spans; the values are
            those of ``unseen_calls``.
        trust_agent_rewards: Whether rewards that the agent itself reported may train.
        reward_weights: Weights by which named rewards are summed to the reward that trains; empty to use the only
            reward, or the unnamed one.
    """

    agent: str | tuple[str, ...] = ""
    agent_args: dict[str, Json] = {}
    harness: str = ""
    workspace: str = ""
    name: str = "experiment"
    store: str = "sqlite:///runs/agl.db"
    train: str = ""
    val: str = ""
    seed: int = 0
    hidden: tuple[str, ...] = ()
    group_key: str = ""
    workdir: str = "runs"
    validate_every: Annotated[
        int, Meta(ge=0, description="write the number of steps between validations, 0 for only before and after")
    ] = 0
    validation_limit: Annotated[int, Meta(ge=0, description="write the most validation tasks, 0 for all")] = 0
    final: Literal["best", "last"] = "best"
    on_collapse: Literal["rollback", "stop", "continue"] = "rollback"
    # Not `drop`: a policy whose overlong answers vanish looks better the more of them it gives.
    failed: Literal["overflow", "drop", "penalise"] = "overflow"
    missing_reward: Literal["drop", "penalise"] = "drop"
    penalty: float = 0.0
    unseen_calls: Literal["drop", "error", "accept"] = "drop"
    unattributed_calls: Literal["drop", "error", "accept"] = "accept"
    trust_agent_rewards: bool = False
    reward_weights: dict[str, float] = {}


EPISODE = ComponentConfig(use="episode")
"""The default credit of an experiment."""


class ExperimentConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole experiment, with one attribute for each top-level key of the file.

    Attributes:
        experiment: The agent, its tasks and the store.
        runner: How attempts run.
        policy: Model servers by resource name.
        resource: Prompts and other values by resource name.
        algorithm: The algorithms, in the order of the file.
        schedule: The order in which algorithms take their steps.
        credit: How rewards are assigned to calls.
        reward: Reward emitters, run after every attempt.
        gateway: The proxy that records calls.
        exporter: Destinations of finished rollouts, such as a tracing backend, or of the run's metrics.
        retention: Which old rollouts the run removes after its end.
        tracers: Names of the tracers to use; ``otel``, ``wire`` and ``unrecorded`` are always on.
        plugins: ``{ disabled = ["name"] }``.
        learn: Settings of ``agl learn`` by name; other commands ignore them.
    """

    experiment: ExperimentSection
    runner: RunnerConfig = RunnerConfig()
    policy: dict[str, PolicyConfig] = {}
    resource: dict[str, ResourceConfig] = {}
    algorithm: tuple[AlgorithmConfig, ...] = ()
    schedule: ScheduleConfig = ScheduleConfig()
    credit: ComponentConfig = EPISODE
    reward: tuple[ComponentConfig, ...] = ()
    gateway: GatewayConfig = GatewayConfig()
    exporter: tuple[ComponentConfig, ...] = ()
    retention: RetentionConfig = RetentionConfig()
    tracers: tuple[str, ...] = ()
    plugins: dict[Literal["disabled"], tuple[str, ...]] = {}
    learn: dict[str, LearnSettings] = {}


def policy(
    use: str,
    /,
    *,
    aliases: str | Iterable[str] = (),
    agents: str = "",
    label: str = "",
    sampling: Literal["override", "refuse", "keep"] = "override",
    **params: Json,
) -> PolicyConfig:
    """Describe a model server: ``policy("torch", model="Qwen/Qwen2.5-0.5B-Instruct")``.

    Args:
        use: Name of the policy, such as ``"openai"``, ``"torch"`` or ``"vllm"``.
        aliases: Model name or names (patterns) that agents use for the policy, besides its own names.
        agents: Regular expression that must match the whole name of an agent, node or role; its calls go to this
            policy.
        label: Start from the version of the weights with this label.
        sampling: Treatment of parameters that narrow the distribution in training: ``"override"``, ``"refuse"`` or
            ``"keep"``.
        params: The policy's own arguments.
    """
    return PolicyConfig(use=use, aliases=listed(aliases), agents=agents, label=label, sampling=sampling, params=params)


def runner(
    use: str = ASYNC,
    /,
    *,
    concurrency: int = 8,
    is_adaptive: bool = False,
    timeout_s: float | None = None,
    max_attempts: int = 3,
    max_losses: int = 20,
    retry_on: Literal["failed", "timeout"] | Iterable[Literal["failed", "timeout"]] = (),
    resources: PlacementConfig | None = None,
    **params: Json,
) -> RunnerConfig:
    """Describe a runner: ``runner("process", concurrency=4)``.

    Args:
        use: Name of the runner, such as ``"async"``, ``"process"`` or ``"command"``.
        concurrency: Attempts at once in the experiment's own process; 0 leaves all attempts to ``agl worker``.
        is_adaptive: Whether the attempts at once follow the load of the model servers, up to ``concurrency``.
        timeout_s: Time limit of one attempt in seconds.
        max_attempts: The most attempts of a rollout that may fail or exceed their time limit; see ``retry_on``.
        max_losses: How many times a rollout may lose its worker and be tried again.
        retry_on: Outcomes that lead to another attempt: ``"failed"``, ``"timeout"``, or both.
        resources: The cluster share of each worker, if the runner places workers.
        params: Further arguments of the runner.
    """
    return RunnerConfig(
        use=use,
        concurrency=concurrency,
        is_adaptive=is_adaptive,
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        max_losses=max_losses,
        retry_on=(retry_on,) if isinstance(retry_on, str) else tuple(retry_on),
        resources=resources,
        params=params,
    )


def validated(config: ExperimentConfig) -> ExperimentConfig:
    """Check that every value has the type that its section declares, and return the configuration.

    Raises:
        ConfigError: A value has another type; the message names the section and the key.
    """
    hints = get_type_hints(ExperimentConfig)
    # From Python values arrive unchecked; msgspec checks types only when it decodes.
    fields = {name: _checked(value, name) for name, value in msgspec.structs.asdict(config).items()}
    return ExperimentConfig(
        **{name: check_value(value, hints[name], name, advice=EXAMPLES.get(name, "")) for name, value in fields.items()}
    )


def _checked(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {key: _checked(item, f"{where}.{key}") for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # a section's items
    if isinstance(value, tuple):
        return tuple(_checked(item, where) for item in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]  # likewise
    if not isinstance(value, Record):
        return value
    hints = get_type_hints(type(value), include_extras=True)
    for name, item in msgspec.structs.asdict(value).items():
        # As a file has it, so that both get the same messages.
        plain = list(cast("tuple[Any, ...]", item)) if isinstance(item, tuple) else item
        check_value(plain, hints[name], f"{where}.{name}", advice=EXAMPLES.get(name, ""))
    return msgspec.convert(msgspec.structs.asdict(value), type(value))


def listed(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names as a tuple; a single name may be given as text."""
    return (names,) if isinstance(names, str) else tuple(names)
