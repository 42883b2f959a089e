import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.contracts import RewardEmitter
from agl.errors import ConfigError
from agl.schemas import Reward
from agl_rewards.sandbox import QueryError, QueryLimits, QueryRunner, check_query, check_syntax, is_ordered
from agl_rewards.sql import SqlExecutes, SqlMatch, SqlSyntax, same_rows
from agl_testing.conformance.reward import RewardConformance

from .cases import database, one, setup

NAMES = "SELECT name FROM singer WHERE age = 30"
ORDERED = f"{NAMES} ORDER BY name DESC"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return database(tmp_path / "the singers.sqlite")


@pytest.fixture
def match(path: Path) -> Callable[..., Reward]:
    """Return the reward of a query, compared with the right one."""

    def reward(query: str, right: Any = NAMES, **params: Any) -> Reward:
        return one(SqlMatch(database=str(path), **params), {"answer": right}, query)

    return reward


class TestSqlMatch(RewardConformance):
    task = {"answer": NAMES}

    @pytest.fixture
    def emitter(self, path: Path) -> RewardEmitter:
        return SqlMatch(database=str(path))


class TestSqlExecutes(RewardConformance):
    @pytest.fixture
    def emitter(self, path: Path) -> RewardEmitter:
        return SqlExecutes(database=str(path))


class TestSqlSyntax(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return SqlSyntax()


@pytest.mark.parametrize(
    ("query", "right", "goal"),
    [
        ("SELECT name FROM singer WHERE age < 35", NAMES, 1.0),
        (f"Here it is:\n```sql\n{NAMES};\n```", NAMES, 1.0),
        (f"{NAMES} ORDER BY id DESC", NAMES, 1.0),
        ("SELECT name FROM singer", NAMES, 0.0),
        ("SELECT DISTINCT title FROM 'my songs'", 'SELECT title FROM "my songs"', 0.0),
        ("SELECT title FROM [my songs] ORDER BY title", 'SELECT title FROM "my songs"', 1.0),
        (f"{NAMES} ORDER BY id", ORDERED, 0.0),
        (f"{NAMES} ORDER BY -id", ORDERED, 1.0),
        ("SELECT age AS years, name FROM singer", "SELECT name, age FROM singer", 0.0),
        ("SELECT avg(age) FROM singer", "SELECT 100 / 3.0", 1.0),
        ("SELECT 40.0", "SELECT age FROM singer WHERE id = 1", 1.0),
        ("SELECT '40'", "SELECT age FROM singer WHERE id = 1", 0.0),
        ("SELECT name FROM singer WHERE 0", "SELECT 1 WHERE 0", 1.0),
        ("SELECT body FROM page WHERE page MATCH 'moon'", "SELECT 'the moon is near'", 1.0),
        ("WITH old(n) AS (SELECT name FROM singer WHERE age > 35) SELECT n FROM old", "SELECT 'Ada'", 1.0),
        (NAMES, ["SELECT 1", NAMES], 1.0),
    ],
)
def test_query_is_right_when_it_gives_the_rows(
    match: Callable[..., Reward], query: str, right: Any, goal: float
) -> None:
    reward = match(query, right)
    assert (goal, {"syntax": 1.0, "execution": 1.0, "goal": goal}) == (reward.value, reward.dimensions)
    assert bool(reward.feedback) == (goal == 0.0)


@pytest.mark.parametrize(
    ("query", "syntax", "feedback"),
    [
        ("", 0.0, "there is no query"),
        ("SELECT FROM", 0.0, 'near "FROM": syntax error'),
        ("SELECT (1", 0.0, "incomplete input"),
        ("SELECT nope FROM singer", 1.0, "no such column: nope"),
        ("SELECT * FROM nope", 1.0, "no such table: nope"),
        ("SELECT 'a\x00'", 0.0, "null character"),
        ("SELECT \ud800", 0.0, "surrogates"),
        ("SELECT ?", 1.0, "bindings"),
        ("SELECT randomblob(100000000)", 1.0, "too big"),
        (f"SELECT 1{' ' * 100_000}+ 1", 0.0, "too large"),
        ("SELECT name FROM singer; SELECT 2", 0.0, "several statements"),
        ("DROP TABLE singer", 0.0, "only queries run here, not DROP TABLE"),
    ],
)
def test_error_is_zero_with_its_reason(match: Callable[..., Reward], query: str, syntax: float, feedback: str) -> None:
    reward = match(query)
    assert (0.0, {"syntax": syntax, "execution": 0.0, "goal": 0.0}) == (reward.value, reward.dimensions)
    assert feedback in reward.feedback


@pytest.mark.parametrize(
    "query",
    [
        "INSERT INTO singer VALUES (9, 'Z', 1)",
        "WITH a AS (SELECT 1) DELETE FROM singer",
        "WITH a AS (SELECT 1) REPLACE INTO singer SELECT 1, 'Z', 1",
        "/* SELECT */ UPDATE singer SET age = 1",
        "ATTACH 'other.sqlite' AS other",
        "PRAGMA user_version = 3",
        "PRAGMA data_version",
        "SELECT * FROM pragma_table_info('singer')",
        "SELECT load_extension('x')",
        "VACUUM INTO 'copy.sqlite'",
        "CREATE TEMP TABLE t AS SELECT 1",
        "BEGIN EXCLUSIVE",
        "EXPLAIN SELECT 1",
        "DETACH main",
        "ANALYZE",
    ],
)
def test_what_does_not_only_read_is_refused_and_changes_nothing(path: Path, query: str) -> None:
    before = path.read_bytes()
    with pytest.raises(QueryError, match="only queries") as caught:
        QueryRunner(QueryLimits()).run(path, query)
    assert "refused" == caught.value.fault
    assert (before, [path]) == (path.read_bytes(), list(path.parent.iterdir()))


def test_endless_query_is_stopped_in_time(path: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    started = time.monotonic()
    with pytest.raises(QueryError, match=r"stopped after 0\.2 s"):
        QueryRunner(QueryLimits(time_s=0.2)).run(path, endless)
    assert time.monotonic() - started < 60


def test_query_may_not_give_too_many_rows(path: Path) -> None:
    assert 3 == len(QueryRunner(QueryLimits(rows=3)).run(path, "SELECT * FROM singer"))
    with pytest.raises(QueryError, match="more than 2 rows"):
        QueryRunner(QueryLimits(rows=2)).run(path, "SELECT * FROM singer")


def test_database_that_another_connection_writes_can_be_read(path: Path) -> None:
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM singer")
    assert [(3,)] == QueryRunner(QueryLimits()).run(path, "SELECT count(*) FROM singer")
    writer.execute("ROLLBACK")
    writer.close()


def test_file_that_is_no_database_is_an_error_and_no_fault_of_the_query(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("not a database, but long enough to look like one\n" * 100, encoding="utf-8")
    with pytest.raises(ConfigError, match="file is not a database"):
        one(SqlExecutes(database=str(tmp_path / "text.sqlite")), {}, NAMES)


def test_event_loop_is_not_blocked_by_a_query(path: Path) -> None:
    import asyncio

    from .cases import chat, rollout

    threads: set[str] = set()
    tick = threading.main_thread().name

    async def both() -> int:
        slow = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
        emitter = SqlExecutes(database=str(path), time_s=0.5)
        work = asyncio.ensure_future(emitter(rollout({}), [chat(1, slow)]))
        ticks = 0
        while not work.done():
            await asyncio.sleep(0.01)
            threads.add(threading.current_thread().name)
            ticks += 1
        assert 0.0 == (await work).value
        return ticks

    assert asyncio.run(both()) > 5
    assert {tick} == threads


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER  BY a", True),
        ("select a from t order\nby a desc limit 3;", True),
        ("SELECT a FROM (SELECT * FROM t ORDER BY b)", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'order by' FROM t -- order by a", False),
        ('SELECT "order by", [order by], `order by` /* order by */ FROM t', False),
        ("WITH q AS (SELECT 1 ORDER BY 1) SELECT * FROM q ORDER /* x */ BY 1", True),
        ("SELECT reorder by_name FROM t", False),
        ("", False),
    ],
)
def test_order_of_the_whole_query_is_seen(sql: str, ordered: bool) -> None:
    assert ordered == is_ordered(sql)


@given(st.text())
def test_any_text_is_judged_and_never_runs_wild(text: str) -> None:
    for check in (check_query, check_syntax):
        with suppress(QueryError):
            check(text)


VALUES = (
    st.none() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 0.1, 1 / 3, -2.5]) | st.sampled_from(["", "1", "a"])
)
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=6)


@given(ROWS, st.randoms())
def test_rows_are_a_multiset_unless_they_are_ordered(rows: list[Any], draw: Any) -> None:
    shuffled = draw.sample(rows, len(rows))
    assert same_rows(rows, shuffled, ordered=False)
    assert same_rows(rows, rows, ordered=True)
    assert not same_rows(rows, [*rows, (1, 1)], ordered=False)
    if rows:
        assert not same_rows(rows, rows[1:], ordered=False)


@given(ROWS, ROWS)
def test_equality_of_rows_is_symmetric_and_follows_the_counts(left: list[Any], right: list[Any]) -> None:
    assert same_rows(left, right, ordered=False) == same_rows(right, left, ordered=False)
    assert same_rows(left, right, ordered=False) == (Counter(left) == Counter(right))
    assert same_rows(left, right, ordered=True) == (left == right)


def test_numbers_are_compared_to_their_significant_digits() -> None:
    assert same_rows([(0.1 + 0.2, 1)], [(0.3, 1.0)], ordered=True)
    assert same_rows([(1 / 3,)], [(0.333,)], ordered=True, digits=3)
    assert not same_rows([(1 / 3,)], [(0.333,)], ordered=True)
    assert not same_rows([(2**60,)], [(2**60 + 1,)], ordered=True)


@pytest.mark.parametrize("ordered", [True, False])
def test_whole_floats_are_compared_with_integers_digit_by_digit(ordered: bool) -> None:
    assert same_rows([(1234567891, "a")], [(1234567891.0, "a")], ordered=ordered)
    assert same_rows([(2**60,)], [(2.0**60,)], ordered=ordered)
    assert not same_rows([(1234567891,)], [(1234567892.0,)], ordered=ordered)
    assert same_rows([(1234567891,)], [(1234567890.9999998,)], ordered=ordered)
    assert same_rows([(1234,), (0.5,)], [(1234.0,), (0.5001,)], ordered=ordered, digits=3)
    assert same_rows([(1, 1e18)], [(1.0, 1e18 + 256)], ordered=ordered)  # sums of floats in another order
    assert same_rows([(1,), (float("inf"),)], [(1.0,), (float("inf"),)], ordered=ordered)
    assert not same_rows([(1,)], [(1, 2.0)], ordered=ordered)


@given(st.integers(-(2**53), 2**53), st.integers(1, 17))
def test_integer_and_its_float_do_not_differ(number: int, digits: int) -> None:
    assert same_rows([(number,)], [(float(number),)], ordered=True, digits=digits)


@pytest.mark.parametrize(("order", "goal"), [("query", 0.0), ("always", 0.0), ("never", 1.0)])
def test_order_can_be_declared(match: Callable[..., Reward], order: str, goal: float) -> None:
    assert goal == match(f"{NAMES} ORDER BY id", ORDERED, order=order).value


def test_database_is_found_beside_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    database(tmp_path / "data" / "songs.sqlite")
    emitter = SqlMatch(database="data/{db}.sqlite", setup=setup(tmp_path))
    assert 1.0 == one(emitter, {"db": "songs", "answer": NAMES}, NAMES).value


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"db": "none", "answer": NAMES}, "does not exist"),
        ({"answer": NAMES}, r"needs \['db'\]"),
        ({"db": "the singers"}, "runs the query in the task's 'answer'"),
        ({"db": "the singers", "answer": []}, "runs the query in the task's 'answer'"),
        ({"db": "the singers", "answer": "SELECT nope"}, "does not run on .*no such column: nope"),
        ({"db": "the singers", "answer": "DELETE FROM singer"}, "does not run on .*only queries"),
    ],
)
def test_task_that_cannot_be_judged_is_an_error(path: Path, task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(SqlMatch(database="{db}.sqlite", setup=setup(path.parent)), task, NAMES)


@pytest.mark.parametrize("params", [{"order": "maybe"}, {"digits": 0}, {"time_s": 0}, {"max_rows": 0}, {"source": "x"}])
def test_parameters_that_mean_nothing_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SqlMatch(database="x", **params)


def test_syntax_needs_no_table_and_execution_does(path: Path) -> None:
    query = "SELECT x FROM nowhere"
    assert 1.0 == one(SqlSyntax(), {}, query).value
    reward = one(SqlExecutes(database=str(path)), {}, query)
    assert (0.0, "no such table: nowhere") == (reward.value, reward.feedback)
    assert 1.0 == one(SqlExecutes(database=str(path)), {}, NAMES).value
