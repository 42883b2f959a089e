"""Divergences between a policy and its teacher equal those of torch's own distributions."""

import math
from itertools import pairwise

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from agl_algo_torch.sdpo import Divergence, among, divergence, likeliest, scaled_logprobs


def logprobs(seed: int, *, temperature: float = 1.0) -> torch.Tensor:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed)) * 3
    return scaled_logprobs(logits, temperature_M=torch.full((5,), temperature))


def whole(policy: torch.Tensor, teacher: torch.Tensor, kind: Divergence) -> torch.Tensor:
    p, q = Categorical(logits=policy), Categorical(logits=teacher)
    if kind == "jsd":
        middle = Categorical(probs=(p.probs + q.probs) / 2)
        return (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2
    return kl_divergence(p, q) if kind == "reverse" else kl_divergence(q, p)


@pytest.mark.parametrize("kind", ["jsd", "reverse", "forward"])
def test_divergence_over_the_vocabulary_is_that_of_torch(kind: Divergence) -> None:
    policy, teacher = logprobs(1, temperature=0.7), logprobs(2)
    torch.testing.assert_close(divergence(policy, teacher, kind=kind), whole(policy, teacher, kind))


@pytest.mark.parametrize("kind", ["jsd", "reverse", "forward"])
def test_merged_tokens_never_raise_a_divergence(kind: Divergence) -> None:
    policy, teacher = logprobs(1), logprobs(2)
    found = [divergence(policy, teacher, kind=kind)]
    for count in (20, 5, 1):
        chosen = likeliest(policy, count=count)
        found.append(divergence(among(policy, chosen), among(teacher, chosen), kind=kind))
    for more, fewer in pairwise(found):
        assert (fewer <= more + 1e-5).all()
    assert (found[-1] > 0).all()


def test_equal_distributions_have_no_divergence_and_no_gradient() -> None:
    logits = logprobs(1).requires_grad_()
    apart = divergence(logits.log_softmax(1), logits.detach().log_softmax(1), kind="jsd")
    apart.sum().backward()
    torch.testing.assert_close(apart.detach(), torch.zeros(5), atol=1e-6, rtol=0)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), atol=1e-6, rtol=0)


def test_certain_distributions_stay_finite() -> None:
    sure = torch.full((1, 9), -200.0).index_fill(1, torch.tensor([3]), 200.0).requires_grad_()
    teacher = sure.detach().flip(1).log_softmax(1)
    policy = sure.log_softmax(1)
    chosen = likeliest(policy, count=2)
    apart = divergence(among(policy, chosen), among(teacher, chosen), kind="jsd")
    apart.sum().backward()
    assert float(apart.detach()) <= math.log(2) + 1e-6
    assert sure.grad is not None
    assert sure.grad.isfinite().all()


def test_whole_vocabulary_is_compared_where_all_of_it_is_asked_for() -> None:
    assert likeliest(logprobs(1), count=0) is None
    assert likeliest(logprobs(1), count=40) is None
