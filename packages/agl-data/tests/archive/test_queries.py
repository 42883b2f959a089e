"""DuckDB and pandas read an archive without agl."""

import asyncio

import duckdb
import pandas
import pytest

from agl.schemas import unpack_ids
from agl.stores import MemoryStore

from .conftest import archive, call, record, record_context


@pytest.fixture
def folder(url) -> str:
    async def work() -> None:
        store = MemoryStore()
        await record_context(store)
        await record(store, ids=range(4), step=1)
        await record(store, ids=range(4, 8), step=2)
        await archive(store, url)

    asyncio.run(work())
    return url


def test_duckdb_finds_the_mean_reward_by_step(folder):
    question = f"SELECT step, avg(reward) FROM '{folder}/*/rollouts/*.parquet' GROUP BY step ORDER BY step"
    assert [(1, 0.375), (2, 1.375)] == duckdb.sql(question).fetchall()


def test_duckdb_joins_spans_to_rollouts(folder):
    question = f"""
        SELECT r.rollout_id, s.agent, s.model, s.prompt_ids, len(s.logprobs), s.request ->> '$.messages[0].role',
            s.duration_s
        FROM '{folder}/sums/rollouts/*.parquet' r JOIN '{folder}/sums/spans/*.parquet' s USING (rollout_id)
        WHERE s.operation = 'chat' AND s.attempt_id LIKE '%.2' ORDER BY r.rollout_id LIMIT 1
    """
    (row,) = duckdb.sql(question).fetchall()
    assert ("sums-000", "solver", "small", unpack_ids(call(0).prompt_ids), 2, "user", 0.5) == row


def test_pandas_reads_every_table(folder):
    rollouts = pandas.read_parquet(f"{folder}/sums/rollouts")
    assert [0.375, 1.375] == rollouts.groupby("step")["reward"].mean().tolist()
    assert {1} == {*rollouts["calls"]}
    assert {2} == {*rollouts["response_tokens"]}
    spans = pandas.read_parquet(f"{folder}/sums/spans")
    assert [4, -5] == list(spans["response_ids"].dropna().iloc[0])
    assert "UTC" == str(spans["started_at"].dt.tz)
    assert 8 == len(pandas.read_parquet(f"{folder}/sums/attempts").query("error_type == 'ValueError'"))
    assert ["v1", "v2", "v3"] == pandas.read_parquet(f"{folder}/sums/versions.parquet")["version"].tolist()
    assert [0.5] == pandas.read_parquet(f"{folder}/sums/metrics.parquet")["value"].tolist()
    labels = pandas.read_parquet(f"{folder}/sums/labels.parquet")
    assert ["v1", "v2", "v1"] == labels["version"].tolist()
