"""Writes the SkyPilot file: the experiment with its agents and its store on one machine of a cloud."""

import shlex
import sys

from agl_deploy.images import requirement_files
from agl_deploy.needs import Needs
from agl_deploy.rendering import fill


def skypilot_files(needs: Needs, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the files by path.

    Args:
        needs: What the experiment needs.
        folder: Where they go, relative to the experiment's folder.
        gpus: GPUs of the machine; 0 for a machine without one.
    """
    secrets = ["AGL_SECRET", *(["PGPASSWORD"] if needs.store else []), *needs.variables["trainer"]]
    text = fill(
        "sky.yaml",
        name=needs.name,
        folder=folder,
        gpus=gpus,
        secrets=dict.fromkeys(secrets),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        run=_run(needs),
    )
    return {"sky.yaml": text, **requirement_files(needs, parts=["trainer"])}


def _run(needs: Needs) -> str:
    """Return the line that runs the experiment; the shell of the machine finds its home."""
    store = '"experiment.store=sqlite:///$HOME/agl-data/agl.db"'
    if needs.store:
        store = shlex.quote(f"experiment.store={needs.store}")
    workdir = '"experiment.workdir=$HOME/agl-data/runs"'
    run = f"~/agl/bin/agl run {shlex.quote(needs.file.name)} --resume --quiet"
    return f"mkdir -p ~/agl-data && {run} --set {store} --set {workdir}"
