"""The typed form of an experiment: what a TOML file says and what ``Trainer(...)`` is built from.

Every section is a frozen record; unknown keys are refused with the close match before anything runs.
"""

import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_type_hints

import msgspec

from agl.errors import ConfigError
from agl.schemas import AttemptStatus, Json, Record


class RunnerConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[runner]``: how attempts run.

    Attributes:
        use: ``async``, ``process``, ``command`` or a plugin's.
        concurrency: Attempts at once in the experiment's own process; 0 leaves them all to ``agl worker``.
        timeout_s: Seconds one attempt may take.
        max_attempts: Attempts per rollout at most.
        retry_on: Outcomes that lead to another attempt; by default only a lost worker.
        params: Further arguments of the runner.
    """

    use: str = "async"
    concurrency: int = 8
    timeout_s: float | None = None
    max_attempts: int = 3
    retry_on: tuple[AttemptStatus, ...] = ("lost",)
    params: dict[str, Json] = {}


class PolicyConfig(Record, frozen=True, kw_only=True):
    """``[policy.NAME]``: a model server; every other key is an argument of it.

    Attributes:
        use: ``openai``, ``torch``, or a plugin's.
        aliases: Model names (patterns) that agents use for it, besides NAME and its model.
        agents: Regular expression over the whole names of agents, nodes and roles: the calls that these make go
            here, whatever model name their code sends.
        label: Label of the version of its weights to start from; where no version has it, ``model`` counts.
        params: The policy's own arguments.
    """

    use: str
    aliases: tuple[str, ...] = ()
    agents: str = ""
    label: str = ""
    params: dict[str, Json] = {}


class ComponentConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[credit]``, ``[[reward]]``, ``[[logger]]``: a component by name with its arguments."""

    use: str
    params: dict[str, Json] = {}


class AlgorithmConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[[algorithm]]``: one algorithm.

    Attributes:
        use: Its registered name, such as ``grpo``.
        tunes: The resource, or the resources, that it changes.
        name: Its name within the experiment; ``use`` by default.
        agents: Regular expression over agent names: whose calls it trains on; ``""`` for all.
        source: Names of the algorithms whose rollouts it learns from instead of collecting its own, or
            ``experiment:NAME`` for the finished ones of another experiment in the store.
        credit: Its own credit assignment; by default the experiment's.
        params: Its own arguments.
    """

    use: str
    tunes: str | tuple[str, ...] = ()
    name: str = ""
    agents: str = ""
    source: str | tuple[str, ...] = ()
    credit: ComponentConfig | None = None
    params: dict[str, Json] = {}

    @property
    def label(self) -> str:
        """The name within the experiment."""
        return self.name or self.use

    @property
    def resources(self) -> tuple[str, ...]:
        """Names of the resources that it tunes."""
        return (self.tunes,) if isinstance(self.tunes, str) else self.tunes

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the algorithms, or of experiments with their prefix, that it learns from."""
        return (self.source,) if isinstance(self.source, str) else self.source


class ScheduleConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[schedule]``: the order in which algorithms take their steps.

    Attributes:
        mode: ``sequential`` one after the other, ``alternate`` ``every`` steps each in turn, ``concurrent``.
        every: Steps in a turn.
        first: Names of algorithms that run to their end before the others, in the order of the file.
    """

    mode: Literal["sequential", "alternate", "concurrent"] = "sequential"
    every: int = 1
    first: str | tuple[str, ...] = ()

    @property
    def firsts(self) -> tuple[str, ...]:
        """Names of the algorithms that run to their end before the others."""
        return (self.first,) if isinstance(self.first, str) else self.first


class GatewayConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[gateway]``: the capture proxy; ``use = "none"`` records calls in the agent's process instead.

    Attributes:
        use: ``auto``, ``none``, or a plugin's.
        advertise: Host name or URL by which other machines reach it; by default the address that it listens at.
        params: Further arguments of the gateway.
    """

    use: str = "auto"
    advertise: str = ""
    params: dict[str, Json] = {}


class ExperimentSection(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[experiment]``: what is run, on what, and where it is kept.

    Attributes:
        name: Name of the experiment; its rollouts, states and metrics carry it.
        agent: ``module:attribute``, or a command as a list of words.
        store: URL.
        train: JSON-lines file of tasks; ``val`` likewise.
        seed: Of everything random.
        hidden: Keys of a task that only reward emitters see.
        group_key: Key of a task that is its identity for group baselines; by default the whole task.
        workdir: Where checkpoints and metrics go; by default ``runs/NAME``.
        validate_every: Steps between validations; 0 for only before and after.
        validation_limit: Validation tasks at most; 0 for all.
        failed: What a failed rollout means for training: left out, or trained with ``penalty``.
        missing_reward: The same for a rollout without a reward.
        penalty: The reward that stands in.
        unseen_calls: What a rollout means of which a framework reported model calls that nobody recorded: left out,
            the end of the run, or trained with what is known.
        unattributed_calls: The same for one with recorded calls outside of everything that its framework reported.
        trust_agent_rewards: Whether rewards that came with an agent's own token may train.
        reward_weights: How named rewards make the scalar that trains; empty for the only or unnamed one.
    """

    agent: str | tuple[str, ...]
    name: str = "experiment"
    store: str = "sqlite:///runs/agl.db"
    train: str = ""
    val: str = ""
    seed: int = 0
    hidden: tuple[str, ...] = ()
    group_key: str = ""
    workdir: str = ""
    validate_every: int = 0
    validation_limit: int = 0
    failed: Literal["drop", "penalise"] = "drop"
    missing_reward: Literal["drop", "penalise"] = "drop"
    penalty: float = 0.0
    unseen_calls: Literal["drop", "error", "accept"] = "drop"
    unattributed_calls: Literal["drop", "error", "accept"] = "accept"
    trust_agent_rewards: bool = False
    reward_weights: dict[str, float] = {}


class ExperimentConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole experiment file.

    Attributes:
        policy: Model servers by resource name.
        resource: Other resources by name: ``{ template = "..." }`` for a prompt, ``{ value = ... }`` for JSON.
        tracers: Names of tracers; ``wire`` is always on where no gateway records.
        plugins: ``{ disabled = ["name"] }``.
    """

    experiment: ExperimentSection
    runner: RunnerConfig = RunnerConfig()
    policy: dict[str, PolicyConfig] = {}
    resource: dict[str, dict[str, Json]] = {}
    algorithm: tuple[AlgorithmConfig, ...] = ()
    schedule: ScheduleConfig = ScheduleConfig()
    credit: ComponentConfig = ComponentConfig(use="episode")
    reward: tuple[ComponentConfig, ...] = ()
    logger: tuple[ComponentConfig, ...] = ()
    gateway: GatewayConfig = GatewayConfig()
    tracers: tuple[str, ...] = ()
    plugins: dict[Literal["disabled"], tuple[str, ...]] = {}


def load_config(path: Path) -> ExperimentConfig:
    """Read an experiment file; raises :class:`ConfigError` that names file, key and remedy."""
    return parse_config(load_data(path), source=str(path))


def load_data(path: Path) -> dict[str, Any]:
    """A TOML file as plain data; raises :class:`ConfigError` when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = sorted(str(p.name) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"; there is {', '.join(near)}" if near else ""
        raise ConfigError(f"no experiment file {str(path)!r}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from None


def parse_config(data: dict[str, Any], *, source: str = "the experiment") -> ExperimentConfig:
    """An experiment from plain data, as in the TOML file."""
    _check_keys(data, ExperimentConfig, path="", source=source)
    shaped = {**data, "policy": {name: _shape_policy(name, p, source) for name, p in data.get("policy", {}).items()}}
    try:
        return msgspec.convert(shaped, ExperimentConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_readable(str(error))}") from None


def _shape_policy(name: str, section: Any, source: str) -> Any:
    if not isinstance(section, dict):
        raise ConfigError(f'{source}: [policy.{name}] must be a table with use = "torch", "openai" or the like')
    table = cast("dict[str, Any]", section)
    if "use" not in table:
        raise ConfigError(f'{source}: [policy.{name}] lacks `use`; write use = "torch", "openai" or a plugin\'s name')
    own = {key: table[key] for key in ("use", "aliases", "agents", "label") if key in table}
    rest = {key: value for key, value in table.items() if key not in own and key != "params"}
    return {**own, "params": {**rest, **table.get("params", {})}}


def _check_keys(data: Any, record: Any, *, path: str, source: str) -> None:
    """Refuse unknown keys in ``data`` and in the nested records, with the close match."""
    if not isinstance(data, dict) or not isinstance(record, type) or not issubclass(record, Record):
        return
    hints = get_type_hints(record)
    for key, value in cast("dict[str, Any]", data).items():
        where = f"{path}.{key}" if path else key
        if key not in hints:
            near = get_close_matches(key, hints, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(hints))}"
            raise ConfigError(f"{source}: unknown key {where!r}; {hint}")
        if record is ExperimentConfig and key == "policy":
            continue
        for inner, item in _nested(hints[key], value):
            _check_keys(item, inner, path=where, source=source)


def _nested(hint: Any, value: Any) -> list[tuple[Any, Any]]:
    if isinstance(hint, type):
        return [(hint, value)]
    inner = [kind for kind in get_args(hint) if isinstance(kind, type) and issubclass(kind, Record)]
    if inner and isinstance(value, dict):
        return [(inner[0], cast("dict[str, Any]", value))]
    if not inner or not isinstance(value, list):
        return []
    return [(inner[0], item) for item in cast("list[Any]", value)]


def _readable(message: str) -> str:
    """msgspec's message with the TOML path in front."""
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", message)
    if match is None:
        return message
    return f"at {match[2]!r}: {match[1]}" if match[2] else match[1]
