"""A wiki in one SQLite file with a full-text index (FTS5): how it is written and how it is searched."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

STOP_WORDS = frozenset({"a", "an", "and", "in", "is", "of", "the", "what", "where", "who"})
TITLE_WEIGHT = 4.0
"""The weight of a word in a passage's title, relative to one in its text."""


def write(path: Path, passages: Iterable[tuple[str, str]]) -> None:
    """Write passages, each a title and a text, in place of what the file held."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text)")
        connection.executemany("INSERT INTO passages(title, text) VALUES (?, ?)", passages)


def search(path: Path, query: str, *, limit: int = 2) -> list[str]:
    """Return the texts of the best passages, best first, by BM25 over title and text; any word of the query may match.

    Raises sqlite3.OperationalError where the file is not there.
    """
    words = [word for word in re.findall(r"\w+", query.lower()) if word not in STOP_WORDS]
    if not words:
        return []
    match = " OR ".join(f'"{word}"' for word in words)
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, ?, 1.0), rowid LIMIT ?",
            (match, TITLE_WEIGHT, limit),
        )
        return [text for (text,) in rows]
