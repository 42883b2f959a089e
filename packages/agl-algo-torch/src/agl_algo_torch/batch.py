"""From rows of the call forest to padded tensors: samples, updates that keep rollouts whole, micro-batches.

B is the number of rows of a micro-batch, T its longest row, M its number of trained tokens.
Rows carry prompt and observation tokens with mask 0 and policy tokens with mask 1; a row is never cut here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agl.errors import ConfigError
from agl_algo_torch.losses import Aggregation, token_logprobs, token_weight, update_total
from agl_algo_torch.typed_torch import from_bytes, integers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from agl.schemas import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """One row ready to train, T tokens long; tensors are on the CPU.

    `ids` int64, `mask` bool, `advantages`, `behaviour` (log-probabilities) and `temperature` float32, all [T].
    `old` [T] are the trainer's log-probabilities before the step's first update, where they were computed.
    `rollout` is the id whose rows share an update and one share of its gradient.
    """

    rollout: str
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    behaviour: Tensor
    temperature: Tensor
    old: Tensor | None = None

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with mask 1 that have a predecessor; the first token of a row is never predicted."""
        return int(self.mask[1:].sum())

    @property
    def is_silent(self) -> bool:
        """Whether every advantage is zero, so that the policy gradient of this row is exactly zero."""
        return not bool((self.advantages[self.mask] != 0).any())


def from_row(
    row: Row, *, advantages: Mapping[str, float], temperatures: Mapping[str, float] | None = None
) -> RowSample:
    """Return the sample of a row; `advantages` and `temperatures` are by span id of the sampled parts.

    A part without an advantage (its call was rejected or not selected) is not trained: its mask becomes 0.
    """
    ids_T = from_bytes(row.ids, kind="<i4", dtype=torch.int64)
    mask_T = torch.zeros(len(ids_T), dtype=torch.bool)
    advantages_T = torch.zeros(len(ids_T))
    temperature_T = torch.ones(len(ids_T))
    behaviour_T = from_bytes(row.logprobs, kind="<f4", dtype=torch.float32)
    for part in row.segments:
        if part.span_id in advantages:
            mask_T[part.start : part.stop] = True
            advantages_T[part.start : part.stop] = advantages[part.span_id]
            temperature_T[part.start : part.stop] = (temperatures or {}).get(part.span_id) or 1.0
    return RowSample(
        rollout=row.rollout_id,
        ids=ids_T,
        mask=mask_T,
        advantages=advantages_T,
        behaviour=behaviour_T,
        temperature=temperature_T,
    )


def from_tokens(rollout: str, ids: Sequence[int], mask: Sequence[int]) -> RowSample:
    """Return a sample for supervised training: every token of mask 1 has advantage 1."""
    mask_T = torch.tensor(mask, dtype=torch.bool)
    return RowSample(
        rollout=rollout,
        ids=torch.tensor(ids, dtype=torch.int64),
        mask=mask_T,
        advantages=mask_T.float(),
        behaviour=torch.zeros(len(ids)),
        temperature=torch.ones(len(ids)),
    )


def split_updates(samples: Sequence[RowSample], *, updates: int) -> list[list[RowSample]]:
    """Deal samples into at most `updates` lists of nearly equal numbers of rollouts, in order.

    All rows of a rollout are in one list, whatever their number; no list is empty.
    """
    order = list(dict.fromkeys(sample.rollout for sample in samples))
    count = max(1, min(updates, len(order)))
    place = {rollout: index * count // len(order) for index, rollout in enumerate(order)}
    lists: list[list[RowSample]] = [[] for _ in range(count)]
    for sample in samples:
        lists[place[sample.rollout]].append(sample)
    return [part for part in lists if part]


def loss_weights(
    samples: Sequence[RowSample], *, aggregation: Aggregation, constant: int = 1
) -> tuple[list[float], float]:
    """Return the weight of a trained token of each sample, and the total of one update that consists of all `samples`.

    Rows of one rollout get one weight, computed from the rollout's tokens over all its rows.
    """
    tokens: dict[str, int] = {}
    for sample in samples:
        tokens[sample.rollout] = tokens.get(sample.rollout, 0) + sample.trained_tokens
    found = [
        token_weight(aggregation, rollout_tokens=max(1, tokens[sample.rollout]), constant=constant)
        for sample in samples
    ]
    return found, update_total(aggregation, tokens=max(1, sum(tokens.values())), rollouts=max(1, len(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded on the right, and the flat tensors of their trained tokens, on one device.

    `ids` and `attention` are [B, T]; `predicts` [B, T - 1] is true where position t predicts a trained token
    t + 1; everything that ends in `_M` is in row-major order of those positions.
    `rows` are the indices of the samples; `old_M` is absent unless every sample has it. `total` is the update's.
    """

    ids: Tensor
    attention: Tensor
    predicts: Tensor
    targets_M: Tensor
    advantages_M: Tensor
    behaviour_M: Tensor
    temperature_M: Tensor
    weight_M: Tensor
    old_M: Tensor | None
    rows: tuple[int, ...]
    total: float

    def logits(self, model: nn.Module) -> Tensor:
        """Run the model and return the logits of the trained tokens, [M, V]."""
        output = model(input_ids=self.ids, attention_mask=self.attention, use_cache=False)
        return output.logits[:, :-1][self.predicts]

    def logprobs(self, logits_M_V: Tensor) -> Tensor:
        """Return the log-probability of each trained token at the temperature that it was sampled with, [M]."""
        return token_logprobs(logits_M_V, targets_M=self.targets_M, temperature_M=self.temperature_M)

    def mean(self, values_M: Tensor) -> Tensor:
        """Return the batch's part of the update's weighted mean."""
        return (self.weight_M * values_M).sum() / self.total

    def scatter(self, values_M: Tensor) -> dict[int, Tensor]:
        """Return values per trained token as one tensor [T] per row, by the sample's index, on the CPU."""
        full_B_T = torch.zeros(self.ids.shape, dtype=values_M.dtype, device=values_M.device)
        full_B_T[:, 1:][self.predicts] = values_M
        lengths = integers(self.attention.sum(dim=1))
        return {row: full_B_T[i, : lengths[i]].cpu() for i, row in enumerate(self.rows)}


def micro_batches(
    samples: Sequence[RowSample],
    weight: Sequence[float],
    *,
    token_budget: int,
    device: torch.device,
    total: float = 1.0,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of at most `token_budget` padded tokens (rows times the longest row), long rows first.

    `weight` is that of a trained token of each sample, and `total` what the update's weighted sums are divided by.
    A row that is longer than the budget comes alone. The order is deterministic. Raises ConfigError for a
    budget below 1.
    """
    if token_budget < 1:
        raise ConfigError(f"The token budget of a micro-batch is {token_budget}. Give the tokens that fit in memory.")
    order = sorted(range(len(samples)), key=lambda index: (-len(samples[index].ids), index))
    chunk: list[int] = []
    for index in order:
        longest = len(samples[(chunk or [index])[0]].ids)
        if chunk and longest * (len(chunk) + 1) > token_budget:
            yield _collate(samples, weight, rows=tuple(chunk), device=device, total=total)
            chunk = []
        chunk.append(index)
    if chunk:
        yield _collate(samples, weight, rows=tuple(chunk), device=device, total=total)


def _collate(
    samples: Sequence[RowSample], weight: Sequence[float], *, rows: tuple[int, ...], device: torch.device, total: float
) -> MicroBatch:
    chosen = [samples[index] for index in rows]
    attention = _pad([torch.ones(len(sample.ids), dtype=torch.int64) for sample in chosen])
    ids = _pad([sample.ids for sample in chosen])
    predicts = _pad([sample.mask for sample in chosen])[:, 1:]
    weight_B = torch.tensor([weight[index] for index in rows], dtype=torch.float32)

    old = [sample.old for sample in chosen if sample.old is not None]

    def flat(tensors: list[Tensor]) -> Tensor:
        return _pad(tensors)[:, 1:][predicts].to(device)

    return MicroBatch(
        ids=ids.to(device),
        attention=attention.to(device),
        predicts=predicts.to(device),
        targets_M=ids[:, 1:][predicts].to(device),
        advantages_M=flat([sample.advantages for sample in chosen]),
        behaviour_M=flat([sample.behaviour for sample in chosen]),
        temperature_M=flat([sample.temperature for sample in chosen]),
        weight_M=weight_B[:, None].expand(predicts.shape)[predicts].to(device),
        old_M=flat(old) if len(old) == len(chosen) else None,
        rows=rows,
        total=total,
    )


def _pad(tensors: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
