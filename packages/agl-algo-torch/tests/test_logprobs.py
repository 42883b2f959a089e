"""Log-probabilities and entropies are those of formulas in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from agl_algo_torch.learner.scoring import entropy, policy_entropy, token_logprobs

F64 = torch.float64


def test_logprobs_are_those_of_the_tempered_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]], dtype=F64)
    actual = token_logprobs(logits, targets_M=torch.tensor([2, 1]), temperature_M=torch.tensor([1.0, 0.5], dtype=F64))
    expected = [
        2.0 - math.log(1 + math.e + math.exp(2)),
        2.0 - math.log(math.exp(6) + math.exp(2) + 1),
    ]
    assert expected == pytest.approx(actual.tolist(), rel=1e-12)


def test_entropy_of_a_uniform_distribution_is_log_of_its_size() -> None:
    assert [math.log(5)] == pytest.approx(entropy(torch.zeros(1, 5)).tolist())


def test_the_entropy_of_the_bonus_is_that_of_what_was_sampled_and_has_a_gradient() -> None:
    logits = torch.tensor([[0.0, 1.0]], dtype=F64, requires_grad=True)
    p = 1 / (1 + math.exp(2))  # of the first token at temperature 0.5
    found = policy_entropy(logits, temperature_M=torch.tensor([0.5], dtype=F64))
    assert [-p * math.log(p) - (1 - p) * math.log(1 - p)] == pytest.approx(found.tolist())
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert float(gradient[0, 0]) > 0 > float(gradient[0, 1])  # towards equal probabilities
