"""``agl deploy``: writes files that deploy an experiment."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from agl import PluginManager
from agl.errors import ConfigError
from agl_deploy.chart import FOLDER, chart_files
from agl_deploy.compose import compose_files, env_example
from agl_deploy.images import image_files, wheel_command
from agl_deploy.needs import Needs, read_needs
from agl_deploy.parts import secrets_of
from agl_deploy.rayjob import rayjob_files
from agl_deploy.serving import serving_files
from agl_deploy.skypilot import skypilot_files
from agl_deploy.writing import State, states, write
from agl_inspect.terminal import pass_manager
from agl_inspect.text import visible

F = TypeVar("F", bound=Callable[..., Any])

_KINDS = ("compose", "kubernetes")

_PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*", re.ASCII)


def _options(function: F) -> F:
    """Add what every kind of files takes."""
    for option in reversed(
        [
            click.argument("file", metavar="EXPERIMENT", type=click.Path(path_type=Path)),
            click.option(
                "--output",
                type=click.Path(path_type=Path, file_okay=False),
                help="Folder to write to, inside the experiment's; by default deploy beside EXPERIMENT.",
            ),
            click.option("--force", is_flag=True, help="Replace files that were edited."),
            click.option("--dry-run", "is_dry", is_flag=True, help="Print the files, and write nothing."),
        ]
    ):
        function = option(function)
    return function


@click.group()
def deploy() -> None:
    """Write files that deploy an experiment, for a person to read and keep.

    Files that were edited are not overwritten.
    """


@deploy.command()
@_options
@pass_manager
def docker(manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool) -> None:
    """Write a Dockerfile with pinned requirements.

    Its targets are the gateway, worker, trainer and console of EXPERIMENT; what is pinned is what is installed here.
    """
    needs, folder, under = _read(manager, file, output)
    _put(folder, image_files(needs, under), force=force, is_dry=is_dry)
    build = ["docker", "build", "--file", f"{under}/Dockerfile", "--target", "gateway", "--tag"]
    steps = [*_steps_of_wheels(needs, under), shlex.join([*build, f"{needs.name}-gateway:local", "."])]
    _tell(needs, steps, is_dry=is_dry)


@deploy.command()
@_options
@click.option("--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="GPUs of the trainer.")
@pass_manager
def compose(manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool, gpus: int) -> None:
    """Write a compose file for one machine.

    It runs PostgreSQL, gateway, trainer, two workers and console of EXPERIMENT. What docker writes comes with it.
    """
    needs, folder, under = _read(manager, file, output)
    files = image_files(needs, under) | compose_files(needs, under, gpus=gpus)
    _put(folder, files, force=force, is_dry=is_dry)
    steps = _steps_of_wheels(needs, under)
    steps += [
        f"give {', '.join(secrets_of(needs))} values in {under}/.env, as {under}/env.example says",
        shlex.join(["docker", "compose", "--file", f"{under}/compose.yaml", "up", "--build"]),
    ]
    _tell(needs, steps, is_dry=is_dry)


@deploy.command()
@_options
@click.option("--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="GPUs of the trainer.")
@pass_manager
def helm(manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool, gpus: int) -> None:
    """Write a Helm chart for Kubernetes.

    It runs what compose runs, with autoscaling, network policies, alerts and a dashboard. What docker writes comes with
    it.
    """
    needs, folder, under = _read(manager, file, output)
    files = image_files(needs, under) | chart_files(needs, gpus=gpus) | {"env.example": env_example(needs, under)}
    _put(folder, files, force=force, is_dry=is_dry)
    trainer = "trainer-cuda" if gpus else "trainer-cpu"
    steps = _steps_of_wheels(needs, under)
    steps += [
        f"build and push gateway, worker, {trainer} and console, and name the registry in {under}/{FOLDER}/values.yaml",
        f"give {', '.join(secrets_of(needs))} values in {under}/.env, as {under}/env.example says",
        f"kubectl create secret generic {needs.name} --from-env-file {under}/.env",
        f"helm upgrade --install {needs.name} {under}/{FOLDER}",
    ]
    _tell(needs, steps, is_dry=is_dry)


@deploy.command()
@_options
@click.option("--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="GPUs of the head.")
@pass_manager
def ray(manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool, gpus: int) -> None:
    """Write a RayJob for Kubernetes with KubeRay.

    It runs EXPERIMENT on a Ray cluster of its own. What docker writes comes with it.
    """
    needs, folder, under = _read(manager, file, output)
    files = (
        rayjob_files(needs, under, gpus=gpus) | image_files(needs, under) | {"env.example": env_example(needs, under)}
    )
    _put(folder, files, force=force, is_dry=is_dry)
    steps = _steps_of_wheels(needs, under)
    steps += [
        f"build and push trainer-{'cuda' if gpus else 'cpu'}, and name its registry in {under}/rayjob.yaml",
        f"give {', '.join(secrets_of(needs))} values in {under}/.env, as {under}/env.example says",
        f"kubectl create secret generic {needs.name} --from-env-file {under}/.env",
        f"kubectl apply --filename {under}/rayjob.yaml",
    ]
    _tell(needs, steps, is_dry=is_dry)


@deploy.command()
@_options
@click.option("--gpus", type=click.IntRange(min=0), default=0, show_default=True, help="GPUs of the machine.")
@pass_manager
def skypilot(manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool, gpus: int) -> None:
    """Write a SkyPilot file for one machine of a cloud.

    The machine runs EXPERIMENT as agl run does, with its agents and, unless its file names a database, its store.
    """
    needs, folder, under = _read(manager, file, output)
    _put(folder, skypilot_files(needs, under, gpus=gpus), force=force, is_dry=is_dry)
    steps = _steps_of_wheels(needs, under)
    steps += [
        f"give the secrets of {under}/sky.yaml values in {under}/.env",
        f"sky launch --cluster {needs.name} --secret-file {under}/.env {under}/sky.yaml",
    ]
    _tell(needs, steps, is_dry=is_dry)


@deploy.command()
@_options
@click.argument("label", metavar="NAME@LABEL")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs of the server.")
@pass_manager
def model(
    manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool, label: str, gpus: int
) -> None:
    """Write what serves a labelled version with vLLM.

    NAME is a policy of EXPERIMENT. The files stand beside a deployment; moving the label promotes and rolls back.
    """
    needs, folder, under = _read(manager, file, output)
    files = serving_files(needs, label, under, gpus=gpus)
    _put(folder, files, force=force, is_dry=is_dry)
    compose, kubernetes = (next(path for path in files if path.endswith(f".{kind}.yaml")) for kind in _KINDS)
    name = compose.removeprefix("model-").removesuffix(".compose.yaml")
    both = ["--file", f"{under}/compose.yaml", "--file", f"{under}/{compose}"]
    _tell(
        needs,
        [
            shlex.join(["docker", "compose", *both, "up", "--detach", "--force-recreate", f"{name}-weights", name]),
            f"or, on Kubernetes: kubectl apply --filename {under}/{kubernetes}",
        ],
        is_dry=is_dry,
    )


def _read(manager: PluginManager, file: Path, output: Path | None) -> tuple[Needs, Path, str]:
    """Return what the experiment needs, the folder to write to, and its path from the experiment's folder."""
    needs = read_needs(file, manager)
    base = needs.file.parent
    folder = output.absolute() if output else base / "deploy"
    under = Path(os.path.relpath(folder, base)).as_posix()
    if not (_PLAIN.fullmatch(under) and folder.resolve().is_relative_to(base.resolve())):
        raise ConfigError(
            f"--output {str(folder)!r} is no folder inside of {str(base)!r}, or has other characters than letters, "
            "digits, '.', '_' and '-'; images are built from the experiment's folder, so choose one there"
        )
    return needs, folder, under


def _put(folder: Path, files: dict[str, str], *, force: bool, is_dry: bool) -> None:
    """Write the files, or print them."""
    if is_dry:
        for path, state in states(folder, files).items():
            click.echo(f"==> {visible(str(folder / path))} ({state}) <==\n{files[path]}")
        return
    for state, paths in _by_state(write(folder, files, force=force)).items():
        click.echo(f"{state}: {', '.join(paths)}")
    click.echo(f"in {visible(str(folder))}")


def _by_state(found: dict[str, State]) -> dict[str, list[str]]:
    words: dict[State, str] = {"new": "written", "changed": "replaced", "edited": "replaced", "same": "as it was"}
    result: dict[str, list[str]] = {}
    for path, state in found.items():
        result.setdefault(words[state], []).append(path)
    return result


def _steps_of_wheels(needs: Needs, under: str) -> list[str]:
    """Return the command that builds wheels, where some are needed."""
    wheels = wheel_command(needs, under)
    return [shlex.join(wheels)] if wheels else []


def _tell(needs: Needs, steps: list[str], *, is_dry: bool) -> None:
    """Print warnings and the next steps; beside files that are printed, to standard error."""
    for text in needs.warnings:
        click.echo(f"warning: {visible(text)}", err=True)
    click.echo(f"next, in {visible(str(needs.file.parent))}:", err=is_dry)
    for step in steps:
        click.echo(f"  {visible(step)}", err=is_dry)
