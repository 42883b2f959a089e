"""Turns rows of the call forest into tensors: samples, updates that keep rollouts whole, micro-batches.

A micro-batch has B rows with N tokens in all, M of them trained; its longest row has T tokens.
Rows carry prompt and observation tokens with mask 0 and policy tokens with mask 1. A row is never cut here.

Rows are split in two ways. An *update* is one step of the optimizer and consists of whole rollouts; its size is part of
the algorithm. A *micro-batch* is one forward and backward pass; its size depends on memory. A micro-batch uses the
weights and the total of its update, so the gradients of all its micro-batches add up to the gradient of the update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agl_algo_torch.learner.model import computing
from agl_algo_torch.learner.packing import packed_inputs, packs_rows
from agl_algo_torch.learner.pictures import picture_inputs
from agl_algo_torch.learner.scoring import (
    Scores,
    Wanted,
    apply_head,
    has_plain_head,
    score_hidden,
    trunk,
    whole_logits,
    without_banned,
)
from agl_algo_torch.learner.typed_torch import from_bytes, split_sizes
from agl_objectives.contract import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from agl.schemas import Row, Segment
    from agl_algo_torch.learner.pictures import Pictures, RowPictures

__all__ = ["MicroBatch", "RowSample", "from_row", "from_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """One row ready to train, T tokens long; tensors are on the CPU.

    `rollout` is the id of the row's rollout; all rows of a rollout are in one update and count as one rollout there.
    `behaviour` has the sampler's log-probabilities. `old` has the trainer's before the step's first update, if they
    were computed. `importance` has weights that were computed in advance, over whole rollouts or for a replayed row.
    `extras` has the values that a loss found in its survey of the update, by name.
    `parts` has the segments of the calls that sampled the trained tokens, if they are known.
    `pictures` has the pictures that tokens of the row stand for; those tokens are never trained.
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
    pictures: RowPictures | None = None

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens, without the row's first token, which no earlier token predicts."""
        return int(self.mask[1:].sum())

    @property
    def is_silent(self) -> bool:
        """True if every advantage of the row is zero, which makes its policy gradient exactly zero."""
        return not bool((self.advantages[self.mask] != 0).any())

    @property
    def trained(self) -> Tensor:
        """True at the tokens that `trained_tokens` counts, [T] bool."""
        chosen_T = self.mask.clone()
        chosen_T[:1] = False
        return chosen_T


def from_row(
    row: Row,
    *,
    advantages: Mapping[str, float],
    temperatures: Mapping[str, float] | None = None,
    pictures: Pictures | None = None,
) -> RowSample:
    """Return the sample of a row; `advantages` and `temperatures` map the span ids of the row's segments.

    A segment without an advantage (its call was rejected or not selected) is not trained: its mask becomes 0.
    A missing temperature counts as 1, and so does 0, the temperature of greedy decoding.
    `pictures` has those of the row, if the model reads any.
    """
    ids_T = from_bytes(row.ids, kind="<i4", dtype=torch.int64)
    mask_T = torch.zeros(len(ids_T), dtype=torch.bool)  # not the row's own mask: some segments have no advantage
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
        pictures=pictures.of(row.media) if pictures else None,
    )


def from_tokens(
    rollout: str,
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    temperature: float = 1.0,
    pictures: RowPictures | None = None,
) -> RowSample:
    """Return a sample for supervised training, in which every token with mask 1 has the advantage 1."""
    mask_T = torch.tensor(mask, dtype=torch.bool)
    return RowSample(
        rollout=rollout,
        ids=torch.tensor(ids, dtype=torch.int64),
        mask=mask_T,
        advantages=mask_T.float(),
        behaviour=torch.zeros(len(ids)),  # nobody sampled it; no supervised loss reads this
        temperature=torch.full((len(ids),), temperature),
        pictures=pictures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows one after the other, and the flat tensors of their trained tokens, on one device.

    Every tensor whose name ends in `_M` is [M], in the order of the positions where `predicts_N` is true.
    `old_M` and `importance_M` are None unless every sample has them.
    A pass computes the rows packed, or padded on the right to the longest row.
    """

    ids_N: Tensor  # int64
    predicts_N: Tensor  # bool, true at a position whose next token is trained
    lengths: tuple[int, ...]  # tokens of each row, N in all
    is_packed: bool
    targets_M: Tensor  # ids of the trained tokens
    advantages_M: Tensor
    behaviour_M: Tensor  # log pi_behaviour
    temperature_M: Tensor
    weight_M: Tensor
    old_M: Tensor | None = None  # log pi_old
    importance_M: Tensor | None = None  # weights that were computed in advance
    row_M: Tensor  # int64, the index of each token's sample
    rollout_M: Tensor  # int64, the number of each token's rollout
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # [M] each
    rows: tuple[int, ...]  # index of each row's sample
    samples: tuple[RowSample, ...] = ()  # the sample of each row
    total: float = 1.0  # the divisor of the whole update

    def scores(self, model: nn.Module, *, has_entropy: bool = False, has_bonus: bool = False) -> Scores:
        """Run the model and return the scores of the trained tokens; the flags request entropies too."""
        wanted = Wanted(
            targets_M=self.targets_M, temperature_M=self.temperature_M, has_entropy=has_entropy, has_bonus=has_bonus
        )
        if has_plain_head(model):
            return score_hidden(model, self._hidden(model), wanted)
        return wanted.of(self.logits(model))

    def logits(self, model: nn.Module) -> Tensor:
        """Run the model and return the logits that predict the trained tokens, [M, V], all in memory at once."""
        if has_plain_head(model):
            return apply_head(model, self._hidden(model))
        with computing(model):
            return without_banned(model, self.run(whole_logits(model)))

    def logprobs(self, model: nn.Module) -> Tensor:
        """Run the model and return the log-probability of each trained token at its sampling temperature, [M]."""
        return self.scores(model).logp_M

    def run(self, network: Callable[..., Tensor]) -> Tensor:
        """Return a network's outputs at the positions that predict the trained tokens, [M, ...].

        `network` takes the inputs of a Hugging Face model and returns an output for every position: [B, T, ...] for
        padded rows, [1, N, ...] for packed rows.
        """
        rows, ids = [sample.pictures for sample in self.samples], split_sizes(self.ids_N, self.lengths)
        pictures = picture_inputs(rows, ids, is_packed=self.is_packed)
        if self.is_packed:
            inputs = packed_inputs(self.ids_N, self.lengths) | pictures
            return network(**inputs)[0][self.predicts_N]  # [N, ...] -> [M, ...]
        # Padding is on the right, so positions count from 0 in every row and text needs no position ids.
        attention_B_T = self._padded(torch.ones_like(self.ids_N))
        values = network(input_ids=self._padded(self.ids_N), attention_mask=attention_B_T, use_cache=False, **pictures)
        return values[self._padded(self.predicts_N)]  # [B, T, ...] -> [M, ...]; padding predicts nothing

    def _hidden(self, model: nn.Module) -> Tensor:
        """Return the last hidden states at the positions that predict the trained tokens, [M, H]."""
        with computing(model):
            return self.run(trunk(model))

    def _padded(self, values_N: Tensor) -> Tensor:
        """Return per-token values [N] as rows padded with 0 on the right, [B, T]."""
        return _pad(split_sizes(values_N, self.lengths))

    def tokens(self, logp_M: Tensor, *, old_M: Tensor, entropy_M: Tensor | None = None) -> TokenBatch:
        """Return the trained tokens as the `TokenBatch` that losses take."""
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
        """Return this micro-batch's contribution to the update's weighted mean: the scalar `sum w x / total`."""
        return (self.weight_M * values_M).sum() / self.total

    def scatter(self, values_M: Tensor) -> dict[int, Tensor]:
        """Return values of trained tokens, [M], as one tensor per row, [T] on the CPU, by sample index."""
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

    A pass over padded rows computes the number of rows times the longest row; a pass over packed rows computes only
    their tokens. A row longer than the budget is alone in its micro-batch. The order is deterministic.
    `weight` has the weight of a trained token for each sample; `total` is the divisor of the update's weighted sums.
    A micro-batch never mixes samples that have importance weights with samples that have none.
    """
    for is_weighed in (False, True):
        places = [at for at, sample in enumerate(samples) if (sample.importance is not None) == is_weighed]
        lengths = [len(samples[at].ids) for at in places]
        for chunk in row_chunks(lengths, token_budget=token_budget, is_packed=is_packed):
            rows = tuple(places[at] for at in chunk)
            yield _collate(samples, weight, rows=rows, device=device, total=total, is_packed=is_packed)


def row_chunks(lengths: Sequence[int], *, token_budget: int, is_packed: bool) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the rows that one pass computes together, as `micro_batches` describes."""
    # Rows of similar length in one pass need the least padding; the index breaks ties.
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
    """Return the micro-batch that consists of the samples with the indices `rows`."""
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
        old_M=flat(old) if len(old) == len(chosen) else None,  # a tensor of some rows would be of no use
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
    """Return the log-probabilities of each sample's trained tokens, [T] per sample on the CPU, 0 at other tokens.

    The log-probability of a token is taken at its sampling temperature. The tensors are in the order of `samples`.
    """
    found: dict[int, Tensor] = {}
    # Weights are 0 because nothing is summed here.
    weight, is_packed = [0.0] * len(samples), packs_rows(model)
    for batch in micro_batches(samples, weight, token_budget=token_budget, device=device, is_packed=is_packed):
        found |= batch.scatter(batch.logprobs(model))  # [M] -> [T] per row
    return [found[index] for index in range(len(samples))]  # micro-batches come longest first
