"""``agl tinker serve``: a subset of Tinker's API on this machine."""

import os
import secrets
from pathlib import Path
from typing import Any

import click

from agl.errors import ConfigError
from agl.hints import pip_install

_ENV = "TINKER_API_KEY"
_PREFIX = "tml-"
"""Prefix of the only keys that the published client sends."""

_MIN_KEY = 16


@click.group()
def tinker() -> None:
    """Work with Tinker's API."""


@tinker.command()
@click.argument("model")
@click.option("--name", default="", help="Name by which clients know the model; by default MODEL.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4748,
    show_default=True,
    help="Port to listen on; 0 takes any free one.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("tinker-checkpoints"),
    show_default=True,
    help="Where weights and states are saved.",
)
@click.option(
    "--key-file", type=click.Path(path_type=Path), help="File with the API key; written if it does not exist."
)
@click.option("--device", default="cpu", show_default=True, help="Device of the model: auto, cpu, cuda ...")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Number type of the base model.",
)
@click.option("--threads", type=click.IntRange(min=0), default=0, help="CPU threads of torch; 0 lets torch choose.")
@click.option(
    "--token-budget",
    type=click.IntRange(min=1),
    default=16_384,
    show_default=True,
    help="Tokens that one forward pass of training may compute.",
)
@click.option(
    "--models",
    "most_models",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Models that may be in training at once.",
)
@click.option(
    "--samplers",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Sets of weights that stay ready for sampling.",
)
@click.option(
    "--max-mb", type=click.IntRange(min=1), default=64, show_default=True, help="Size of the largest request, in MiB."
)
def serve(key_file: Path | None, **settings: Any) -> None:
    """Serve MODEL, a folder or a hub name, to clients of Tinker's API.

    Example: agl tinker serve ./tiny --key-file key.txt

    Clients need TINKER_BASE_URL and TINKER_API_KEY. The key is that of the environment variable TINKER_API_KEY here,
    or of the file.
    """
    key, source = key_of(key_file)
    try:
        from agl_tinker.server.running import ServeSettings, run_server
    except ImportError as error:
        raise ConfigError(
            f"agl tinker serve needs the server's packages, and {error.name} is not installed. "
            f"Run: {pip_install('agl-tinker[server]')}"
        ) from error
    try:
        run_server(ServeSettings(**settings), key=key, source=source, say=click.echo)
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


def key_of(path: Path | None) -> tuple[str, str]:
    """Return the API key and a description of its source: the environment, or a file that only this user can read.

    Raises:
        ConfigError: No key is set and no file is given, the file cannot be created or read, or the key lacks the
            required form.
    """
    if path is None:
        key, source = os.environ.get(_ENV, ""), f"the environment variable {_ENV}"
        if not key:
            raise ConfigError(
                f"the server asks its clients for a key: set {_ENV}, or give --key-file FILE, where one is written if "
                "the file is not there"
            )
    else:
        source = f"the file {path}"
        try:
            key = _read_or_make(path)
        except OSError as error:
            raise ConfigError(f"the key's file {path} cannot be made or read ({error}); choose another") from error
    if not key.startswith(_PREFIX) or len(key) < _MIN_KEY:
        raise ConfigError(
            f"the key of {source} is not a key of Tinker's API, which begins with {_PREFIX!r} and has at least "
            f"{_MIN_KEY} characters"
        )
    return key, source


def _read_or_make(path: Path) -> str:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{_PREFIX}{secrets.token_urlsafe(32)}\n")
    return path.read_text(encoding="utf-8").strip()
