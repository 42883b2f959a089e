"""Registers ``agl runs archive`` and ``agl runs restore``."""

from collections.abc import Iterable

from agl import hookimpl
from agl.contracts import CommandEntry


@hookimpl
def agl_commands() -> Iterable[CommandEntry]:
    """Register both commands below ``agl runs``."""
    yield CommandEntry(
        name="archive",
        parent="runs",
        factory="agl_archive.command:archive",
        summary="write finished rollouts as Parquet files",
    )
    yield CommandEntry(
        name="restore",
        parent="runs",
        factory="agl_archive.command:restore",
        summary="bring archived rollouts back into a store",
    )
