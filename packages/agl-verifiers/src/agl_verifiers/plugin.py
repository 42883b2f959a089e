"""Registers the runner behind ``agent = "verifiers:NAME"``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import RunnerEntry


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runner of verifiers' environments."""
    yield RunnerEntry(
        name="verifiers",
        factory="agl_verifiers.runner:VerifiersRunner",
        summary="an environment of the verifiers library as agent, tasks and reward",
    )
