"""Writes parts of messages: the name that was probably meant, the command that installs a package, and counts."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = ["closest", "count_of", "did_you_mean", "pip_install"]


def closest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the choice that is most similar to ``name``, or else the shortest that has ``name`` as a word.

    Returns ``""`` if no similarity reaches ``cutoff`` (at most 1) and no choice has the word; words have 3 letters or
    more.
    """
    every = list(choices)
    wordy = sorted((choice for choice in every if len(name) > 2 and name in re.split(r"[\W_]", choice)), key=len)
    return next(iter(get_close_matches(name, every, n=1, cutoff=cutoff) or wordy), "")


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(name: str, choices: Iterable[str], *, otherwise: str = "") -> str:
    """Return ``did you mean 'CHOICE'?`` with the choice most similar to ``name``; ``otherwise`` if none is similar."""
    near = closest(name, choices)
    return f"did you mean {near!r}?" if near else otherwise


def pip_install(package: str) -> str:
    """Return the command that installs a package, which may have extras: ``pip install 'agl-algo-torch[lora]'``.

    If agl runs from a checkout, the command installs the package, and its dependencies there, from the checkout.
    """
    name, bracket, extras = package.partition("[")
    # packages/agl-core/src/agl/hints.py: three levels up are the other packages, if this is a
    # checkout.
    folders = _folders(Path(__file__).parents[3] / name)
    # Each need is installed from the checkout too: pip would look for it in an index, and may find
    # an older release or nothing.
    words = [word for folder in dict.fromkeys(folders) for word in ("-e", folder)] or [name]
    words[-1] += bracket + extras
    return shlex.join(["pip", "install", *words])


def _folders(project: Path) -> list[str]:
    """Return the folders of a package's dependencies in the checkout, then its own; empty if it is not there."""
    if not os.path.isfile(project / "pyproject.toml"):  # false for a folder of another user, too
        return []
    needs = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    own = str(project.relative_to(Path.cwd()) if project.is_relative_to(Path.cwd()) else project)
    return [*(one for need in needs for one in _folders(project.with_name(re.split(r"[^\w-]", need)[0]))), own]
