"""The table ``[learn.NAME]`` of an experiment file: the settings of `agl learn`, which other commands only check."""

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Json, Record
from agl_inspect.retention import parse_duration

if TYPE_CHECKING:
    from agl_run.config.sections import ExperimentConfig, ExperimentSection


class SignalSettings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signal in ``feedback``: ``{ use = "judge", weight = 0.3 }``.

    Attributes:
        use: A built-in signal, or the ``use`` of a ``[[reward]]`` of the file.
        weight: The weight in the mean of the signals; ratings by people have no weight, because they count alone.
        range: The lowest and the highest value of a rating or score, such as ``[1, 5]`` for stars.
        phrases: Phrases with which users correct an answer, in addition to the built-in ones.
    """

    use: str
    weight: Annotated[float, Meta(gt=0, description="write a weight above 0, such as 0.3")] = 1.0
    range: tuple[float, float] = (0.0, 1.0)
    phrases: tuple[str, ...] = ()


class ReplaySettings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``replay``: the comparison on held-out recorded conversations.

    Attributes:
        tasks: The most conversations that are replayed for one candidate; 0 leaves the replay out.
        gain: The gain in reward above which a candidate counts as better.
        regression: A file of tasks that every candidate runs as well, and on which it may not get worse; relative to
            the experiment file.
        control: Whether the old versions run twice, which shows by how much identical versions differ.
    """

    tasks: Annotated[int, Meta(ge=0, description="write a number of conversations, or 0 for no replay")] = 200
    gain: float = 0.0
    regression: str = ""
    control: bool = True


class CanarySettings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``canary``: the trial on a growing share of the traffic.

    Attributes:
        share: The shares, in increasing order.
        units: The number of units that have to get the candidate at each share.
        guard: What else may not get worse: ``latency``, ``refusals``, ``cost`` or ``length``.
    """

    share: tuple[float, ...] = (0.05, 0.2, 0.5)
    units: Annotated[int, Meta(ge=1, description="write a number of users, at least 1")] = 20
    guard: tuple[Literal["latency", "refusals", "cost", "length"], ...] = ("latency", "refusals")


class GateSettings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[learn.NAME.gate]``: what a candidate has to show.

    Attributes:
        holdback: The share of the traffic that keeps the old versions after a promotion.
        error: The largest probability that the learner ever promotes a candidate that is no better.
        approve: ``person`` waits for ``agl learn approve`` before the canary.
    """

    replay: ReplaySettings = ReplaySettings()
    canary: CanarySettings = CanarySettings()
    holdback: Annotated[float, Meta(ge=0, lt=0.5, description="write a share from 0 to below 0.5")] = 0.1
    error: Annotated[float, Meta(gt=0, lt=1, description="write a probability such as 0.05")] = 0.05
    approve: Literal["auto", "person"] = "auto"


class LearnSettings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[learn.NAME]``.

    Attributes:
        tunes: The prompts and values that may change, and at most one policy, whose weights may change; each tuned by
            an ``[[algorithm]]`` of the file.
        feedback: The signals that become rewards: names, or ``{ use = "judge", weight = 0.3 }``.
        unit: What is independent: ``user`` or ``conversation``.
        task: ``module:function`` that makes a task of the agent from a recorded conversation; by default the task is
            ``{"question": ..., "said": ...}`` with the first question and the users' reactions.
        kind: ``module:function`` that names the kind of a task; no kind may get worse.
        every: The number of rated conversations after which the algorithms learn again.
        settle: How long to wait for feedback before a conversation counts, such as ``5m``.
        per_user: The most conversations of one user that a round of training reads.
        memory: The most conversations that a round of training reads; half of them are older ones, against forgetting.
        label: The label that names the served versions.
    """

    tunes: tuple[str, ...]
    feedback: tuple[str | SignalSettings, ...] = ("thumbs",)
    unit: Literal["user", "conversation"] = "user"
    task: str = ""
    kind: str = ""
    every: Annotated[int, Meta(ge=1, description="write a number of conversations, at least 1")] = 40
    settle: str = "5m"
    per_user: Annotated[int, Meta(ge=1, description="write a number of conversations, at least 1")] = 10
    memory: Annotated[int, Meta(ge=2, description="write a number of conversations, at least 2")] = 400
    label: str = "production"
    gate: GateSettings = GateSettings()


def learner_of(config: "ExperimentConfig") -> tuple[str, LearnSettings]:
    """Return the name and the settings of the learner in an experiment file.

    Raises:
        ConfigError: The file has no ``[learn.NAME]`` or several of them, or the learner tunes several policies, or a
            resource that no algorithm tunes.
    """
    if len(config.learn) != 1:
        there = f"has {len(config.learn)}: {', '.join(config.learn)}" if config.learn else "has none"
        raise ConfigError(f"a learner needs one table [learn.NAME], and the file {there}")
    ((name, settings),) = config.learn.items()
    tuned = sorted({target for algorithm in config.algorithm for target in algorithm.tunes})
    has_targets = all(algorithm.tunes for algorithm in config.algorithm)  # else the plan finds the only one there is
    policies = [target for target in settings.tunes if target in config.policy]
    if len(policies) > 1:
        raise ConfigError(f"learn.{name}.tunes has the policies {', '.join(policies)}; a learner tunes at most one")
    for target in settings.tunes:
        if has_targets and target not in tuned:
            hint = did_you_mean(target, tuned, otherwise=f"the algorithms tune {', '.join(tuned) or 'nothing'}")
            raise ConfigError(f"learn.{name}.tunes has {target!r}, which no [[algorithm]] of the file tunes; {hint}")
    if not settings.tunes:
        raise ConfigError(f"learn.{name}.tunes is empty; name the prompts that may change")
    try:
        parse_duration(settings.settle)
    except ValueError as error:
        raise ConfigError(f"learn.{name}.settle: {error}") from None
    _check_gate(name, settings.gate)
    return name, settings


def _check_gate(name: str, gate: GateSettings) -> None:
    shares = gate.canary.share
    if not shares or list(shares) != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] < 1:
        raise ConfigError(
            f"learn.{name}.gate.canary.share is {list(shares)}; write increasing shares between 0 and 1, such as "
            "[0.05, 0.2, 0.5]. A candidate that does no harm at the last one is promoted"
        )
    if abs(gate.replay.gain) >= 1:
        raise ConfigError(f"learn.{name}.gate.replay.gain is {gate.replay.gain:g}; rewards lie between 0 and 1")


_EXAMPLES = 12
"""Enough validation tasks for a prompt search to prove something."""


def example_tasks(section: "ExperimentSection") -> tuple[list[Json], list[Json]]:
    """Return training and validation tasks, for checks of a learner's file before there are conversations."""
    keys = dict.fromkeys((*section.hidden, section.group_key or "said"), "")
    tasks: list[Json] = [{"question": f"number {number}", **keys} for number in range(2 * _EXAMPLES)]
    return tasks[:_EXAMPLES], tasks[_EXAMPLES:]
