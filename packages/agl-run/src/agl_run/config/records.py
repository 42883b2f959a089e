"""The configuration of an experiment: frozen records that a TOML file becomes and that Python builds.

:class:`ExperimentConfig` is a whole experiment, and each section of the file is a record of its own; those of
algorithms, rewards and credit are in :mod:`agl.algorithms`. :func:`policy` and :func:`runner` build theirs with the
component's own parameters written next to the settings, as in a file.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast, get_type_hints

import msgspec
from msgspec import Meta

from agl.algorithms import AlgorithmConfig, ComponentConfig, PlacementConfig
from agl.schemas import Json, JsonResource, PromptTemplate, Record
from agl.stores import MAX_ATTEMPTS
from agl_run.config.wording import check_value

ASYNC = "async"
"""The default runner."""


class RunnerConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[runner]``: how attempts run.

    Attributes:
        use: ``async``, ``process``, ``command`` or a plugin's.
        concurrency: Attempts at once in the experiment's own process, 0 to leave them all to ``agl worker``; in each
            worker where the runner places workers.
        timeout_s: Seconds one attempt may take.
        max_attempts: Attempts per rollout at most that may fail or take too long; see ``retry_on``.
        max_losses: Attempts per rollout at most that may lose their worker, which is repeated always; with one more
            the rollout fails, because it may be what ends its workers.
        retry_on: Outcomes that lead to another attempt: ``failed``, ``timeout``, or both; by default neither.
        resources: The part of a cluster that each worker gets; only for a runner that places workers, such as ``ray``.
        params: Further arguments of the runner.
    """

    use: str = ASYNC
    concurrency: Annotated[
        int, Meta(ge=0, description="it must be at least 1, or 0 to leave every attempt to `agl worker`")
    ] = 8
    timeout_s: (
        Annotated[float, Meta(gt=0, description="it must be above 0 seconds, or be left out for no limit")] | None
    ) = None
    max_attempts: Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS, description=f"choose between 1 and {MAX_ATTEMPTS}")] = 3
    max_losses: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS, description=f"choose between 0 and {MAX_ATTEMPTS}")] = 20
    retry_on: tuple[Literal["failed", "timeout"], ...] = ()
    resources: PlacementConfig | None = None
    params: dict[str, Json] = {}


class PolicyConfig(Record, frozen=True, kw_only=True):
    """``[policy.NAME]``: a model server; every other key is an argument of it.

    Attributes:
        use: ``openai``, ``torch``, or a plugin's.
        aliases: Model names (patterns) that agents use for it, besides NAME and its model.
        agents: Regular expression over the whole names of agents, nodes and roles: the calls that these make go
            here, whatever model name their code sends.
        label: Label of the version of its weights to start from; where no version has it, ``model`` counts.
        sampling: Treatment of calls that ask for less than the full distribution (top-p, penalties, temperature 0) in
            rollouts that train the policy: ``override`` that, ``refuse`` the call, or ``keep`` what it asks for.
        params: The policy's own arguments.
    """

    use: str
    aliases: tuple[str, ...] = ()
    agents: str = ""
    label: str = ""
    sampling: Literal["override", "refuse", "keep"] = "override"
    params: dict[str, Json] = {}


class ResourceConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[resource.NAME]``: a prompt (``template``) or any JSON value (``value``); exactly one of them is given.

    Attributes:
        template: The text of a prompt.
        engine: How the prompt's placeholders are written; see :class:`agl.PromptTemplate`.
        value: Any JSON value.
        label: Label of the version to start from; where no version has it, ``template`` or ``value`` counts.
    """

    template: str | None = None
    engine: Literal["f-string", "jinja", "plain"] = "f-string"
    value: Json = msgspec.UNSET
    label: str = ""

    @classmethod
    def of(cls, resource: PromptTemplate | JsonResource) -> "ResourceConfig":
        """Return the section that describes a resource."""
        if isinstance(resource, PromptTemplate):
            return cls(template=resource.template, engine=resource.engine)
        return cls(value=resource.value)


class ScheduleConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[schedule]``: the order in which algorithms take their steps.

    Attributes:
        mode: ``sequential`` one after the other, ``alternate`` ``every`` steps each in turn, ``concurrent``.
        every: Steps in a turn.
        first: Names of algorithms that run to their end before the others, in the order of the file.
    """

    mode: Literal["sequential", "alternate", "concurrent"] = "sequential"
    every: Annotated[int, Meta(ge=1, description="it must be at least 1")] = 1
    first: tuple[str, ...] = ()


class GatewayConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway]``: the capture proxy; ``use = "none"`` records calls in the agent's process instead.

    Attributes:
        use: ``auto``, ``none``, or a plugin's.
        advertise: Host name or URL by which other machines reach it; by default the address that it listens at.
        ca: File with the authorities of its certificate, in PEM, for workers and agents; by default that of
            ``AGL_CA_FILE``, else the system's.
        process: True for a process of its own; ``auto`` gives it one for more than 64 attempts at once, and where no
            attempt runs here (``concurrency = 0``), if the store allows it.
        params: Further arguments of the gateway.
    """

    use: str = "auto"
    advertise: str = ""
    ca: str = ""
    process: Literal["auto"] | bool = "auto"
    params: dict[str, Json] = {}


class RetentionConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[retention]``: old rollouts that a run removes once it has ended; without a limit it removes none.

    Attributes:
        older_than: Age from which a finished rollout is old, such as ``30d``; see ``agl runs gc``.
        keep: Number of the newest finished rollouts, which stay whatever their age.
        max_size: Size of the store's data, such as ``10GB``, up to which no rollout is removed.
        experiments: ``own`` for rollouts of earlier runs of this experiment, ``all`` for those of every experiment in
            the store.
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
        workspace: Folder that a harness gets a copy of in every rollout, or ``git:FOLDER@REVISION``; fields of the task
            stand in braces, and a task's own ``workspace`` comes first.
        name: Name of the experiment; its rollouts, states and metrics carry it.
        store: URL.
        train: JSON-lines, CSV or Parquet file of training tasks, a file with one JSON array of them, or tasks that a
            package reads, such as ``harbor:FOLDER``.
        val: The same for validation tasks.
        seed: Of everything random.
        hidden: Keys of a task that only reward emitters see.
        group_key: Key of a task that is its identity for group baselines; by default the whole task.
        workdir: Folder in which each experiment has one of its own, by its name, for checkpoints and metrics.
        validate_every: Steps between validations; 0 for only before and after.
        validation_limit: Validation tasks at most; 0 for all.
        final: The versions that are live at the end: ``best`` of those that were validated, or the ``last`` ones.
        on_collapse: Reaction to a validation reward that fell below the best one by more than chance explains, twice in
            a row: ``rollback`` to the best versions with smaller steps, ``stop``, or ``continue``.
        failed: Treatment of a failed rollout: left out of training, or trained with ``penalty``.
        missing_reward: The same for a rollout without a reward.
        penalty: The substitute reward.
        unseen_calls: Treatment of a rollout with model calls that were seen and not recorded: ``drop``
            leaves it out, ``error`` ends the run, ``accept`` trains on the recorded calls.
        unattributed_calls: The same for a rollout with recorded calls outside of the framework's spans.
        trust_agent_rewards: Whether rewards that the agent itself reported may train.
        reward_weights: Weights of the named rewards in the scalar that trains; empty to use the only or unnamed one.
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
    failed: Literal["drop", "penalise"] = "drop"
    missing_reward: Literal["drop", "penalise"] = "drop"
    penalty: float = 0.0
    unseen_calls: Literal["drop", "error", "accept"] = "drop"
    unattributed_calls: Literal["drop", "error", "accept"] = "accept"
    trust_agent_rewards: bool = False
    reward_weights: dict[str, float] = {}


EPISODE = ComponentConfig(use="episode")
"""The credit of experiments that name none."""


class ExperimentConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole experiment, as in a file.

    Attributes:
        experiment: The agent, its tasks and the store.
        runner: How attempts run.
        policy: Model servers by resource name.
        resource: Prompts and other values by resource name.
        algorithm: The algorithms, in order.
        schedule: The order in which algorithms take their steps.
        credit: How rewards reach calls.
        reward: Reward emitters, run after every attempt.
        gateway: The capture proxy.
        exporter: Destinations of finished rollouts, such as a tracing backend, or of the numbers of the run.
        retention: Old rollouts that the run removes once it has ended.
        tracers: Names of tracers of frameworks; ``otel``, ``wire`` and ``unrecorded`` are always on.
        plugins: ``{ disabled = ["name"] }``.
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
        aliases: Model name or names (patterns) that agents use for it, besides its own names.
        agents: Regular expression: the calls of agents, nodes and roles whose whole name it matches go here.
        label: Label of the version of its weights to start from.
        sampling: ``"override"``, ``"refuse"`` or ``"keep"`` parameters that narrow the distribution in training.
        params: The policy's own arguments.
    """
    return PolicyConfig(use=use, aliases=listed(aliases), agents=agents, label=label, sampling=sampling, params=params)


def runner(
    use: str = ASYNC,
    /,
    *,
    concurrency: int = 8,
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
        concurrency: Attempts at once in the experiment's own process; 0 leaves them all to ``agl worker``.
        timeout_s: Seconds one attempt may take.
        max_attempts: Attempts per rollout at most that may fail or take too long; see ``retry_on``.
        max_losses: Attempts per rollout at most that may lose their worker.
        retry_on: Outcomes that lead to another attempt: ``"failed"``, ``"timeout"``, or both.
        resources: The part of a cluster that each worker gets, where the runner places workers.
        params: Further arguments of the runner.
    """
    return RunnerConfig(
        use=use,
        concurrency=concurrency,
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
        ConfigError: A value has another type; names the section and the key.
    """
    hints = get_type_hints(ExperimentConfig)
    # From Python values arrive unchecked; msgspec checks types only when it decodes.
    fields = {name: _checked(value, name) for name, value in msgspec.structs.asdict(config).items()}
    return ExperimentConfig(**{name: check_value(value, hints[name], name) for name, value in fields.items()})


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
        check_value(plain, hints[name], f"{where}.{name}")
    return msgspec.convert(msgspec.structs.asdict(value), type(value))


def listed(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)
