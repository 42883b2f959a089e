"""``agl worker-token``: make a token for the workers of one experiment."""

import asyncio
import time

import click

from agl.errors import ConfigError
from agl_gateway.client import HttpStore
from agl_gateway.tokens_api import LONGEST_S
from agl_run import signing_keys
from agl_run.commands import as_url, seconds_of
from agl_run.tokens import AttemptTokens


@click.command("worker-token")
@click.argument("experiment")
@click.option(
    "--valid",
    "valid_s",
    type=seconds_of,
    default="30d",
    show_default=True,
    metavar="DURATION",
    help="Time after which it is refused.",
)
@click.option("--name", default="", help="Whom it is for, as the audit log shows it.")
@click.option(
    "--store", "url", metavar="URL", help="A gateway to ask with the admin token; by default this machine's key signs."
)
def worker_token(experiment: str, valid_s: float, name: str, url: str | None) -> None:
    """Make a token with which agl worker runs the rollouts of EXPERIMENT, a name, and reaches nothing else.

    It is printed, and kept nowhere. Give it to workers in AGL_WORKER_TOKEN, or in a file that AGL_WORKER_TOKEN_FILE
    names, which is read again when it changes. It cannot be revoked before it expires, except with the key that signed
    it.
    """
    if not 0 < valid_s <= LONGEST_S:
        raise ConfigError(f"--valid is {valid_s:g} s; write a time above 0 and up to {LONGEST_S / 86_400:.0f}d")
    if url is None:
        tokens = AttemptTokens(signing_keys())
        click.echo(tokens.issue_for_worker(experiment, expires_at=time.time() + valid_s, name=name))
        return
    if not (served := as_url(url)).startswith(("http://", "https://")):
        raise ConfigError(f"--store {url!r} is no gateway; write http://HOST:PORT, or leave it away to sign here")
    click.echo(asyncio.run(_asked(served, experiment, valid_s=valid_s, name=name)))


async def _asked(url: str, experiment: str, *, valid_s: float, name: str) -> str:
    store = HttpStore(url)
    try:
        return await store.make_worker_token(experiment, valid_s=valid_s, name=name)
    finally:
        await store.close()
