"""Names in a SQLite store for the completion of commands: read quickly, with nothing created, migrated or locked."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

_ROLLOUTS = "SELECT rollout_id FROM rollouts WHERE rollout_id >= ? AND rollout_id < ? ORDER BY rollout_id LIMIT ?"
_EXPERIMENTS = (  # skips through the index from name to name
    "WITH RECURSIVE names(name) AS (SELECT min(experiment) FROM rollouts WHERE experiment >= ? "
    "UNION ALL SELECT (SELECT min(experiment) FROM rollouts WHERE experiment > name) FROM names "
    "WHERE name IS NOT NULL) "
    "SELECT name FROM names WHERE name < ? LIMIT ?"
)
_WAIT_S = 0.1
_AFTER_ALL = "\U0010ffff"


def rollout_ids(path: Path, begin: str, *, limit: int) -> list[str]:
    """Return the ids of rollouts that start with ``begin``, sorted; raises :class:`sqlite3.Error` on failure."""
    return _column(path, _ROLLOUTS, (begin, begin + _AFTER_ALL, limit))


def experiments(path: Path, begin: str, *, limit: int) -> list[str]:
    """Return the names of experiments that start with ``begin``, sorted; raises as :func:`rollout_ids` does."""
    return [name for name in _column(path, _EXPERIMENTS, (begin, begin + _AFTER_ALL, limit)) if name]


def _column(path: Path, query: str, values: Sequence[object]) -> list[str]:
    address = f"{path.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, timeout=_WAIT_S)) as connection:
        return [text for (text,) in connection.execute(query, values)]
