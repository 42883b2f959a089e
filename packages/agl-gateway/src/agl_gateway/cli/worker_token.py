"""``agl worker-token``: make a token for the workers of one experiment."""

import asyncio
import os
import time
from pathlib import Path

import click

from agl.errors import ConfigError
from agl_gateway.access.worker_tokens import LONGEST_S
from agl_gateway.client import HttpStore
from agl_inspect.stores import as_url
from agl_inspect.terminal.query import seconds_of
from agl_run import signing_keys
from agl_run.access import AttemptTokens


@click.command("worker-token")
@click.argument("experiment")
@click.option(
    "--valid",
    "valid_s",
    type=seconds_of,
    default="30d",
    show_default=True,
    metavar="DURATION",
    help="Time after which the token expires.",
)
@click.option("--name", default="", help="Name of the token's holder in the audit log.")
@click.option(
    "--store", "url", metavar="URL", help="Gateway that signs, with the admin token; by default, this machine's key."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the token to this file, for this user only, instead of printing it; replaces an existing file.",
)
def worker_token(experiment: str, valid_s: float, name: str, url: str | None, output: Path | None) -> None:
    """Make a token that lets agl worker run the rollouts of the experiment named EXPERIMENT, and nothing else.

    Give it to workers in AGL_WORKER_TOKEN, or in a file that AGL_WORKER_TOKEN_FILE names, which is read again when it
    changes. It cannot be revoked before it expires, except with the key that signed it.
    """
    if not 0 < valid_s <= LONGEST_S:
        raise ConfigError(f"--valid is {valid_s:g} s; write a time above 0 and up to {LONGEST_S / 86_400:.0f}d")
    if url is None:
        tokens = AttemptTokens(signing_keys())
        _put(tokens.issue_for_worker(experiment, expires_at=time.time() + valid_s, name=name), output)
        return
    if not (served := as_url(url)).startswith(("http://", "https://")):
        raise ConfigError(f"--store {url!r} is not a gateway; write http://HOST:PORT, or leave it out to sign here")
    _put(asyncio.run(_asked(served, experiment, valid_s=valid_s, name=name)), output)


def _put(token: str, output: Path | None) -> None:
    """Print the token, or write it to ``output`` in one atomic replacement, so that no worker reads a partial token."""
    if output is None:
        click.echo(token)
        return
    draft = output.with_name(f"{output.name}.new")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{token}\n")
        draft.replace(output)
    except OSError as error:
        raise ConfigError(f"the token cannot be written to {output} ({error}); name another file") from error


async def _asked(url: str, experiment: str, *, valid_s: float, name: str) -> str:
    store = HttpStore(url)
    try:
        return await store.make_worker_token(experiment, valid_s=valid_s, name=name)
    finally:
        await store.close()
