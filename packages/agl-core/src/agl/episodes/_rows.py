"""Rows: branches as packed arrays for a trainer, and with advantages.

Everything stays packed bytes: int32 ids, uint8 mask, float32 log-probabilities and advantages.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Row, Segment, Transition


def make_rows(transitions: Sequence[Transition], *, group_id: str) -> tuple[Row, ...]:
    """One row per branch of an attempt's transitions, in order of the branches.

    The row's tokens are the prompt and response of the branch's last call, because every earlier call's are a
    prefix of them. The mask is 1 on the branch's own responses; a prefix that was forked from another branch is
    trained there and has mask 0 here, so that each sampled token is in exactly one row.
    """
    branches: dict[int, list[Transition]] = {}
    for transition in transitions:
        if not transition.reject:
            branches.setdefault(transition.branch, []).append(transition)
    return tuple(_row(branches[branch], group_id) for branch in sorted(branches))


def attach(episode: Episode, credits: Iterable[CallCredit]) -> tuple[Row, ...]:
    """The episode's rows with ``advantages``: each call's value on its tokens, 0.0 where the mask is 0.

    Pass credits whose values are final, that is after an estimator has compared them with their baselines.
    Raises :class:`ConfigError` when a trained call has no credit.
    """
    values = {credit.span_id: credit.value for credit in credits}
    return tuple(_with_values(row, values) for row in episode.rows)


def _row(calls: Sequence[Transition], group_id: str) -> Row:
    last = calls[-1]
    ids = last.prompt_ids + last.response_ids
    mask, logprobs = bytearray(len(ids) // 4), bytearray(len(ids))
    segments: list[Segment] = []
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


def _with_values(row: Row, values: Mapping[str, float]) -> Row:
    advantages = bytearray(len(row.ids))
    for segment in row.segments:
        value = values.get(segment.span_id)
        if value is None:
            raise ConfigError(
                f"the credit assignment gave no value for call {segment.span_id} of rollout {row.rollout_id}; "
                "it must return one CallCredit for every call that is not rejected"
            )
        packed = struct.pack("<f", value) * (segment.stop - segment.start)
        advantages[segment.start * 4 : segment.stop * 4] = packed
    return msgspec.structs.replace(row, advantages=bytes(advantages))
