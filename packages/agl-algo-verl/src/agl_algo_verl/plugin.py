"""Registers the algorithm `verl` and the policy `verl`, without importing verl or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import AlgorithmEntry, PolicyEntry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def agl_algorithms() -> Iterable[AlgorithmEntry]:
    """Register VERL's policy-gradient training, configured by VERL's own keys."""
    yield AlgorithmEntry(
        name="verl",
        factory="agl_algo_verl.algorithm:make",
        summary="policy gradients with VERL's engine and any loss and estimator (GRPO, PPO, RLOO, GSPO, CISPO)",
        tunes=("weights",),
    )


@hookimpl
def agl_policies() -> Iterable[PolicyEntry]:
    """Register the policy that serves VERL's replicas at one address."""
    yield PolicyEntry(
        name="verl",
        factory="agl_algo_verl.serving.policy:VerlPolicy",
        summary='one address for the replicas of VERL\'s trainer (engine = "ray"), and for a policy here without them',
        trains=True,
    )
