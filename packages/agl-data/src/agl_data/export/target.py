"""Opens the file that an export writes, and writes the list of losses next to it."""

import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import click

from agl.errors import ConfigError
from agl.schemas import to_json
from agl_inspect.exports import Losses
from agl_inspect.text import visible

STDOUT = Path("-")


@contextmanager
def target_of(output: Path | None, losses: Losses | None = None) -> Generator[BinaryIO]:
    """Open the file of an export for writing.

    A regular file is written under a temporary name, and renamed when the block ends without an error. Pipes, devices
    and standard output are written directly.

    Args:
        output: The file; ``None`` or ``-`` for standard output.
        losses: Counts the data that the format cannot hold. At the end of the block they are written to
            ``OUTPUT.losses.json``; if nothing was lost, that file is removed.

    Raises:
        ConfigError: The file cannot be written.
    """
    if output is None or output == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if output.exists() and not output.is_file():
        with _opened(output, output) as file:
            yield file
        return
    final = output.resolve()
    part = final.with_name(f".{final.name[:200]}.{os.getpid()}.part")
    try:
        with _opened(part, output) as file:
            yield file
        if losses is not None:
            _keep_losses(final, losses)
        if final.exists():
            shutil.copymode(final, part)
        part.replace(final)
    finally:
        with suppress(OSError):
            part.unlink()


def print_losses(losses: Losses, form: str) -> None:
    """Print the losses of an export to standard error."""
    listed = losses.listed()
    if not listed:
        return
    click.echo(f"what {form} does not hold:", err=True)
    width = len(str(listed[0][1]))
    for what, count, _ in listed:
        click.echo(visible(f"  {count:>{width}}  {what}"), err=True)


def _opened(path: Path, output: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error.strerror}; pass another --output") from error


def _keep_losses(final: Path, losses: Losses) -> None:
    path = final.with_name(f"{final.name}.losses.json")
    listed = losses.listed()
    if not listed:
        path.unlink(missing_ok=True)
        return
    lines: list[Any] = [{"what": what, "count": count, "rollouts": ids} for what, count, ids in listed]
    with target_of(path) as file:
        file.write(to_json({"losses": lines}) + b"\n")
