"""``agl serve``: a store and a gateway for other processes and machines."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from agl.contracts import Store, Upstream
from agl.errors import ConfigError, StoreError
from agl.hints import did_you_mean
from agl.urls import base_url_of, shown_url
from agl_gateway.access.certificate import certificate_of
from agl_gateway.access.worker_tokens import ADMIN_ENV, named_keys
from agl_gateway.processes.supervisor import Place, Supervisor, listening, refusal
from agl_gateway.record.redaction import redaction_of
from agl_gateway.record.spool_file import OFF, default_folder, left_text, spools_for
from agl_gateway.service import BACKLOG, GatewayService, bind_error
from agl_gateway.settings import Settings, Share, descriptions
from agl_gateway.traffic.splits import parse_split
from agl_inspect.keys import KeyFile, Keys, state_dir
from agl_inspect.records.splits import ServedSplit
from agl_inspect.retention import RetentionLimits, retaining
from agl_inspect.stores import as_url, build_store, command
from agl_inspect.terminal.opening import manager_of
from agl_inspect.terminal.query import seconds_of
from agl_run import settle_heap, signing_keys
from agl_run.access import AttemptTokens

F = TypeVar("F", bound=Callable[..., Any])

_CLIENT_ENV = "AGL_CLIENT_TOKEN"
_WAKE_S = 0.2
_OPEN_PAUSES = 5
_SAY_S = 30.0
_DEFAULTS = {**asdict(Settings()), **asdict(Share())}
_DESCRIPTIONS = descriptions()
_UPSTREAM_KEYS = {"model", "key_env", "aliases", "trained", "version"}
_TRUTHS = {**dict.fromkeys(("1", "true", "yes"), True), **dict.fromkeys(("0", "false", "no"), False)}


def _setting(flag: str, name: str = "", **given: Any) -> Callable[[F], F]:
    """Return the command-line option of a gateway setting, with the setting's own default and description."""
    name = name or flag.removeprefix("--").replace("-", "_")
    default = given.pop("default", _DEFAULTS[name])
    is_shown = default not in ("", (), None, False, 0)
    return click.option(flag, name, default=default, show_default=is_shown, help=_DESCRIPTIONS[name], **given)


@click.command()
@click.option("--store", "url", required=True, help="The store's URL, or a SQLite file such as runs.db.")
@_setting("--host")
@_setting("--port", default=4747)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of processes that serve the port; a process that ends is restarted.",
)
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    metavar="NAME=URL[,model=M][,key_env=VAR][,aliases=A|B][,trained=1][,version=V]",
    help="A model API to relay calls to; repeatable.",
)
@click.option(
    "--split",
    "split_text",
    metavar="LABEL=SHARE,LABEL=SHARE",
    help="Give each label's versions to this share of rollouts and conversations. Name the baseline first.",
)
@_setting("--conversation-idle", "conversation_idle_s", type=seconds_of, default="30m", metavar="DURATION")
@_setting("--base-rate", type=click.FloatRange(0, 1), metavar="SHARE")
@_setting("--reward-threshold", type=float, metavar="REWARD")
@_setting("--reward-wait", "reward_wait_s", type=seconds_of, default="1h", metavar="DURATION")
@_setting("--max-spans-per-minute", type=click.IntRange(min=0), metavar="N")
@click.option("--token-file", type=click.Path(path_type=Path), help="File to write the admin token to.")
@_setting("--spool", metavar="FOLDER|off")
@_setting("--advertise", metavar="HOST")
@_setting("--tls-cert", type=click.Path())
@_setting("--tls-key", type=click.Path())
@_setting("--redact", metavar="NAME")
@_setting("--audit-log", type=click.Path(dir_okay=False))
@_setting("--timeout", "timeout_s")
@_setting("--max-answer", metavar="BYTES")
@_setting("--max-calls")
@_setting("--max-spans")
@_setting("--protect-status", "is_status_protected", is_flag=True)
@_setting("--allow-host", "known_hosts", multiple=True, metavar="NAME")
@_setting("--helper-match", metavar="REGEX")
@_setting("--native-api", "native_apis", multiple=True, type=click.Choice(["messages", "responses"]))
@_setting("--fetch-media", "fetch_media", multiple=True, metavar="HOST")
@click.option(
    "--older-than",
    type=seconds_of,
    metavar="DURATION",
    help="At the start and every hour, remove rollouts that finished longer ago than this, such as 30d.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    help="Always keep this many of the newest finished rollouts. Without --older-than, all others are removed.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    url: str,
    workers: int,
    upstreams: tuple[str, ...],
    split_text: str | None,
    token_file: Path | None,
    older_than: float | None,
    keep: int | None,
    **settings: Any,
) -> None:
    """Serve a store and a gateway to other processes."""
    share = Share(**{one.name: settings.pop(one.name) for one in fields(Share)})
    found = Settings(is_shared=True, share=share, **settings)
    if found.conversation_idle_s <= 0:
        raise ConfigError("--conversation-idle must be above 0; write 30m, 2h or 1d")
    manager, url = manager_of(ctx), as_url(url)
    parsed = [parse_upstream(text) for text in upstreams]
    split = parse_split(split_text) if split_text else None
    admin_key, source = admin_key_of(token_file)
    tokens = AttemptTokens(signing_keys())
    certificate = certificate_of(found)
    redaction = redaction_of(found.redact, manager)
    retention = RetentionLimits.of(older_than, keep)

    async def run(place: Place | None = None) -> None:
        store = build_store(manager, url)
        folder = found.spool
        if place is not None:
            folder = folder or str(default_folder())
        elif not parsed and not folder:
            folder = OFF  # a gateway without upstreams records no calls
        stopping = _stopping(place)
        if not await wait_for_store(store, shown_url(url), stopping):
            await store.close()
            return
        taken = () if place is None else place.group.taken
        spools = await spools_for(store, folder, shown=shown_url(url), without=taken)
        if place is not None:
            place.report(spools=[str(file.path) for file in spools])
        service = GatewayService(
            store=store,
            upstreams=parsed,
            tokens=tokens,
            settings=found,
            admin_key=admin_key,
            client_key=client_key_of(),
            arms=True,
            split=split,
            certificate=certificate,
            redaction=redaction,
            spools=spools,
            group=None if place is None else place.group,
            listener=None if place is None else place.listener,
        )
        is_first = place is None or place.group.number == 0
        await _serve(
            service,
            partial(_banner, service, store_url=url, token_source=source, split=split),
            retention=retention if is_first else None,
            place=place,
            stopping=stopping,
        )

    if workers > 1:
        ctx.exit(_supervised(run, workers, found, url))
    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


def _supervised(run: Callable[[Place], Coroutine[Any, Any, None]], workers: int, found: Settings, url: str) -> int:
    """Serve with several processes until a signal arrives; returns the exit status."""
    reasons = refusal(url, spool=found.spool, max_spans_per_minute=found.share.max_spans_per_minute)
    if reasons:
        raise ConfigError(f"--workers {workers} is refused: {'; '.join(reasons)}")
    try:
        listener = listening(found.host, found.port, backlog=BACKLOG)
    except OSError as error:
        raise bind_error(found.host, found.port, error) from error
    return Supervisor(count=workers, listener=listener, serve=run, say=click.echo, run_async=asyncio.run).run()


def _stopping(place: Place | None) -> asyncio.Event:
    """Return an event that a signal sets, or, with several gateway processes, the end of the parent process."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stopping.set)
        except NotImplementedError:  # on Windows
            signal.signal(number, lambda _number, _frame: stopping.set())
    if place is not None:
        loop.add_reader(place.parent, stopping.set)
    return stopping


async def wait_for_store(store: Store, shown: str, stopping: asyncio.Event) -> bool:
    """Wait until the store answers, and return true; return false if ``stopping`` is set first.

    While the store does not answer, a message says so twice a minute.
    """
    said_at = float("-inf")
    while not stopping.is_set():
        try:
            await store.cursor()
        except StoreError as error:
            if time.monotonic() - said_at > _SAY_S:
                said_at = time.monotonic()
                click.echo(f"the store {shown} does not answer; the gateway starts once it does: {error}", err=True)
            for _ in range(_OPEN_PAUSES):
                await _wait(stopping)
        else:
            return True
    return False


def parse_upstream(text: str) -> Upstream:
    """Parse an upstream from ``NAME=URL,key=value,...``; raises :class:`ConfigError`."""
    head, *rest = text.split(",")
    name, is_pair, base_url = head.partition("=")
    if not (name and is_pair and base_url):
        raise ConfigError(f"--upstream {text!r} is not NAME=URL; write --upstream main_llm=http://127.0.0.1:8000/v1")
    given: dict[str, str] = {}
    for key, _, value in (part.partition("=") for part in rest):
        if key in given:
            raise ConfigError(f"--upstream {text!r} has {key!r} twice; leave one away")
        given[key] = value
    unknown = sorted(given.keys() - _UPSTREAM_KEYS)
    if unknown:
        hint = did_you_mean(unknown[0], _UPSTREAM_KEYS, otherwise=f"known are {sorted(_UPSTREAM_KEYS)}")
        raise ConfigError(f"--upstream {text!r} has unknown settings {unknown}; {hint}")
    is_trained = _TRUTHS.get(given.get("trained", "no").lower())
    if is_trained is None:
        raise ConfigError(f"--upstream {text!r} has trained={given['trained']}; write trained=1, or leave it away")
    return Upstream(
        name=name,
        base_url=base_url_of(base_url, who=f"--upstream {name}:"),
        model=given.get("model", ""),
        api_key_env=given.get("key_env", ""),
        aliases=tuple(alias for alias in given.get("aliases", "").split("|") if alias),
        is_trained=is_trained,
        model_version=given.get("version", ""),
    )


def admin_key_of(token_file: Path | None) -> tuple[Keys, str]:
    """Return the admin token and the name of its source.

    The token comes from the environment, or from a file that only this user can read. A missing file is created. An
    existing file is not changed, so clients survive a restart. A file may hold several tokens, one per line, and is
    read again when it changes.
    """
    if os.environ.get(ADMIN_ENV) and (keys := named_keys(ADMIN_ENV, purpose="admin token")):
        return keys, f"the environment variable {ADMIN_ENV}"
    named = os.environ.get(f"{ADMIN_ENV}_FILE", "")
    path = token_file or (Path(named) if named else state_dir() / "serve-token")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"agl_admin_{secrets.token_urlsafe(32)}\n")
        return KeyFile(path, purpose="admin token"), str(path)
    except OSError as error:
        raise ConfigError(
            f"the admin token's file {path} cannot be made or read ({error}); choose another with --token-file, "
            f"or set {ADMIN_ENV}"
        ) from error


def client_key_of() -> str | Keys:
    """Return the keys of conversation clients, from ``AGL_CLIENT_TOKEN`` or its file; ``""`` if neither is set."""
    return named_keys(_CLIENT_ENV, purpose="client token") or ""


async def _serve(
    service: GatewayService,
    banner: Callable[[], list[str]],
    *,
    retention: RetentionLimits | None,
    place: Place | None,
    stopping: asyncio.Event,
) -> None:
    """Serve until ``stopping`` is set, then write all remaining records to the store."""
    try:
        await service.start()
        lines = banner()
        if place is not None:
            place.report(lines=lines)
        else:
            click.echo("\n".join(lines))
        settle_heap()
        async with retaining(service.store, retention, say=click.echo):
            while not stopping.is_set():
                await _wait(stopping)
    finally:
        left = await service.stop()
        await service.store.close()
    last = left_text(left, service.spool_path) if left else "everything recorded is in the store"
    who = "" if place is None else f"process {place.group.number} "
    click.echo(f"{who}stopped: {last}", err=True)


async def _wait(stopping: asyncio.Event) -> None:
    """Wait for the event, but at most one short interval: Windows delivers signals only between wake-ups."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_WAKE_S):
            await stopping.wait()


def _banner(service: GatewayService, *, store_url: str, token_source: str, split: ServedSplit | None) -> list[str]:
    url = service.advertised
    policies = ", ".join(service.router.targets) or "none; add one with --upstream NAME=URL"
    lines = [
        f"serving {shown_url(store_url)} at {url}",
        f"  admin token  in {token_source}",
        f'  runners      AGL_TOKEN=<admin token>, store = "{url}"',
        f"  agents       OPENAI_BASE_URL={url}/v1, OPENAI_API_KEY=<the attempt's token>",
        f"  policies     {policies}",
        f"  spool        {service.spool_path or 'none; the store takes every call at once'}",
        f"  API          {url}/openapi.json, {url}/metrics, {url}/healthz, {url}/v1/traces (OTLP)",
    ]
    if split is not None:
        shares = ", ".join(f"{label} {share:g}" for label, share in split.shares.items())
        report = command("resources", "split", *split.shares, store_url=store_url)
        lines.append(f"  split        {shares}; the report is {url}/split, or: {report}")
    if service.ignored is not None:
        lines.append("  ignored      the split of `agl learn`, because of --split; its candidates get no traffic here")
    if service.has_conversations:
        key = f"<{_CLIENT_ENV}, or the admin token>"
        lines.append(f"  clients      OPENAI_BASE_URL={url}/v1, OPENAI_API_KEY={key}")
    return [*lines, "stop with Ctrl-C"]
