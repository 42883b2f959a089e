"""Turns rows of the call forest into tensors: samples, updates that keep rollouts whole, micro-batches.

B is the number of rows of a micro-batch, T its longest row, N the number of all its tokens, M that of the trained ones.
Rows carry prompt and observation tokens with mask 0 and policy tokens with mask 1. A row is never cut here.

Two ways of splitting meet in this file. An *update* is one step of the optimizer, and its size is part of the
algorithm: it holds whole rollouts. A *micro-batch* is one forward and backward pass, and its size is a matter of
memory: its weights and total are those of its update, so the gradients of the micro-batches add up to the update's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agl_algo_torch.learner.model import computing
from agl_algo_torch.learner.packing import packed_inputs, packs_rows
from agl_algo_torch.learner.scoring import (
    Scores,
    Wanted,
    apply_head,
    has_plain_head,
    score_hidden,
    trunk,
    whole_logits,
)
from agl_algo_torch.learner.typed_torch import from_bytes, split_sizes
from agl_objectives.contract import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from agl.schemas import Row, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """One row ready to train, T tokens long; tensors are on the CPU.

    `behaviour` are the sampler's log-probabilities. `old` are the trainer's before the step's first update, where
    they were computed. `rollout` is the id whose rows share an update and one share of its gradient.
    `importance` are weights that were taken over whole rollouts, and `extras` what a loss found in its survey.
    `parts` are the calls that sampled its trained tokens, where they are known.
    """

    rollout: str
    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool, true where the policy wrote the token and it is trained
    advantages: Tensor  # [T] float32
    behaviour: Tensor  # [T] float32, nats
    temperature: Tensor  # [T] float32, 1 where the mask is 0
    old: Tensor | None = None  # [T] float32, nats
    importance: Tensor | None = None  # [T] float32
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # [T] each
    parts: tuple[Segment, ...] = ()

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with mask 1, without the row's first token: nothing stands before it to predict it from."""
        return int(self.mask[1:].sum())

    @property
    def is_silent(self) -> bool:
        """True when every advantage is zero, so that the policy gradient of this row is exactly zero."""
        return not bool((self.advantages[self.mask] != 0).any())

    @property
    def trained(self) -> Tensor:
        """True at the tokens that `trained_tokens` counts, [T] bool."""
        chosen_T = self.mask.clone()
        chosen_T[:1] = False
        return chosen_T


def from_row(
    row: Row, *, advantages: Mapping[str, float], temperatures: Mapping[str, float] | None = None
) -> RowSample:
    """Return the sample of a row; `advantages` and `temperatures` are by span id of the sampled parts.

    A part without an advantage (its call was rejected or not selected) is not trained: its mask becomes 0.
    A missing temperature, and that of greedy decoding, counts as 1.
    """
    ids_T = from_bytes(row.ids, kind="<i4", dtype=torch.int64)
    mask_T = torch.zeros(len(ids_T), dtype=torch.bool)  # not the row's own mask: parts without an advantage stay out
    advantages_T = torch.zeros(len(ids_T), dtype=torch.float64)
    temperature_T = torch.ones(len(ids_T))
    behaviour_T = from_bytes(row.logprobs, kind="<f4", dtype=torch.float32)
    for part in row.segments:
        if part.span_id in advantages:
            mask_T[part.start : part.stop] = True
            advantages_T[part.start : part.stop] = advantages[part.span_id]
            # 0 is greedy decoding, whose reported log-probabilities are the model's own (see `sampling`).
            temperature_T[part.start : part.stop] = (temperatures or {}).get(part.span_id) or 1.0
    return RowSample(
        rollout=row.rollout_id,
        ids=ids_T,
        mask=mask_T,
        advantages=advantages_T.float(),  # infinite beyond 3.4e38: the update is then skipped, and counted
        behaviour=behaviour_T,
        temperature=temperature_T,
        parts=tuple(part for part in row.segments if part.span_id in advantages),
    )


def from_tokens(rollout: str, ids: Sequence[int], mask: Sequence[int], *, temperature: float = 1.0) -> RowSample:
    """Return a sample for supervised training: every token of mask 1 has advantage 1."""
    mask_T = torch.tensor(mask, dtype=torch.bool)
    return RowSample(
        rollout=rollout,
        ids=torch.tensor(ids, dtype=torch.int64),
        mask=mask_T,
        advantages=mask_T.float(),
        behaviour=torch.zeros(len(ids)),  # nobody sampled it; no supervised loss reads this
        temperature=torch.full((len(ids),), temperature),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows one behind the other, and the flat tensors of their trained tokens, on one device.

    Everything that ends in `_M` is [M], in the order of the positions where `predicts_N` is true.
    `old_M` is absent unless every sample has it.
    A pass computes the rows packed, or padded on the right to the longest one.
    """

    ids_N: Tensor  # int64
    predicts_N: Tensor  # bool, true where a position predicts a trained token, which is the next one
    lengths: tuple[int, ...]  # tokens of each row, N in all
    is_packed: bool
    targets_M: Tensor  # the tokens that are predicted
    advantages_M: Tensor
    behaviour_M: Tensor  # log pi_behaviour
    temperature_M: Tensor
    weight_M: Tensor
    old_M: Tensor | None = None  # log pi_old
    importance_M: Tensor | None = None  # weights of whole rollouts, where they were taken
    row_M: Tensor  # int64, the index of the sample
    rollout_M: Tensor  # int64, the number of its rollout
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    rows: tuple[int, ...]  # indices of the samples, in the order of the rows
    samples: tuple[RowSample, ...] = ()  # in the same order
    total: float = 1.0  # the divisor of the whole update

    def scores(self, model: nn.Module, *, has_entropy: bool = False, has_bonus: bool = False) -> Scores:
        """Run the model and return the scores of the trained tokens, with the entropies that are asked for."""
        wanted = Wanted(
            targets_M=self.targets_M, temperature_M=self.temperature_M, has_entropy=has_entropy, has_bonus=has_bonus
        )
        if has_plain_head(model):
            return score_hidden(model, self._hidden(model), wanted)
        return wanted.of(self.logits(model))

    def logits(self, model: nn.Module) -> Tensor:
        """Run the model and return the logits before the trained tokens, [M, V], all in memory at once."""
        if has_plain_head(model):
            return apply_head(model, self._hidden(model))
        with computing(model):
            return self.run(whole_logits(model))

    def logprobs(self, model: nn.Module) -> Tensor:
        """Run the model and return the log-probability of each trained token, [M], at its temperature."""
        return self.scores(model).logp_M

    def run(self, network: Callable[..., Tensor]) -> Tensor:
        """Return what a network says at the positions before the trained tokens, [M, ...].

        `network` takes the inputs of a Hugging Face model and returns a value for every position: [B, T, ...] for
        padded rows, [1, N, ...] for packed ones.
        """
        if self.is_packed:
            return network(**packed_inputs(self.ids_N, self.lengths))[0][self.predicts_N]  # [N, ...] -> [M, ...]
        # Padding is on the right, so positions count from 0 in every row and no position ids are needed.
        attention_B_T = self._padded(torch.ones_like(self.ids_N))
        values = network(input_ids=self._padded(self.ids_N), attention_mask=attention_B_T, use_cache=False)
        return values[self._padded(self.predicts_N)]  # [B, T, ...] -> [M, ...]; padding predicts nothing

    def _hidden(self, model: nn.Module) -> Tensor:
        """Return the last hidden states before the trained tokens, [M, H]."""
        with computing(model):
            return self.run(trunk(model))

    def _padded(self, values_N: Tensor) -> Tensor:
        """Return values of all tokens as rows, [B, T], with 0 behind the shorter ones."""
        return _pad(split_sizes(values_N, self.lengths))

    def tokens(self, logp_M: Tensor, *, old_M: Tensor, entropy_M: Tensor | None = None) -> TokenBatch:
        """Return the trained tokens as losses read them."""
        return TokenBatch(
            logp_M=logp_M,
            old_M=old_M,
            behaviour_M=self.behaviour_M,
            advantages_M=self.advantages_M,
            weight_M=self.weight_M,
            row_M=self.row_M,
            rollout_M=self.rollout_M,
            entropy_M=entropy_M,
            extras=self.extras,
        )

    def mean(self, values_M: Tensor) -> Tensor:
        """Return the batch's part of the update's weighted mean, `sum w x / total`, a scalar."""
        return (self.weight_M * values_M).sum() / self.total

    def scatter(self, values_M: Tensor) -> dict[int, Tensor]:
        """Return values per trained token as one tensor [T] per row, by the sample's index, on the CPU."""
        full_N = torch.zeros(self.ids_N.shape, dtype=values_M.dtype, device=values_M.device)
        full_N[1:][self.predicts_N[:-1]] = values_M  # a value belongs to the token, not to the position before it
        return dict(zip(self.rows, split_sizes(full_N.cpu(), self.lengths), strict=True))


def micro_batches(
    samples: Sequence[RowSample],
    weight: Sequence[float],
    *,
    token_budget: int,
    device: torch.device,
    total: float = 1.0,
    is_packed: bool = False,
) -> Iterator[MicroBatch]:
    """Yield micro-batches whose passes compute at most `token_budget` tokens, long rows first.

    Padded rows compute their padding too: the number of rows times the longest one. Packed rows compute their tokens.
    `weight` is that of a trained token of each sample, and `total` what the update's weighted sums are divided by.
    A row that is longer than the budget comes alone. The order is deterministic. Rows that bring importance weights
    are replayed, and come apart from the others, whose weights a micro-batch finds by itself.
    """
    for is_weighed in (False, True):
        places = [at for at, sample in enumerate(samples) if (sample.importance is not None) == is_weighed]
        lengths = [len(samples[at].ids) for at in places]
        for chunk in row_chunks(lengths, token_budget=token_budget, is_packed=is_packed):
            rows = tuple(places[at] for at in chunk)
            yield _collate(samples, weight, rows=rows, device=device, total=total, is_packed=is_packed)


def row_chunks(lengths: Sequence[int], *, token_budget: int, is_packed: bool) -> Iterator[tuple[int, ...]]:
    """Yield the places of the rows that one pass computes together, see `micro_batches`."""
    # Rows of like length side by side waste the least padding; the index breaks ties.
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    chunk: list[int] = []
    tokens = 0  # of the chunk, as a pass computes them
    for index in order:
        longest = lengths[(chunk or [index])[0]]  # the first of a chunk
        tokens = tokens + lengths[index] if is_packed else longest * (len(chunk) + 1)
        if chunk and tokens > token_budget:
            yield tuple(chunk)
            chunk, tokens = [], lengths[index]
        chunk.append(index)
    if chunk:
        yield tuple(chunk)


def _collate(
    samples: Sequence[RowSample],
    weight: Sequence[float],
    *,
    rows: tuple[int, ...],
    device: torch.device,
    total: float,
    is_packed: bool,
) -> MicroBatch:
    """Return the micro-batch of the samples `rows`."""
    chosen = [samples[index] for index in rows]
    trained_N = torch.cat([sample.trained for sample in chosen])  # never the first token of a row
    number = {rollout: n for n, rollout in enumerate(dict.fromkeys(sample.rollout for sample in samples))}

    old = [sample.old for sample in chosen if sample.old is not None]
    importance = [sample.importance for sample in chosen if sample.importance is not None]

    def flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors)[trained_N].to(device)  # [T] per row -> [N] -> [M]

    def spread(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        # One value per row: [B] -> [M]
        counts = torch.tensor([sample.trained_tokens for sample in chosen])
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

    return MicroBatch(
        ids_N=torch.cat([sample.ids for sample in chosen]).to(device),
        predicts_N=trained_N.roll(-1).to(device),  # a row's last position gets the next row's first token, untrained
        lengths=tuple(len(sample.ids) for sample in chosen),
        is_packed=is_packed,
        targets_M=flat([sample.ids for sample in chosen]),
        advantages_M=flat([sample.advantages for sample in chosen]),
        behaviour_M=flat([sample.behaviour for sample in chosen]),
        temperature_M=flat([sample.temperature for sample in chosen]),
        weight_M=spread([weight[index] for index in rows], torch.float32),
        old_M=flat(old) if len(old) == len(chosen) else None,  # half of it would be of no use
        importance_M=flat(importance) if len(importance) == len(chosen) else None,
        row_M=spread(list(rows), torch.int64),
        rollout_M=spread([number[sample.rollout] for sample in chosen], torch.int64),
        extras={name: flat([sample.extras[name] for sample in chosen]) for name in chosen[0].extras},
        rows=rows,
        samples=tuple(chosen),
        total=total,
    )


def _pad(tensors: list[Tensor]) -> Tensor:
    # B of [T_i] -> [B, T], 0 on the right. A token id of 0 there is harmless: attention and mask exclude it.
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


@torch.no_grad()
def recompute_logprobs(
    model: nn.Module, samples: Sequence[RowSample], *, token_budget: int, device: torch.device
) -> list[Tensor]:
    """Return the log-probabilities of each sample's trained tokens, [T] per sample on the CPU, 0 elsewhere.

    They are taken at the temperature that each token was sampled with, and come in the order of `samples`.
    """
    found: dict[int, Tensor] = {}
    # Weights are 0 because nothing is summed here.
    weight, is_packed = [0.0] * len(samples), packs_rows(model)
    for batch in micro_batches(samples, weight, token_budget=token_budget, device=device, is_packed=is_packed):
        found |= batch.scatter(batch.logprobs(model))  # [M] -> [T] per row
    return [found[index] for index in range(len(samples))]  # micro-batches come longest first
