"""Completes the ids of rollouts and the names of experiments on the command line, from a SQLite store.

A completion must be quick and must change nothing, so the file is read as it is, and other kinds of stores, which may
be far away, are not asked. Nothing is said of what fails: there are then no suggestions.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import click

from agl.errors import AglError
from agl_inspect.stores.urls import SQLITE
from agl_inspect.terminal.opening import resolve_url
from agl_store_sqlite import experiments, rollout_ids

LATEST = "latest"
"""The id that stands for the newest rollout."""

_LISTED = 100
"""Suggestions at most; more letters lead to the others."""


def complete_rollout(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Ids that begin with what was typed, and ``latest``."""
    begins_latest = LATEST.startswith(incomplete) and _names(ctx, lambda path: rollout_ids(path, "", limit=1))
    found = _names(ctx, lambda path: rollout_ids(path, incomplete, limit=_LISTED))
    return [LATEST, *found] if begins_latest else found


def complete_experiment(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Names of experiments that begin with what was typed."""
    return _names(ctx, lambda path: experiments(path, incomplete, limit=_LISTED))


def _names(ctx: click.Context, look: Callable[[Path], list[str]]) -> list[str]:
    try:
        url = resolve_url(ctx.params.get("store_url") or ctx.params.get("source"))
        return look(Path(url.removeprefix(SQLITE))) if url.startswith(SQLITE) else []
    except (AglError, sqlite3.Error, OSError):
        return []
