"""Registers the runners for environments of other libraries."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import RunnerEntry


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runners for verifiers and for OpenEnv."""
    yield RunnerEntry(
        name="verifiers",
        factory="agl_environments.verifiers.runner:VerifiersRunner",
        summary="an environment of the verifiers library as agent, tasks and reward",
    )
    yield RunnerEntry(
        name="openenv",
        factory="agl_environments.openenv.runner:OpenEnvRunner",
        summary="an agent with a session of an OpenEnv server",
    )
