"""From the prepared rows of a step to those that VERL's end of the bridge takes.

VERL on Ray makes a rollout's weight from rows: here advantages are scaled where that would show, and `ray_loops.py`
does the rest. With a critic the rows carry rewards instead, for VERL's own GAE makes the advantages (`shaping.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from agl.errors import AglError
from agl_algo_verl.batches import per_rollout, weighting
from agl_algo_verl.bridge import BridgeRow, StepRows
from agl_algo_verl.shaping import call_returns, call_rewards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl_algo_verl.objectives import LossChoice
    from agl_algo_verl.rows import PreparedStep, RowSample


def rows_for_verl(
    prepared: PreparedStep, *, mode: str, step: int, has_critic: bool = False, choice: LossChoice | None = None
) -> StepRows:
    """Return the rows of a step; `mode` is the loss's `loss_agg_mode`, `choice` a loss of agl-objectives.

    Raises AglError where VERL could not train them: there is no row, or rows have several temperatures.
    """
    if has_critic:
        prepared = replace(prepared, samples=with_rewards(prepared))
    # A mean over each row's tokens becomes one over each rollout's (`batches.per_rollout`). Modes that add up tokens
    # need nothing: how a rollout is cut into rows does not change their sum.
    is_scaled = choice is None and mode == "seq-mean-token-mean"
    samples = per_rollout(prepared.samples) if is_scaled else prepared.samples
    temperature = _temperature(prepared, step=step)
    seen: Counter[int] = Counter()
    places: dict[str, int] = {}  # of each rollout within its group, counted from 0: part of VERL's key for its rows
    for name, group in prepared.rollouts:
        places[name] = seen[group]
        seen[group] += 1
    if choice is not None:
        weights = weighting(samples, rollouts=len(prepared.rollouts), choice=choice)
        rows = _rows(samples, places, weight=weights.weight)
        return StepRows(rows=tuple(rows), temperature=temperature, total=weights.total)
    # What a mean over sequences has to divide by; a mean over tokens counts its tokens itself.
    counted = 0 if mode == "token-mean" else len(prepared.rollouts)
    return StepRows(rows=tuple(_rows(samples, places)), temperature=temperature, rollouts=counted)


def with_rewards(prepared: PreparedStep) -> list[RowSample]:
    """Return the samples with rewards in place of advantages; VERL makes advantages from them and its critic."""
    returns = call_returns(prepared)
    return [replace(s, advantages=call_rewards(s, returns[s.rollout]).float()) for s in prepared.samples]


def _temperature(prepared: PreparedStep, *, step: int) -> float:
    """Return the temperature of all rows; raises AglError where they have several, or there are none."""
    if not prepared.samples:
        left_out = {name: count for name, count in prepared.metrics.items() if name.startswith("rows_")}
        raise AglError(
            f"step {step} has no row to train ({left_out}), and VERL's trainer needs one. "
            "Raise data.max_prompt_length or data.max_response_length, or set mask_truncated = false where every "
            "answer was cut."
        )
    found = sorted({sample.temperature for sample in prepared.samples})
    if len(found) > 1:
        raise AglError(
            f"the rows of step {step} were drawn at the temperatures {found}, and VERL's trainer takes one for a step. "
            'Let the agent use one temperature, or train with engine = "inproc".'
        )
    return found[0]


def _rows(
    samples: Sequence[RowSample], places: Mapping[str, int], *, weight: Mapping[str, float] | None = None
) -> list[BridgeRow]:
    parts: Counter[str] = Counter()  # rows of each rollout so far
    rows: list[BridgeRow] = []
    for sample in samples:
        row = BridgeRow(
            group=sample.group,
            rollout=places[sample.rollout],
            part=parts[sample.rollout],
            ids=sample.ids,
            mask=sample.mask.long(),
            scores=sample.advantages,
            logprobs=sample.behaviour,
            weight=1.0 if weight is None else weight[sample.rollout],
        )
        parts[sample.rollout] += 1
        rows.append(row)
    return rows
