"""Finds reasons in a run's metrics why the run does not learn, proposes changes, and stores findings as alerts.

Each rule looks at the steps of one algorithm; most rules compare the means of the last steps with those of the first.
A rule makes a finding only if the metrics that it reads were logged and are clear, and the finding gives their numbers.
The limits are conventions, not theorems: they mark numbers that are worth a look.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, mode
from typing import Literal

from msgspec.structs import replace

from agl.acceptance import odds_text
from agl.contracts import Metric, RolloutQuery, SpanQuery, Store
from agl.schemas import Record
from agl_inspect.records.gold import THRESHOLD
from agl_inspect.records.names import id_prefix
from agl_inspect.records.shelf import Shelf, run_key
from agl_inspect.records.state import load_settings
from agl_inspect.rollouts.span_reader import reward_of

VALIDATE = "validate"
"""The algorithm name under which a validation's metrics are logged."""

_WINDOW = 5
"""The number of first steps, and of last steps, over which rules take means."""

_LEAST = 3
"""The least number of steps with which a rule makes a finding."""

_IDLE = 0.5
"""A finding is made if at least this share of the runner's slots has no rollout."""

_REJECTED = 0.5
"""If a correction leaves out at least this share of the tokens, it explains why a step trained nothing."""

_FALLEN = 0.1
"""A finding is made if the last validation rewards are this far below the best one.

The fall is a share of the largest absolute validation reward.
"""

_HALF = 6
"""The least number of steps in the second half of a run whose reward is said to stand still."""

_FAR = 0.25
"""A reward is far from the best if it lacks this much of 1, or of the largest reward if that is larger."""

_READ, _REWARDS = 512, 32
"""The most rollouts of a step whose rewards are looked at, and the most rewards of each."""

LONGER_ANSWERS = (
    "raise the agent's max_tokens",
    "leave such answers out of the loss: sampling.mask_truncated = true",
)
FULL_SAMPLING = 'sampling = "override" in [policy.NAME], or remove those parameters from the agent'
REWRITTEN = "agl why latest names the call where the conversation no longer continues: the agent rewrites its history"
"""Advice for agents that rewrite their history; forecasts give it too, from recorded rollouts."""


class Suggestion(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A finding about what keeps an algorithm from learning, with a change to try.

    Attributes:
        rule: The rule's name, such as ``silent-groups``.
        algorithm: The name of the algorithm whose steps were looked at.
        step: The last step that was looked at.
        evidence: The measurement, with its numbers.
        change: The proposed change, with the setting's name and a value where there is one.
        first: The first of the newest steps, whose rollouts show what is meant.
    """

    rule: str
    algorithm: str
    step: int
    evidence: str
    change: str
    first: int = 1


@dataclass(frozen=True)
class _Steps:
    """The steps of one algorithm, in order: step numbers, and metrics by name; with the settings of its run."""

    numbers: Sequence[int]
    metrics: Sequence[Mapping[str, float]]
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    def all(self, name: str) -> list[float]:
        """Return the metric's values at the steps that logged it."""
        return [step[name] for step in self.metrics if name in step]

    def without_set(self, proposals: Mapping[str, str]) -> str:
        """Join the proposals whose setting, a pattern for each, the run does not have yet; ``""`` fits none."""
        own = [f"{name} = {value}" for name, value in self.settings.items()]
        left = [each for each, has in proposals.items() if not has or not any(re.search(has, one) for one in own)]
        return ", or ".join(filter(None, (", ".join(left[:-1]), *left[-1:])))

    def end(self, name: str) -> float | None:
        """Return the metric's mean over the last steps; ``None`` if too few of them logged it."""
        found = [step[name] for step in self.metrics[-_WINDOW:] if name in step]
        return fmean(found) if len(found) >= _LEAST else None

    def change(self, name: str) -> tuple[float, float] | None:
        """Return the metric's mean over the first steps and over the last ones; ``None`` if the two would overlap."""
        found = self.all(name)
        return (fmean(found[:_WINDOW]), fmean(found[-_WINDOW:])) if len(found) >= 2 * _WINDOW else None

    @property
    def untrained(self) -> int:
        """The number of last steps that skipped updates for lack of a gradient and made no other update."""
        return sum(bool(step.get("updates_skipped")) and not step.get("grad_norm") for step in self.metrics[-_WINDOW:])

    @property
    def standstill(self) -> str:
        """Say by how much the reward changed in the second half of the steps; ``""`` if it rises or is near the best.

        Nor may the interval of the change reach a quarter of the way to the best, which many noisy rises would do. The
        best is taken to be 1, a larger reward if there was one, or 0 if all rewards are below it.
        """
        rewards = self.all("reward")
        half = rewards[len(rewards) // 2 :]
        if len(half) < _HALF:
            return ""
        lacking = (max(1.0, *rewards) if max(rewards) >= 0 else 0.0) - fmean(half[-_WINDOW:])
        rise, error = (len(half) * each for each in _slope(half))
        if lacking < _FAR * max(1.0, *map(abs, rewards)) or rise > 2 * error or rise + 2 * error > lacking / 4:
            return ""
        return f"in the last {len(half)} steps the reward changed by {rise:+.2g} ± {2 * error:.2g}"

    @property
    def is_better(self) -> bool:
        """True if the reward has risen over all steps by more than noise explains."""
        rewards = self.all("reward")
        return len(rewards) >= 2 * _WINDOW and _slope(rewards)[0] > 2 * _slope(rewards)[1]


_Finding = tuple[str, str]
_Rule = Callable[[_Steps], _Finding | None]


Table = Mapping[int, Mapping[str, float]]
"""The metrics of one algorithm, by step and then by name."""


def suggestions_of(metrics: Sequence[Metric], settings: Mapping[str, str] | None = None) -> list[Suggestion]:
    """Return the suggestions from the metrics of one run, by algorithm and then in the order of the rules.

    Changes to what the run's ``settings`` have already, by ``ALGORITHM.SETTING``, are left out.
    """
    tables: dict[str, dict[int, dict[str, float]]] = {}
    for metric in metrics:
        tables.setdefault(metric.algorithm, {}).setdefault(metric.step, {})[metric.name] = metric.value
    validations = tables.pop(VALIDATE, {})
    return [
        one
        for name, table in tables.items()
        for one in suggestions_for(name, table, validations=validations, settings=settings)
    ]


async def suggestions_in(store: Store, metrics: Sequence[Metric]) -> list[Suggestion]:
    """Return the suggestions from the metrics of one run; that on silent groups names the rewards of its step."""
    records = await store.experiments(metrics[0].experiment) if metrics else []
    settings = await load_settings(store, replace(records[0], run=metrics[0].run)) if records else {}
    found = suggestions_of(metrics, settings)
    rewards = [await _rewards_of(store, metrics[0], one) if one.rule == "silent-groups" else "" for one in found]
    return [replace(one, evidence=one.evidence + words) for one, words in zip(found, rewards, strict=True)]


async def _rewards_of(store: Store, run: Metric, found: Suggestion) -> str:
    """Return the commonest reward of a step's silent groups, and the part of it that is lowest in most rollouts."""
    first, end = (id_prefix(run.experiment, run.run, found.algorithm, "train", step=found.step + n) for n in (0, 1))
    query = RolloutQuery(experiment=run.experiment, mode="train", after=first, limit=_READ)
    read = await store.recordings(query, spans=SpanQuery(kind="reward", limit=_REWARDS))
    own = [one for one in read if one.rollout.rollout_id < end]
    groups: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for one in own:
        if (reward := reward_of(one)) is not None:
            groups.setdefault(one.rollout.group_id, []).append(reward)
        dimensions = {name: v for span in one.spans if span.reward for name, v in span.reward.dimensions.items()}
        for name, value in dimensions.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    silent = [rewards[0] for rewards in groups.values() if len(rewards) > 1 and len(set(rewards)) == 1]
    if not silent:
        return ""
    said = f"; in step {found.step}, {len(silent)} of {len(groups)} tasks got one reward, mostly {mode(silent):.3g}"
    lowest = {
        name: values.count(min(values))
        for name, values in parts.items()
        if min(values) < max(values) or min(values) <= 0
    }
    if not lowest or max(lowest.values()) <= len(own) / 2:
        return said
    name = max(lowest, key=lambda part: lowest[part])
    return f"{said}, and {name} is {min(parts[name]):.3g} in {lowest[name]} of {len(own)} rollouts"


def suggestions_for(
    algorithm: str, table: Table, *, validations: Table, settings: Mapping[str, str] | None = None
) -> list[Suggestion]:
    """Return the suggestions from the metrics of one algorithm and of its run's validations."""
    of_others = [name for name in settings or {} if ".sampling." in name and not name.startswith(f"{algorithm}.")]
    own = {name: value for name, value in (settings or {}).items() if name not in of_others}
    steps, validated = _steps(table, own), _steps(validations, {})
    findings = {rule: look(steps) for rule, look in _RULES.items()} | {"overfitting": _overfitting(steps, validated)}
    if not any(findings.values()):
        findings["no-progress"] = _still(steps)  # any other finding would explain it
    findings |= {rule: look(steps) for rule, look in _TIMES.items()}
    return [
        Suggestion(
            rule=rule,
            algorithm=algorithm,
            step=steps.numbers[-1],
            evidence=finding[0],
            change=finding[1],
            first=steps.numbers[-_WINDOW:][0],
        )
        for rule, finding in findings.items()
        if finding is not None
    ]


def _steps(table: Table, settings: Mapping[str, str]) -> _Steps:
    numbers = sorted(table)
    rows = [{k: v for k, v in table[number].items() if math.isfinite(v)} for number in numbers]
    return _Steps(numbers, rows, settings)


def _where(name: str, is_wrong: Callable[[float], bool], evidence: str, change: str, *, fewest: int = _LEAST) -> _Rule:
    """Return a rule about the mean of one metric over the last steps; ``evidence`` is a format string for the mean."""

    def look(steps: _Steps) -> _Finding | None:
        value = steps.end(name)
        is_found = value is not None and is_wrong(value) and len(steps.numbers) >= fewest
        return (evidence.format(value), change) if is_found else None

    return look


def _silent_groups(steps: _Steps) -> _Finding | None:
    share = steps.end("silent_share")
    if share is None or share < 0.3 or (share < 0.6 and not steps.standstill):
        return None
    reward = steps.end("reward")
    rewarded = "" if reward is None else f", and the mean reward is {reward:.3g}"
    still = steps.standstill and f"; {steps.standstill}"
    low, some = steps.without_set(_EASIER), steps.without_set(_MORE)
    return (
        f"{share:.0%} of the rollouts taught nothing, because the rollouts of a task got the same reward"
        f"{rewarded}{still}",
        f"if that reward is low: {low}; if it is as high as it gets, these tasks are learned: harder ones, or stop"
        + (some and f"; if some tasks teach: {some}"),
    )


_EASIER = {
    "easier tasks": "",
    "a reward for a part of the way": r"\.parts\.",
    "a warm start with sft or rft": r'\.use = "(sft|rft)"',
    "a larger group_size": "",
    "sdpo, which learns from errors and failed checks": r'\.use = "sdpo"',
}
_MORE = {
    "sampling.refill = 3": r"\.sampling\.refill = ([2-9]|\d\d)",
    'sampling.curriculum = "frontier"': r'\.sampling\.curriculum = "frontier"',
}
"""Changes for tasks whose rollouts all fail, or that differ in difficulty, with the settings of a run that has them."""


def _untrained(steps: _Steps) -> _Finding | None:
    if steps.untrained < _LEAST:
        return None
    found = f"{steps.untrained} of the last {len(steps.metrics[-_WINDOW:])} steps trained nothing"
    shares = {"rollout_rs": steps.end("rejected_share") or 0.0, "rollout_is": steps.end("tis_masked") or 0.0}
    bound = max(shares, key=lambda name: shares[name])
    if shares[bound] >= _REJECTED:
        return (
            f"{found}, and {bound} left {shares[bound]:.0%} of the tokens out of the loss",
            "look at logprob_gap: if it is large, the server does not have the trained weights, or samples from "
            f"another distribution than it reports; if it is small, give {bound}_threshold wider bounds",
        )
    if any(look(steps) for look in (_silent_groups, _no_pairs, _nothing_good, _one_kind)):
        return None  # these rules explain it
    return f"{found}, because no call had a gradient", "agl why latest says at each call why it did not train"


def _dropped(steps: _Steps) -> _Finding | None:
    share = steps.end("dropped_share")
    if share is None or share - (steps.end("evaluator_failed_share") or 0.0) < 0.1:
        return None  # failed evaluators have a rule of their own
    names = sorted({name for step in steps.metrics[-_WINDOW:] for name in step if name.startswith("dropped_")})
    parts = {name.removeprefix("dropped_"): steps.end(name) for name in names if name != "dropped_share"}
    why = ", ".join(f"{count:.1f} a step: {name}" for name, count in parts.items() if count)
    return (
        f"{share:.0%} of the rollouts take no part in training{f' ({why})' if why else ''}",
        "agl runs --status failed shows their errors; repair the agent or its reward",
    )


def _unreadable(steps: _Steps) -> _Finding | None:
    last = steps.metrics[-1]
    count, asked = last.get("unusable_answers", 0.0), last.get("spent_calls", 0.0)
    if count < _LEAST or count < 0.3 * asked:
        return None
    return (
        f"{count:.0f} of {asked:.0f} answers of the optimiser's model held no usable text",
        "a model that follows instructions better, or a larger max_tokens, in [algorithm.params.optimizer]",
    )


def _unsent(steps: _Steps) -> _Finding | None:
    if not steps.metrics[-1].get("texts_unsent"):
        return None
    return (
        "a tuned text is in no model call, so no change of it can have an effect",
        "give the agent's function a parameter with the resource's name, and send its text to the model",
    )


def _cut(steps: _Steps) -> _Finding | None:
    share = steps.end("truncated_share")
    if share is None or share < 0.1:
        return None
    change = steps.without_set({LONGER_ANSWERS[0]: "", LONGER_ANSWERS[1]: r"\.sampling\.mask_truncated = true"})
    return f"{share:.0%} of the rollouts have an answer that was cut at a limit of tokens", change


def _clipped(steps: _Steps) -> _Finding | None:
    low, high = steps.end("clipped_low"), steps.end("clipped_high")
    share = (low or 0.0) + (high or 0.0)
    if share < 0.3:
        return None
    return (
        f"the clip removed the gradient of {share:.0%} of the tokens",
        "the policy moves too far within a step: fewer epochs or updates_per_step, or half the lr",
    )


def _far(steps: _Steps) -> _Finding | None:
    found = steps.change("kl")
    if found is None or found[1] < 0.1 or found[1] < 5 * found[0] or steps.is_better:
        return None
    return (
        f"the distance to the start grew from {found[0]:.3g} to {found[1]:.3g} nats per token, and the reward did not",
        "raise objective.kl_coef, or halve the lr",
    )


def _spread_lost(steps: _Steps) -> _Finding | None:
    found = steps.change("entropy")
    if found is None or found[0] <= 0 or found[1] > 0.1 * found[0] or steps.is_better:
        return None
    return (
        f"the entropy fell from {found[0]:.3g} to {found[1]:.3g} nats, and the reward did not rise",
        "the policy repeats itself: objective.entropy_coef = 0.001 or more, a higher clip_high, or half the lr",
    )


def _longer(steps: _Steps) -> _Finding | None:
    each = [
        {**step, "length": step["tokens"] / step["rollouts"]}
        for step in steps.metrics
        if step.get("rollouts") and "tokens" in step
    ]
    found = _Steps(steps.numbers, each).change("length")
    if found is None or found[1] < 2 * found[0] or steps.is_better:
        return None
    return (
        f"a rollout's answers grew from {found[0]:.0f} to {found[1]:.0f} tokens, and the reward did not rise",
        "take reward off long answers: sampling.overlong_limit and sampling.overlong_buffer",
    )


def _leap(steps: _Steps) -> _Finding | None:
    norms = steps.all("grad_norm")
    if len(norms) < 2 * _WINDOW:
        return None
    usual, most = median(norms[:-_WINDOW]), max(norms[-_WINDOW:])
    if usual <= 0 or most < 10 * usual:
        return None
    return (
        f"the gradient's length leapt to {most:.3g}, {most / usual:.0f} times what it was",
        "halve the lr; max_grad_norm bounds what one step can do",
    )


def _one_kind(steps: _Steps) -> _Finding | None:
    good, bad = steps.end("good"), steps.end("bad")
    if good is None or bad is None or (good and bad):
        return None
    return (
        f"all rollouts count as {'good' if good else 'bad'}, and the loss compares the two kinds",
        f"{'raise' if good else 'lower'} good_from",
    )


def _split_rows(steps: _Steps) -> _Finding | None:
    rows, rollouts = steps.end("rows"), steps.end("rollouts")
    if not rows or not rollouts or rows < 3 * rollouts:
        return None
    return (
        f"a rollout becomes {rows / rollouts:.1f} training rows, which each repeat its conversation",
        REWRITTEN,
    )


def _idle_slots(steps: _Steps) -> _Finding | None:
    idle, slots, seconds = steps.end("slots_idle_share"), steps.end("slots"), steps.end("collect_s")
    if idle is None or slots is None or seconds is None or idle < _IDLE:
        return None
    whole = seconds + (steps.end("update_s") or 0.0)
    if whole < 1 or seconds < 0.3 * whole:
        return None
    found = (
        f"{idle:.0%} of the runner's {slots:.0f} slots had no rollout in the {seconds:.1f} s in which a step "
        "collects its rollouts"
    )
    rollouts = steps.end("rollouts")
    if rollouts is not None and 0 < rollouts < slots:
        return (
            f"{found}, which are {rollouts:.0f}",
            f"concurrency = {math.ceil(rollouts)} in [runner] is as fast, or fill the slots: more tasks_per_step, or "
            "a larger group_size",
        )
    return (
        found,
        "a few long rollouts hold up the others: bound them by timeout_s in [runner], or take more tasks_per_step; if "
        f"all are short, concurrency = {math.ceil(2 * (1 - idle) * slots)} in [runner] is enough",
    )


def _slow_rollouts(steps: _Steps) -> _Finding | None:
    if (steps.end("slots_idle_share") or 0.0) >= _IDLE:
        return None  # further slots would be idle too
    rollouts, slots = steps.end("rollouts"), steps.end("slots")
    change = "raise concurrency in [runner], or add agl worker"
    if rollouts and slots and rollouts <= slots:
        change = "all rollouts of a step run at once already: serve the model faster, or bound rollouts by timeout_s"
    return _bottleneck(steps, "collect_s", "waiting for rollouts", change)


def _slow_updates(steps: _Steps) -> _Finding | None:
    change = 'a GPU, there with compute.dtype = "bfloat16" and a larger compute.token_budget'
    return _bottleneck(steps, "update_s", "updates", change)


def _bottleneck(steps: _Steps, name: str, doing: str, change: str) -> _Finding | None:
    collect, update = steps.end("collect_s"), steps.end("update_s")
    part = steps.end(name)
    if collect is None or update is None or part is None or collect + update < 1 or part < 0.8 * (collect + update):
        return None
    return f"{part / (collect + update):.0%} of a step's {collect + update:.1f} s are {doing}", change


def _still(steps: _Steps) -> _Finding | None:
    if steps.end("silent_share") is None or steps.untrained or not steps.standstill:
        return None
    if (steps.end("clipped_low") or 0.0) + (steps.end("clipped_high") or 0.0) > 0.1:
        return None
    return (
        f"{steps.standstill}, though groups differ and little is clipped",
        "raise the lr threefold, or take more tasks_per_step",
    )


def _overfitting(steps: _Steps, validations: _Steps) -> _Finding | None:
    rewards = validations.all("reward")
    if len(rewards) < 4 or not steps.is_better:
        return None
    best, ends = max(rewards), rewards[-2:]
    if best - max(ends) <= _FALLEN * max(map(abs, rewards)):
        return None
    return (
        f"the training reward rises, and the last validations fell from {best:.3g} to {ends[0]:.3g} and {ends[1]:.3g}",
        "more training tasks, fewer steps, or kl_coef; the best versions have the label best",
    )


def _slope(values: Sequence[float]) -> tuple[float, float]:
    """Fit a line through the values; return its slope per step, and the standard error of the slope."""
    count = len(values)
    middle, level = (count - 1) / 2, fmean(values)
    across = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - level) for place, value in enumerate(values)) / across
    rest = sum((value - level - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    return slope, (rest / max(1, count - 2) / across) ** 0.5


def _gold_gap(steps: _Steps) -> _Finding | None:
    odds, gaps, golds = steps.all("gold_evidence"), steps.all("gold_gap"), steps.all("gold_reward")
    if not gaps or max(odds, default=0.0) < THRESHOLD:
        return None
    first, last, gold = fmean(gaps[:_WINDOW]), fmean(gaps[-_WINDOW:]), fmean(golds[-_WINDOW:])
    return (
        f"the reward runs away from the gold reward, which is {gold:.2f}: the gap went from {first:+.2f} to "
        f"{last:+.2f}, evidence {odds_text(max(odds))}",
        "agl audit shows what the rewarded answers have in common; then repair the reward, try it with agl replay "
        "--score, and start again from a version before the gap",
    )


_no_pairs = _where(
    "pairs",
    lambda pairs: pairs == 0,
    "there is no pair to prefer: the rewards of every group are equal",
    "a larger group_size, or a reward that distinguishes good from better",
)
_nothing_good = _where(
    "imitated", lambda count: count == 0, "no rollout was good enough to imitate", "lower min_reward"
)

_RULES: dict[str, _Rule] = {
    "unsent-text": _unsent,
    "unreadable-answers": _unreadable,
    "gold-gap": _gold_gap,
    "silent-groups": _silent_groups,
    "skipped-updates": _untrained,
    "dropped-rollouts": _dropped,
    "evaluator-errors": _where(
        "evaluator_failed_share",
        lambda share: share >= 0.02,
        "a reward broke in {:.0%} of the rollouts, which failed though the agent had done its work",
        "agl runs --status failed shows the error; repair the reward, or give a judge more retries and a longer "
        "timeout_s in [reward.params]; agl replay --score FILE --status failed tries it on these rollouts",
    ),
    "cut-answers": _cut,
    "narrowed-sampling": _where(
        "calls_sampling_kept",
        lambda calls: calls > 0,
        "{:.0f} calls a step were sampled with top-p, penalties or temperature 0, which biases the gradient",
        FULL_SAMPLING,
    ),
    "clipped-updates": _clipped,
    "stale-rollouts": _where(
        "effective_share",
        lambda share: share <= 0.5,
        "importance weights leave {:.0%} of the tokens' worth",
        "the rollouts are too old for the policy that learns from them: fewer updates_per_step, or half the lr",
    ),
    "distance-grows": _far,
    "entropy-lost": _spread_lost,
    "answers-grow": _longer,
    "gradient-leaps": _leap,
    "critic-blind": _where(
        "explained_variance",
        lambda share: share < 0,
        "the critic explains {:.0%} of the returns: less than their mean would",
        "a higher critic.lr, critic.warmup = 10, or grpo, which needs no critic",
        fewest=2 * _WINDOW,
    ),
    "no-pairs": _no_pairs,
    "nothing-to-imitate": _nothing_good,
    "one-kind": _one_kind,
    "split-rows": _split_rows,
}

_TIMES: dict[str, _Rule] = {
    "slow-rollouts": _slow_rollouts,
    "slow-updates": _slow_updates,
    "workers-idle": _idle_slots,
}


AlertKind = Literal["suggestion", "collapse"]
"""The kind of an alert; see :class:`Alert`."""


class Alert(Record, frozen=True, kw_only=True):
    """A finding of a rule about a run, stored once.

    Attributes:
        kind: ``collapse`` if the run acted upon the finding, else ``suggestion``.
        time: Unix seconds at which the finding was first made.
        found: The finding.
    """

    kind: AlertKind
    time: float
    found: Suggestion


async def add_alert(store: Store, name: str, run: int, kind: AlertKind, found: Suggestion, *, key: str) -> bool:
    """Store an alert; return false if the run already has an alert with the same rule and ``key``."""
    shelf, key = _alerts(name, run), f"{found.rule}/{key}"
    if await shelf.get(store, key):
        return False
    await shelf.add(store, {key: Alert(kind=kind, time=time.time(), found=found)})
    return True


async def read_alerts(store: Store, name: str, run: int) -> list[Alert]:
    """Return the alerts of a run, in order of time."""
    return sorted((await _alerts(name, run).read(store)).values(), key=lambda alert: alert.time)


def _alerts(name: str, run: int) -> Shelf[Alert]:
    return Shelf(Alert, run_key(name, run, "alerts/"))
