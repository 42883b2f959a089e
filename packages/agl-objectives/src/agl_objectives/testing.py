"""Conformance tests of losses and estimators: subclass a class, give it one fixture, and pytest runs the tests.

    class TestMine(LossConformance):
        @pytest.fixture
        def loss(self) -> Loss:
            return my_loss

Every flag has the strictest value by default, so a subclass shows which exceptions a component has. Needs pytest.
Almost everything is computed in float64, on the CPU, for an update of three rollouts with two rows each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from agl_objectives.contract import Scores, TokenBatch, surveyed
from agl_objectives.typed_torch import integers

if TYPE_CHECKING:
    from torch import Tensor

    from agl_objectives.contract import Estimator, Loss

__all__ = [
    "EstimatorConformance",
    "LossConformance",
    "chosen",
    "chosen_scores",
    "example_scores",
    "example_tokens",
    "weighted_loss",
]

SEEDS = pytest.mark.parametrize("seed", range(4))


def example_tokens(seed: int) -> TokenBatch:
    """Return an update of 3 rollouts with 2 rows each, 24 tokens in all; a rollout has one advantage and one weight."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    place_M = torch.tensor([0] * 5 + [1] * 9 + [2] * 10)
    old_M = -normal(24).abs() - 0.05
    share = 1.0 / torch.bincount(place_M).double()  # the weight of `aggregation = "sequence"`
    return TokenBatch(
        logp_M=old_M + 0.3 * normal(24),
        old_M=old_M,
        behaviour_M=old_M + 0.01 * normal(24),
        advantages_M=torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64)[place_M],
        weight_M=share[place_M],
        row_M=2 * place_M + torch.arange(24) % 2,
        rollout_M=7 * place_M,  # numbers of rollouts need not be consecutive
        entropy_M=normal(24).abs(),
    )


def weighted_loss(loss: Loss, tokens: TokenBatch) -> Tensor:
    """Return the loss of an update that consists of exactly these tokens, a scalar with gradient."""
    return (tokens.weight_M * loss(surveyed(loss, tokens)).loss_M).sum()


def chosen(tokens: TokenBatch, places: Tensor) -> TokenBatch:
    """Return the tokens at the indices `places`, in that order, with their `extras`."""
    parts = {
        name: getattr(tokens, name)[places]
        for name in ("logp_M", "old_M", "behaviour_M", "advantages_M", "weight_M", "row_M", "rollout_M")
    }
    entropy_M = None if tokens.entropy_M is None else tokens.entropy_M[places]
    extras = {name: values_M[places] for name, values_M in tokens.extras.items()}
    return TokenBatch(**parts, entropy_M=entropy_M, extras=extras)


class LossConformance:
    """Tests of the contract of a loss; override the fixture `loss`."""

    has_value: ClassVar[bool] = True
    """False for a loss with stopped gradients, whose gradient is not the derivative of its value."""
    trains_silent: ClassVar[bool] = False
    """True for a loss in which tokens with the advantage 0 may have a gradient (`LossEntry.trains_silent`)."""
    compares_batch: ClassVar[bool] = False
    """True for a loss that chooses tokens by comparing all tokens of an update."""

    @pytest.fixture
    def loss(self) -> Loss:
        """The loss under test."""
        raise NotImplementedError("give the loss with a fixture named loss")

    @SEEDS
    def test_the_gradient_is_that_of_the_value(self, loss: Loss, seed: int) -> None:
        """The gradient equals the central differences of the whole update, survey included, in every token."""
        if not self.has_value:
            pytest.skip("its gradient is stopped in places")
        tokens = example_tokens(seed)
        logp_M = tokens.logp_M.clone().requires_grad_()
        (found_M,) = torch.autograd.grad(weighted_loss(loss, replace(tokens, logp_M=logp_M)), logp_M)
        step_MM = 1e-6 * torch.eye(len(found_M), dtype=torch.float64)
        expected = [
            weighted_loss(loss, replace(tokens, logp_M=tokens.logp_M + step_M))
            - weighted_loss(loss, replace(tokens, logp_M=tokens.logp_M - step_M))
            for step_M in step_MM
        ]
        torch.testing.assert_close(torch.stack(expected) / 2e-6, found_M, atol=1e-7, rtol=1e-6)

    @SEEDS
    def test_micro_batches_add_up_in_any_order(self, loss: Loss, seed: int) -> None:
        """The tokens, also in random order, are cut into three micro-batches without regard to rollouts."""
        tokens = example_tokens(seed)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(tokens.logp_M), generator=generator)
        whole_M = torch.zeros_like(tokens.logp_M)
        for part in surveyed(loss, tokens), surveyed(loss, chosen(tokens, order)):
            logp_M = part.logp_M.clone().requires_grad_()
            ready = replace(part, logp_M=logp_M)
            pieces = [chosen(ready, places) for places in torch.arange(len(order)).tensor_split([6, 15])]
            total = torch.stack([(piece.weight_M * loss(piece).loss_M).sum() for piece in pieces]).sum()
            (found_M,) = torch.autograd.grad(total, logp_M)
            if part.old_M is tokens.old_M:
                one = ready.logp_M.detach().clone().requires_grad_()
                (whole_M,) = torch.autograd.grad(weighted_loss(loss, replace(tokens, logp_M=one)), one)
                torch.testing.assert_close(whole_M, found_M)
            else:
                torch.testing.assert_close(whole_M[order], found_M)

    @SEEDS
    def test_cutting_a_rollout_into_other_rows_changes_nothing(self, loss: Loss, seed: int) -> None:
        """One row per token gives the same losses as one row per rollout."""
        tokens = example_tokens(seed)
        cut = replace(tokens, row_M=torch.arange(len(tokens.row_M)))
        one = replace(tokens, row_M=tokens.rollout_M)
        assert torch.equal(loss(surveyed(loss, one)).loss_M, loss(surveyed(loss, cut)).loss_M)

    @SEEDS
    def test_tokens_without_weight_have_no_effect(self, loss: Loss, seed: int) -> None:
        """Tokens without weight change neither the losses of other tokens nor the counts."""
        tokens = example_tokens(seed)
        weight_M = tokens.weight_M.clone()
        weight_M[::3] = 0.0
        kept = weight_M > 0
        tokens = replace(tokens, weight_M=weight_M)
        changed = replace(
            tokens,
            logp_M=torch.where(kept, tokens.logp_M, -9.0),
            old_M=torch.where(kept, tokens.old_M, -1.0),
            advantages_M=torch.where(kept, tokens.advantages_M, 5.0),
        )
        one, other = (loss(surveyed(loss, both)) for both in (tokens, changed))
        torch.testing.assert_close(one.loss_M[kept], other.loss_M[kept])
        assert one.counts == other.counts

    @pytest.mark.parametrize("distance", [-200.0, 200.0])
    def test_extreme_ratios_give_finite_numbers(self, loss: Loss, distance: float) -> None:
        """Loss and gradient are finite in float32, in which exp(200) is infinite."""
        exact = example_tokens(0)
        names = ("logp_M", "old_M", "behaviour_M", "advantages_M", "weight_M", "entropy_M")
        tokens = replace(exact, **{name: getattr(exact, name).float() for name in names})
        logp_M = (tokens.logp_M - (distance < 0) * 200.0).requires_grad_()
        old_M = tokens.old_M - (distance > 0) * 200.0
        total = weighted_loss(loss, replace(tokens, logp_M=logp_M, old_M=old_M))
        (found_M,) = torch.autograd.grad(total, logp_M)
        assert bool(torch.isfinite(total))
        assert bool(torch.isfinite(found_M).all())

    @SEEDS
    def test_silent_rollouts_have_no_gradient(self, loss: Loss, seed: int) -> None:
        """A rollout whose advantages are 0 has no gradient, but other rollouts of the update have one."""
        if self.trains_silent:
            pytest.skip("tokens of advantage 0 may have a gradient")
        tokens = example_tokens(seed)
        silent = tokens.rollout_M == 7
        logp_M = tokens.logp_M.clone().requires_grad_()
        advantages_M = torch.where(silent, 0.0, tokens.advantages_M)
        total = weighted_loss(loss, replace(tokens, logp_M=logp_M, advantages_M=advantages_M))
        (found_M,) = torch.autograd.grad(total, logp_M)
        assert not bool(found_M[silent].any())
        assert bool((found_M[~silent] != 0).any())

    @SEEDS
    def test_a_rollout_does_not_depend_on_the_others(self, loss: Loss, seed: int) -> None:
        """The losses of a rollout are the same alone and with two other rollouts."""
        if self.compares_batch:
            pytest.skip("it compares all tokens of an update")
        tokens = example_tokens(seed)
        own = tokens.rollout_M == 7
        beside_M = loss(surveyed(loss, tokens)).loss_M[own]
        alone = chosen(tokens, own.nonzero()[:, 0])
        torch.testing.assert_close(loss(surveyed(loss, alone)).loss_M, beside_M)


class EstimatorConformance:
    """Tests of the contract of an estimator; override the fixture `estimator`."""

    compares_batch: ClassVar[bool] = False
    """True for an estimator that compares scores of different groups, or scales them together."""

    @pytest.fixture
    def estimator(self) -> Estimator:
        """The estimator under test."""
        raise NotImplementedError("give the estimator with a fixture named estimator")

    @SEEDS
    def test_the_order_of_scores_changes_nothing(self, estimator: Estimator, seed: int) -> None:
        """Shuffled scores give equally shuffled advantages and units."""
        scores = example_scores(seed)
        order = torch.randperm(len(scores.scores_S), generator=torch.Generator().manual_seed(seed))
        one, other = estimator(scores), estimator(chosen_scores(scores, order))
        torch.testing.assert_close(one.found_S[order], other.found_S)
        torch.testing.assert_close(one.unit_S[order], other.unit_S)

    def test_equal_scores_have_no_advantage(self, estimator: Estimator) -> None:
        """The advantages are exactly 0, because a difference by rounding must not become a signal."""
        scores = example_scores(0)
        equal = replace(scores, scores_S=torch.full_like(scores.scores_S, 0.1))
        assert not bool(estimator(equal).found_S.any())

    @SEEDS
    def test_estimates_are_finite_and_keep_the_type(self, estimator: Estimator, seed: int) -> None:
        """There is a finite estimate for every score, also in a group of one and for scores of very different sizes."""
        scores = example_scores(seed)
        scores = replace(scores, scores_S=scores.scores_S * torch.logspace(-6, 6, len(scores.scores_S)).double())
        found = estimator(scores)
        for values_S in (found.found_S, found.unit_S):
            assert (scores.scores_S.shape, scores.scores_S.dtype) == (values_S.shape, values_S.dtype)
            assert bool(torch.isfinite(values_S).all())

    @SEEDS
    def test_a_group_does_not_depend_on_the_others(self, estimator: Estimator, seed: int) -> None:
        """The advantages of a group are the same alone and with other groups."""
        if self.compares_batch:
            pytest.skip("it compares all scores of a batch")
        scores = example_scores(seed)
        own = (scores.group_S == 1).nonzero()[:, 0]
        alone = chosen_scores(scores, own)
        one = estimator(replace(alone, group_S=torch.zeros_like(alone.group_S)))
        assert torch.equal(one.found_S, estimator(scores).found_S[own])


def example_scores(seed: int) -> Scores:
    """Return random scores for groups of 4, 3, 5 and 1 rollouts."""
    generator = torch.Generator().manual_seed(seed)
    group_S = torch.tensor([0] * 4 + [1] * 3 + [2] * 5 + [3])
    return Scores(
        scores_S=torch.randn(13, generator=generator, dtype=torch.float64),
        group_S=group_S,
        tokens_S=torch.randint(1, 50, (13,), generator=generator),
        roles_S=tuple("writer" if place % 2 else "critic" for place in range(13)),
    )


def chosen_scores(scores: Scores, places: Tensor) -> Scores:
    """Return the scores at the indices `places`, in that order."""
    return Scores(
        scores_S=scores.scores_S[places],
        group_S=scores.group_S[places],
        tokens_S=scores.tokens_S[places],
        roles_S=tuple(scores.roles_S[place] for place in integers(places)),
    )
