"""Registers the runner that gives agents an OpenEnv environment."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import RunnerEntry


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runner."""
    yield RunnerEntry(
        name="openenv",
        factory="agl_openenv.runner:OpenEnvRunner",
        summary="an agent with a session of an OpenEnv server",
    )
