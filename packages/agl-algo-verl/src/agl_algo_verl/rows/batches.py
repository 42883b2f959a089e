"""From samples to the batches that VERL's engine reads: updates that keep rollouts whole, micro-batches, jagged rows.

VERL's losses are sums over tokens with a weight per token, divided by one number for the whole update. The division
into rows must not change that sum: micro-batches add up, padding rows have no trained token, and the mean over
sequences is a mean over rollouts.

T is the length of a row, R of its response.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from agl_algo_verl.losses.choice import chosen_loss
from agl_algo_verl.typed import integers, ragged, verl_part
from agl_objectives.aggregation import token_weight, update_total

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensordict import TensorDict
    from torch import Tensor

    from agl_algo_verl.losses.choice import LossChoice
    from agl_algo_verl.rows.rows import RowSample
    from agl_algo_verl.settings.settings import VerlSettings


def updates(
    samples: Sequence[RowSample], rollouts: Sequence[tuple[str, int]], *, tasks: int
) -> list[tuple[list[RowSample], int]]:
    """Cut a step into updates of `tasks` tasks; returns for each update its rows and its number of rollouts.

    The number includes rollouts whose rows were all left out; an update without any row is left out.
    """
    parts: dict[int, tuple[list[RowSample], int]] = {}
    # The count divides a mean over sequences. It includes rollouts without rows: leaving out a row that is too long
    # must not give the others more weight.
    for _, group in rollouts:
        rows, count = parts.get(group // tasks, ([], 0))
        parts[group // tasks] = (rows, count + 1)
    # Groups are numbered in a step's order, so the first `tasks` groups are update 0. Cutting by task keeps all rows of
    # a rollout, and all rollouts of a group, in one update.
    for sample in samples:
        parts[sample.group // tasks][0].append(sample)
    return [part for _, part in sorted(parts.items()) if part[0]]


def has_gradient(samples: Sequence[RowSample], settings: VerlSettings) -> bool:
    """Return true if the loss of these rows can have a gradient."""
    actor, choice = settings.actor, chosen_loss(settings)
    trains_silent = choice is not None and choice.found().entry.trains_silent
    others = actor.entropy_coeff or (actor.use_kl_loss and actor.kl_loss_coef) or trains_silent
    return any(sample.kept_tokens and (others or not sample.is_silent) for sample in samples)


def per_rollout(samples: Sequence[RowSample]) -> list[RowSample]:
    """Scale advantages so that a mean over the tokens of each row becomes a mean over the tokens of its rollout.

    VERL's `vanilla` and `gspo` are proportional to a positive factor of the advantages, so this is exact.
    """
    # VERL sums (1 / n_row) * sum of token losses over rows; here each rollout needs 1 / n_rollout for all its rows. A *
    # n_row / n_rollout converts the first to the second: clipping depends only on the ratio and the sign of A. As in
    # VERL, n counts the tokens that are not rejected.
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.rollout] += sample.kept_tokens
    return [replace(s, advantages=s.advantages * (s.kept_tokens / max(1, tokens[s.rollout]))) for s in samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """The weights of an update's tokens, for a loss of agl-objectives (`losses/loss_worker.py`).

    Attributes:
        weight: w_t of the tokens of each rollout, by rollout id.
        total: W, the divisor of the weighted sum.
        number: The number of each rollout, by rollout id.
    """

    weight: Mapping[str, float]
    total: float
    number: Mapping[str, int]

    def fields(self, samples: Sequence[RowSample]) -> dict[str, Tensor]:
        """Return the batch fields that the loss reads, one number per row, [B]."""
        # A held row may belong to a rollout without any trained row; it has no token to weight.
        return {
            "agl_weight": torch.tensor([self.weight.get(s.rollout, 0.0) for s in samples], dtype=torch.float32),
            "agl_total": torch.full((len(samples),), self.total),
            "agl_rollout": torch.tensor([self.number.get(s.rollout, 0) for s in samples]),
            "agl_row": torch.arange(len(samples)),
        }


def weighting(samples: Sequence[RowSample], *, rollouts: int, choice: LossChoice) -> Weighting:
    """Return the weights of an update's tokens; `rollouts` is the number of rollouts, including those without a row."""
    tokens: Counter[str] = Counter()
    for sample in samples:
        tokens[sample.rollout] += sample.kept_tokens
    trained = sum(sample.trained_tokens for sample in samples)
    return Weighting(
        weight={
            rollout: token_weight(choice.aggregation, rollout_tokens=max(1, count), constant=choice.constant)
            for rollout, count in tokens.items()
        },
        total=update_total(choice.aggregation, tokens=max(1, trained), rollouts=rollouts),
        number={rollout: index for index, rollout in enumerate(tokens)},
    )


def fill_up(samples: Sequence[RowSample], *, multiple: int) -> list[RowSample]:
    """Append copies of the last row, without trained tokens, until the number of rows is a multiple of `multiple`.

    No sum over tokens changes.
    """
    missing = -len(samples) % multiple
    copy = replace(samples[-1], mask=torch.zeros_like(samples[-1].mask), held=None)
    return [*samples, *(copy for _ in range(missing))]


def micro_batched(
    samples: Sequence[RowSample], *, rows: int | None, tokens: int, device: torch.device, **options: Any
) -> TensorDict:
    """Return a batch on a device, which VERL cuts into micro-batches of `rows` rows or, without `rows`, by `tokens`.

    A row longer than `tokens` raises the limit to its length and forms a micro-batch alone.
    """
    sizes: dict[str, Any] = {
        "use_dynamic_bsz": rows is None,
        "max_token_len_per_gpu": max(tokens, *(len(s.ids) for s in samples)),  # VERL refuses a row beyond its budget
    }
    if rows is not None:
        samples = fill_up(samples, multiple=rows)  # VERL wants whole micro-batches
        sizes["micro_batch_size_per_gpu"] = rows
    return cast("Any", batch(samples, **sizes, **options)).to(device)


def batch(samples: Sequence[RowSample], *, weighting: Weighting | None = None, **options: Any) -> TensorDict:
    """Return rows in the ragged form that VERL's engine reads; `options` are VERL's settings for this batch."""
    # Every entry is jagged, one vector per row: [T] in the first two, then [T - R], and [R] from `responses` on.
    tensors: dict[str, Tensor] = {
        "input_ids": ragged([s.ids for s in samples]),
        "position_ids": ragged([torch.arange(len(s.ids)) for s in samples]),
        "prompts": ragged([s.ids[: s.prompt] for s in samples]),
        "responses": ragged([s.ids[s.prompt :] for s in samples]),
        # Rejected tokens are in VERL's second mask, which counts the tokens of an update, but not in the first.
        "response_mask": ragged([s.kept.long() for s in samples]),
        "loss_mask": ragged([s.mask.long() for s in samples]),
        "advantages": ragged([s.advantages for s in samples]),
        # pi_old of PPO's ratio pi / pi_old: the engine's own value, so that the ratio starts at 1. Before it is
        # computed, the recorded one stands in; a forward pass needs the field but does not read it.
        "old_log_probs": ragged([s.behaviour if s.old is None else s.old for s in samples]),
        # [B]: the engine divides logits by it, as the server did when it sampled the tokens
        "temperature": torch.tensor([s.temperature for s in samples], dtype=torch.float32),
        "rollout_log_probs": ragged([s.behaviour for s in samples]),
    }
    if weighting is not None:
        tensors |= weighting.fields(samples)
    for name, found in {
        "ref_log_prob": [s.reference for s in samples if s.reference is not None],
        "values": [s.values for s in samples if s.values is not None],
        "returns": [s.returns for s in samples if s.returns is not None],
    }.items():
        if len(found) == len(samples):  # all rows have it or none, as the settings ask
            tensors[name] = ragged(found)
    if any(s.held is not None for s in samples):
        tensors |= _held_fields(samples)
    if any(s.importance is not None for s in samples):
        weights = [torch.zeros_like(s.behaviour) if s.importance is None else s.importance for s in samples]
        tensors["rollout_is_weights"] = ragged(weights)
    return verl_part("verl.utils.tensordict_utils:get_tensordict")(tensor_dict=tensors, non_tensor_dict=options)


def _held_fields(samples: Sequence[RowSample]) -> dict[str, Tensor]:
    """Return the fields for the anchor: 1 / (number of held tokens) at held tokens, and log pi_ref."""
    held = [torch.zeros_like(s.mask) if s.held is None else s.held for s in samples]
    share = 1.0 / max(1, sum(int(held_R.sum()) for held_R in held))
    start = [s.behaviour if s.held is None or s.reference is None else s.reference for s in samples]
    return {"agl_anchor": ragged([held_R * share for held_R in held]), "agl_start": ragged(start)}


def per_row(data: TensorDict, name: str) -> Tensor:
    """Return a field of a batch with one number per row, [B]."""
    values = cast("Any", data)[name]
    return (values.values() if values.is_nested else values).reshape(-1)


def responses(found: Any, samples: Sequence[RowSample]) -> list[Tensor]:
    """Return a model's outputs at the positions that predict the response tokens, [R] per sample on the CPU.

    `found` is ragged, one vector [T] per row.
    """
    # `offsets` is the start of each row in the flat values; padding rows of a micro-batch come last and are dropped.
    # The model's output at position i is about token i + 1, so the window begins one position before the response.
    values, offsets = found.values().float().cpu(), integers(found.offsets())
    return [values[start + s.prompt - 1 : start + len(s.ids) - 1] for s, start in zip(samples, offsets, strict=False)]
