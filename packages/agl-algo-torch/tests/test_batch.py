"""Rows become tensors, and splitting a rollout into rows does not change its gradient."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agl.schemas import Row, Segment, pack_floats, pack_ids
from agl_algo_torch.learner.batch import RowSample, from_row, micro_batches
from agl_objectives.aggregation import loss_weights, split_updates
from agl_objectives.losses import PPOClip

CPU = torch.device("cpu")
VOCABULARY = 7


class Bigram(nn.Module):
    """A model whose logits depend on the current token only, so that a token's loss is the same in any row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))

    def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> object:
        assert attention_mask.shape == input_ids.shape
        assert not use_cache
        return type("Output", (), {"logits": self.table[input_ids]})()


def sample(rollout: str, ids: list[int], mask: list[int], advantage: float) -> RowSample:
    mask_T = torch.tensor(mask, dtype=torch.bool)
    return RowSample(
        rollout=rollout,
        ids=torch.tensor(ids),
        mask=mask_T,
        advantages=mask_T.double() * advantage,
        behaviour=torch.zeros(len(ids)),
        temperature=torch.ones(len(ids)),
    )


def gradient(
    samples: list[RowSample], aggregation: str, *, budget: int = 64, skip_silent: bool = False
) -> torch.Tensor:
    model = Bigram()
    weight, total = loss_weights(samples, aggregation=aggregation, constant=16)
    kept = [i for i, s in enumerate(samples) if s.trained_tokens and not (skip_silent and s.is_silent)]
    chosen, share = [samples[i] for i in kept], [weight[i] for i in kept]
    for batch in micro_batches(chosen, share, total=total, token_budget=budget, device=CPU):
        logp_M = batch.logprobs(model)
        batch.mean(PPOClip()(batch.tokens(logp_M, old_M=logp_M.detach())).loss_M).backward()
    return torch.zeros_like(model.table) if model.table.grad is None else model.table.grad


@st.composite
def rollouts(draw: st.DrawFn) -> list[tuple[list[int], list[int], float]]:
    count = draw(st.integers(1, 4))
    token = st.integers(0, VOCABULARY - 1)
    result: list[tuple[list[int], list[int], float]] = []
    for _ in range(count):
        ids = draw(st.lists(token, min_size=3, max_size=10))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        result.append((ids, mask, draw(st.sampled_from([-1.5, 0.0, 0.5, 2.0]))))
    return result


def cut(name: str, rollout: tuple[list[int], list[int], float], parts: list[int]) -> list[RowSample]:
    """Return one row per part; each trains the tokens of its part and repeats the context before them."""
    ids, mask, advantage = rollout
    rows: list[RowSample] = []
    for part in sorted(set(parts)):
        own = [m if parts[i] == part else 0 for i, m in enumerate(mask)]
        last = max((i for i, m in enumerate(own) if m), default=1)
        rows.append(sample(name, ids[: last + 1], own[: last + 1], advantage))
    return rows


@settings(max_examples=60)
@given(rollouts(), st.data(), st.sampled_from(["token", "sequence", "constant"]), st.integers(1, 40))
def test_a_split_rollout_has_the_gradient_of_the_whole(
    given_rollouts: list[tuple[list[int], list[int], float]], data: st.DataObject, aggregation: str, budget: int
) -> None:
    whole = [sample(f"r{i}", *r) for i, r in enumerate(given_rollouts)]
    split: list[RowSample] = []
    for i, r in enumerate(given_rollouts):
        parts = data.draw(st.lists(st.integers(0, 3), min_size=len(r[0]), max_size=len(r[0])))
        split += cut(f"r{i}", r, parts)
    torch.testing.assert_close(gradient(whole, aggregation), gradient(split, aggregation, budget=budget))


@settings(max_examples=40)
@given(rollouts(), st.sampled_from(["token", "sequence", "constant"]))
def test_skipping_silent_rows_changes_nothing(
    given_rollouts: list[tuple[list[int], list[int], float]], aggregation: str
) -> None:
    samples = [sample(f"r{i}", *r) for i, r in enumerate(given_rollouts)]
    torch.testing.assert_close(gradient(samples, aggregation), gradient(samples, aggregation, skip_silent=True))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 6))
def test_all_rows_of_a_rollout_share_an_update(rows_per_rollout: list[int], updates: int) -> None:
    samples = [sample(f"r{i}", [1, 2], [0, 1], 1.0) for i, n in enumerate(rows_per_rollout) for _ in range(n)]
    parts = split_updates(samples, updates=updates)
    found = [{s.rollout for s in part} for part in parts]
    assert min(updates, len(rows_per_rollout)) == len(parts)
    assert len(rows_per_rollout) == sum(len(names) for names in found)  # no name is in two parts
    assert len(samples) == sum(len(part) for part in parts)
    assert max(len(names) for names in found) - min(len(names) for names in found) <= 1


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 64))
def test_micro_batches_keep_to_the_budget_and_lose_no_token(lengths: list[int], budget: int) -> None:
    samples = [sample(f"r{i}", [i % VOCABULARY] * n, [0] + [1] * (n - 1), 1.0) for i, n in enumerate(lengths)]
    batches = list(micro_batches(samples, [1.0] * len(samples), token_budget=budget, device=CPU))
    for batch in batches:
        assert max(batch.lengths) * len(batch.lengths) <= budget or len(batch.lengths) == 1
    assert sum(n - 1 for n in lengths) == sum(len(batch.targets_M) for batch in batches)
    assert list(range(len(lengths))) == sorted(row for batch in batches for row in batch.rows)


def row(ids: list[int], logprobs: list[float], *segments: Segment) -> Row:
    return Row(
        rollout_id="r",
        attempt_id="r.1",
        group_id="g",
        branch=0,
        ids=pack_ids(ids),
        mask=bytes(int(any(s.start <= i < s.stop for s in segments)) for i in range(len(ids))),
        logprobs=pack_floats(logprobs),
        segments=segments,
    )


def test_prompt_and_observation_tokens_are_not_trained() -> None:
    made = from_row(
        row(
            [5, 6, 1, 2, 6, 6, 3],
            [0, 0, -0.5, -0.25, 0, 0, -1],
            Segment(start=2, stop=4, span_id="a"),
            Segment(start=6, stop=7, span_id="b"),
        ),
        advantages={"a": 1.0, "b": -2.0},
        temperatures={"a": 0.5},
    )
    assert made.mask.tolist() == [False, False, True, True, False, False, True]
    assert made.advantages.tolist() == [0, 0, 1, 1, 0, 0, -2]
    assert made.temperature.tolist() == [1, 1, 0.5, 0.5, 1, 1, 1]
    batch = next(iter(micro_batches([made], [0.25], token_budget=64, device=CPU)))
    assert batch.targets_M.tolist() == [1, 2, 3]
    assert batch.behaviour_M.tolist() == [-0.5, -0.25, -1]
    assert batch.weight_M.tolist() == [0.25] * 3


def test_a_part_without_credit_becomes_context() -> None:
    made = from_row(
        row([5, 1, 2], [0, -1, -1], Segment(start=1, stop=2, span_id="a"), Segment(start=2, stop=3, span_id="b")),
        advantages={"b": 1.0},
    )
    assert made.mask.tolist() == [False, False, True]


def test_scatter_is_the_inverse_of_flattening() -> None:
    samples = [sample("a", [1, 2, 3], [0, 1, 0], 1.0), sample("b", [1, 2, 3, 4, 5], [0, 0, 1, 0, 1], 1.0)]
    (batch,) = micro_batches(samples, [1.0, 1.0], token_budget=64, device=CPU)
    by_row = batch.scatter(batch.targets_M.float())
    assert {index: values.tolist() for index, values in by_row.items()} == {0: [0, 2, 0], 1: [0, 0, 3, 0, 5]}
