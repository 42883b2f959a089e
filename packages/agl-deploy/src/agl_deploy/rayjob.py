"""Writes the RayJob: the experiment on a Ray cluster of its own, which KubeRay makes and removes."""

import json
import re
import shlex

from agl.errors import ConfigError
from agl.hints import pip_install
from agl_deploy.needs import Needs
from agl_deploy.parts import TRAINER_PORT
from agl_deploy.rendering import fill

AGENTS = "agl_agents"
"""The custom resource of the nodes for agents, so that none runs on the head, which has the keys of providers."""

_SHARE = 0.001
_DATABASE_PORT = 5432


def rayjob_files(needs: Needs, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the manifest by path.

    Args:
        needs: What the experiment needs.
        folder: Where it goes, relative to the experiment's folder.
        gpus: GPUs of the head; 0 for the image for CPUs.

    Raises:
        ConfigError: Nothing in the experiment uses Ray, or Ray's server for jobs is not installed here.
    """
    ray = needs.ray
    if ray is None:
        raise ConfigError(
            f'nothing in {needs.file.name} uses Ray; write [runner] use = "ray", which runs the agents there, or take '
            "agl deploy helm"
        )
    if not ray.takes_jobs:
        raise ConfigError(
            "the images pin what is installed here, and Ray's server for jobs is not; run: "
            f"{pip_install('ray[default]')}"
        )
    text = fill(
        "rayjob.yaml",
        name=needs.name,
        folder=folder,
        bundled=not needs.store,
        image=f"{needs.name}-{'trainer-cuda' if gpus else 'trainer-cpu'}:local",
        entrypoint=_entrypoint(needs),
        version=ray.version,
        gpus=gpus,
        shared=ray.shares_files,
        room=shlex.quote(json.dumps({AGENTS: 1})) if ray.runs_agents else "",
        head_secrets=dict.fromkeys(["AGL_SECRET", "PGPASSWORD", *needs.variables["trainer"]]),
        agent_secrets=dict.fromkeys(["PGPASSWORD", *needs.variables["worker"]]),
        port=TRAINER_PORT,
        database_ports=_database_ports(needs.store),
    )
    return {"rayjob.yaml": text}


def _database_ports(store: str) -> list[int]:
    """Return the ports in the URL of a database, which may name several hosts."""
    place = re.split("[/?]", store.partition("://")[2])[0]
    hosts = place.rpartition("@")[2].split(",")
    found = [re.search(r":(\d+)$", host) for host in hosts]
    return sorted({int(port[1]) if port else _DATABASE_PORT for port in found})


def _entrypoint(needs: Needs) -> str:
    """Return the line that a shell on the head runs, in a folder of its own choice."""
    words = ["agl", "run", needs.file.name, "--resume", "--quiet"]
    settings = {
        "experiment.store": needs.store or f"postgresql://agl@{needs.name}-postgres/agl",
        "experiment.workdir": "/data/runs",
        "gateway.advertise": f"{needs.name}-ray",
        "gateway.params.host": "0.0.0.0",
        "gateway.params.port": str(TRAINER_PORT),
        "gateway.params.spool": "/data/spool",
    }
    if needs.ray is not None and needs.ray.runs_agents:
        words += ["--ray", "auto"]
        settings[f"runner.resources.custom.{AGENTS}"] = str(_SHARE)
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return f"cd /app && PATH=/opt/agl/venv/bin:$PATH exec {shlex.join(words)}"
