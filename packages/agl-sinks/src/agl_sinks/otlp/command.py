"""``agl data otlp``: sends recorded rollouts to a tracing backend, or writes them as a file of OTLP's JSON."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import click
import msgspec

from agl import PluginManager
from agl.contracts import Recording, RolloutQuery, Store
from agl.errors import ConfigError, ExportError
from agl.hints import count_of
from agl.schemas import to_json
from agl.stores import read_recordings
from agl_inspect.terminal.opening import pass_manager, store_option, with_store
from agl_inspect.terminal.query import filter_options, find_ids, make_query
from agl_sinks.otlp.exporter import OtlpExporter
from agl_sinks.otlp.requests import as_json, requests_of

BATCH = 16
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds to wait before each repetition of a batch."""


@click.command()
@click.argument("rollout_ids", nargs=-1, metavar="[IDS]...")
@click.option(
    "--endpoint", default="", help="The backend's base URL; by default $OTEL_EXPORTER_OTLP_ENDPOINT, or port 4318 here."
)
@click.option("--headers-env", default="", help="The environment variable with its headers, such as a key.")
@click.option("--contents", is_flag=True, help="Send messages, tool calls, tasks and texts of errors too.")
@click.option("--service", default="", help="The service's name in the backend; by default the experiment's.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write OTLP's JSON to a file instead.")
@store_option
@filter_options
@pass_manager
def otlp(
    manager: PluginManager,
    rollout_ids: tuple[str, ...],
    endpoint: str,
    headers_env: str,
    contents: bool,
    service: str,
    output: Path | None,
    store_url: str | None,
    experiment: str | None,
    status: tuple[str, ...],
    mode: str | None,
) -> None:
    """Send finished rollouts as traces.

    IDS are ids, unique beginnings of ids, or latest; without any, all rollouts that match the filters are sent. Sending
    a rollout again adds nothing: its trace has the same ids.
    """
    if output is not None and (endpoint or headers_env):
        raise ConfigError("--output writes a file and sends nothing; leave out --endpoint and --headers-env")
    query = make_query(experiment, status, mode)
    if output is None:
        exporter = OtlpExporter(endpoint=endpoint, headers_env=headers_env, contents=contents, service=service)
        done, handle = f"sent to {exporter.destination}", partial(_send, exporter=exporter)
    else:
        done, handle = f"written to {output}", partial(_write, path=output, has_contents=contents, service=service)

    async def work(store: Store) -> int:
        chosen = msgspec.structs.replace(query, ids=await find_ids(store, rollout_ids))
        return await handle(_batches(store, chosen))

    click.echo(f"{count_of(with_store(manager, store_url, work), 'rollout')} {done}")


async def _batches(store: Store, query: RolloutQuery) -> AsyncIterator[list[Recording]]:
    """Yield the finished rollouts that match, in batches."""
    batch: list[Recording] = []
    async for recording in read_recordings(store, query, spans="all"):
        if recording.rollout.is_finished:
            batch.append(recording)
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


async def _send(batches: AsyncIterator[list[Recording]], exporter: OtlpExporter) -> int:
    count = 0
    async for batch in batches:
        try:
            await _export(exporter, batch)
        except ExportError as error:
            raise ExportError(
                f"{error}; {count_of(count, 'rollout')} sent before; sending them again adds nothing"
            ) from None
        count += len(batch)
    return count


async def _export(exporter: OtlpExporter, batch: list[Recording]) -> None:
    """Send a batch, repeating it after temporary errors."""
    for pause in _PAUSES_S:
        try:
            await exporter.export(batch)
        except ExportError as error:
            if not error.is_passing:
                raise
            await asyncio.sleep(max(pause, min(error.retry_after_s, 30.0)))
        else:
            return
    await exporter.export(batch)


async def _write(batches: AsyncIterator[list[Recording]], path: Path, *, has_contents: bool, service: str) -> int:
    """Write requests as JSON lines, the file format of collectors; returns the number of rollouts."""
    count = 0
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; pass another --output") from error
    with file:
        async for batch in batches:
            for request in requests_of(batch, has_contents=has_contents, service=service):
                file.write(to_json(as_json(request)) + b"\n")
            count += len(batch)
    return count
