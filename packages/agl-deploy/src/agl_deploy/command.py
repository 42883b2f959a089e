"""``agl deploy``: writes files that deploy an experiment."""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from agl import PluginManager
from agl.errors import ConfigError
from agl_deploy.files import (
    CHART,
    chart_files,
    compose_files,
    env_example,
    image_files,
    rayjob_files,
    serving_files,
    skypilot_files,
    trainer_image,
    wheel_command,
)
from agl_deploy.needs import Needs, read_needs
from agl_deploy.parts import secrets_of
from agl_deploy.writing import State, states, write
from agl_inspect.terminal.opening import pass_manager
from agl_inspect.text import visible

_WORDS: dict[State, str] = {"new": "written", "changed": "replaced", "edited": "replaced", "same": "as it was"}
_PLAIN = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*", re.ASCII)

Made = tuple[dict[str, str], list[str]]
"""The files that a subcommand generates, as contents by path, and the steps that deploy them."""


@click.group()
def deploy() -> None:
    """Write files that deploy an experiment, to read and to keep.

    Files that were edited are not overwritten.
    """


def _kind(*own: Callable[[Any], Any]) -> Callable[[Callable[..., Made]], click.Command]:
    """Make a decorator that turns a function into a subcommand.

    The function returns files and steps, and its docstring is the help text. ``own`` are options of the subcommand,
    in addition to the common ones.
    """
    common = (
        click.argument("file", metavar="EXPERIMENT", type=click.Path(path_type=Path)),
        click.option(
            "--output",
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder to write to, within that of EXPERIMENT.  [deploy]",
        ),
        click.option("--force", is_flag=True, help="Replace files that were edited."),
        click.option("--dry-run", "is_dry", is_flag=True, help="Print the files, and write nothing."),
    )

    def command(make: Callable[..., Made]) -> click.Command:
        def run(
            manager: PluginManager, file: Path, output: Path | None, force: bool, is_dry: bool, **options: Any
        ) -> None:
            needs, folder, under = _read(manager, file, output)
            files, steps = make(needs, under, **options)
            _put(folder, files, force=force, is_dry=is_dry)
            _print_steps(needs, steps, is_dry=is_dry)

        found = pass_manager(run)
        for option in reversed([*common, *own]):
            found = option(found)
        return deploy.command(make.__name__, help=make.__doc__)(found)

    return command


def _gpus(of: str, *, at_least: int = 0) -> Callable[[Any], Any]:
    kind = click.IntRange(min=at_least)
    return click.option("--gpus", type=kind, default=at_least, show_default=True, help=f"GPUs of the {of}.")


@_kind()
def docker(needs: Needs, under: str) -> Made:
    """Write a Dockerfile with pinned requirements.

    Its targets are the gateway, worker, trainer and console of EXPERIMENT, with the releases that are installed
    here.
    """
    build = ["docker", "build", "--file", f"{under}/Dockerfile", "--target", "gateway", "--tag"]
    return image_files(needs, under), [*_wheels(needs, under), shlex.join([*build, f"{needs.name}-gateway:local", "."])]


@_kind(_gpus("trainer"))
def compose(needs: Needs, under: str, *, gpus: int) -> Made:
    """Write a compose file for one machine.

    It runs PostgreSQL, gateway, trainer, two workers and console of EXPERIMENT. What docker writes comes with it.
    """
    up = shlex.join(["docker", "compose", "--file", f"{under}/compose.yaml", "up", "--build"])
    files = image_files(needs, under) | compose_files(needs, under, gpus=gpus)
    return files, [*_wheels(needs, under), _secrets(needs, under), up]


@_kind(_gpus("trainer"))
def helm(needs: Needs, under: str, *, gpus: int) -> Made:
    """Write a Helm chart for Kubernetes.

    It runs what compose runs, with autoscaling, network policies, alerts and a dashboard. What docker writes comes with
    it.
    """
    images = f"gateway, worker, {trainer_image(gpus)} and console, and name the registry in {under}/{CHART}/values.yaml"
    install = f"helm upgrade --install {needs.name} {under}/{CHART}"
    return _on_kubernetes(needs, under, chart_files(needs, gpus=gpus), images, install)


@_kind(_gpus("head"))
def ray(needs: Needs, under: str, *, gpus: int) -> Made:
    """Write a RayJob for Kubernetes with KubeRay.

    It runs EXPERIMENT on a Ray cluster of its own. What docker writes comes with it.
    """
    images = f"{trainer_image(gpus)}, and name its registry in {under}/rayjob.yaml"
    install = f"kubectl apply --filename {under}/rayjob.yaml"
    return _on_kubernetes(needs, under, rayjob_files(needs, under, gpus=gpus), images, install)


@_kind(_gpus("machine"))
def skypilot(needs: Needs, under: str, *, gpus: int) -> Made:
    """Write a SkyPilot file for one machine of a cloud.

    The machine runs EXPERIMENT as agl run does, with its agents and, unless its file names a database, its store.
    """
    launch = f"sky launch --cluster {needs.name} --secret-file {under}/.env {under}/sky.yaml"
    secrets = f"give the secrets of {under}/sky.yaml values in {under}/.env"
    return skypilot_files(needs, under, gpus=gpus), [*_wheels(needs, under), secrets, launch]


@_kind(click.argument("label", metavar="NAME@LABEL"), _gpus("server", at_least=1))
def model(needs: Needs, under: str, *, label: str, gpus: int) -> Made:
    """Write the files that serve a labelled version with vLLM.

    NAME is a policy of EXPERIMENT. The files belong to a deployment; moving the label promotes and rolls back.
    """
    files = serving_files(needs, label, under, gpus=gpus)
    compose, kubernetes = (
        next(path for path in files if path.endswith(f".{end}.yaml")) for end in ("compose", "kubernetes")
    )
    name = compose.removeprefix("model-").removesuffix(".compose.yaml")
    both = ["--file", f"{under}/compose.yaml", "--file", f"{under}/{compose}"]
    up = shlex.join(["docker", "compose", *both, "up", "--detach", "--force-recreate", f"{name}-weights", name])
    return files, [up, f"or, on Kubernetes: kubectl apply --filename {under}/{kubernetes}"]


def _on_kubernetes(needs: Needs, under: str, files: dict[str, str], images: str, install: str) -> Made:
    """Return ``files`` with the images' files and ``env.example``, and the steps; ``install`` is the last step."""
    secret = f"kubectl create secret generic {needs.name} --from-env-file {under}/.env"
    steps = [*_wheels(needs, under), f"build and push {images}", _secrets(needs, under), secret, install]
    return files | image_files(needs, under) | {"env.example": env_example(needs, under)}, steps


def _wheels(needs: Needs, under: str) -> list[str]:
    """Return the step that builds wheels; empty if none are needed."""
    wheels = wheel_command(needs, under)
    return [shlex.join(wheels)] if wheels else []


def _secrets(needs: Needs, under: str) -> str:
    return f"give {', '.join(secrets_of(needs))} values in {under}/.env, as {under}/env.example says"


def _read(manager: PluginManager, file: Path, output: Path | None) -> tuple[Needs, Path, str]:
    """Return the experiment's needs, the folder to write to, and that folder relative to the experiment's folder."""
    needs = read_needs(file, manager)
    base = needs.file.parent
    folder = output.absolute() if output else base / "deploy"
    under = Path(os.path.relpath(folder, base)).as_posix()
    if not (_PLAIN.fullmatch(under) and folder.resolve().is_relative_to(base.resolve())):
        raise ConfigError(
            f"--output {str(folder)!r} is not a folder within {str(base)!r}, or has other characters than letters, "
            "digits, '.', '_' and '-'; images are built from the experiment's folder, so choose one there"
        )
    return needs, folder, under


def _put(folder: Path, files: dict[str, str], *, force: bool, is_dry: bool) -> None:
    """Write the files and print their states; in a dry run, print the files instead."""
    if is_dry:
        for path, state in states(folder, files).items():
            click.echo(f"==> {visible(str(folder / path))} ({state}) <==\n{files[path]}")
        return
    found = write(folder, files, force=force)
    for word in dict.fromkeys(_WORDS[state] for state in found.values()):
        click.echo(f"{word}: {', '.join(path for path, state in found.items() if _WORDS[state] == word)}")
    click.echo(f"in {visible(str(folder))}")


def _print_steps(needs: Needs, steps: list[str], *, is_dry: bool) -> None:
    """Print the warnings to standard error, and the next steps to standard output (in a dry run, to standard error)."""
    for text in needs.warnings:
        click.echo(f"warning: {visible(text)}", err=True)
    click.echo(f"next, in {visible(str(needs.file.parent))}:", err=is_dry)
    for step in steps:
        click.echo(f"  {visible(step)}", err=is_dry)
