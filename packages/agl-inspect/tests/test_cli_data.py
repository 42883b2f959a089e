"""``agl runs``, ``show``, ``why`` and ``export`` on real SQLite stores."""

import asyncio
import json
import random
import re
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from agl import PluginManager, Reward, Rollout, Span, semconv
from agl.contracts import ExperimentRecord, RolloutQuery, Store
from agl.errors import ConfigError
from agl.schemas import (
    Claim,
    ErrorInfo,
    ModelCall,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    pack_floats,
    pack_ids,
)
from agl.schemas import _codec as codec
from agl.tracing import chat_spans
from agl_data.export.dialogues import chat_tools
from agl_inspect.ownership import Ownership
from agl_inspect.records.state import AlgorithmState, save_progress
from agl_inspect.rollouts.span_reader import in_tree
from agl_inspect.terminal.opening import resolve_url
from agl_inspect.terminal.program import cli
from agl_inspect.terminal.query import seconds_of
from agl_testing.waiting import wait_until

QUESTION = [{"role": "user", "content": "What is 2+3?"}]
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {}}]}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "5"}
ANSWER = {"role": "assistant", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def call(request_id: str, messages: list, answer: dict, prompt: list[int], response: list[int], **more) -> ModelCall:
    return ModelCall(
        request_id=request_id,
        dialect="chat",
        model="main_llm",
        policy="main_llm",
        request={"messages": messages, "tools": TOOLS},
        response={"choices": [{"message": answer}]},
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(response),
        logprobs=pack_floats([-0.5] * len(response)),
        finish_reason="stop",
        **more,
    )


def spans_of(claim: Claim) -> tuple[Span, ...]:
    """Return the spans of an agent with two calls that continue each other, one failed call, and a reward."""
    ids = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
    first = call("r1", QUESTION, CALLED, [1, 2, 3], [4, 5])
    second = call("r2", [*QUESTION, {**CALLED, "content": ""}, TOOL], ANSWER, [1, 2, 3, 4, 5, 6], [7, 8])
    failed = call("r3", QUESTION, {}, [], [], status_code=500, error="overloaded", ids_missing="no answer")
    agent = {semconv.AGENT_NAME: "solver"}
    return (
        Span(**ids, span_id="a" * 16, name="invoke_agent solver", attributes=agent, start_ns=1, end_ns=9),
        Span(**ids, span_id="b" * 16, parent_id="a" * 16, name="chat main_llm", call=first, start_ns=2, end_ns=3),
        Span(**ids, span_id="c" * 16, parent_id="a" * 16, name="chat main_llm", call=second, start_ns=4, end_ns=5),
        Span(**ids, span_id="d" * 16, parent_id="a" * 16, name="chat main_llm", call=failed, start_ns=6, end_ns=7),
        Span(**ids, span_id="e" * 16, name="reward", reward=Reward(value=0.75, source="evaluator"), start_ns=8),
    )


async def fill(store: Store, count: int, *, experiment: str = "calc") -> list[str]:
    """Record ``count`` finished rollouts and one that is queued."""
    names = [f"ro-{experiment}-{number:03d}" for number in range(count)]
    await store.enqueue([Rollout(rollout_id=name, task={"q": "2+3"}, experiment=experiment) for name in names])
    claims = await store.claim(worker="w", limit=count, experiment=experiment)
    await store.finish(
        [Outcome(attempt_id=c.attempt.attempt_id, status="succeeded", spans=spans_of(c)) for c in claims]
    )
    await store.enqueue([Rollout(rollout_id=f"ro-{experiment}-waits", task={}, experiment=experiment)])
    return names


async def finish_with(store: Store, *make) -> None:
    """Record one finished rollout with the spans that the functions ``make`` return for its claim."""
    await store.enqueue([Rollout(rollout_id="ro-one", task={"q": "2+3"}, experiment="one")])
    (claim,) = await store.claim(worker="w", experiment="one")
    spans = tuple(span(claim) for span in make)
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=spans)])


@pytest.fixture
def store_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a coroutine function on ``runs/agl.db`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)
    (tmp_path / "runs").mkdir()
    manager = PluginManager()

    def use(work, *args, **kwargs):
        async def main():
            store = manager.build(manager.store_entry("sqlite"), url="sqlite:///runs/agl.db")
            try:
                return await work(store, *args, **kwargs)
            finally:
                await store.close()

        return asyncio.run(main())

    return use


def invoke(*args: str):
    return CliRunner().invoke(cli, args, catch_exceptions=False)


def ids_in(store: Store):
    return store.rollouts(RolloutQuery())


def test_runs_lists_newest_first_with_reward(store_of):
    store_of(fill, 3)
    lines = invoke("runs").output.splitlines()
    assert ["rollout", "experiment", "mode", "status", "tries", "reward", "created", "task"] == lines[0].split()
    assert ["ro-calc-waits", "ro-calc-002", "ro-calc-001", "ro-calc-000"] == [line.split()[0] for line in lines[1:]]
    assert ["calc", "train", "succeeded", "1", "0.75"] == lines[2].split()[1:6]
    assert '{"q":"2+3"}' in lines[2]


async def fill_with_rewards(store: Store, rewards: dict[str, float | None]) -> None:
    """Record finished rollouts with these rewards by id."""
    await store.enqueue([Rollout(rollout_id=rollout_id, task={}, experiment="r") for rollout_id in rewards])
    for claim in await store.claim(worker="w", limit=len(rewards)):
        value = rewards[claim.rollout.rollout_id]
        ids = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
        reward = Reward(value=value, source="evaluator")
        spans = () if value is None else (Span(**ids, span_id="e" * 16, name="reward", reward=reward),)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=spans)])


def test_runs_sorts_by_reward(store_of):
    store_of(fill_with_rewards, {"a": 0.5, "b": None, "c": -1.0, "d": 2.0, "e": 0.5, "f": 0.0})

    def listed(*options: str) -> str:
        found = json.loads(invoke("runs", "--sort", "reward", "--json", *options).output)
        return "".join(item["rollout"]["rollout_id"] for item in found)

    assert "d" == listed("--limit", "1")
    assert "deafcb" == listed()
    assert "cfaedb" == listed("--ascending")
    assert "cf" == listed("--ascending", "--limit", "2")
    assert "" == listed("--status", "failed")


def test_runs_filters_and_limits(store_of):
    store_of(fill, 3)
    store_of(fill, 1, experiment="other")
    assert 2 == len(invoke("runs", "--experiment", "other").output.splitlines()[1:])
    assert 3 == len(json.loads(invoke("runs", "--experiment", "calc", "--status", "succeeded", "--json").output))
    assert 1 == len(json.loads(invoke("runs", "--limit", "1", "--json").output))
    assert [] == json.loads(invoke("runs", "--mode", "val", "--json").output)


@pytest.mark.parametrize("command", [("runs",), ("data", "export")])
def test_experiment_that_is_not_recorded_is_refused_with_a_choice(store_of, command: tuple[str, ...]):
    store_of(fill, 1)
    missing = "no rollout of an experiment 'clac' is recorded; "
    assert f"{missing}agl runs lists the records" in invoke(*command, "--experiment", "clac").output
    store_of(save_progress, ExperimentRecord(name="calc", status="running"))
    result = invoke(*command, "--experiment", "clac")
    assert (1, True) == (result.exit_code, f"{missing}did you mean 'calc'?" in result.output)
    assert "'else' is recorded; choose from: calc" in invoke(*command, "--experiment", "else").output


def test_runs_are_sorted_and_searched(store_of):
    store_of(fill, 3)
    store_of(fill, 1, experiment="other")

    def names(*options: str) -> list[str]:
        return [item["rollout"]["rollout_id"] for item in json.loads(invoke("runs", "--json", *options).output)]

    expected = ["ro-calc-000", "ro-calc-001", "ro-calc-002", "ro-other-000", "ro-calc-waits", "ro-other-waits"]
    assert sorted(expected[:4], reverse=True) == names("--sort", "created", "--status", "succeeded")
    by_status = [expected[4], expected[5], *expected[:4]]
    assert by_status == names("--sort", "status", "--ascending")
    assert by_status[::-1] == names("--sort", "status")
    assert {*expected[4:]} == {*names("--sort", "finished", "--ascending")[:2]}
    assert ["ro-other-waits", "ro-calc-waits"] == names("--contains", "waits")
    assert 4 == len(names("--contains", '"2+3"'))


def test_runs_says_how_many_rollouts_there_are(store_of):
    store_of(fill, 3)
    listed = invoke("runs", "--limit", "2")
    assert (3, "(2 of 4 rollouts; --limit shows more)\n") == (len(listed.stdout.splitlines()), listed.stderr)
    assert "" == invoke("runs", "--limit", "4").stderr
    assert "3\n" == invoke("runs", "--status", "succeeded", "--limit", "1", "--count").output


@pytest.mark.parametrize("created_at", [1.7e18, -1e300, float("inf")])
def test_time_beyond_the_calendar_is_listed_as_a_number(store_of, created_at):
    async def put(store: Store):
        await store.enqueue([Rollout(rollout_id="ro-odd", task=None, created_at=created_at)])

    store_of(put)
    assert f"{created_at:g}" in invoke("runs").output
    assert f"created {created_at:g} UTC" in invoke("show", "ro-odd").output


def test_runs_json_carries_rollout_and_reward(store_of):
    store_of(fill, 1)
    found = json.loads(invoke("runs", "--json").output)
    assert [None, 0.75] == [item["reward"] for item in found]
    assert "succeeded" == found[1]["rollout"]["status"]


@pytest.mark.parametrize(("rating", "value"), [("up", 1.0), ("down", 0.0), ("0.4", 0.4)])
def test_rating_of_a_person_is_recorded_beside_the_evaluators_reward(store_of, rating, value):
    store_of(fill, 1)
    rated = invoke("runs", "rate", "ro-calc-000", rating, "--feedback", "late")
    assert f"rated ro-calc-000 with {value:g}\n" == rated.output
    assert f"reward {value:g} by human" in invoke("show", "ro-calc-000").output
    why = invoke("why", "ro-calc-000").output
    assert "reward 0.75: the evaluator's reward" in why
    assert f"recorded reward {value:g} by human" in why


@pytest.mark.parametrize("rating", ["nan", "good"])
def test_rating_that_is_no_number_is_refused(store_of, rating):
    store_of(fill, 1)
    assert f"a number, not '{rating}'" in invoke("runs", "rate", "ro-calc-000", rating).stderr
    assert "is still queued" in invoke("runs", "rate", "ro-calc-waits", "up").stderr


def test_rm_removes_finished_rollouts_only(store_of):
    store_of(fill, 3)
    assert "removed 2 rollouts\n" == invoke("runs", "rm", "ro-calc-000", "ro-calc-002").output
    assert ["ro-calc-001", "ro-calc-waits"] == [rollout.rollout_id for rollout in store_of(ids_in)]
    result = invoke("runs", "rm", "ro-calc-001", "ro-calc-waits")
    assert 1 == result.exit_code
    assert "ro-calc-waits" in result.stderr
    assert 2 == len(store_of(ids_in))


def test_rm_of_an_unknown_rollout_names_it(store_of):
    store_of(fill, 1)
    result = invoke("runs", "rm", "ro-nowhere")
    assert (1, True) == (result.exit_code, "ro-nowhere" in result.stderr)


def test_rm_keeps_what_an_unfinished_experiment_needs(store_of):
    store_of(fill, 2)
    store_of(save_progress, ExperimentRecord(name="calc", status="running"))
    result = invoke("runs", "rm", "ro-calc-000")
    assert 1 == result.exit_code
    assert "'calc', which is not finished" in result.stderr
    assert "removed 1 rollout\n" == invoke("runs", "rm", "--force", "ro-calc-000").output


def test_gc_keeps_the_newest_and_every_unfinished_rollout(store_of):
    store_of(fill, 5)
    dry = json.loads(invoke("runs", "gc", "--keep", "2", "--dry-run", "--json").output)
    assert ["ro-calc-000", "ro-calc-001", "ro-calc-002"] == dry["removed"]
    assert 6 == len(store_of(ids_in))
    assert "removed 3 rollouts\n" == invoke("runs", "gc", "--keep", "2").output
    assert ["ro-calc-003", "ro-calc-004", "ro-calc-waits"] == [r.rollout_id for r in store_of(ids_in)]


async def fill_much(store: Store) -> None:
    """Record 400 rollouts of 10 kB."""
    noise = random.Random(1)
    tasks = [{"text": noise.randbytes(5_000).hex()} for _ in range(400)]
    made = await store.enqueue([Rollout(rollout_id=f"ro-{n:03}", task=task) for n, task in enumerate(tasks)])
    await store.cancel([rollout.rollout_id for rollout in made])


def test_gc_returns_the_space_of_what_it_removes(store_of):
    store_of(fill_much)
    size = Path(resolve_url(None).removeprefix("sqlite:///")).stat().st_size
    done = invoke("runs", "gc", "--keep", "10")
    assert re.fullmatch(r"removed 390 rollouts\nthe store has 0\.\d MiB instead of [4-9]\.\d MiB\n", done.output)
    assert Path(resolve_url(None).removeprefix("sqlite:///")).stat().st_size < size / 8
    assert 10 == len(store_of(ids_in))
    done = json.loads(invoke("runs", "gc", "--keep", "5", "--json").output)
    assert 0 < done["compaction"]["after"] <= done["compaction"]["before"] < 1 << 20
    assert json.loads(invoke("runs", "gc", "--keep", "5", "--json").output)["compaction"] is None


def test_gc_removes_the_oldest_until_the_store_is_small_enough(store_of):
    store_of(fill_much)
    dry = json.loads(invoke("runs", "gc", "--max-size", "3MB", "--dry-run", "--json").output)
    assert (100 < len(dry["removed"]) < 300, None) == (True, dry["size"])
    assert "removed 0 rollouts\n" == invoke("runs", "gc", "--max-size", "1GB").output
    done = json.loads(invoke("runs", "gc", "--max-size", "3MB", "--json").output)
    assert 2_500_000 < done["size"] <= 3_000_000
    assert done["compaction"]["after"] <= 3_100_000
    assert [f"ro-{n:03}" for n in range(len(done["removed"]), 400)] == [r.rollout_id for r in store_of(ids_in)]
    done = invoke("runs", "gc", "--max-size", "1MB", "--keep", "300").output
    assert re.search(r"its data still take [23]\.\d MB instead of 1\.0 MB: the rest is needed, not finished", done)


def test_vacuum_returns_all_unused_space(store_of):
    store_of(fill_much)
    store_of(lambda store: store.delete([f"ro-{n:03}" for n in range(399)]))
    assert re.fullmatch(r"the store has 0\.\d MiB instead of [4-9]\.\d MiB\n", invoke("runs", "vacuum").output)
    done = json.loads(invoke("runs", "vacuum", "--json").output)
    assert done["before"] == done["after"] == Path("runs/agl.db").stat().st_size


def test_vacuum_is_refused_while_something_runs(store_of, tmp_path):
    store_of(fill, 1)
    store_of(lambda store: store.claim(worker="w", limit=1))
    result = invoke("runs", "vacuum")
    assert (1, True) == (
        result.exit_code,
        "rollout 'ro-calc-waits' is running, and would have to wait" in result.stderr,
    )

    async def owned(store: Store) -> Result:
        await store.cancel(["ro-calc-waits"])
        await save_progress(store, ExperimentRecord(name="calc", status="running"))
        async with Ownership(store, "calc", workdir=tmp_path / "elsewhere"):
            return await asyncio.to_thread(invoke, "runs", "vacuum")

    result = store_of(owned)
    assert (1, True) == (result.exit_code, "the experiment 'calc' is running" in result.stderr)
    assert 0 == invoke("runs", "vacuum").exit_code


def test_gc_looks_at_the_age(store_of):
    store_of(fill, 2)
    assert "removed 0 rollouts\n" == invoke("runs", "gc", "--older-than", "1h").output
    wait_until(lambda: "removed 2 rollouts\n" == invoke("runs", "gc", "--older-than", "0.01").output)


def test_gc_never_takes_an_unfinished_experiments_rollouts(store_of):
    store_of(fill, 2)
    store_of(fill, 2, experiment="done")
    store_of(save_progress, ExperimentRecord(name="calc", status="running"))
    store_of(save_progress, ExperimentRecord(name="done", status="finished"))
    assert (
        "removed 2 rollouts\nkept 2 of experiments that are not finished\n"
        == invoke("runs", "gc", "--keep", "0").output
    )
    assert 2 == len([r for r in store_of(ids_in) if r.experiment == "calc" and r.is_finished])


def test_gc_without_a_limit_is_refused(store_of):
    store_of(fill, 1)
    result = invoke("runs", "gc")
    assert (1, True) == (result.exit_code, "--older-than 7d" in result.stderr)


@pytest.mark.parametrize("option", [("--experiment", "calc"), ("--status", "failed"), ("--limit", "1"), ("--json",)])
def test_option_of_the_list_before_a_command_is_refused_and_removes_nothing(store_of, option):
    store_of(fill, 2, experiment="other")
    result = invoke("runs", *option, "gc", "--keep", "0")
    assert (2, True) == (result.exit_code, f"{option[0]} is for the list of agl runs" in result.stderr)
    assert 2 == sum(rollout.is_finished for rollout in store_of(ids_in))


def test_group_store_wins_over_the_environment(store_of, monkeypatch, tmp_path):
    store_of(fill, 2)
    monkeypatch.setenv("AGL_STORE", "sqlite:///nowhere.db")
    assert "removed 1 rollout\n" == invoke("runs", "rm", "--store", "runs/agl.db", "ro-calc-000").output


def test_show_prints_the_conversation_and_then_the_spans(store_of):
    store_of(fill, 1)
    lines = invoke("show", "ro-calc-000").output.splitlines()
    assert lines[0] == "ro-calc-000: succeeded, train, experiment calc, reward 0.75"
    assert lines[2].startswith("attempt 1: succeeded, by w")
    talk, line = lines[3 : lines.index("")], lines[lines.index("") + 1 :]
    assert talk[0].startswith("solver / invoke_agent solver main_llm, 3 + 2 tokens, stop")
    assert any("ERROR 500 overloaded" in each for each in talk)
    assert ["reward", "  reward 0.75 by evaluator"] == talk[-2:]
    names = ["invoke_agent solver", "  chat main_llm", "  chat main_llm", "  chat main_llm", "reward"]
    assert names == [each[21:] for each in line[1:]]


def counted_call(claim: Claim) -> Span:
    """Return the span of a call whose answer has token counts and no token ids."""
    made = call("r9", QUESTION, ANSWER, [], [], ids_missing="the backend returned none")
    answer = {**made.response, "usage": {"prompt_tokens": 17, "completion_tokens": 4}}
    made = msgspec.structs.replace(made, response=answer)
    (span,) = chat_spans(
        [made],
        rollout_id=claim.rollout.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        trace_id="f" * 32,
        parent_id=None,
        framework_span_id="",
        start_ns=1,
        end_ns=2,
    )
    return span


@pytest.mark.parametrize("command", ["show", "why"])
def test_usage_is_shown_where_the_answer_had_no_token_ids(store_of, command):
    store_of(finish_with, counted_call)
    output = invoke(command, "latest").output
    assert "17 + 4 tokens" in output
    assert "0 + 0" not in output


def test_show_prints_the_spans_that_are_chosen(store_of):
    store_of(fill, 1)
    expected = {("--kind", "call"): 3, ("--span", "main"): 3, ("--agent", "solver"): 4, ("--kind", "reward"): 1}
    for options, count in {**expected, ("--agent", "solver", "--kind", "call"): 3}.items():
        assert count == len(json.loads(invoke("show", "ro-calc-000", "--json", *options).output)["spans"])
    assert "no span fits --span, --agent and --kind" in invoke("show", "ro-calc-000", "--kind", "cal").output


def test_show_as_json_round_trips(store_of):
    store_of(fill, 1)
    found = json.loads(invoke("show", "ro-calc-000", "--json").output)
    spans = [codec.from_json(json.dumps(span), Span) for span in found["spans"]]
    assert pack_ids([4, 5]) == spans[1].call.response_ids
    assert ["succeeded"] == [attempt["status"] for attempt in found["attempts"]]


def test_show_of_a_failed_attempt_names_its_error(store_of):
    async def failing(store: Store):
        await store.enqueue([Rollout(rollout_id="ro-bad", task=None)])
        claims = await store.claim(worker="w")
        error = ErrorInfo(type="ValueError", message="no such tool")
        await store.finish([Outcome(attempt_id=claims[0].attempt.attempt_id, status="failed", error=error)])

    store_of(failing)
    output = invoke("show", "latest").output
    assert ": ValueError: no such tool" in output
    assert "no spans were recorded" in output


NAMED = {
    "show": ("show", "{}"),
    "why": ("why", "{}"),
    "export": ("data", "export", "{}", "--format", "spans"),
    "replay": ("replay", "{}"),
    "rm": ("runs", "rm", "{}"),
}


def named(command: str, rollout_id: str):
    return invoke(*(part.format(rollout_id) for part in NAMED[command]))


@pytest.mark.parametrize("command", NAMED)
def test_every_command_takes_latest_and_a_unique_beginning_of_an_id(store_of, command):
    store_of(finish_with, counted_call)
    store_of(fill, 2)
    alone = {"replay": "the rollout ro-one belongs", "rm": "removed 1 rollout"}
    assert alone.get(command, "ro-one") in named(command, "ro-o").output
    newest = {"replay": "ro-calc-waits", "rm": "ro-calc-waits", "export": "0 lines"}
    assert newest.get(command, "ro-calc-waits") in named(command, "latest").output


@pytest.mark.parametrize("is_deleted", [False, True])
def test_latest_is_the_last_of_rollouts_that_ended_in_another_order(store_of, is_deleted):
    async def write(store: Store):
        await store.enqueue([Rollout(rollout_id=f"ro-{name}", task=name) for name in ("a", "b", "c")])
        claims = await store.claim(worker="w", limit=3)
        for claim in reversed(claims):
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
        if is_deleted:
            await store.delete(["ro-b"])

    store_of(write)
    assert "ro-c: succeeded" in invoke("show", "latest").output


@pytest.mark.parametrize("command", NAMED)
def test_ambiguous_beginning_lists_the_candidates_and_an_unknown_one_says_so(store_of, command):
    store_of(fill, 2)
    result = named(command, "ro-calc-0")
    assert 1 == result.exit_code
    assert "several rollouts begin with 'ro-calc-0': ro-calc-000, ro-calc-001; write more of the id" in result.stderr
    unknown = named(command, "ro-other")
    assert (1, True) == (unknown.exit_code, "unknown rollout 'ro-other'; no id begins so" in unknown.stderr)
    slip = named(command, "ro-clac-001")
    assert (1, True) == (slip.exit_code, "'ro-clac-001'; did you mean 'ro-calc-001'? agl runs lists" in slip.stderr)


def test_long_list_of_candidates_is_cut(store_of):
    store_of(fill, 12)
    assert "ro-calc-007 and more; write more of the id" in invoke("why", "ro").stderr


def test_whole_id_and_name_of_a_resource_win_over_the_beginning_of_an_id(store_of):
    store_of(fill, 1)
    store_of(finish_with, counted_call)

    async def publish(store: Store):
        await store.enqueue([Rollout(rollout_id="ro-calc-000-more", task={})])
        resource = PromptTemplate(template="Hello")
        await store.publish([ResourceVersion(name="ro-one-prompt", version="1", resource=resource)])
        await store.enqueue([Rollout(rollout_id="ro-one-prompt-1", task={})])

    store_of(publish)
    assert "ro-calc-000: succeeded" in invoke("show", "ro-calc-000").output
    assert "ro-one-prompt: 1 published version," in invoke("show", "ro-one-prompt").output
    assert "ro-one-prompt-1: queued" in invoke("show", "ro-one-prompt-1").output


def test_show_of_an_unknown_attempt_says_how_many_there_are(store_of):
    store_of(fill, 1)
    result = invoke("show", "ro-calc-000", "--attempt", "2")
    assert (1, True) == (result.exit_code, "the rollout ro-calc-000 has 1" in result.stderr)


def test_tree_keeps_deep_and_circular_spans():
    ids = {"rollout_id": "r", "attempt_id": "r.1"}
    deep = [Span(**ids, span_id=str(n), parent_id=str(n - 1), name=f"s{n}", start_ns=n) for n in range(3000)]
    found = list(in_tree(deep))
    assert (3000, (2999, "s2999")) == (len(found), (found[-1][0], found[-1][1].name))
    circle = [Span(**ids, span_id="x", parent_id="y", name="x"), Span(**ids, span_id="y", parent_id="x", name="y")]
    assert [("x", True), ("y", True)] == sorted((span.name, is_circular) for _, span, is_circular in in_tree(circle))


def test_why_accounts_for_every_call(store_of):
    store_of(fill, 1)
    output = invoke("why", "ro-calc-000").output
    assert "3 calls recorded, 1 rejected; 1 row with 4 sampled tokens" in output
    assert "rejected, error" in output
    found = json.loads(invoke("why", "latest", "--json", "--store", "runs/agl.db").output)
    assert "ro-calc-waits" == found["rollout_id"]
    calls = json.loads(invoke("why", "ro-calc-000", "--json").output)["calls"]
    assert ["", "", "error"] == [item["reject"] for item in calls]
    assert {"solver"} == {item["agent"] for item in calls}


def own_reward(claim: Claim) -> Span:
    ids = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
    return Span(**ids, span_id="e" * 16, name="reward", reward=Reward(value=0.25, source="agent"))


@pytest.mark.parametrize("experiment", ["one", "one-dev", "one-try"])
def test_why_counts_rewards_by_the_settings_of_the_experiments_last_step(store_of, experiment):
    async def finish(store: Store):
        await store.enqueue([Rollout(rollout_id="ro-one", task=None, experiment=experiment)])
        (claim,) = await store.claim(worker="w")
        spans = (own_reward(claim),)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=spans)])

    store_of(finish)
    assert "1 reward came with the agent's own token and does not count" in invoke("why", "latest").output
    trusting = AlgorithmState(step=1, settings={"experiment.trust_agent_rewards": "true"})
    store_of(save_progress, ExperimentRecord(name="one"), {"grpo": trusting})
    output = invoke("why", "latest").output
    assert "reward 0.25: " in output
    assert "do not count" not in output


def test_why_with_agents_says_who_is_not_selected(store_of):
    store_of(fill, 1)
    calls = json.loads(invoke("why", "ro-calc-000", "--agents", "writer", "--json").output)["calls"]
    assert ["not_selected", "not_selected"] == [item["reject"] for item in calls][:2]


def exported(*args: str) -> list[dict]:
    result = invoke("data", "export", *args)
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_export_messages_gives_one_dialogue_per_conversation(store_of):
    store_of(fill, 2)
    lines = exported("--status", "succeeded")
    expected = {
        "messages": [*QUESTION, {**CALLED, "content": ""}, TOOL, ANSWER],
        "tools": TOOLS,
        "rollout_id": "ro-calc-000",
        "agent": "solver",
        "reward": 0.75,
    }
    assert expected == lines[0]
    assert 2 == len(lines)


def test_export_transitions_has_tokens_as_lists(store_of):
    store_of(fill, 1)
    lines = exported("ro-calc-000", "--format", "transitions")
    assert [[1, 2, 3], [1, 2, 3, 4, 5, 6]] == [line["prompt_ids"] for line in lines[:2]]
    assert ([4, 5], [-0.5, -0.5], 0.75) == (
        lines[0]["response_ids"],
        lines[0]["logprobs"],
        lines[0]["episode_reward"],
    )
    assert ["", "", "error"] == [line["reject"] for line in lines]


def test_export_rows_has_masks(store_of):
    store_of(fill, 1)
    (row,) = exported("ro-calc-000", "--format", "rows")
    assert [1, 2, 3, 4, 5, 6, 7, 8] == row["ids"]
    assert [0, 0, 0, 1, 1, 0, 1, 1] == row["mask"]
    assert 0.75 == row["reward"]
    assert 2 == len(row["segments"])


def test_export_spans_to_a_file_can_be_read_back(store_of, tmp_path):
    store_of(fill, 1)
    result = invoke("data", "export", "ro-calc-000", "--format", "spans", "--output", "out.jsonl")
    assert (0, "5 lines of spans written to out.jsonl\n") == (result.exit_code, result.stderr)
    spans = [codec.from_json(line, Span) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert store_of(lambda store: store.spans("ro-calc-000")) == spans


def test_export_writes_the_spans_that_are_chosen_and_nothing_else(store_of):
    store_of(fill, 3)
    rewards = exported("--format", "spans", "--kind", "reward")
    assert [("ro-calc-000", 0.75), ("ro-calc-001", 0.75), ("ro-calc-002", 0.75)] == [
        (span["rollout_id"], span["reward"]["value"]) for span in rewards
    ]
    assert 3 == len(exported("ro-calc-001", "--format", "spans", "--agent", "solver", "--span", "chat"))
    refused = invoke("data", "export", "--kind", "call")
    assert (1, True) == (refused.exit_code, "pass --format spans, without --min-reward" in refused.output)


def test_export_keeps_only_what_earned_enough(store_of):
    store_of(fill, 2)
    assert 2 == len(exported("--min-reward", "0.75"))
    assert [] == exported("--min-reward", "0.8")


def test_export_of_pairs_says_how_many_tasks_give_none(store_of):
    store_of(fill, 2)
    result = invoke("data", "export", "--format", "dpo")
    assert (0, "") == (result.exit_code, result.stdout)
    assert re.match(r"\d tasks? gives? no pair: fewer than two runs", result.stderr)
    assert result.stderr.endswith("0 lines of dpo written to stdout\n")


def test_export_to_an_unwritable_path_says_so(store_of):
    store_of(fill, 1)
    result = invoke("data", "export", "--output", "absent/out.jsonl")
    assert (1, True) == (result.exit_code, "cannot write 'absent" in result.stderr)


def test_tools_of_other_dialects_become_functions():
    schema = {"type": "object"}
    made = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": schema}}
    for dialect, tool in (
        ("messages", {"name": "add", "description": "sum", "input_schema": schema}),
        ("responses", {"type": "function", "name": "add", "description": "sum", "parameters": schema}),
    ):
        request = {"tools": [tool, {"type": "web_search"}]}
        assert [made] == chat_tools(ModelCall(request_id="r", dialect=dialect, model="m", request=request))


def test_store_is_found_named_or_asked_for(tmp_path):
    with pytest.raises(ConfigError, match=r"found 0 of runs/\*\.db"):
        resolve_url(None, tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("a.db", "b.db"):
        (tmp_path / "runs" / name).touch()
    with pytest.raises(ConfigError, match=r"found 2 of runs/\*\.db, a.db, b.db; name one with --store sqlite:///"):
        resolve_url(None, tmp_path)
    with pytest.raises(ConfigError, match="there is no store"):
        resolve_url("typo.db", tmp_path)
    assert "sqlite:///runs/a.db" == resolve_url("runs/a.db", tmp_path)
    assert "http://gateway:4747" == resolve_url("http://gateway:4747", tmp_path)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("2m", 120), ("1.5h", 5400), ("7d", 604_800), ("1w", 604_800)]
)
def test_durations(text, seconds):
    assert seconds == seconds_of(text)


def test_bad_duration_is_a_usage_error(store_of):
    store_of(fill, 1)
    result = invoke("runs", "gc", "--older-than", "soon")
    assert (2, True) == (result.exit_code, "write 30m, 12h, 7d" in result.stderr)


def test_tables_are_rich_on_a_terminal(store_of, monkeypatch, capsys):
    store_of(fill, 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    cli(["runs", "--experiment", "calc"], standalone_mode=False)
    assert "ro-calc-000" in capsys.readouterr().out
