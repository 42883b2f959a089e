"""Statistics as rows of an SQL table. One statement adds to them, so that writers need not read them first."""

from collections.abc import Iterable
from typing import Any

from agl.contracts import Moments, Statistics
from agl.stores import place_of
from agl_store_sqlite.sql.rows import Row

_KEY = ("experiment", "algorithm", "step", "mode")
_SUMS = ("succeeded", "failed", "cancelled", "seconds", "calls", "prompt_tokens", "response_tokens")

STATISTICS = ", ".join((*_KEY, *_SUMS, "rewards", "mean", "squares"))
"""The columns of the table ``statistics``; a step of -1 means that rollouts belong to no step."""

_ALL = "(s.rewards + excluded.rewards)"
_APART = "(excluded.mean - s.mean)"


def merging(greatest: str) -> str:
    """Return the ``ON CONFLICT`` clause for ``INSERT INTO statistics AS s``, which adds to existing rows.

    Means and squares are merged as by :meth:`agl.contracts.Moments.plus`. ``greatest`` is the database's function for
    the larger of two numbers.
    """
    squares = f"s.squares + excluded.squares + {_APART} * {_APART} * s.rewards * excluded.rewards / {_ALL}"
    sums = ", ".join(f"{name} = s.{name} + excluded.{name}" for name in (*_SUMS, "rewards"))
    return (
        f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET {sums}, "
        f"mean = CASE {_ALL} WHEN 0 THEN 0.0 ELSE s.mean + {_APART} * excluded.rewards / {_ALL} END, "
        f"squares = CASE {_ALL} WHEN 0 THEN 0.0 ELSE {greatest}(0.0, {squares}) END"
    )


def joined(shares: Iterable[Statistics]) -> list[Statistics]:
    """Add up the given statistics by step and mode, in order of experiment, algorithm, step and mode."""
    found: dict[tuple[str, str, int, str], Statistics] = {}
    for share in shares:
        place = place_of(share)
        found[place] = found[place].plus(share) if place in found else share
    return [found[place] for place in sorted(found)]


def additions(shares: Iterable[Statistics]) -> list[list[Statistics]]:
    """Return two lists of shares to add to the statistics, in this order: of new rollouts, then of removed ones.

    Each list has at most one share per step and mode, sorted. In this order, a count reaches zero (which resets the
    mean) only at the end.
    """
    given = list(shares)
    coming = joined(share for share in given if share.rollouts > 0)
    going = joined(share.negative for share in given if share.rollouts < 0)
    return [coming, [share.negative for share in going]]


def statistics_row(share: Statistics) -> Row:
    """Return statistics as a row with the columns :data:`STATISTICS`."""
    reward = share.reward
    return *place_of(share), *(getattr(share, name) for name in _SUMS), reward.count, reward.mean, reward.squares


def read_statistics(rows: Iterable[Row]) -> list[Statistics]:
    """Read rows of :data:`STATISTICS`, sorted by their keys; rows without any rollout are skipped."""
    found = [_read(*row) for row in sorted(rows, key=lambda row: row[: len(_KEY)])]
    return [each for each in found if each.rollouts]


def _read(experiment: str, algorithm: str, step: int, mode: Any, *numbers: Any) -> Statistics:
    *sums, count, mean, squares = numbers
    return Statistics(
        experiment=experiment,
        algorithm=algorithm,
        step=None if step < 0 else step,
        mode=mode,
        reward=Moments(count=count, mean=mean, squares=squares),
        **dict(zip(_SUMS, sums, strict=True)),
    )
