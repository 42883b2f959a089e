"""Writes the compose file: PostgreSQL, gateway, trainer, workers and console on one machine."""

from typing import Any

from agl.errors import ConfigError
from agl_deploy.needs import Needs
from agl_deploy.parts import CONSOLE_PORT, GATEWAY_PORT, Part, parts_of, secrets_of
from agl_deploy.rendering import fill

WORKERS = 2

_RUNS = {
    "gateway": {"networks": ["data", "agents"], "restart": "unless-stopped"},
    "trainer": {"networks": ["data", "agents"], "restart": "on-failure:5", "volume": "trained", "start_period": "15m"},
    "worker": {"networks": ["agents"], "restart": "on-failure"},
    "console": {"networks": ["data"], "restart": "unless-stopped"},
}
_PORTS = {"gateway": GATEWAY_PORT, "console": CONSOLE_PORT}


def compose_files(needs: Needs, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the compose file and an example of its secrets, by path.

    Args:
        needs: What the experiment needs.
        folder: Where they go, relative to the experiment's folder.
        gpus: GPUs of the trainer; 0 for the image for CPUs.

    Raises:
        ConfigError: Ray starts the agents, and not the file's workers.
    """
    if needs.ray is not None and needs.ray.runs_agents:
        raise ConfigError(
            f'[runner] use = "ray" in {needs.file.name} has Ray start the agents, which a compose file starts itself; '
            "take agl deploy ray, or another runner such as async"
        )
    is_bundled = not needs.store
    parts = {
        name: _service(part, needs, is_bundled=is_bundled, gpus=gpus if name == "trainer" else 0)
        for name, part in parts_of(needs).items()
    }
    up = "/".join([".."] * (folder.count("/") + 1))
    text = fill("compose.yaml", name=needs.name, folder=folder, context=up, parts=parts, bundled=is_bundled)
    return {"compose.yaml": text, "env.example": env_example(needs, folder)}


def _service(part: Part, needs: Needs, *, is_bundled: bool, gpus: int) -> dict[str, Any]:
    after = {"gateway": "service_healthy"}
    if part.name == "gateway":
        after = {"postgres": "service_healthy"} if is_bundled else {}
    port = _PORTS.get(part.name)
    target = part.name if part.name != "trainer" else "trainer-cuda" if gpus else "trainer-cpu"
    return {
        "service": part.name,
        "target": target,
        "image": f"{needs.name}-{target}:local",
        "command": part.command,
        "health": list(part.health),
        "secrets": part.secrets,
        "ports": f"127.0.0.1:{port}:{port}" if port else "",
        "volume": "",
        "start_period": "60s",
        "after": after,
        "replicas": WORKERS if part.name == "worker" else 1,
        "gpus": gpus,
        **_RUNS[part.name],
    }


def env_example(needs: Needs, folder: str) -> str:
    """Return the example of ``.env``: every variable that needs a value, without values."""
    lines = [f"# Copy to {folder}/.env, which git and the images leave out, and give every variable a value."]
    for name, use in secrets_of(needs).items():
        lines += [f"# {use}", f"{name}="]
    return "\n".join([*lines, ""])
