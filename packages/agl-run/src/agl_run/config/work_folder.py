"""The folder of an experiment's checkpoints, weights and metrics.

Experiments may name one folder, for instance when a file runs again under another name to compare two settings. The
first one owns it, and each other one works in a folder of its own inside, so that none overwrites another's weights.
"""

from pathlib import Path

from agl.errors import ConfigError
from agl_run.config.records import ExperimentSection

OWNER = "experiment.txt"
"""File in the folder with the name of the experiment that owns it."""


def work_folder(base: Path, section: ExperimentSection) -> Path:
    """Return the folder of an experiment whose file is in ``base``."""
    if not section.workdir:
        return base / f"runs/{section.name}"
    shared = base / section.workdir
    return shared if _owner(shared) in ("", section.name) else shared / f"experiment-{section.name}"


def own(workdir: Path, name: str) -> None:
    """Note in an experiment's folder that it is its own; the caller holds the folder's lock.

    Raises:
        ConfigError: Another experiment has begun there since the folder was chosen.
    """
    owner = _owner(workdir)
    if owner not in ("", name):
        raise ConfigError(f"the experiment {owner!r} has just begun in {workdir}; start {name!r} once more")
    if not owner:
        (workdir / OWNER).write_text(name, encoding="utf-8")


def _owner(folder: Path) -> str:
    try:
        return (folder / OWNER).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # there is no such file, or no such folder
        return ""
