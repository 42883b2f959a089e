"""The objective over rows: losses in micro-batches of any size, importance of whole rollouts, the entropy bonus."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from agl.errors import ConfigError
from agl_algo_torch.learner.batch import RowSample, micro_batches, recompute_logprobs
from agl_algo_torch.learner.objective import PolicyObjective, Tally
from agl_objectives.contract import LossTerms, TokenBatch
from agl_objectives.registry import losses
from agl_objectives.settings import Correction, Objective

CPU = torch.device("cpu")
LOSSES = [entry.name for entry in losses()]


class Bigram(nn.Module):
    """A model whose logits depend on the current token only, so that a token's loss is the same in any row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(7, 7, generator=generator, dtype=torch.float64))

    def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> object:
        del attention_mask, use_cache
        return type("Output", (), {"logits": self.table[input_ids]})()


def sample(rollout: str, ids: list[int], mask: list[int], advantage: float) -> RowSample:
    mask_T = torch.tensor(mask, dtype=torch.bool)
    noise_T = torch.sin(torch.tensor(ids).double() * 3.0)  # by token, as the model's logits are
    return RowSample(
        rollout=rollout,
        ids=torch.tensor(ids),
        mask=mask_T,
        advantages=mask_T.double() * advantage,
        behaviour=-1.5 + 0.2 * noise_T,
        temperature=torch.ones(len(ids)),
        old=-1.8 + 0.5 * noise_T,
    )


WHOLE = [
    sample("a", [1, 2, 3, 4, 5, 6, 1], [0, 1, 1, 0, 1, 1, 1], 1.0),
    sample("b", [2, 3, 6, 1, 0], [0, 0, 1, 1, 1], -0.5),
    sample("c", [5, 5, 2, 4], [0, 1, 1, 1], 0.0),
]
CUT = [
    sample("a", [1, 2, 3, 4, 5, 6, 1], [0, 1, 0, 0, 1, 0, 1], 1.0),
    WHOLE[2],
    sample("a", [1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 0, 1], 1.0),
    sample("b", [2, 3, 6, 1, 0], [0, 0, 0, 1, 1], -0.5),
    sample("b", [2, 3, 6], [0, 0, 1], -0.5),
]
"""The tokens of ``WHOLE`` in other rows and another order."""


def objective(loss: str, *, correction: Correction = Correction(), **settings: Any) -> PolicyObjective:
    return PolicyObjective("grpo", Objective(loss=loss, **settings), correction=correction, updates=2)


def learner_of(model: nn.Module) -> Any:
    """Return a learner with the one method that an objective calls."""
    return SimpleNamespace(
        logprobs=lambda rows: recompute_logprobs(model, rows, token_budget=64, device=CPU),
    )


def gradient(made: PolicyObjective, samples: list[RowSample], *, budget: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the gradient of one update with respect to the table of logits, and the metrics."""
    model, tally = Bigram(), Tally()
    weight, total = made.weights(samples)
    kept = [index for index, row in enumerate(samples) if made.has_gradient(row)]
    rows = made.surveyed(samples, learner=learner_of(model))
    chosen, share = [rows[i] for i in kept], [weight[i] for i in kept]
    unused: Any = None  # the reference, which only a KL penalty asks for
    for batch in micro_batches(chosen, share, total=total, token_budget=budget, device=CPU):
        made.loss(batch, model=model, tuned=unused, tally=tally).backward()
    assert model.table.grad is not None
    return model.table.grad, tally.report()


@pytest.mark.parametrize("loss", LOSSES)
def test_neither_micro_batches_nor_rows_change_the_gradient_of_any_loss(loss: str) -> None:
    # Bounds that are met in part, and shares that choose more than one token.
    params = {
        "gspo": {"clip_low": 0.5, "clip_high": 0.5},
        "clip-cov": {"ratio": 0.3, "cov_low": 0.01},
        "kl-cov": {"ratio": 0.3},
    }
    made = objective(loss, loss_params=params.get(loss))
    one, logged = gradient(made, WHOLE, budget=64)
    other, same = gradient(made, CUT, budget=1)
    assert bool((one != 0).any())
    torch.testing.assert_close(one, other)
    assert logged == pytest.approx(same)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_importance_weights_of_a_rollout_are_taken_over_its_rows(level: Any) -> None:
    made = objective("ppo-clip", correction=Correction(cap=50.0, level=level, is_normalised=True))
    found: list[torch.Tensor] = []
    for samples in (WHOLE, CUT):
        bare = [replace(row, old=None) for row in samples]
        rows = made.with_old_logprobs(bare, learner=learner_of(Bigram()))
        assert len({float(v) for row in rows if row.rollout == "a" for v in row.importance[row.trained]}) == 1  # type: ignore[index]
        found.append(gradient(made, rows, budget=5)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("level", "cap"), [("token", 1.0), ("sequence", 0.002), ("geometric", 0.2)])
def test_share_of_truncated_weights_does_not_depend_on_their_division_by_the_mean(level: Any, cap: float) -> None:
    shares: list[float] = []
    for is_normalised in (False, True):
        made = objective("gpg", correction=Correction(cap=cap, level=level, is_normalised=is_normalised))
        bare = [replace(row, old=None) for row in WHOLE]
        rows = made.with_old_logprobs(bare, learner=learner_of(Bigram()), skips_silent=False)
        shares.append(gradient(made, rows, budget=5)[1]["tis_truncated"])
    assert 0 < shares[0] < 1
    assert shares[0] == shares[1]


def test_masked_importance_drops_tokens_and_counts_them() -> None:
    made = objective("gpg", correction=Correction(cap=0.8, mode="mask"))
    _, logged = gradient(made, WHOLE[:2], budget=64)
    masked = sum(
        not math.log(0.5) <= float(o - b) <= math.log(0.8)
        for row in WHOLE[:2]
        for o, b in zip(row.old[row.mask], row.behaviour[row.mask], strict=True)
    )
    assert masked / logged["tokens"] == pytest.approx(logged["tis_masked"])
    assert 0 < logged["tis_masked"] < 1


def test_an_entropy_bonus_trains_silent_rows_towards_equal_probabilities() -> None:
    silent = [replace(row, advantages=torch.zeros(len(row.ids))) for row in WHOLE]
    assert not any(objective("ppo-clip").has_gradient(row) for row in silent)
    made = objective("ppo-clip", entropy_coef=0.5)
    found, _ = gradient(made, silent, budget=64)
    model = Bigram()
    logp = model.table.log_softmax(dim=1)
    entropy_V = -(logp.exp() * logp).sum(dim=1)
    before = [row.ids[place - 1] for row in WHOLE for place in row.mask.nonzero()[:, 0]]
    (expected,) = torch.autograd.grad(-0.5 * torch.stack([entropy_V[token] for token in before]).mean(), model.table)
    torch.testing.assert_close(expected, found)


def test_the_largest_ratio_is_that_of_the_policy_to_the_old_one() -> None:
    rows = [replace(WHOLE[0], old=None)]
    _, logged = gradient(objective("ppo-clip"), rows, budget=64)
    assert logged["ratio_max"] == 1.0
    _, logged = gradient(objective("ppo-clip"), WHOLE[:1], budget=64)
    assert logged["ratio_max"] != pytest.approx(1.0)
    assert math.isfinite(logged["ratio_max"])


def bare(tokens: TokenBatch) -> Any:
    return -tokens.logp_M if len(tokens.logp_M) == 8 else LossTerms(loss_M=-tokens.logp_M)


def cut(tokens: TokenBatch) -> LossTerms:
    return LossTerms(loss_M=-tokens.logp_M[:6])


@pytest.mark.parametrize(("loss", "got"), [(bare, "Tensor"), (cut, r"loss_M = \[.*\]")])
def test_a_loss_that_gives_no_number_for_each_token_is_refused(loss: Any, got: str) -> None:
    made = objective(f"{__name__}:{loss.__name__}")
    with pytest.raises(ConfigError, match=f"{loss.__name__}' returned {got} for 8 trained tokens; return LossTerms"):
        gradient(made, WHOLE, budget=1000)


def test_effective_share_is_one_over_tokens_that_weigh_the_same_and_falls_with_their_spread() -> None:
    even, uneven = Tally(), Tally()
    for tally, parts in ((even, [[2.0, 2.0], [2.0]]), (uneven, [[2.0, 0.0], [0.0]])):
        for part in parts:
            tally.weigh(torch.tensor(part))
            tally.sums["tokens"] += len(part)
    assert 1.0 == pytest.approx(even.report()["effective_share"])
    assert 1 / 3 == pytest.approx(uneven.report()["effective_share"])
