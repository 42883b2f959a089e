"""Writes the files that images are built from: Dockerfile, requirements, the health check."""

import sys
from collections.abc import Iterable

from agl_deploy.needs import PARTS, Needs
from agl_deploy.parts import CONSOLE_PORT, GATEWAY_PORT, HEALTH, TRAINER_PORT, parts_of
from agl_deploy.rendering import fill, template


def image_files(needs: Needs, folder: str) -> dict[str, str]:
    """Return the files by path.

    Args:
        needs: What the experiment needs.
        folder: Where they go, relative to the experiment's folder.
    """
    dockerfile = fill(
        "Dockerfile",
        folder=folder,
        name=needs.name,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        health=HEALTH,
        parts=parts_of(needs),
        gateway_port=GATEWAY_PORT,
        trainer_port=TRAINER_PORT,
        console_port=CONSOLE_PORT,
    )
    return {
        "Dockerfile": dockerfile,
        "Dockerfile.dockerignore": template("Dockerfile.dockerignore"),
        "health.py": template("health.py"),
        **requirement_files(needs, parts=PARTS),
    }


def requirement_files(needs: Needs, *, parts: Iterable[str]) -> dict[str, str]:
    """Return the requirements of parts by path, with the folder for wheels, which git leaves out like secrets."""
    return {
        **{f"requirements/{part}.txt": _requirements(needs, part) for part in parts},
        "wheels/.gitkeep": "",
        ".gitignore": ".env\nwheels/*\n!wheels/.gitkeep\n",
    }


def wheel_command(needs: Needs, folder: str) -> list[str]:
    """Return the command that builds the wheels that no index has; empty where there are none."""
    if not needs.sources:
        return []
    return ["python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", f"{folder}/wheels", *needs.sources]


def _requirements(needs: Needs, part: str) -> str:
    lines = [pin.line + ("  # a wheel in the folder wheels" if pin.source else "") for pin in needs.pins[part]]
    return "\n".join([f"# What was installed when agl deploy wrote this, for the {part}.", *lines, ""])
