"""Requests to the optimiser's model, and merges of texts without it.

The requests are data: text files with ``$name`` placeholders; a user can replace each file.

:func:`merge3` is a three-way merge like that of diff3 (Khanna, Kunal and Pierce 2007). With the parent as the base,
each side is a list of edits (start, stop, new lines) of the base's lines, and two edits conflict if they touch.
Deviation: two insertions at one position do not conflict; both are kept, as two rules added at the end of a prompt
should be.
"""

import difflib
import string
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from agl.errors import ConfigError
from agl.hints import did_you_mean

REQUESTS = ("improve", "critique", "edit", "merge", "rewrite")
_PLACES = {
    "improve": {"component", "text", "evidence", "constraints"},
    "critique": {"component", "text", "evidence"},
    "edit": {"component", "text", "critique", "evidence", "constraints"},
    "merge": {"component", "text", "other", "constraints"},
    "rewrite": {"component", "text", "constraints"},
}


class Requests:
    """The texts of the requests to the optimiser's model, by kind.

    Args:
        replaced: The user's own files by kind, relative to ``folder``.
        folder: The experiment's folder.

    Raises:
        ConfigError: A kind is unknown, a file is missing, or a file has an unknown placeholder.
    """

    def __init__(self, replaced: Mapping[str, str], *, folder: Path) -> None:
        unknown = sorted(set(replaced) - set(REQUESTS))
        if unknown:
            hint = did_you_mean(unknown[0], REQUESTS, otherwise=f"the kinds of request are {list(REQUESTS)}")
            raise ConfigError(f"requests has {unknown}; {hint}")
        self._texts = {kind: _read(kind, replaced.get(kind), folder) for kind in REQUESTS}

    def text(self, kind: str, **values: str) -> str:
        """Return the request of a kind with its placeholders filled."""
        return string.Template(self._texts[kind]).safe_substitute(values)


def _read(kind: str, path: str | None, folder: Path) -> str:
    if path is None:
        return (resources.files("agl_algo_apo") / "prompts" / f"{kind}.txt").read_text(encoding="utf-8")
    try:
        text = (folder / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read requests.{kind} = {path!r}: {error}") from error
    unknown = sorted(set(string.Template(text).get_identifiers()) - _PLACES[kind])
    if unknown:
        raise ConfigError(
            f"requests.{kind} = {path!r} has the places {unknown}; those that are filled are "
            f"{sorted(_PLACES[kind])}. Write a literal dollar sign twice"
        )
    return text


def merge3(base: str, ours: str, theirs: str) -> str | None:
    """Merge the changes of ``ours`` and ``theirs`` to ``base``, line by line; ``None`` if they conflict.

    They conflict if they change the same lines, or if together they would lose a line that all three texts contain, for
    example because each side removed one of two copies. Lines that both insert at one position are kept in order, ours
    first; equal lines are kept once.
    """
    lines = base.splitlines()
    common = {*lines} & {*ours.splitlines()} & {*theirs.splitlines()}
    edits = _edits(lines, ours.splitlines())
    for start, stop, new in _edits(lines, theirs.splitlines()):
        if (start, stop, new) in edits:  # both made the same change, which is made once
            continue
        clash = [edit for edit in edits if _touches(edit, start, stop)]
        if not clash:
            edits.append((start, stop, new))
        elif len(clash) == 1 and start == stop == clash[0][0] == clash[0][1]:  # two insertions at one place
            kept = clash[0][2]
            edits[edits.index(clash[0])] = (start, stop, [*kept, *(line for line in new if line not in kept)])
        else:
            return None
    # From the end to the start, so that the positions of the remaining edits stay valid.
    for start, stop, new in sorted(edits, key=lambda edit: (edit[0], edit[1]), reverse=True):
        lines[start:stop] = new
    if not common <= {*lines}:
        return None
    return "\n".join(lines) + ("\n" if base.endswith("\n") else "")


def merge_texts(base: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """Merge the changes of several candidates' texts to ``base``; returns ``None`` if any of the changes conflict."""
    merged = dict(others[0])
    # One after the other into the same texts, each against the base from which all of them started.
    for other in others[1:]:
        for name, text in base.items():
            joined = merge3(text, merged[name], other[name])
            if joined is None:
                return None
            merged[name] = joined
    return merged


Edit = tuple[int, int, list[str]]
"""An edit (start, stop, new lines) that replaces the base's lines [start, stop); an insertion has start == stop."""


def _edits(base: list[str], changed: list[str]) -> list[Edit]:
    """Return the edits that turn the lines ``base`` into ``changed``."""
    matcher = difflib.SequenceMatcher(a=base, b=changed, autojunk=False)
    return [(i1, i2, changed[j1:j2]) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]


def _touches(edit: Edit, start: int, stop: int) -> bool:
    """Return true if ``edit`` conflicts with an edit of the lines [start, stop).

    Two edits conflict if they overlap, insert at one position, or one inserts into the other.
    """
    if edit[0] == edit[1] and start == stop:  # two insertions, at one place or not
        return edit[0] == start
    # Ranges overlap, or an insertion lies inside a range; one at the end of a range does not touch it.
    return max(edit[0], start) < min(edit[1], stop) or (
        (edit[0] == edit[1] and start < edit[0] < stop) or (start == stop and edit[0] < start < edit[1])
    )
