"""Rows: branches as packed arrays for a trainer, cut to length, weighted, and with advantages.

Everything stays packed bytes: int32 ids, uint8 mask, float32 log-probabilities and advantages.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode, Row, Segment, Transition

Aggregation = Literal["rollout", "token"]


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


def split_row(row: Row, max_tokens: int, *, context: int | None = None) -> tuple[Row, ...]:
    """Cut a row into pieces of at most ``max_tokens`` tokens; every sampled token is trained in exactly one piece.

    A piece repeats at least ``context`` tokens (default: a quarter of ``max_tokens``) before its trained tokens, and
    more where they fit, with mask 0. It lacks the tokens further back, so the model conditions on less than it had
    when it sampled. A piece ends between two calls where it can; a call longer than a piece is cut. A row that fits
    is returned as it is. The pieces' recorded logprobs are those of the unsplit row.
    """
    kept = max(1, max_tokens // 4) if context is None else context
    if not 1 <= kept < max_tokens:
        raise ConfigError(
            f"split_row got max_tokens={max_tokens} and context={kept}; "
            "choose a context of at least 1 token, to predict the first trained one, and below max_tokens"
        )
    if len(row.mask) <= max_tokens:
        return (row,)
    return tuple(_piece(row, segments, max_tokens) for segments in _windows(row.segments, max_tokens, kept))


def rollout_weights(
    rows: Sequence[Row], *, aggregation: Aggregation = "rollout", rollouts: int | None = None
) -> list[float]:
    """The weight of each sampled token of a row in the loss, one number per row.

    With N rollouts and T_i sampled tokens in all rows of rollout i, the loss is the sum over rows r and sampled
    tokens t of w_r * l_rt, where

        rollout:  w_r = 1 / (N * T_i)       mean over a rollout's tokens, then over rollouts
        token:    w_r = 1 / (T_1 + ... + T_N)   mean over all tokens

    Both depend on how many tokens a rollout has, not on how they are spread over rows: splitting a rollout changes
    neither its share nor the loss. ``rollouts`` is N where some rollouts have no row and still count; by default
    the number of rollouts in ``rows``. A row without a sampled token weighs 0. Pass all rows of an update at once.
    """
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.rollout_id] = tokens.get(row.rollout_id, 0) + row.mask.count(1)
    if aggregation == "token":
        total = sum(tokens.values())
        return [1.0 / total if row.mask.count(1) else 0.0 for row in rows]
    count = len(tokens) if rollouts is None else rollouts
    return [1.0 / (count * tokens[row.rollout_id]) if row.mask.count(1) else 0.0 for row in rows]


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


def _windows(segments: Sequence[Segment], size: int, context: int) -> list[list[Segment]]:
    """The trained parts of each piece, in tokens of the row; a call that does not fit into a piece is cut."""
    pieces: list[list[Segment]] = []
    begin = 0
    for segment in segments:
        rest = segment
        while rest.start < rest.stop:
            if not pieces or rest.stop - begin > size:
                begin = max(0, rest.start - context)
                pieces.append([])
            stop = min(rest.stop, begin + size)
            pieces[-1].append(msgspec.structs.replace(rest, stop=stop))
            rest = msgspec.structs.replace(rest, start=stop)
    return pieces


def _piece(row: Row, segments: Sequence[Segment], size: int) -> Row:
    """The piece that trains ``segments``, with as much context before them as fits."""
    end = segments[-1].stop
    begin = max(0, end - size)
    return msgspec.structs.replace(
        row,
        ids=row.ids[begin * 4 : end * 4],
        mask=_kept(row.mask, segments, begin, end, width=1),
        logprobs=_kept(row.logprobs, segments, begin, end, width=4),
        advantages=_kept(row.advantages, segments, begin, end, width=4) if row.advantages else b"",
        segments=tuple(
            msgspec.structs.replace(part, start=part.start - begin, stop=part.stop - begin) for part in segments
        ),
    )


def _kept(values: bytes, segments: Sequence[Segment], begin: int, end: int, *, width: int) -> bytes:
    """``values`` of the tokens ``[begin, end)``, zero outside ``segments``; ``width`` bytes per token."""
    kept = bytearray((end - begin) * width)
    for part in segments:
        kept[(part.start - begin) * width : (part.stop - begin) * width] = values[
            part.start * width : part.stop * width
        ]
    return bytes(kept)
