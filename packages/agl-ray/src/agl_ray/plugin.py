"""Registers the runner ``ray`` without importing Ray."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import RunnerEntry


@hookimpl
def agl_runners() -> Iterable[RunnerEntry]:
    """Register the runner that places workers on a Ray cluster."""
    yield RunnerEntry(
        name="ray", factory="agl_ray.fleet:RayFleet", summary="workers that Ray places, restarts and scales"
    )
