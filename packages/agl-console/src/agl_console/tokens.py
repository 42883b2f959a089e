"""The tokens of a rollout's rows, or of one call: ids, log-probabilities, entropies, advantages, and training use."""

import math
from array import array
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from agl.contracts import CallUse
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Episode, MediaSpan, ModelCall, Record, Row, unpack_floats, unpack_ids
from agl_inspect.rollouts.training import token_values
from agl_inspect.rollouts.turns import tone_of

WINDOW = 1000
"""The most tokens on a page."""

_LEVELS = (-0.01, -0.1, -0.5, -1.0, -2.0, -4.0)
"""Log-probabilities in nats that separate the levels 0 (certain) to 6 (surprising)."""

_SPREADS = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0)
"""Entropies in nats that separate the levels 0 (no choice) to 6 (as among 55 equally likely tokens or more)."""


class TokensFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page: a row by its branch, and the position of the first token to show."""

    row: int = 0
    start: int = 0


class TokenCell(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One token.

    Attributes:
        logprob: Behaviour log-probability; ``None`` for a token that was not sampled.
        level: From 0 for a certain token to 6 for a surprising one; ``None`` for a token that was not sampled.
        version: Index into ``versions`` of the weights that sampled the token; ``None`` if it was not sampled.
        advantage: The token's own advantage if the step reported one per token, else its call's; ``None`` without a
            report.
        tone: The advantage on the scale of the row, from -3 (lowest, below 0) to 3 (highest, above 0).
        text: The token's text; ``""`` without a vocabulary.
        entropy: The policy's entropy before the token in nats, as a step reported it; ``None`` without a report.
        spread: From 0 for an entropy near 0 to 6 for one above 4 nats; ``None`` without a report.
    """

    position: int
    id: int
    is_trained: bool
    logprob: float | None
    level: int | None
    version: int | None
    advantage: float | None = None
    tone: int | None = None
    text: str = ""
    entropy: float | None = None
    spread: int | None = None


class SegmentRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A part of a row that one call sampled.

    Attributes:
        logprob: Mean log-probability of its tokens; ``None`` if it has no tokens.
        advantage: The advantage that a step reported for the call; ``None`` without a report.
        entropy: The mean entropy over its tokens that a step reported; ``None`` without a report.
    """

    start: int
    stop: int
    span_id: str
    agent: str
    model_version: str
    logprob: float | None
    advantage: float | None
    entropy: float | None = None


class RowSummary(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A row: its branch, its number of tokens, its number of sampled tokens, and its sampled parts."""

    branch: int
    tokens: int
    sampled: int
    segments: list[SegmentRow]


class TokensView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A window of the tokens of one row.

    Attributes:
        summary: How many tokens were sampled and trained, and with which advantage, in sentences.
        media: The pictures whose tokens are in the window.
        weights: The folder of the policy's tokenizer; ``""`` if none is on this machine.
        versions: The model versions that sampled the row's tokens.
        previous: The query of the window before this one; empty at the start of the row.
        next: The query of the window after this one; empty at the end of the row.
    """

    rollout_id: str
    rows: list[RowSummary]
    row: int
    summary: str
    versions: list[str]
    cells: list[TokenCell]
    previous: dict[str, str]
    next: dict[str, str]
    media: list[MediaSpan] = []
    weights: str = ""


def tokens_view(episode: Episode, chosen: TokensFilter, uses: Mapping[str, CallUse], *, reason: str = "") -> TokensView:
    """Return a window of a row's tokens; raises :class:`NotFoundError` if the rollout has no such row.

    ``uses`` gives the steps' use of each call, by span id; ``reason`` says why an advantage is 0.
    """
    rollout_id = episode.rollout.rollout_id
    summaries = [summary_of(row, uses) for row in episode.rows]
    if not episode.rows and chosen.row == 0:
        none: dict[str, str] = {}
        return TokensView(
            rollout_id=rollout_id, rows=[], row=0, summary="", versions=[], cells=[], previous=none, next=none
        )
    row = next((row for row in episode.rows if row.branch == chosen.row), None)
    if row is None:
        raise NotFoundError("row", str(chosen.row), f"rows of the rollout {rollout_id}: {len(episode.rows)}")
    total = len(row.mask)
    if not 0 <= chosen.start < total:
        raise ConfigError(f"the row has {total} tokens and none at {chosen.start}; start below {total}")
    versions = list(dict.fromkeys(segment.model_version for segment in row.segments))
    sampled = array("h", [-1]) * total
    for segment in row.segments:
        number = versions.index(segment.model_version)
        sampled[segment.start : segment.stop] = array("h", [number]) * (segment.stop - segment.start)
    stop = min(total, chosen.start + WINDOW)
    part = slice(chosen.start * 4, stop * 4)
    cells = cells_of(
        unpack_ids(row.ids[part]),
        unpack_floats(row.logprobs[part]),
        versions=sampled[chosen.start : stop],
        mask=row.mask[chosen.start : stop],
        start=chosen.start,
    )
    (summary,) = (each for each in summaries if each.branch == row.branch)
    place = {"row": str(row.branch)}
    return TokensView(
        rollout_id=rollout_id,
        rows=summaries,
        row=row.branch,
        summary=sentences_of([summary], uses, reason=reason),
        versions=versions,
        cells=_with_uses(cells, [(part.start, uses.get(part.span_id), part.stop) for part in summary.segments]),
        previous={**place, "start": str(max(0, chosen.start - WINDOW))} if chosen.start else {},
        next={**place, "start": str(stop)} if stop < total else {},
        media=media_at(row.media, cells),
    )


def media_at(media: Sequence[MediaSpan], cells: Sequence[TokenCell]) -> list[MediaSpan]:
    """Return the pictures of which at least one token is among the cells."""
    first, stop = (cells[0].position, cells[-1].position + 1) if cells else (0, 0)
    return [span for span in media if span.offset < stop and span.offset + span.length > first]


def call_cells(call: ModelCall, *, trains: bool, use: CallUse | None) -> list[TokenCell]:
    """Return the last tokens of a call's prompt and the first tokens of its answer, one window in all.

    ``trains`` is true if the call is in a row; ``use`` is a step's report on the call.
    """
    answer = unpack_ids(call.response_ids[: min(WINDOW, call.response_len) * 4])
    first = max(0, call.prompt_len - max(1, WINDOW - len(answer)))
    prompt = unpack_ids(call.prompt_ids[first * 4 : call.prompt_len * 4])
    given = unpack_floats(call.logprobs[: min(len(answer), len(call.logprobs) // 4) * 4])
    logprobs = [0.0] * len(prompt) + (given if len(given) == len(answer) else [math.nan] * len(answer))
    cells = cells_of(
        [*prompt, *answer],
        logprobs,
        versions=[-1] * len(prompt) + [0] * len(answer),
        mask=bytes(len(prompt)) + (b"\x01" if trains else b"\x00") * len(answer),
        start=first,
    )
    return _with_uses(cells, [(call.prompt_len, use, call.prompt_len + call.response_len)])


def summary_of(row: Row, uses: Mapping[str, CallUse]) -> RowSummary:
    """Count the tokens of a row and of its sampled parts."""
    segments = [
        SegmentRow(
            start=segment.start,
            stop=segment.stop,
            span_id=segment.span_id,
            agent=segment.agent,
            model_version=segment.model_version,
            logprob=_mean(unpack_floats(row.logprobs[segment.start * 4 : segment.stop * 4])),
            advantage=uses[segment.span_id].advantage if segment.span_id in uses else None,
            entropy=_mean([each for each in _numbers(uses.get(segment.span_id), "entropy") if math.isfinite(each)]),
        )
        for segment in row.segments
    ]
    return RowSummary(branch=row.branch, tokens=len(row.mask), sampled=row.mask.count(1), segments=segments)


def sentences_of(rows: Sequence[RowSummary], uses: Mapping[str, CallUse], *, reason: str) -> str:
    """Return how many tokens of some rows trained, and with which advantage; ``reason`` says why it is 0."""
    total, sampled = sum(row.tokens for row in rows), sum(row.sampled for row in rows)
    parts = [(part, uses[part.span_id]) for row in rows for part in row.segments if part.span_id in uses]
    trained = [(part, use) for part, use in parts if use.row >= 0]
    if not trained:
        return f"The model sampled {sampled:,} of {total:,} tokens; no step has trained on them." if rows else ""
    count = sum(part.stop - part.start for part, _ in trained)
    if all(use.advantage == 0 and not use.tokens.get("advantage") for _, use in trained):
        return f"{count:,} of {total:,} tokens could train; none changed the model{reason}."
    left_out = "answers left out, " if count < sampled else ""
    said = f"{count:,} of {total:,} tokens trained; the other {total - count:,} are of {left_out}the prompt and tools."
    advantages = [use.advantage for _, use in trained if use.advantage is not None]
    if not advantages:
        return said
    low, high = min(advantages), max(advantages)
    return f"{said} The advantage is {f'between {low:.4g} and {high:.4g}' if low < high else f'{low:.4g}'}."


def cells_of(
    ids: Sequence[int], logprobs: Sequence[float], *, versions: Sequence[int], mask: bytes, start: int
) -> list[TokenCell]:
    """Return the cells of tokens from position ``start`` on; version -1 marks tokens that were not sampled."""
    return [
        TokenCell(
            position=start + index,
            id=token,
            is_trained=bool(trains),
            logprob=logprob if version >= 0 and math.isfinite(logprob) else None,
            level=level_of(logprob) if version >= 0 and math.isfinite(logprob) else None,
            version=version if version >= 0 else None,
        )
        for index, (token, logprob, version, trains) in enumerate(zip(ids, logprobs, versions, mask, strict=True))
    ]


def level_of(logprob: float) -> int:
    """Return the level of a token: 0 if it is certain, up to 6 if its probability is below 2 %."""
    return sum(1 for bound in _LEVELS if logprob < bound)


def _with_uses(cells: Sequence[TokenCell], parts: Sequence[tuple[int, CallUse | None, int]]) -> list[TokenCell]:
    """Add the steps' reports on calls to cells; ``parts`` has each call's start, the report on it, and its stop."""
    known = [number for _, use, _ in parts for number in (*_numbers(use, "advantage"), use.advantage if use else None)]
    largest = max((abs(number) for number in known if number is not None and math.isfinite(number)), default=0.0)
    found = list(cells)
    first = cells[0].position if cells else 0
    for start, use, stop in parts:
        if use is None:
            continue
        advantages, entropies = _numbers(use, "advantage"), _numbers(use, "entropy")
        for at in range(max(0, start - first), min(len(found), stop - first)):
            number = at + first - start
            advantage = advantages[number] if number < len(advantages) else use.advantage
            entropy = entropies[number] if number < len(entropies) else None
            found[at] = _valued(found[at], advantage=_finite(advantage), entropy=_finite(entropy), largest=largest)
    return found


def _valued(cell: TokenCell, *, advantage: float | None, entropy: float | None, largest: float) -> TokenCell:
    return replace(
        cell,
        advantage=advantage,
        tone=None if advantage is None else tone_of(advantage, largest),
        entropy=entropy,
        spread=None if entropy is None else sum(1 for bound in _SPREADS if entropy > bound),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _numbers(use: CallUse | None, name: str) -> list[float]:
    return [] if use is None else token_values(use, name)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
