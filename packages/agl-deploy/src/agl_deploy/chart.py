"""Writes the Helm chart of an experiment, with its values, their schema, rules for Prometheus and a dashboard."""

from collections.abc import Iterator
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable

from agl_deploy.needs import Needs
from agl_deploy.rendering import fill, template

FOLDER = "chart"
_FILLED = ("Chart.yaml", "values.yaml")
"""Files that the experiment decides about; all others are the same for every experiment."""


def chart_files(needs: Needs, *, gpus: int) -> dict[str, str]:
    """Return the chart by path.

    Args:
        needs: What the experiment needs.
        gpus: GPUs of the trainer; 0 for the image for CPUs.
    """
    own = {"file": needs.file.name, "gpus": gpus, "version": version("agl-core")}
    values = {**{key: getattr(needs, key) for key in ("name", "experiment", "store", "variables")}, **own}
    return {
        path: fill(path, **values) if path.rpartition("/")[2] in _FILLED else template(path)
        for path in _paths(files("agl_deploy") / "templates" / FOLDER, FOLDER)
    }


def _paths(folder: Traversable, path: str) -> Iterator[str]:
    """Yield the paths of all files below a folder of the package, in order."""
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        below = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _paths(entry, below)
        else:
            yield below
