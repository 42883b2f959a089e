"""Registers the algorithm, the policy and the command, without importing tinker or torch."""

from collections.abc import Iterable

from agl import AlgorithmEntry, PolicyEntry, hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_algorithms() -> Iterable[AlgorithmEntry]:
    """Register training on a server that speaks Tinker's API."""
    yield AlgorithmEntry(
        name="tinker",
        factory="agl_tinker.algorithm:Tinker",
        summary="policy gradients with group-relative advantages on a server that speaks Tinker's API",
        tunes=("weights",),
    )


@hookimpl
def agl_policies() -> Iterable[PolicyEntry]:
    """Register the policy whose model is sampled on a server that speaks Tinker's API."""
    yield PolicyEntry(
        name="tinker",
        factory="agl_tinker.policy:TinkerPolicy",
        summary="a model on a server that speaks Tinker's API, behind OpenAI-compatible endpoints here",
        trains=True,
    )


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register ``agl tinker``."""
    yield CommandEntry(
        name="tinker", factory="agl_tinker.command:tinker", summary="serve a subset of Tinker's API on this machine"
    )
