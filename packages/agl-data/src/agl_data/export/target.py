"""The file that an export writes, which gets its name only once it is whole, and the list of losses next to it."""

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
    """Open a file that gets its name when the block ends well; a pipe, a device and standard output as they are.

    Args:
        output: The file; ``None`` or ``-`` for standard output.
        losses: What the format could not hold by the end of the block; written to ``OUTPUT.losses.json``, which is
            removed when nothing was lost.

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
    """Print a format's losses on standard error."""
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
