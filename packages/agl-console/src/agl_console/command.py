"""``agl console``: looks at the runs of a store in a browser, or prints one view as JSON."""

import asyncio
import os
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import click
from aiohttp import web

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl.stores import TableStore
from agl.urls import shown_url
from agl_console.access import Access, admin_token_of
from agl_console.guard import checked_password
from agl_console.learning import LearningFilter, learning_view
from agl_console.pages import Pages
from agl_console.server import make_app
from agl_console.views import read_view
from agl_console.vocabulary import Vocabularies, Vocabulary
from agl_inspect.stores import as_url
from agl_inspect.terminal.opening import given_options, pass_manager, with_store
from agl_inspect.terminal.output import print_json

PASSWORD_ENV = "AGL_CONSOLE_PASSWORD"


class _Console(click.Group):
    """Accepts STORE or nothing before a subcommand, and options before and after STORE."""

    allow_interspersed_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse everything before the first word that names a subcommand as this command's own arguments."""
        place = next((index for index, word in enumerate(args) if word in self.commands), len(args))
        own, below = args[:place], args[place:]
        if not below:
            return super().parse_args(ctx, own)
        given, _, _ = self.make_parser(ctx).parse_args(list(own))
        store = [] if isinstance(given.get("store_url"), str) else [""]
        return super().parse_args(ctx, [*own, *store, "--", *below])


@click.group(cls=_Console, invoke_without_command=True)
@click.argument("store_url", metavar="[STORE]", required=False)
@click.option("--store", "named", metavar="URL", help="The same as STORE.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port; 0 takes any free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address; one that other machines reach needs a password.",
)
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Answer to this host name too; repeatable.")
@click.option("--open", "opens", is_flag=True, help="Open a browser.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="A model's tokenizer.json, or its folder: tokens are shown with their texts.",
)
@click.option(
    "--actions", "acts", is_flag=True, help="Let people with the admin token promote, cancel, rate and leave notes."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="With --actions: file with the admin token, made if missing.",
)
@click.option("--json", "address", metavar="ADDRESS", help="Print a view, such as /rollouts?status=failed.")
@pass_manager
@click.pass_context
def console(
    ctx: click.Context,
    manager: PluginManager,
    store_url: str | None,
    named: str | None,
    port: int,
    host: str,
    hosts: tuple[str, ...],
    opens: bool,
    tokenizer: Path | None,
    acts: bool,
    token_file: Path | None,
    address: str | None,
) -> None:
    """Look at the runs of STORE in a browser.

    STORE is a URL or a SQLite file; by default $AGL_STORE, or else the file runs/*.db if there is exactly one.

    The console only reads, unless --actions lets people who sign in with the admin token act; the token is $AGL_TOKEN,
    or else in --token-file. It answers only to this machine; with another --host it asks for the password in
    $AGL_CONSOLE_PASSWORD.
    """
    if store_url and named:
        raise click.UsageError(f"{store_url!r} and --store {named!r} name two stores; give one")
    store_url = store_url or named or os.environ.get("AGL_STORE")
    ctx.meta["store_url"] = store_url
    if ctx.invoked_subcommand is not None:
        _refuse_unused(ctx, used=("store_url", "named"), by=ctx.invoked_subcommand)
        return
    if address is not None:
        _refuse_unused(ctx, used=("store_url", "named", "tokenizer", "address"), by="--json")
    vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
    if address is not None:
        with_store(manager, store_url, lambda store: _print(store, address, Vocabularies(vocabulary)))
        return
    password = checked_password(host, os.environ.get(PASSWORD_ENV, ""))
    if token_file is not None and not acts:
        raise ConfigError("--token-file is the token for actions, which this console does not offer; add --actions")
    token, source = admin_token_of(token_file) if acts else ("", "")

    async def serve(store: Store) -> None:
        own = store.backend.shown_url if isinstance(store, TableStore) else shown_url(as_url(store_url or ""))
        app = make_app(
            store,
            name=own,
            hosts=(host, *hosts),
            password=password,
            vocabulary=vocabulary,
            access=Access(token) if acts else None,
            audit=_log,
        )

        def on_ready(address: str) -> None:
            if acts:
                click.echo(f"to act, sign in at {address}sign-in with the admin token in {source}")
            if opens:
                webbrowser.open(address)

        await _serve(app, host, port, on_ready=on_ready)

    with_store(manager, store_url, serve)


@console.command()
@click.argument("run")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write; by default RUN.html.")
@pass_manager
@click.pass_context
def export(ctx: click.Context, manager: PluginManager, run: str, output: Path | None) -> None:
    """Write the figures, numbers and settings of RUN as one HTML file.

    RUN is the name of an experiment. The file needs no other file.
    """
    path = output or Path(f"{run}.html")

    async def read(store: Store) -> str:
        return Pages("").export(await learning_view(store, run, LearningFilter(), rows=sys.maxsize), time.time())

    page = with_store(manager, ctx.meta["store_url"], read)
    try:
        path.write_bytes(page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; pass another --output") from error
    click.echo(f"{run} in {path}")


def _refuse_unused(ctx: click.Context, *, used: Collection[str], by: str) -> None:
    """Raise :class:`click.UsageError` if options were given that would have no effect."""
    given = [option for name, option in given_options(ctx).items() if name not in used]
    if given:
        raise click.UsageError(f"{by} starts no server and takes no {', '.join(given)}; leave that out")


def _log(line: str) -> None:
    """Write a line of the action log to standard error, with the time in UTC."""
    click.echo(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {line}", err=True)


async def _print(store: Store, address: str, vocabularies: Vocabularies) -> None:
    parts = urlsplit(address)
    print_json((await read_view(store, parts.path, parse_qs(parts.query), vocabularies)).data)


async def _serve(app: web.Application, host: str, port: int, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        address = await _bound(runner, host, port)
        click.echo(f"console at {address} (Ctrl-C ends it)")
        on_ready(address)
        await stopped.wait()
    finally:
        await runner.cleanup()


async def _bound(runner: web.AppRunner, host: str, port: int) -> str:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another --port, or 0 for any"
        ) from error
    found = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{found}/"
