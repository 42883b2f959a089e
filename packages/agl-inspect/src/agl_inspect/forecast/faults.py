"""Finds faults in recorded rollouts that would harm a training run, each with its evidence and a change to make.

A rule looks at the facts of all rollouts together, and reports a fault only if they are clear. The limits are
conventions, as in :mod:`agl_inspect.advice.suggestions`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agl.hints import count_of
from agl.schemas import Json, Record, to_json
from agl_inspect.advice.suggestions import FULL_SAMPLING, LONGER_ANSWERS, REWRITTEN
from agl_inspect.forecast.observed import Observed, ToolUse
from agl_inspect.rollouts.explanations import NEXT_STEP
from agl_inspect.text import short

SHARE = 0.1
"""A fault is reported only if at least this share of the rollouts has it."""

_LEAST = 4
"""The least number of rollouts with which a rule compares rollouts."""

_SAME_WORDS = 5
"""If every rollout of a task gives the same answer, this is suspicious from this number of words on."""

_RETRIED = 0.2
"""Repeated calls or attempts are reported if at least this share of the rollouts has them."""


class Fault(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A fault of recorded rollouts, or of an experiment's tasks.

    Attributes:
        rule: The rule's name, such as ``reward-never-varies``.
        evidence: The finding, with its numbers.
        change: The proposed change.
        example: Id of a rollout that shows the fault; ``""`` for a fault of the tasks.
    """

    rule: str
    evidence: str
    change: str
    example: str = ""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The rollouts that the rules look at, and the settings of the experiment that matter to the rules.

    Attributes:
        rollouts: The facts of the rollouts, at least one.
        needs_token_ids: Whether an algorithm trains on tokens.
        token_budget: Largest number of tokens of a pass; a longer row takes a pass of its own. 0 for no limit.
    """

    rollouts: Sequence[Observed]
    needs_token_ids: bool = False
    token_budget: int = 0

    @property
    def succeeded(self) -> list[Observed]:
        """The rollouts that succeeded."""
        return [one for one in self.rollouts if one.status == "succeeded"]

    def groups(self) -> list[list[Observed]]:
        """Return one list per task, of its rollouts that succeeded and made calls."""
        found: dict[str, list[Observed]] = {}
        for one in self.succeeded:
            if one.calls:
                found.setdefault(one.group_id, []).append(one)
        return list(found.values())


_Found = tuple[str, str, str]
_Rule = Callable[[Examined], _Found | None]


def faults_in(examined: Examined) -> list[Fault]:
    """Return the faults of recorded rollouts, in the order of the rules."""
    found = ((rule, look(examined)) for rule, look in _RULES.items())
    return [Fault(rule=rule, evidence=fault[0], change=fault[1], example=fault[2]) for rule, fault in found if fault]


def faults_of_tasks(train: Sequence[Json], val: Sequence[Json]) -> list[Fault]:
    """Return the faults of an experiment's tasks: tasks that appear twice, or in both datasets."""
    known, measured = Counter(map(_key, train)), Counter(map(_key, val))
    repeated = sum(count - 1 for count in known.values())
    shared = sum(count for key, count in measured.items() if key in known)
    found: list[Fault] = []
    if repeated:
        often = known.most_common(1)[0]
        found.append(
            Fault(
                rule="repeated-tasks",
                evidence=f"{repeated} of {len(train)} training tasks stand there already, one of them {often[1]} "
                f"times: {short(often[0])}",
                change="leave each task once, or give those that differ in what is not in the file an id of their own",
            )
        )
    if shared:
        first = next(key for key in measured if key in known)
        found.append(
            Fault(
                rule="shared-tasks",
                evidence=f"{shared} of {len(val)} validation tasks are training tasks too, such as {short(first)}",
                change="take them out of the training tasks: a validation on them measures what was learnt by heart",
            )
        )
    return found


def _key(task: Json) -> str:
    return to_json(task).decode()


def _many(
    concerns: Callable[[Observed], bool],
    evidence: Callable[[Sequence[Observed], str], str],
    change: str,
    *,
    needs_token_ids: bool = False,
) -> _Rule:
    """Return a rule that reports a fault if ``concerns`` is true for at least the share ``SHARE`` of the rollouts.

    ``evidence`` gets the rollouts concerned, and a text such as ``3 of 20 rollouts``.
    """

    def look(examined: Examined) -> _Found | None:
        found = [one for one in examined.rollouts if concerns(one)]
        if not _is_many(found, examined) or (needs_token_ids and not examined.needs_token_ids):
            return None
        return evidence(found, _of(found, examined)), change, _first(found)

    return look


def _errors(failed: Sequence[Observed], of: str) -> str:
    errors = Counter(one.error for one in failed)
    return f"{of} failed: {', '.join(f'{text} ({count})' for text, count in errors.most_common(2))}"


def _nameless(mixed: Sequence[Observed], of: str) -> str:
    named = sorted({name for one in mixed for name in one.agents if name})
    return f"{sum(one.agents[''] for one in mixed)} calls in {of} have no agent's name, but others are by " + ", ".join(
        named[:5]
    )


def _is_of_others(one: Observed) -> bool:
    """Return true for a failure that a more specific rule reports."""
    return one.is_timeout or _is_of_reward(one) or _has_no_call(one)


def _is_of_reward(one: Observed) -> bool:
    return "the reward '" in one.error


def _reward_errors(examined: Examined) -> _Found | None:
    wrong = [one for one in examined.rollouts if _is_of_reward(one)]
    if not wrong:
        return None
    error = Counter(one.error for one in wrong).most_common(1)[0][0]
    return f"the reward failed in {_of(wrong, examined)}: {error}", "correct the reward", _first(wrong)


def _reward_missing(examined: Examined) -> _Found | None:
    missing = [one for one in examined.succeeded if one.reward is None]
    if len(missing) < SHARE * len(examined.succeeded) or not missing:
        return None
    return (
        f"{_of(missing, examined)} ended well and without a reward",
        "return or emit a reward, or name one in a section [[reward]]; agl why says which rewards did not count",
        _first(missing),
    )


def _reward_flat(examined: Examined) -> _Found | None:
    rewards = [one.trains for one in examined.rollouts if one.trains is not None]
    if len(rewards) < _LEAST or max(rewards) - min(rewards) > 1e-6:
        return None
    return (
        f"all of {len(rewards)} rewards are {rewards[0]:g}",
        "if that is the worst: easier tasks, or a reward for a part of the way; if it is the best, there is nothing "
        "to learn; if neither, look at what the reward compares",
        _first(examined.rollouts),
    )


def _long(examined: Examined) -> _Found | None:
    limit = examined.token_budget
    long = [one for one in examined.rollouts if limit and one.context > limit]
    if not long:
        return None
    most = max(long, key=lambda one: one.context)
    return (
        f"{_of(long, examined)} are longer than token_budget = {limit}, the longest has {most.context} tokens",
        f"such a row takes a pass of its own, and the memory of {most.context} tokens: token_budget = {most.context}, "
        "or a shorter history",
        most.rollout_id,
    )


def _has_no_call(one: Observed) -> bool:
    return "NoModelCallsError" in one.error or (one.status == "succeeded" and not one.calls and not one.unseen)


def _other_policy(examined: Examined) -> _Found | None:
    calling = [one for one in examined.succeeded if one.calls]
    others = [one for one in calling if one.rejects.get("not_selected", 0) >= one.calls]
    if not others or len(others) < SHARE * len(calling):
        return None
    return (
        f"{_of(others, examined)} made no call by the agents and to the policy in training",
        NEXT_STEP["not_selected"],
        _first(others),
    )


def _leaked(examined: Examined) -> _Found | None:
    keys = Counter(key for one in examined.rollouts for key in one.leaked)
    chance = Counter(key for one in examined.rollouts for key in one.chance)
    clear = [key for key, count in keys.items() if count >= 3 and count - chance[key] >= SHARE * len(examined.rollouts)]
    if not clear:
        return None
    seen = [one for one in examined.rollouts if set(clear) & set(one.leaked)]
    return (
        f"the hidden value {' and '.join(map(repr, sorted(clear)))} of the task stands in the first prompt of "
        f"{_of(seen, examined)}",
        "take it out of what the agent reads: it learns to copy the answer",
        _first(seen),
    )


def _identical(examined: Examined) -> _Found | None:
    groups = [group for group in examined.groups() if len(group) > 1]
    same = [group for group in groups if len({one.answers for one in group}) == 1]
    is_greedy = all(one.is_greedy for group in same for one in group)
    if len(groups) < 2 or len(same) < 0.8 * len(groups):
        return None
    if not is_greedy and min(one.words for group in same for one in group) < _SAME_WORDS:
        return None  # short equal answers are no surprise
    why = ", all drawn at temperature 0" if is_greedy else ""
    return (
        f"in {len(same)} of {len(groups)} groups all rollouts gave the same answers, word for word{why}",
        f"{FULL_SAMPLING}; a cache before the model does the same",
        _first(same[0]),
    )


def _unused_tools(examined: Examined) -> _Found | None:
    offered = [one for one in examined.succeeded if one.has_tools]
    if len(offered) < _LEAST or any(one.asks_tools or one.tools for one in offered):
        return None
    return (
        f"{_of(offered, examined)} were offered tools, and none called one",
        "look at a prompt: say what the tools are for, or check that the server parses tool calls of this model",
        _first(offered),
    )


def _failing_tools(examined: Examined) -> _Found | None:
    totals: dict[str, ToolUse] = {}
    for one in examined.rollouts:
        for name, use in one.tools.items():
            known = totals.get(name, ToolUse())
            totals[name] = ToolUse(calls=known.calls + use.calls, failed=known.failed + use.failed)
    broken = sorted(name for name, use in totals.items() if use.calls >= 3 and use.failed == use.calls)
    if not broken:
        return None
    named = ", ".join(f"{name!r} ({totals[name].calls})" for name in broken)
    users = [one for one in examined.rollouts if set(broken) & set(one.tools)]
    return f"every call of a tool failed: {named}", "repair the tool; agl show prints its errors", _first(users)


def _retries(examined: Examined) -> _Found | None:
    again = [one for one in examined.rollouts if (one.attempts > 1 and not one.is_timeout) or one.retried]
    if len(again) < _RETRIED * len(examined.rollouts) or len(examined.rollouts) < _LEAST:
        return None
    return (
        f"{_of(again, examined)} repeated a model call or a whole attempt",
        "look at the errors of the first tries with agl show; fewer rollouts at once if the server refuses some",
        _first(again),
    )


def _split(examined: Examined) -> _Found | None:
    split = [one for one in examined.rollouts if one.drifted or one.restarted]
    if not examined.needs_token_ids or not _is_many(split, examined):
        return None
    rows = sum(one.rows for one in split) / len(split)
    return (
        f"in {_of(split, examined)} an agent's conversation begins anew, so that they have {rows:.1f} rows each",
        REWRITTEN.replace("latest", _first(split)),
        _first(split),
    )


def _is_many(concerned: Sequence[Observed], examined: Examined) -> bool:
    return bool(concerned) and len(concerned) >= SHARE * len(examined.rollouts)


def _of(concerned: Sequence[Observed], examined: Examined) -> str:
    return f"{len(concerned)} of {count_of(len(examined.rollouts), 'rollout')}"


def _first(concerned: Sequence[Observed]) -> str:
    return concerned[0].rollout_id


_RULES: Mapping[str, _Rule] = {
    "failed-rollouts": _many(
        lambda one: one.status != "succeeded" and not _is_of_others(one),
        _errors,
        "repair the agent; agl show prints the traceback",
    ),
    "timeouts": _many(
        lambda one: one.is_timeout,
        lambda _, of: f"{of} reached their time limit",
        "raise timeout_s in [runner], or lower concurrency where the model's server is slow",
    ),
    "retries": _retries,
    "no-calls": _many(
        _has_no_call,
        lambda _, of: f"{of} made no model call that was recorded",
        "let the agent's client call over HTTP with httpx, as the openai and anthropic clients do, or give it the base "
        "URL and key of the resource",
    ),
    "other-policy": _other_policy,
    "unseen-calls": _many(
        lambda one: one.unseen > 0,
        lambda found, of: f"{count_of(sum(one.unseen for one in found), 'unrecorded model call')} in {of}",
        NEXT_STEP["unseen_calls"],
    ),
    "call-errors": _many(
        lambda one: bool(one.rejects.get("error") or one.rejects.get("incomplete")),
        lambda _, of: f"{of} have model calls that failed",
        NEXT_STEP["error"],
    ),
    "missing-token-ids": _many(
        lambda one: bool(one.rejects.get("missing_token_ids")),
        lambda _, of: f"{of} have calls without token ids",
        NEXT_STEP["missing_token_ids"],
        needs_token_ids=True,
    ),
    "reward-errors": _reward_errors,
    "reward-missing": _reward_missing,
    "reward-never-varies": _reward_flat,
    "cut-answers": _many(
        lambda one: one.cut > 0,
        lambda _, of: f"{of} have an answer that was cut at a limit of tokens",
        ", or ".join(LONGER_ANSWERS),
    ),
    "over-token-budget": _long,
    "hidden-in-prompt": _leaked,
    "identical-answers": _identical,
    "unused-tools": _unused_tools,
    "failing-tools": _failing_tools,
    "nameless-agents": _many(
        lambda one: bool(one.agents.get("")) and len(one.agents) > 1, _nameless, NEXT_STEP["unattributed"]
    ),
    "split-rows": _split,
}
