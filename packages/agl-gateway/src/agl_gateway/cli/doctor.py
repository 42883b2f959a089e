"""``agl doctor``: examines a deployment end to end, names faults and says how to repair them.

Every check is made on the running system: it asks the gateway with the token that a worker would send, writes to the
store and reads the value back, and compares clocks by the answers. It leaves nothing behind.
"""

import asyncio
import os
import socket
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal, cast
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import getproxies_environment

import aiohttp
import click

from agl import PluginManager
from agl.contracts import Presence, Store
from agl.errors import AglError, ConfigError, StoreError
from agl.hints import count_of
from agl.schemas import Record, new_trace_id
from agl.urls import base_url_of, shown_url
from agl_gateway.access.worker_tokens import ADMIN_ENV, named_keys
from agl_gateway.processes.announcement import GATEWAYS, gateways_of
from agl_gateway.record.spool_file import SpoolReport, default_folder, spools_in
from agl_gateway.relay.routing import exemption, proxy_for
from agl_inspect.keys import state_dir
from agl_inspect.stores import SQLITE, as_url, build_store
from agl_inspect.terminal.opening import pass_manager, resolve_url, with_store
from agl_inspect.terminal.output import json_option, print_json
from agl_inspect.text import visible
from agl_run import (
    SECRET_ENV,
    SECRET_FILE_ENV,
    WORKER_TOKEN_ENV,
    WORKER_TOKEN_FILE_ENV,
    ExperimentConfig,
    client_context,
    is_loopback,
    is_secret_given,
    load_config,
    refusal_of,
    signing_keys,
    worker_key,
)
from agl_run.access import AdminKey

State = Literal["ok", "warning", "wrong"]

_WORKERS = (WORKER_TOKEN_ENV, WORKER_TOKEN_FILE_ENV)

_CLOCK_S = 5.0
"""Seconds by which clocks may differ; leases and tokens last at least a minute."""

_SLOW_S = 1.0
_READ_S = 30.0
_TIMEOUT_S = 10.0
_MIN_FREE, _WARN_FREE = 64 << 20, 1 << 30
_UNREACHABLE = "start it, or correct the address; look at firewalls between this machine and it"
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Maps the address of a server that listens on all addresses to the loopback address to connect to."""

_GUESSED = ("secret", "password", "changeme", "change-me", "default", "example", "test", "your-own", "xxxx")


class Finding(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of one check.

    Attributes:
        check: The name of the check, such as ``clock of the store``.
        text: The finding.
        advice: The next step of the user; ``""`` if there is nothing to do.
    """

    check: str
    state: State
    text: str
    advice: str = ""


def _ok(check: str, text: str) -> Finding:
    return Finding(check=check, state="ok", text=text)


def _warning(check: str, text: str, advice: str = "") -> Finding:
    return Finding(check=check, state="warning", text=text, advice=advice)


def _wrong(check: str, text: str, advice: str = "") -> Finding:
    return Finding(check=check, state="wrong", text=text, advice=advice)


def _judged(check: str, is_ok: bool, text: str, advice: str = "", *, otherwise: State = "wrong") -> Finding:
    """Return an ``ok`` finding if ``is_ok``, else a finding with the state ``otherwise`` and the advice."""
    return _ok(check, text) if is_ok else Finding(check=check, state=otherwise, text=text, advice=advice)


@dataclass(kw_only=True)
class Patient:
    """A deployment to examine.

    Attributes:
        store_url: The URL of the deployment's store; ``""`` for none.
        gateway_url: The URL of the gateway to check; ``""`` for none.
        token: The token in the URL of a served store; ``""`` for the environment's token.
        ca: The file of authorities that signed the gateway's certificate; ``""`` for the file in ``AGL_CA_FILE``, else
            the system's authorities.
        spool: The folder of the spools on this machine.
        ports: Addresses on which parts of the deployment listen or will listen.
        keys: Environment variables that the deployment's experiment names.
        models: The base URLs of the experiment's policies, by check.
    """

    store_url: str = ""
    gateway_url: str = ""
    token: str = field(default="", repr=False)
    ca: str = ""
    spool: Path = field(default_factory=default_folder)
    ports: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    keys: list[str] = field(default_factory=list[str])
    models: dict[str, str] = field(default_factory=dict[str, str])


def patient_of(target: str) -> Patient:
    """Return the deployment that an experiment file or a URL describes; ``""`` selects the only store on this machine.

    Raises:
        ConfigError: The experiment's file cannot be read, or the store does not exist.
    """
    if target.endswith(".toml"):
        return _of_experiment(load_config(Path(target)), Path(target).parent)
    return _of_store(resolve_url(target or None))


async def examine(patient: Patient, manager: PluginManager) -> list[Finding]:
    """Run every check and return all findings; a failed check does not stop the others."""
    found = [
        *versions(manager),
        *secrets(patient.keys),
        *ports(patient.ports),
        *models(patient.models),
        *disks(patient),
        *map(_spool, spools_in(patient.spool)),
    ]
    found += list(transport(patient.gateway_url, patient.store_url))
    if patient.gateway_url:
        found += [finding async for finding in _gateway(patient.gateway_url, patient.ca, token=patient.token)]
    is_of_worker = not patient.token and any(os.environ.get(name) for name in _WORKERS)
    if patient.store_url and patient.gateway_url and is_of_worker:
        text = "a worker's token reads no more of it than its experiment's rollouts; ask with an admin token for more"
        found.append(_ok("store", text))
    elif patient.store_url:
        found += [finding async for finding in _store(patient.store_url, manager)]
    return found


def versions(manager: PluginManager) -> Iterator[Finding]:
    """Check that all installed ``agl-*`` packages have the same version, and report the plugins that do not load."""
    installed = {found.name: found.version for found in distributions() if found.name.startswith("agl-")}
    counts = sorted(set(installed.values()))
    if len(counts) == 1:
        yield _ok("versions here", f"{len(installed)} packages of {counts[0]}")
    else:
        listed = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
        advice = "install one release of all of them; they share a version number"
        yield _wrong("versions here", f"packages of several releases: {listed}", advice)
    for plugin in manager.status():
        if plugin.state == "broken":
            yield _wrong(f"plugin {plugin.name}", plugin.error, "agl plugins check")


def secrets(keys: Sequence[str]) -> Iterator[Finding]:
    """Check the signing key, the admin token and the experiment's keys, without ever showing a value."""
    try:
        found = signing_keys()().splitlines() if _has_secret() else []
    except ConfigError as error:
        yield _wrong("signing key", str(error))
    else:
        given = [name for name in (SECRET_ENV, SECRET_FILE_ENV) if name in os.environ]
        where = given[0] if given else "the key in this user's state folder"
        if not found:
            yield _ok("signing key", "it does not exist yet; the first run makes it")
        yield from _strengths("signing key", found, where=where)
    try:
        yield from _strengths("admin token", _admin_tokens(), where=ADMIN_ENV)
    except ConfigError as error:
        yield _wrong("admin token", str(error))
    for name in keys:
        is_set = bool(os.environ.get(name))
        text = "is set" if is_set else "is not set, and the experiment's file names it"
        yield _judged(f"key {name}", is_set, text, f"set {name} where the gateway runs")


def ports(addresses: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Report for each address whether something listens there."""
    for host, port in addresses:
        check = f"port {host}:{port}"
        try:
            socket.create_connection((_ANY.get(host, host), port), timeout=2.0).close()
        except socket.gaierror as error:
            yield _wrong(check, f"the host cannot be found ({error})", "correct host in the params of [gateway]")
        except OSError:
            yield _ok(check, "is free")
        else:
            yield _ok(check, "something listens there, as it should while the experiment runs")


def models(urls: Mapping[str, str]) -> Iterator[Finding]:
    """Report the environment's proxies, and which base URLs are wrong or asked through a proxy; by check."""
    proxies = getproxies_environment()
    for scheme in sorted(proxies.keys() & {"http", "https"}):
        exempt = f"NO_PROXY, which is {proxies['no']!r}" if "no" in proxies else "NO_PROXY, which is not set"
        text = f"model servers at {scheme}:// are asked through {shown_url(proxies[scheme])}, except those in {exempt}"
        yield _ok(f"proxy for {scheme}", text)
    for check, given in urls.items():
        try:
            url = base_url_of(given, who="its base_url")
        except ConfigError as error:
            yield _wrong(check, str(error))
        else:
            proxy, entry = shown_url(proxy_for(url, proxies)), exemption(url, proxies)
            direct = f"directly (NO_PROXY has {entry})" if entry else "directly"
            yield _ok(check, f"{shown_url(url)} is asked " + (f"through the proxy {proxy}" if proxy else direct))


def disks(patient: Patient) -> Iterator[Finding]:
    """Check the free space on the disks of the state folder, the spools and a SQLite store."""
    places = {"disk of the state folder": state_dir(), "disk of the spool": patient.spool}
    if patient.store_url.startswith(SQLITE):
        places["disk of the store"] = Path(patient.store_url.removeprefix(SQLITE))
    seen: set[int] = set()
    for name, path in places.items():
        there = next((each for each in (path, *path.absolute().parents) if each.exists()), Path())
        if (device := there.stat().st_dev) in seen:
            continue
        seen.add(device)
        free = disk_usage(there).free
        state: State = "wrong" if free < _MIN_FREE else "warning"
        advice = f"make room on the disk of {there}; agl runs gc removes old rollouts"
        yield _judged(name, free >= _WARN_FREE, f"{free >> 20} MiB free", advice, otherwise=state)


def transport(*urls: str) -> Iterator[Finding]:
    """Report which connections to other machines are encrypted, and warn of those that are not."""
    for url in dict.fromkeys(filter(None, urls)):
        parts = urlsplit(url)
        if parts.hostname is None or is_loopback(url):
            continue
        if parts.scheme == "http":
            text = f"{shown_url(url)} is not encrypted: tokens and prompts can be read on the way"
            advice = "serve it with --tls-cert and --tls-key, or behind a proxy that has a certificate, as https://"
            yield _warning("encryption", text, advice)
        elif parts.scheme in ("postgresql", "postgres"):
            mode = parse_qs(parts.query).get("sslmode", ["prefer"])[0]
            is_safe = mode in ("verify-ca", "verify-full")
            text = f"{shown_url(url)} is opened with sslmode={mode}"
            advice = "add sslmode=verify-full and sslrootcert=FILE, or sslrootcert=system"
            yield _judged("encryption", is_safe, text, advice, otherwise="warning")
        else:
            yield _ok("encryption", f"{shown_url(url)} uses {parts.scheme}")


async def _gateway(url: str, ca: str, *, token: str) -> AsyncIterator[Finding]:
    """Check a gateway's token, clock, version and health, with ``token`` or else this machine's own."""
    check = f"gateway {url}"
    try:
        token = token or _own_token()
        context = client_context(ca) if url.startswith("https:") else True
    except (ConfigError, OSError) as error:
        yield _wrong(check, f"was not asked: {error}")
        return
    try:
        connector = aiohttp.TCPConnector(ssl=context)
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            before = time.time()
            async with session.get(f"{url}/identity", headers={"authorization": f"Bearer {token}"}) as answer:
                status, about = answer.status, await _json(answer)
            after = time.time()
            async with session.get(f"{url}/healthz") as answer:
                health = await _json(answer)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        yield _wrong(check, f"does not answer ({error or type(error).__name__})", refusal_of(error, ca) or _UNREACHABLE)
        return
    if status != 200:
        advice = f"set {ADMIN_ENV} to its admin token, or {SECRET_ENV} to the secret that it runs with"
        yield _wrong(check, f"answers {status} to this machine's token", advice)
        return
    yield _ok(check, f"answers in {(after - before) * 1e3:.0f} ms and accepts the token")
    yield _clock("clock of the gateway", about.get("time"), before, after)
    yield _version(str(about.get("version", "")))
    text = str(health.get("status", "unknown")) + (f": {health['store']}" if "store" in health else "")
    advice = "see to its store: its spool, if it has one, takes the calls meanwhile"
    yield _judged("health of the gateway", health.get("status") == "ok", text, advice)


async def _store(url: str, manager: PluginManager) -> AsyncIterator[Finding]:
    check = f"store {shown_url(url)}"
    if url.startswith(SQLITE):
        yield await asyncio.to_thread(_damage, Path(url.removeprefix(SQLITE)))
    try:
        store = build_store(manager, url)
    except AglError as error:
        yield _wrong(check, str(error))
        return
    try:
        for look in (_answers, _writes, _gateways):
            async for finding in look(store, check):
                yield finding
    except (StoreError, TimeoutError) as error:
        yield _wrong(check, str(error) or "does not answer in time")
    finally:
        await store.close()


def _damage(file: Path) -> Finding:
    """Check every page of a SQLite store, which reads the whole file; stops after ``_READ_S`` seconds."""
    end = time.monotonic() + _READ_S
    check = "pages of the store"
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.set_progress_handler(lambda: time.monotonic() > end, 100_000)
            (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        # A busy or unreadable file says nothing about its pages.
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            text = f"were not all read within {_READ_S:g} s" if str(error) == "interrupted" else f"are unread: {error}"
            return _warning(check, text, f"check them with: sqlite3 {file} 'PRAGMA quick_check'")
        found = str(error)
    text = "are whole" if found == "ok" else f"are damaged: {' '.join(found.split())}"
    advice = f"bring {file} back from a backup, or save the rest with: sqlite3 {file} .recover | sqlite3 NEW"
    return _judged(check, found == "ok", text, advice)


async def _answers(store: Store, check: str) -> AsyncIterator[Finding]:
    took = await _timed(store.cursor)
    yield _judged(check, took <= _SLOW_S, f"answers in {took * 1e3:.0f} ms", otherwise="warning")


async def _writes(store: Store, check: str) -> AsyncIterator[Finding]:
    """Write a value to the store, read it back and delete it; report the time taken and the clocks' difference."""
    name = f"agl-doctor-{new_trace_id()[:12]}"
    key = f"gateway/{name}"
    took = await _timed(lambda: store.save_state({key: b"written"}))
    is_there = (await store.load_state(key)).get(key) == b"written"
    await store.save_state({key: b""})
    text = f"a write took {took * 1e3:.0f} ms and " + ("was read back" if is_there else "was not read back")
    is_ok = is_there and took <= _SLOW_S
    yield _judged(f"writes to the {check}", is_ok, text, otherwise="warning" if is_there else "wrong")
    before = time.time()
    await store.announce(Presence(experiment=name, member="doctor", session=name))
    after = time.time()
    (seen,) = await store.presences(name)
    await store.withdraw(name, ["doctor"])
    yield _clock("clock of the store", seen.seen_at, before, after)


async def _gateways(store: Store, check: str) -> AsyncIterator[Finding]:
    """Report the gateways of a store, and those that are gone and left calls in their spools."""
    del check
    found = await gateways_of(store, now=time.time())
    for gone in (each for each in found if each.is_gone):
        advice = (
            f"start a gateway on {gone.machine} with the same spool; if the machine is gone for good, so are these "
            "calls, and agl doctor --forget takes it off the list"
        )
        yield (_wrong if gone.calls else _warning)("spool of a gateway that is gone", str(gone), advice)
    living = [each for each in found if not each.is_gone]
    if living:
        held = sum(each.calls for each in living)
        yield _ok("gateways", f"{len(living)} live and hold {count_of(held, 'call')} in their spools")


async def forget_gone(store: Store) -> int:
    """Remove the gateways that are gone from the store's list; returns how many were removed."""
    gone = [each.member for each in await gateways_of(store, now=time.time()) if each.is_gone]
    await store.withdraw(GATEWAYS, gone)
    return len(gone)


def _of_experiment(config: ExperimentConfig, folder: Path) -> Patient:
    store = as_url(config.experiment.store) if config.experiment.store else ""
    if store.startswith(SQLITE):
        path = folder / store.removeprefix(SQLITE)
        store = f"sqlite:///{path}" if path.exists() else ""
    params: dict[str, Any] = dict(config.gateway.params)
    spool = params.get("spool")
    port = params.get("port")
    patient = _of_store(store)
    if config.gateway.ca:
        patient.ca = patient.ca or str(folder / config.gateway.ca)
    if isinstance(port, int) and port:
        patient.ports.append((str(params.get("host", "127.0.0.1")), port))
    if isinstance(spool, str) and spool not in ("", "off"):
        patient.spool = Path(spool)
    named = (policy.params.get("api_key_env") for policy in config.policy.values())
    for name, policy in config.policy.items():
        given: Any = policy.params.get("base_url", [])
        urls = cast("list[Any]", given) if isinstance(given, list) else [given]
        patient.models |= {f"model server {number} of {name}": str(url) for number, url in enumerate(urls, 1)}
    patient.keys = sorted({name for name in named if isinstance(name, str) and name})
    return patient


def _of_store(url: str) -> Patient:
    """Return the deployment of a store; if the store is served over HTTP, its URL is also the gateway's."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return Patient(store_url=url)
    return Patient(
        store_url=url,
        gateway_url=shown_url(parts._replace(query="").geturl()).rstrip("/"),
        token=unquote(parts.password or parts.username or ""),
        ca=parse_qs(parts.query).get("ca", [""])[0],
    )


def _has_secret() -> bool:
    return is_secret_given() or (state_dir() / "secret").exists()


def _own_token() -> str:
    """Return the token that this machine's workers and commands send; raises the errors of :class:`KeyFile`."""
    if worker := worker_key():
        return worker()
    if tokens := _admin_tokens():
        return tokens[0].decode("utf-8", "replace")
    return AdminKey(signing_keys())() if _has_secret() else ""


def _admin_tokens() -> list[bytes]:
    """Return the admin tokens from the environment or its file; raises the errors of :func:`named_keys`."""
    keys = named_keys(ADMIN_ENV, purpose="admin token")
    return [] if keys is None else keys().splitlines()


def _strengths(check: str, keys: Sequence[bytes], *, where: str) -> Iterator[Finding]:
    """Check the strength of each key; with several keys, each finding gives the key's line number."""
    for number, key in enumerate(keys, 1):
        name = f"{check} of line {number}" if len(keys) > 1 else check
        yield _strength(name, key.decode("utf-8", "replace"), where=where)


def _strength(check: str, value: str, *, where: str) -> Finding:
    lower = value.lower()
    is_guessed = any(word in lower for word in _GUESSED) or len(set(value)) < 8
    if not is_guessed and len(value) >= 24:
        return _ok(check, f"{len(value)} characters, from {where}")
    what = "looks like a default or an example" if is_guessed else f"has {len(value)} characters only"
    advice = 'make one with: python -c "import secrets; print(secrets.token_hex(32))"'
    return (_wrong if is_guessed else _warning)(check, f"{where} {what}: who guesses it may do everything", advice)


def _spool(found: SpoolReport) -> Finding:
    check = f"spool {found.path}"
    if found.is_busy:
        return _ok(check, "a gateway uses it")
    if found.calls:
        age = max(0.0, time.time() - found.oldest_at)
        calls = count_of(found.calls, "call")
        held = f"holds {calls} ({found.size} bytes, the oldest {age:.0f} s old) for {found.store_url}"
        advice = "start a gateway of that store here, with the same --spool folder"
        return _wrong(check, f"{held}, and no gateway drains it", advice)
    text = f"calls that the store refused, with its reasons: {found.refused}" if found.refused else "is empty"
    advice = "look at its table refused, and remove the file when you need it no longer"
    return _judged(check, not found.refused, text, advice, otherwise="warning")


def _clock(check: str, shown: object, before: float, after: float) -> Finding:
    if not isinstance(shown, int | float) or not shown:
        return _warning(check, "is not in its answer: it is of an older release")
    off = max(before - shown, shown - after, 0.0)
    text = f"differs from this machine's by {off:.1f} s" if off > 0.05 else "is this machine's"
    return _judged(check, off <= _CLOCK_S, text, "set both by NTP: tokens and leases end too early or too late")


def _version(theirs: str) -> Finding:
    ours = next((found.version for found in distributions() if found.name == "agl-gateway"), "")
    text = theirs if theirs == ours else f"{theirs or 'unknown'}, and {ours} here"
    return _judged("version of the gateway", theirs == ours, text, "run the same release everywhere")


async def _json(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        found: Any = await answer.json(content_type=None)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begin = time.perf_counter()
    await work()
    return time.perf_counter() - begin


_MARKS = {"ok": "ok     ", "warning": "warning", "wrong": "WRONG  "}


@click.command()
@click.argument("target", required=False, default="")
@click.option("--forget", is_flag=True, help="Remove gateways that are gone from the store's list.")
@json_option
@pass_manager
def doctor(manager: PluginManager, target: str, forget: bool, as_json: bool) -> None:
    """Check a deployment: TARGET is an experiment file, or the URL of a gateway or store; by default the only store
    here.

    Checks versions, secrets, ports, proxies, disks, encryption, clocks, the gateway's token and health, the store's
    pages and writes, and spools that no gateway drains. The exit status is 1 if something is wrong.
    """
    patient = patient_of(target)
    if forget:
        count = with_store(manager, patient.store_url, forget_gone)
        click.echo(f"took {count_of(count, 'gateway')} off the list")
        return
    found = asyncio.run(examine(patient, manager))
    if as_json:
        print_json(found)
    else:
        for finding in found:
            click.echo(visible(_line(finding)))
        click.echo(_summary(found))
    if any(finding.state == "wrong" for finding in found):
        sys.exit(1)


def _line(finding: Finding) -> str:
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{_MARKS[finding.state]}  {finding.check}: {finding.text}{advice}"


def _summary(found: list[Finding]) -> str:
    wrong, warnings = (sum(finding.state == state for finding in found) for state in ("wrong", "warning"))
    if wrong or warnings:
        return f"{count_of(len(found), 'check')}: {wrong} wrong, {count_of(warnings, 'warning')}"
    return f"{len(found)} checks: all is well"
