"""A step's values for single tokens, their entropies and advantages, for `agl why` and the console.

The entropies come from the pass that computes the log-probabilities before the step's first update.

R is the length of a response, N the number of tokens that a call wrote.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from agl_algo_verl.typed import floats, half_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agl.contracts import CallUse
    from agl_algo_verl.rows.rows import PreparedStep, RowSample

ENTROPY, ADVANTAGE = "entropy", "advantage"
"""The keys of the numbers in `CallUse.tokens`."""


def mean_entropy(samples: Sequence[RowSample]) -> dict[str, float]:
    """Return the mean entropy over trained tokens in nats, as the metric `entropy`; empty without a trained token."""
    found = [x for s in samples if s.entropy is not None for x in floats(s.entropy[s.mask])]
    return {ENTROPY: sum(found) / len(found)} if found else {}


def with_tokens(prepared: PreparedStep, samples: Sequence[RowSample]) -> dict[str, tuple[CallUse, ...]]:
    """Return the uses of a step's calls, by rollout id, with the entropies and advantages of their tokens added.

    A call gets its tokens' advantages if they differ, and their mean if it had no advantage itself: with a critic, and
    with a penalty in the reward.

    Args:
        prepared: The step.
        samples: The step's rows, after the models have evaluated them.
    """
    found: defaultdict[tuple[str, str], dict[str, bytes]] = defaultdict(dict[str, bytes])
    means: dict[tuple[str, str], float] = {}
    for sample in samples:
        for span_id, start, stop in sample.calls:
            trained_N = sample.mask[start:stop]
            if stop <= start or not bool(trained_N.any()):
                continue  # the call is one token at the start of the row, which nothing predicts
            key, length = (sample.rollout, span_id), prepared.tokens.get(span_id, stop - start)
            advantages_N = sample.advantages[start:stop]
            values_M = advantages_N[trained_N]
            means[key] = float(values_M.mean())
            if sample.entropy is not None:
                found[key][ENTROPY] = _packed(sample.entropy[start:stop], trained_N, length=length)
            if bool((values_M != values_M[0]).any()):
                found[key][ADVANTAGE] = _packed(advantages_N, trained_N, length=length)
    return {
        rollout: tuple(
            _with(use, found.get((rollout, use.span_id)), means.get((rollout, use.span_id))) for use in calls
        )
        for rollout, calls in prepared.uses.items()
    }


def _with(use: CallUse, tokens: dict[str, bytes] | None, mean: float | None) -> CallUse:
    if tokens is None:
        return use
    return replace(use, tokens=tokens, advantage=mean if use.advantage is None else use.advantage)


def _packed(values_N: Tensor, trained_N: Tensor, *, length: int) -> bytes:
    """Pack a call's values for its `length` tokens; NaN at untrained tokens, and where the row cuts the call."""
    known_N = values_N.float().where(trained_N, torch.nan)
    return half_bytes(torch.cat([torch.full((length - len(known_N),), torch.nan), known_N]))
