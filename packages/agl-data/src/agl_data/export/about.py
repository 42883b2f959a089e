"""Makes the object ``agl``, which holds the fields of a rollout and its calls that an export format has no name for.

Each format writes the object into a free field, and ``agl data import`` reads it back. The object only repeats fields
of the record.
"""

from typing import Any

from msgspec.structs import replace

from agl.schemas import Json, Reward, Span, Transition, to_builtins
from agl_data.json_values import without_empty
from agl_inspect.exports import Exported, Losses, call_record

NO_TARGET = "rewards about spans that are not written: left out"


def rollout_about(item: Exported) -> dict[str, Json]:
    """Return a rollout's identity, task and outcome."""
    rollout, attempt = item.recording.rollout, item.episode.attempt
    about: dict[str, Json] = {
        "rollout_id": rollout.rollout_id,
        "attempt_id": attempt.attempt_id if attempt else "",
        "experiment": rollout.experiment,
        "group_id": rollout.group_id,
        "mode": rollout.mode,
        "status": rollout.status,
        "task": rollout.task,
        "hidden": list(rollout.hidden),
        "resources": rollout.resources,
        "reward": item.episode.reward,
    }
    return without_empty(about)


def call_about(span: Span, seen: Transition) -> dict[str, Json]:
    """Return a model call's span id, times and reward, and its record without token ids, request and response."""
    call = span.call
    assert call is not None  # noqa: S101  # transitions are made of calls
    bare = replace(call, prompt_ids=b"", response_ids=b"", logprobs=b"")
    about: dict[str, Json] = {
        "span_id": span.span_id,
        "sequence": span.sequence,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "reward": seen.reward,
        "call": call_record(bare),
    }
    return without_empty(about)


def rewards_about(item: Exported, calls: set[str], losses: Losses) -> list[dict[str, Any]]:
    """Return the deciding attempt's rewards, each with the span id of the call it is about.

    Args:
        item: The rollout.
        calls: Span ids of the calls that the export writes.
        losses: Counts the rewards that are about a span the export does not write.
    """
    rollout, attempt = item.recording.rollout, item.episode.attempt
    found: list[dict[str, Any]] = []
    for span in item.recording.spans:
        reward = span.reward
        if reward is None or attempt is None or span.attempt_id != attempt.attempt_id:
            continue
        target = target_of(span, reward)
        if target and target not in calls:
            losses.add(NO_TARGET, rollout.rollout_id)
            continue
        about = {"call": target, "at_ns": span.start_ns, "sequence": span.sequence, "is_late": span.is_late or None}
        fields = {**to_builtins(reward), "span_id": None}
        found.append({"value": reward.value, **without_empty({**fields, **about})})
    return found


def target_of(span: Span, reward: Reward) -> str:
    """Return the id of the span that a reward is about; ``""`` if the reward names no span.

    Such a reward is about the rollout, or about the newest call before the reward.
    """
    if reward.scope == "rollout":
        return ""
    return reward.span_id or (span.parent_id if reward.scope == "span" else "") or ""
