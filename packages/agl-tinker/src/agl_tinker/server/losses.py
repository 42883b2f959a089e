"""Tinker's built-in losses, computed with the losses of ``agl_objectives`` if these are the same.

Tinker's losses are sums over tokens. With r the ratio of the policy's probability to the sampler's, A the advantage, w
a weight, and sg(x) for x without its gradient:

    cross_entropy         -w log pi
    importance_sampling   -r A
    ppo                   -min(r A, clip(r, low, high) A)         low 0.8, high 1.2
    cispo                 -sg(clip(r, low, high)) A log pi        low 0, high 4
    dro                   -(A log pi - beta / 2 (log r)^2)        beta 0.05

Tinker's formulas have no mask. A token with advantage 0 and log-probability 0 is padding before an answer; here the
last term of ``dro`` is not applied to such tokens, since it would change their probability.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agl_objectives.contract import TokenBatch
from agl_objectives.registry import find_loss
from agl_tinker.server.problems import RefusedError, not_offered

TokenLoss = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]
Config = Mapping[str, float]
_LIMIT = 20.0
"""Limit of the absolute value of a log-ratio, as in ``agl_objectives``; beyond it exp would overflow."""

_CLIPS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in loss of Tinker's.

    Attributes:
        inputs: Names of the tensors that a row must have besides ``target_tokens``.
        build: Creates the loss from its parameters.
        optional: Names of further tensors that a row may have; a missing one counts as all ones.
        config: The loss's parameters with their defaults.
    """

    inputs: tuple[str, ...]
    build: Callable[[Config], TokenLoss]
    optional: tuple[str, ...] = ()
    config: Config


def _cross_entropy(_: Config) -> TokenLoss:
    return lambda logp_N, inputs, _row_N: -inputs["weights"] * logp_N


def _importance_sampling(_: Config) -> TokenLoss:
    def loss(logp_N: Tensor, inputs: Mapping[str, Tensor], _row_N: Tensor) -> Tensor:
        return -torch.exp((logp_N - inputs["logprobs"]).clamp(-_LIMIT, _LIMIT)) * inputs["advantages"]

    return loss


def _ppo(config: Config) -> TokenLoss:
    low, high = (config[name] for name in _CLIPS)
    return _ours("ppo-clip", clip_low=1.0 - low, clip_high=high - 1.0)


def _cispo(config: Config) -> TokenLoss:
    low, high = (config[name] for name in _CLIPS)
    return _ours("cispo", clip_low=1.0 - low, clip_high=high - 1.0)


def _dro(config: Config) -> TokenLoss:
    loss = _ours("dro", beta=config["beta"])

    def masked(logp_N: Tensor, inputs: Mapping[str, Tensor], row_N: Tensor) -> Tensor:
        is_answer_N = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
        return torch.where(is_answer_N, loss(logp_N, inputs, row_N), 0.0)

    return masked


def _ours(name: str, **params: float) -> TokenLoss:
    call = find_loss(name, params).call

    def loss(logp_N: Tensor, inputs: Mapping[str, Tensor], row_N: Tensor) -> Tensor:
        old_N = inputs["logprobs"]
        tokens = TokenBatch(
            logp_M=logp_N,
            old_M=old_N,
            behaviour_M=old_N,
            advantages_M=inputs["advantages"],
            weight_M=torch.ones_like(old_N),
            row_M=row_N,
            rollout_M=row_N,
        )
        return call(tokens).loss_M

    return loss


_ON_POLICY = ("logprobs", "advantages")
LOSSES: dict[str, BuiltIn] = {
    "cross_entropy": BuiltIn(inputs=(), optional=("weights",), config={}, build=_cross_entropy),
    "importance_sampling": BuiltIn(inputs=_ON_POLICY, config={}, build=_importance_sampling),
    "ppo": BuiltIn(inputs=_ON_POLICY, config=dict(zip(_CLIPS, (0.8, 1.2), strict=True)), build=_ppo),
    "cispo": BuiltIn(inputs=_ON_POLICY, config=dict(zip(_CLIPS, (0.0, 4.0), strict=True)), build=_cispo),
    "dro": BuiltIn(inputs=_ON_POLICY, config={"beta": 0.05}, build=_dro),
}


def built_in(name: str) -> BuiltIn:
    """Return a loss by name; raises :class:`RefusedError`, which lists all losses, for an unknown name."""
    if name not in LOSSES:
        refusal = not_offered(f"The loss {name!r}")
        raise RefusedError(f"{refusal} Its losses are {', '.join(LOSSES)}.")
    return LOSSES[name]


def make_loss(name: str, config: Mapping[str, float | str]) -> TokenLoss:
    """Return a loss with its parameters; raises :class:`RefusedError` if it does not accept them."""
    found = built_in(name)
    unknown = sorted(config.keys() - found.config.keys())
    texts = sorted(key for key, value in config.items() if isinstance(value, str))
    if unknown or texts:
        known = f"use {', '.join(found.config)}, each a number" if found.config else "it has none"
        raise RefusedError(f"The loss {name!r} does not take the loss_fn_config {unknown or texts}; {known}.")
    values = {**found.config, **{key: float(value) for key, value in config.items()}}
    low, high = values.get(_CLIPS[0], 0.0), values.get(_CLIPS[1], 1.0)
    if not 0.0 <= low <= 1.0 <= high or not values.get("beta", 1.0) > 0:
        raise RefusedError(
            f"The loss {name!r} got {values}; thresholds of the ratio are from 0 to 1 and at least 1, and beta is "
            "above 0."
        )
    return found.build(values)
