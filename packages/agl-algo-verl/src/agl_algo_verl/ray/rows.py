"""Converts the prepared rows of a step to the rows that VERL's end of the bridge takes.

VERL on Ray derives a rollout's weight from rows. So advantages are scaled here where that would matter, and
`ray/loops.py` does the rest. With a critic the rows carry rewards instead, because VERL's own GAE computes the
advantages (`shaping.py`). Rows that are held and not trained (`losses/anchor.py`) go into the update that trains their
rollout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from agl.errors import AglError
from agl_algo_verl.losses.shaping import call_returns, call_rewards
from agl_algo_verl.ray.bridge import BridgeRow, StepRows
from agl_algo_verl.ray.completion import ROW_MEAN
from agl_algo_verl.rows.batches import per_rollout, updates, weighting

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from agl_algo_verl.losses.choice import LossChoice
    from agl_algo_verl.ray.completion import Completion
    from agl_algo_verl.rows.rows import PreparedStep, RowSample


def rows_for_verl(
    prepared: PreparedStep,
    *,
    mode: str,
    step: int,
    has_critic: bool = False,
    choice: LossChoice | None = None,
    tasks: int | None = None,
    has_gradient: Callable[[Sequence[RowSample]], bool] = bool,
    held: Sequence[RowSample] = (),
    replayed: Collection[str] = (),
    completion: Completion | None = None,
) -> StepRows:
    """Return the rows of a step in the form that VERL's side of the bridge takes.

    Args:
        prepared: The step's rollouts, and at least one sample.
        mode: The loss's `loss_agg_mode`.
        step: The step's number, for errors.
        has_critic: True if VERL computes the advantages with a critic.
        choice: A loss of agl-objectives; None for one of VERL's.
        tasks: Number of tasks per update; None for a single update.
        has_gradient: Returns whether an update of the given rows can have a gradient. If a step has several updates,
            those without a gradient are left out, because momentum would still move the weights.
        held: The rows of calls that are held.
        replayed: The rollouts on which earlier steps have trained.
        completion: The computation on the rows once VERL has recomputed log-probabilities; None to change nothing.

    Raises AglError if rows have several temperatures, which VERL cannot train.
    """
    if has_critic:
        prepared = replace(prepared, samples=with_rewards(prepared))
    # A mean over each row's tokens becomes a mean over each rollout's tokens (`batches.per_rollout`). Modes that sum
    # tokens need no change: the division of a rollout into rows does not affect the sum.
    is_scaled = choice is None and mode == ROW_MEAN and not (completion and completion.scales_later)
    samples = per_rollout(prepared.samples) if is_scaled else prepared.samples
    temperature = _temperature(prepared.samples, step=step)
    seen: Counter[int] = Counter()
    places: dict[str, int] = {}  # of each rollout within its group, counted from 0: part of VERL's key for its rows
    for name, group in prepared.rollouts:
        places[name] = seen[group]
        seen[group] += 1
    parts = [(samples, len(prepared.rollouts))]
    if tasks is not None:
        parts = updates(samples, prepared.rollouts, tasks=tasks)
        # With a critic, these values are rewards, and the critic learns from all of them.
        parts = [part for part in parts if has_critic or has_gradient(part[0])] or parts
    numbered: Counter[str] = Counter()  # rows of each rollout so far
    rows = [
        row
        for number, (part, rollouts) in enumerate(parts)
        for row in _rows(
            part, places, numbered, update=number, rollouts=rollouts, choice=choice, held=held, replayed=replayed
        )
    ]
    several = tuple(rollouts for _, rollouts in parts) if len(parts) > 1 else ()
    # The divisor of a mean over sequences; a mean over tokens counts its tokens itself.
    counted = 0 if several or choice is not None or mode == "token-mean" else parts[0][1]
    return StepRows(rows=tuple(rows), temperature=temperature, rollouts=counted, updates=several, completion=completion)


def with_rewards(prepared: PreparedStep) -> list[RowSample]:
    """Return the samples with rewards in place of advantages; VERL's critic turns rewards into advantages."""
    returns = call_returns(prepared)
    return [replace(s, advantages=call_rewards(s, returns[s.rollout]).float()) for s in prepared.samples]


def _temperature(samples: Sequence[RowSample], *, step: int) -> float:
    """Return the temperature that all rows have; raises AglError if they have several."""
    found = sorted({sample.temperature for sample in samples})
    if len(found) > 1:
        raise AglError(
            f"the rows of step {step} were drawn at the temperatures {found}, and VERL's trainer takes one for a step. "
            'Let the agent use one temperature, or train with engine = "inproc".'
        )
    return found[0]


def _rows(
    samples: Sequence[RowSample],
    places: Mapping[str, int],
    numbered: Counter[str],
    *,
    update: int,
    rollouts: int,
    choice: LossChoice | None,
    held: Sequence[RowSample],
    replayed: Collection[str],
) -> list[BridgeRow]:
    """Return the rows of one update of `rollouts` rollouts, and the `held` rows of the same rollouts."""
    weights = None if choice is None else weighting(samples, rollouts=rollouts, choice=choice)
    names = {sample.rollout for sample in samples}
    anchored = [sample for sample in held if sample.rollout in names]
    tokens = sum(len(sample.mask) for sample in anchored)
    rows: list[BridgeRow] = []
    for sample in [*samples, *anchored]:
        row = BridgeRow(
            group=sample.group,
            rollout=places[sample.rollout],
            part=numbered[sample.rollout],
            ids=sample.ids,
            mask=sample.mask.long(),
            scores=sample.advantages,
            logprobs=sample.behaviour,
            weight=1.0 if weights is None else weights.weight[sample.rollout],
            total=1.0 if weights is None else weights.total,
            update=update,
            is_replayed=sample.rollout in replayed,
            held=0.0 if sample.held is None else 1.0 / tokens,
        )
        numbered[sample.rollout] += 1
        rows.append(row)
    return rows
