"""Rewards SQL that can be parsed, that can be executed, and that gives the same rows as the task's own query.

:class:`SqlMatch` runs both queries on a SQLite database and records all three results as the dimensions ``syntax``,
``execution`` and ``goal``, so that ``[experiment] reward_weights`` can weight them without running a query twice.
`sandbox` runs the untrusted queries safely.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast

from agl.contracts import RewardSetup
from agl.errors import ConfigError
from agl.schemas import PromptTemplate, Record, Reward, Rollout, Span
from agl_rewards.query_child import Row
from agl_rewards.sandbox import QueryError, QueryLimits, QueryRunner, check_syntax, is_ordered
from agl_rewards.source import task_fields, text_source, unfenced

Order = Literal["query", "always", "never"]


class SqlSyntax:
    """Gives 1.0 if the text is one query that SQLite can parse, else 0.0; tables need not exist.

    If the text contains a fenced block of SQL, only the block counts. Statements that are not queries get 0.0.

    Args:
        source: Where the text comes from; see :mod:`agl_rewards.source`.
        name: The reward's name.
    """

    def __init__(self, *, source: str = "answer", name: str = "sql-syntax") -> None:
        self._text = text_source(source)
        self._name = name

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Return the reward of one attempt."""
        error = _syntax_error(query_in(self._text(spans)))
        return Reward(value=float(not error), name=self._name, source="evaluator", feedback=error)


class SqlExecutes:
    """Gives 1.0 if the query runs on the database within the limits, whatever the resulting rows, else 0.0.

    Args:
        database: Path of the SQLite database; see :class:`SqlMatch`.
        source: Where the text comes from; see :mod:`agl_rewards.source`.
        time_s: Seconds that a query may take.
        max_rows: The most rows that a query may give.
        name: The reward's name.
        setup: The experiment, to whose folder ``database`` is relative.
    """

    def __init__(
        self,
        *,
        database: str,
        source: str = "answer",
        time_s: float = 5.0,
        max_rows: int = 10_000,
        name: str = "sql-executes",
        setup: RewardSetup | None = None,
    ) -> None:
        self._database = _Database(database, setup)
        self._text = text_source(source)
        self._queries = QueryRunner(_limits(time_s, max_rows))
        self._name = name

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Return the reward of one attempt; raises :class:`ConfigError` if the database does not exist."""
        path = self._database.of(rollout)
        try:
            await asyncio.to_thread(self._queries.run, path, query_in(self._text(spans)))
        except QueryError as error:
            return Reward(value=0.0, name=self._name, source="evaluator", feedback=str(error))
        return Reward(value=1.0, name=self._name, source="evaluator")


class QueryVerdict(Record, frozen=True, kw_only=True):
    """The checks that a query passed, and feedback on the first check that it failed."""

    syntax: bool = False
    execution: bool = False
    goal: bool = False
    feedback: str = ""


class SqlMatch:
    """Gives 1.0 if the query gives the same rows as the task's query, else 0.0.

    Rows are compared as multisets, or in order if the task's query orders them; rows that are equal in that order must
    then be in the order in which SQLite returns them for the task's query. Columns are compared by position, and their
    names do not matter. Both queries run with the same limits and can only read; a query with an error scores 0, with
    the error as feedback.

    Args:
        database: Path of the SQLite database, relative to the experiment file; ``{key}`` stands for a key of the task.
        answer: The task's key that holds the right query, or a list of right queries.
        source: Where the text comes from; see :mod:`agl_rewards.source`.
        order: When the order of rows counts: if the task's ``query`` orders them, ``always``, or ``never``.
        digits: Significant digits to which floating-point numbers are compared; see :func:`same_rows`.
        time_s: Seconds that a query may take.
        max_rows: The most rows that a query may give.
        name: The reward's name.
        setup: The experiment, to whose folder ``database`` is relative.
    """

    def __init__(
        self,
        *,
        database: str,
        answer: str = "answer",
        source: str = "answer",
        order: Order = "query",
        digits: int = 9,
        time_s: float = 5.0,
        max_rows: int = 10_000,
        name: str = "sql-match",
        setup: RewardSetup | None = None,
    ) -> None:
        if order not in ("query", "always", "never"):
            raise ConfigError(f"sql-match got order = {order!r}; write 'query', 'always' or 'never'")
        if not 1 <= digits <= 17:
            raise ConfigError(f"sql-match got digits = {digits}; numbers have 1 to 17 significant digits")
        self._database = _Database(database, setup)
        self._answer = answer
        self._text = text_source(source)
        self._order: Order = order
        self._digits = digits
        self._queries = QueryRunner(_limits(time_s, max_rows))
        self._name = name

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Return the reward of one attempt; raises :class:`ConfigError` if the database or a right query fails."""
        path, right = self._database.of(rollout), self._right(rollout)
        judged = await asyncio.to_thread(self._judge, path, right, query_in(self._text(spans)), rollout.rollout_id)
        dimensions: dict[str, float | None] = {
            "syntax": float(judged.syntax),
            "execution": float(judged.execution),
            "goal": float(judged.goal),
        }
        return Reward(
            value=float(judged.goal),
            name=self._name,
            dimensions=dimensions,
            source="evaluator",
            feedback=judged.feedback,
        )

    def _right(self, rollout: Rollout) -> list[str]:
        found = task_fields(rollout.task).get(self._answer)
        queries: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
        if not queries or not all(isinstance(query, str) and query.strip() for query in queries):
            raise ConfigError(
                f"the reward sql-match runs the query in the task's {self._answer!r}, and the task of rollout "
                f"{rollout.rollout_id} has none there; add it to the dataset, or name another key with answer = ..."
            )
        return queries

    def _judge(self, path: Path, right: Sequence[str], query: str, rollout_id: str) -> QueryVerdict:
        # The task's own queries first: if one does not run, the dataset is at fault and the agent's query untried.
        expected = [(self._expected(path, sql, rollout_id), self._is_ordered(sql)) for sql in right]
        try:
            rows = self._queries.run(path, query)
        except QueryError as error:
            return QueryVerdict(syntax=error.fault == "execution", feedback=str(error))
        if any(same_rows(wanted, rows, ordered=ordered, digits=self._digits) for wanted, ordered in expected):
            return QueryVerdict(syntax=True, execution=True, goal=True)
        wanted, ordered = expected[0]
        return QueryVerdict(syntax=True, execution=True, feedback=_difference(wanted, rows, ordered=ordered))

    def _expected(self, path: Path, sql: str, rollout_id: str) -> list[Row]:
        try:
            return self._queries.run(path, sql)
        except QueryError as error:
            raise ConfigError(
                f"the task's own query of rollout {rollout_id} does not run on {path}: {error}; correct the dataset, "
                "or raise time_s or max_rows"
            ) from error

    def _is_ordered(self, sql: str) -> bool:
        return is_ordered(sql) if self._order == "query" else self._order == "always"


def query_in(text: str) -> str:
    """Return the SQL in a text: its last fenced block of SQL, or else the whole text."""
    return unfenced(text, "sql", "sqlite")


def same_rows(wanted: Sequence[Row], rows: Sequence[Row], *, ordered: bool, digits: int = 9) -> bool:
    """Return true if two results are equal: as sequences if ``ordered``, else as multisets of rows.

    Values of different types differ as in SQLite: ``1`` differs from ``'1'`` but equals ``1.0``. Floats are compared to
    ``digits`` significant digits; in a column that also has integers, all digits before the decimal point count.
    """
    both = (*wanted, *rows)
    whole = {column for row in both for column, value in enumerate(row) if isinstance(value, int)}
    left, right = (
        [tuple(_plain(value, digits, keeps_whole=column in whole) for column, value in enumerate(row)) for row in given]
        for given in (wanted, rows)
    )
    return left == right if ordered else Counter(left) == Counter(right)


def _plain(value: Any, digits: int, *, keeps_whole: bool) -> Any:
    """Prepare a value for comparison: round a float to ``digits`` digits, but with ``keeps_whole`` at most to units."""
    if not isinstance(value, float):
        return value
    if keeps_whole and isfinite(value) and (value.is_integer() or abs(value) >= 10**digits):
        return round(value)
    # Sums in another order differ in the last digits.
    return float(f"{value:.{digits}g}")


def _difference(wanted: Sequence[Row], rows: Sequence[Row], *, ordered: bool) -> str:
    order = ", in this order" if ordered else ""
    return f"expected {_shown(wanted)}{order}; got {_shown(rows)}"


def _shown(rows: Sequence[Row]) -> str:
    if not rows:
        return "no rows"
    text = ", ".join(repr(row)[:200] for row in rows[:3])
    return f"{len(rows)} row{'s' if len(rows) > 1 else ''} {text}{', ...' if len(rows) > 3 else ''}"


def _syntax_error(query: str) -> str:
    try:
        check_syntax(query)
    except QueryError as error:
        return str(error)
    return ""


def _limits(time_s: float, max_rows: int) -> QueryLimits:
    if time_s <= 0 or max_rows < 1:
        raise ConfigError(f"a query needs time_s above 0 and max_rows of at least 1, not {time_s} and {max_rows}")
    return QueryLimits(time_s=time_s, rows=max_rows)


class _Database:
    """Finds the database file that a rollout's task names."""

    def __init__(self, database: str, setup: RewardSetup | None) -> None:
        self._template = PromptTemplate(template=database)
        self._folder = setup.folder if setup is not None else Path()

    def of(self, rollout: Rollout) -> Path:
        path = self._folder / self._template.format(**task_fields(rollout.task))
        if not path.is_file():
            raise ConfigError(
                f"the database {str(path)!r} of rollout {rollout.rollout_id} does not exist; make it, or correct the "
                "reward's database = ..., which is relative to the experiment file"
            )
        return path
