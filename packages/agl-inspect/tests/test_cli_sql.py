"""``agl sql``: plain columns over the contents of any store, for reading only."""

import asyncio
import csv
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agl import Reward, Rollout, Span, semconv
from agl.contracts import ExperimentRecord, Metric, Store
from agl.schemas import Claim, ErrorInfo, ModelCall, Outcome, pack_floats, pack_ids
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore


def spans_of(claim: Claim) -> tuple[Span, ...]:
    """Return a call with token ids, a call with only the backend's token counts, and a reward."""
    ids = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
    exact = ModelCall(
        request_id="r1",
        dialect="chat",
        model="m",
        policy="main",
        request={"messages": [{"role": "user", "content": "2+3?"}]},
        response={"choices": []},
        prompt_ids=pack_ids([1, 2, 3]),
        response_ids=pack_ids([4, 5]),
        logprobs=pack_floats([-0.5, -0.5]),
        finish_reason="stop",
    )
    counted = ModelCall(request_id="r2", dialect="chat", model="judge", response={"choices": []})
    counts = {semconv.INPUT_TOKENS: 70, semconv.OUTPUT_TOKENS: 9, semconv.CACHE_READ_TOKENS: 64}
    return (
        Span(**ids, span_id="a" * 16, name="invoke_agent solver", attributes={semconv.AGENT_NAME: "solver"}),
        Span(**ids, span_id="b" * 16, parent_id="a" * 16, name="chat m", call=exact, start_ns=2),
        Span(**ids, span_id="c" * 16, name="chat judge", call=counted, attributes=counts, start_ns=3),
        Span(**ids, span_id="d" * 16, name="reward", reward=Reward(value=0.5, name="right", source="evaluator")),
    )


async def fill(store: Store) -> None:
    """Record two rollouts of ``sums``, the second of which fails, one of ``other``, and a metric of each."""
    place = {"algorithm": "grpo", "step": 3}
    await store.enqueue(
        [
            Rollout(
                rollout_id=f"ro-{n}", task={"q": n}, experiment="sums", metadata=place, resources={"prompt": f"v{n}"}
            )
            for n in (1, 2)
        ]
    )
    first, second = await store.claim(worker="w", limit=2)
    error = ErrorInfo(type="ValueError", message="no")
    await store.finish(
        [
            Outcome(attempt_id=first.attempt.attempt_id, status="succeeded", spans=spans_of(first)),
            Outcome(attempt_id=second.attempt.attempt_id, status="failed", error=error),
        ]
    )
    await store.enqueue([Rollout(rollout_id="ro-3", task=None, experiment="other")])
    for name in ("sums", "other"):
        await store.save_state({}, experiment=ExperimentRecord(name=name))
    await store.log_metrics(
        [Metric(experiment=name, algorithm="grpo", step=3, name="reward", value=0.5) for name in ("sums", "other")]
    )


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the only store of the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    (tmp_path / "runs").mkdir()

    async def main() -> None:
        store = SQLiteStore("sqlite:///runs/agl.db")
        await fill(store)
        await store.close()

    asyncio.run(main())


def sql(*words: str) -> Result:
    return CliRunner().invoke(cli, ("sql", *words))


def rows(query: str, *options: str) -> list[dict[str, Any]]:
    return json.loads(sql(query, "--json", *options).output)


@pytest.mark.usefixtures("filled")
def test_rollouts_have_their_rewards_tokens_and_places():
    found = rows(
        "SELECT rollout_id, experiment, algorithm, step, status, reward, calls, prompt_tokens, response_tokens, task "
        "FROM rollouts ORDER BY rollout_id"
    )
    assert ["ro-1", "sums", "grpo", 3, "succeeded", 0.5, 2, 73, 11, '{"q":1}'] == list(found[0].values())
    assert ["ro-2", "sums", "grpo", 3, "failed", None, 0, 0, 0, '{"q":2}'] == list(found[1].values())
    assert ["ro-3", "other", None, None, "queued", None, 0, 0, 0, "null"] == list(found[2].values())


@pytest.mark.usefixtures("filled")
def test_rewards_of_two_versions_are_compared_with_a_query():
    query = "SELECT resources ->> 'prompt' AS version, avg(reward) AS reward FROM rollouts GROUP BY 1 ORDER BY 1"
    versions = [(None, None), ("v1", 0.5), ("v2", None)]
    assert versions == [(row["version"], row["reward"]) for row in rows(query)]


@pytest.mark.usefixtures("filled")
def test_calls_rewards_and_attempts_are_joined_by_their_ids():
    found = rows(
        "SELECT c.agent, c.turn, c.policy, c.model, c.prompt_tokens, c.reject, c.request ->> '$.messages[0].content' "
        "AS asked, w.name, w.value, a.worker FROM calls c JOIN rewards w USING (attempt_id) "
        "JOIN attempts a USING (attempt_id) ORDER BY c.started_at"
    )
    assert ["solver", 0, "main", "m", 3, "", "2+3?", "right", 0.5, "w"] == list(found[0].values())
    assert ["", "judge", 70] == [found[1][name] for name in ("policy", "model", "prompt_tokens")]
    assert [{"error_type": "ValueError", "error": "no"}] == rows(
        "SELECT error_type, error FROM attempts WHERE status = 'failed'"
    )


@pytest.mark.usefixtures("filled")
def test_prompt_tokens_from_the_providers_cache_are_counted_for_calls_and_rollouts():
    assert [(0, 3), (64, 70)] == [
        tuple(row.values()) for row in rows("SELECT cached_tokens, prompt_tokens FROM calls ORDER BY started_at")
    ]
    assert [(64,), (0,), (0,)] == [
        tuple(row.values()) for row in rows("SELECT cached_tokens FROM rollouts ORDER BY rollout_id")
    ]


@pytest.mark.usefixtures("filled")
def test_experiment_limits_every_table():
    query = "SELECT experiment FROM rollouts UNION ALL SELECT experiment FROM metrics"
    assert [{"experiment": "other"}] * 2 == rows(query, "--experiment", "other")
    assert 5 == len(rows(query))


@pytest.mark.usefixtures("filled")
def test_rows_are_printed_as_a_table_or_as_csv():
    query = "SELECT rollout_id, reward FROM rollouts ORDER BY 1"
    assert ["rollout_id  reward", "ro-1        0.5", "ro-2", "ro-3"] == sql(query).output.splitlines()
    assert [["rollout_id", "reward"], ["ro-1", "0.5"], ["ro-2", ""], ["ro-3", ""]] == list(
        csv.reader(sql(query, "--csv").output.splitlines())
    )


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("DELETE FROM rollouts", "it does more than read"),
        ("ATTACH 'runs/agl.db' AS other", "it does more than read"),
        ("PRAGMA writable_schema = 1", "it does more than read"),
        ("SELECT 1; DROP TABLE calls", "one statement at a time"),
        ("SELECT wages FROM calls", "no such column: wages"),
        ("SELEC 1", 'near "SELEC": syntax error'),
    ],
)
def test_query_that_is_wrong_or_changes_something_is_refused(query: str, fault: str):
    before = Path("runs/agl.db").read_bytes()
    result = sql(query)
    assert 1 == result.exit_code
    assert fault in result.output
    assert "write one SELECT over rollouts, attempts, calls, rewards, metrics" in result.output
    assert before == Path("runs/agl.db").read_bytes()


@pytest.mark.usefixtures("filled")
def test_fault_that_only_a_later_row_has_is_named():
    result = sql("SELECT json(CASE rollout_id WHEN 'ro-2' THEN 'x' ELSE '1' END) AS j FROM rollouts")
    assert (1, True) == (result.exit_code, "the query cannot be run: malformed JSON" in result.stderr)


@pytest.mark.usefixtures("filled")
def test_columns_of_one_name_are_refused_where_json_would_keep_one_of_them():
    query = "SELECT * FROM rollouts r JOIN calls c USING (rollout_id)"
    result = sql(query, "--json")
    assert (1, True) == (
        result.exit_code,
        "several columns are called prompt_tokens, response_tokens, cached_tokens, " in result.stderr,
    )
    assert 2 == sql(query, "--csv").output.splitlines()[0].split(",").count("prompt_tokens")
    assert 1 == len(rows("SELECT r.prompt_tokens AS every, c.prompt_tokens FROM rollouts r JOIN calls c LIMIT 1"))


@pytest.mark.usefixtures("filled")
def test_row_of_a_table_stays_on_one_line():
    lines = sql("SELECT 'a' || char(10) || 'b' || char(9) || 'c' AS text, 1 AS n").output.splitlines()
    assert [r"a\nb\tc  1"] == lines[1:]


@pytest.mark.parametrize("odd", [{"a": 1}, [1], 2**63])
@pytest.mark.usefixtures("filled")
def test_metadata_and_token_counts_of_any_shape_are_read(odd: Any):
    ids = {"rollout_id": "ro-odd", "span_id": "b" * 16}
    made = ModelCall(request_id="r1", dialect="chat", model="m", response={"choices": []})

    async def put() -> None:
        store = SQLiteStore("sqlite:///runs/agl.db")
        await store.enqueue([Rollout(rollout_id="ro-odd", task=None, metadata={"algorithm": odd, "step": odd})])
        claim = next(one for one in await store.claim(worker="w", limit=9) if one.rollout.rollout_id == "ro-odd")
        span = Span(
            **ids, attempt_id=claim.attempt.attempt_id, name="chat m", call=made, attributes={semconv.INPUT_TOKENS: odd}
        )
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=(span,))])
        await store.close()

    asyncio.run(put())
    query = "SELECT algorithm, step, prompt_tokens FROM rollouts WHERE rollout_id = 'ro-odd'"
    shown = json.dumps(odd, separators=(",", ":"))
    assert {"algorithm": shown, "prompt_tokens": 0} == {k: v for k, v in rows(query)[0].items() if k != "step"}
    assert [{"prompt_tokens": 0}] == rows("SELECT prompt_tokens FROM calls WHERE rollout_id = 'ro-odd'")


def test_tables_are_listed_without_a_query_and_without_a_store():
    lines = sql().output.splitlines()
    assert ["rollouts", "attempts", "calls", "rewards", "metrics"] == [line.partition(":")[0] for line in lines]
    assert "prompt_tokens INTEGER" in lines[2]


@pytest.mark.usefixtures("filled")
def test_queries_may_be_recursive_and_read_no_table():
    query = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 3) SELECT sum(x) AS s FROM n"
    assert [{"s": 6}] == rows(query)
    assert [{"v": sqlite3.sqlite_version}] == rows("SELECT sqlite_version() AS v")
