"""Builds the rows that train: one branch of the call forest each, as packed arrays for a trainer.

Everything stays packed bytes: int32 ids, uint8 mask, float32 log-probabilities. The trainer adds the advantages.
"""

from collections.abc import Sequence

from agl.schemas import Row, Segment, Transition


def make_rows(transitions: Sequence[Transition], *, group_id: str) -> tuple[Row, ...]:
    """One row per branch of an attempt's transitions, in order of the branches.

    The row's tokens are the prompt and response of the branch's last call, which contain those of every earlier call as
    a prefix. The mask is 1 for the branch's own responses. A prefix that comes from another branch trains there and has
    mask 0 here, so that each sampled token trains in exactly one row.
    """
    # Transitions are in order of time, and so are the calls of a branch.
    branches: dict[int, list[Transition]] = {}
    for transition in transitions:
        if not transition.reject:
            branches.setdefault(transition.branch, []).append(transition)
    return tuple(_row(branches[branch], group_id) for branch in sorted(branches))


def _row(calls: Sequence[Transition], group_id: str) -> Row:
    last = calls[-1]
    ids = last.prompt_ids + last.response_ids
    # mask: uint8 [T]; logprobs: float32 [T] as bytes, 4 each.
    mask, logprobs = bytearray(len(ids) // 4), bytearray(len(ids))
    segments: list[Segment] = []
    # Only the branch's own answers: a shared prefix has its mask in the branch that sampled it, so
    # that each sampled token has weight in exactly one row.
    for call in calls:
        start, stop = call.start, call.start + len(call.response_ids) // 4
        mask[start:stop] = b"\x01" * (stop - start)
        logprobs[start * 4 : stop * 4] = call.logprobs
        segments.append(
            Segment(start=start, stop=stop, span_id=call.span_id, agent=call.agent, model_version=call.model_version)
        )
    return Row(
        rollout_id=last.rollout_id,
        attempt_id=last.attempt_id,
        group_id=group_id,
        branch=last.branch,
        ids=ids,
        mask=bytes(mask),
        logprobs=bytes(logprobs),
        segments=tuple(segments),
    )
