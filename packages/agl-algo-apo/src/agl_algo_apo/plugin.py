"""Registers the algorithms `apo`, `gepa` and `random`, without importing an HTTP client or gepa."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import AlgorithmEntry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def agl_algorithms() -> Iterable[AlgorithmEntry]:
    """Register the algorithms that tune prompts and other texts that agents read."""
    yield AlgorithmEntry(
        name="apo",
        factory="agl_algo_apo.apo:APO",
        summary="prompt optimisation: a racing beam over textual gradients, for few rollouts",
        tunes=("prompt_template", "json"),
        needs_token_ids=False,
        shares=True,
    )
    yield AlgorithmEntry(
        name="gepa",
        factory="agl_algo_apo.gepa:GEPA",
        summary="prompt optimisation by the gepa library (reflective evolution on a Pareto front)",
        tunes=("prompt_template", "json"),
        needs_token_ids=False,
    )
    yield AlgorithmEntry(
        name="random",
        factory="agl_algo_apo.random_search:RandomSearch",
        summary="prompt optimisation without evidence: the floor that every other must beat",
        tunes=("prompt_template", "json"),
        needs_token_ids=False,
    )
