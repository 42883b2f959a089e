"""Every view as a page and as JSON, over a store that training runs filled."""

import functools
import html
import json
import math
import re
import shlex
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from agl import semconv
from agl.contracts import ExperimentRecord, LabelMove, Metric, Moments, Presence, RolloutQuery, Store, VersionScore
from agl.schemas import (
    Blob,
    Episode,
    ErrorInfo,
    Json,
    MediaSpan,
    ModelCall,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    RetryPolicy,
    Reward,
    Rollout,
    Row,
    Segment,
    Weights,
    digest_of,
    pack_floats,
    pack_ids,
    to_json,
)
from agl.stores import MemoryStore
from agl.tracing import chat_spans
from agl_console import pages, rollouts
from agl_console.rewards import ROWS
from agl_console.rollout import SPANS
from agl_console.rollouts import PAGE
from agl_console.server import make_app
from agl_console.tokens import TokensFilter, tokens_view
from agl_console.versions import VERSIONS
from agl_console.vocabulary import Vocabulary
from agl_inspect.records.validations import Validation, validations_of
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally, add_tallies
from agl_inspect.rollouts.turns import tone_of
from agl_store_sqlite._store import SQLiteStore

from .conftest import Open
from .records import HOSTILE, LONG_LINE, LONG_NAME, Recorder, agent, call, record, rollout_name, team, training

FIRST = rollout_name(0)
VIEWS = (
    *("/", "/?compare=sums&compare=sums-slow", "/runs/sums", f"/runs/{LONG_NAME}", "/rollouts"),
    *(
        "/rollouts?experiment=sums&step=2",
        f"/rollouts/{FIRST}",
        "/rollouts/sums-1-grpo-hostile",
    ),
    *("/rollouts/sums-1-grpo-failed", "/rollouts/sums-1-grpo-waiting", "/rollouts/sums-1-grpo-long"),
    *(f"/rollouts/{FIRST}/tokens?row=1", "/rollouts/sums-1-grpo-waiting/tokens"),
    *("/rollouts/sums-1-grpo-hostile/spans/3", "/rollouts/sums-1-grpo-long/spans/3"),
    *("/runs/sums/agents", f"/runs/{LONG_NAME}/agents", "/runs/sums/agents?mode=train"),
    *("/group?experiment=sums&group=task-1", "/group?experiment=sums&group=task-0&algorithm=grpo&step=1"),
    *("/runs/refused", "/runs/refused/agents", "/?compare=refused"),
    *("/versions", "/versions/style", "/versions/style?version=first&against=production", "/versions/main_llm"),
    *("/versions/tools", f"/versions/{LONG_NAME}"),
    *("/learners", "/learners/support", "/learners/support/c1", "/learners/support/c2"),
)


WORDS: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "said": "gone"}
WITH_HOSTILE_TEXTS = ("/versions/style", "/versions/tools", "/group?experiment=sums&group=task-1")


async def text_of(client: TestClient, address: str) -> str:
    answer = await client.get(address)
    assert 200 == answer.status, await answer.text()
    return await answer.text()


async def data_of(client: TestClient, address: str) -> Any:
    answer = await client.get(address + ("&" if "?" in address else "?") + "format=json")
    assert 200 == answer.status, await answer.text()
    return await answer.json()


@pytest.mark.parametrize("address", VIEWS)
async def test_view_is_a_page_and_the_same_data_as_json(opened: Open, address: str) -> None:
    async with opened() as client:
        page, data = await text_of(client, address), await data_of(client, address)
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert isinstance(data, dict)


async def test_cached_prompt_tokens_stand_with_a_call(opened: Open) -> None:
    store = MemoryStore()
    await store.enqueue([Rollout(rollout_id="ro", task=1)])
    (claim,) = await store.claim(worker="w")
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
    made = ModelCall(request_id="q", dialect="chat", model="m", request={"messages": []}, response={"usage": usage})
    at = {"rollout_id": "ro", "attempt_id": claim.attempt.attempt_id, "trace_id": "", "parent_id": None}
    await store.append_spans(chat_spans([made], **at, framework_span_id="", start_ns=1, end_ns=2))
    async with opened(store) as client:
        for address in ("/rollouts/ro", "/rollouts/ro/spans/1"):
            assert "12 (8 cached) + 3 tokens" in await text_of(client, address)


@pytest.fixture(scope="module")
def damaged(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the filled store in which one rollout, and the second span of every other, are garbage."""
    path = tmp_path_factory.mktemp("damaged") / "runs.db"
    with closing(sqlite3.connect(filled)) as whole, closing(sqlite3.connect(path)) as copy:
        whole.backup(copy)
        copy.execute("UPDATE rollouts SET data = x'c1' WHERE rollout_id = ?", (rollout_name(1),))
        copy.execute("UPDATE spans SET data = x'c1' WHERE key & 0xffffff = 2")
        copy.commit()
    return path


@pytest.mark.parametrize("address", [each for each in VIEWS if "row=" not in each])  # damaged attempts have no rows
async def test_damaged_records_hide_no_view(opened: Open, damaged: Path, address: str) -> None:
    store = SQLiteStore(f"sqlite:///{damaged}")
    async with opened(store) as client:
        assert (await text_of(client, address)).rstrip().endswith("</html>")
        assert isinstance(await data_of(client, address), dict)
    await store.close()


async def test_runs_show_status_last_reward_and_best_version(opened: Open, filled: Path) -> None:
    store = SQLiteStore(f"sqlite:///{filled}")
    await store.announce(Presence(experiment="sums-slow", session="s"))  # on a busy machine the first sign is old
    await store.close()
    async with opened() as client:
        runs = {run["name"]: run for run in (await data_of(client, "/"))["runs"]}
        page = await text_of(client, "/")
    assert {"sums": "finished", "sums-slow": "running", LONG_NAME: "stopped", "refused": "stopped"} == {
        name: run["status"] for name, run in runs.items()
    }
    assert ["grpo", "validate"] == [last["algorithm"] for last in runs["sums"]["rewards"]]
    assert "sums-1-grpo-2" == runs["sums"]["best"]["version"]
    assert runs["sums"]["has_failures"]
    assert not runs["sums-slow"]["has_failures"]
    assert LONG_NAME in page


@pytest.mark.parametrize("other", ["sums-slow", "sums-1"])
async def test_best_version_of_a_run_is_its_own_where_the_name_of_another_begins_alike(
    opened: Open, other: str
) -> None:
    store, shared = MemoryStore(), PromptTemplate(template="Answer.")
    for name, mean in (("sums", 0.25), (other, 0.75)):
        made, step = f"{name}-1-grpo-5", {"algorithm": "grpo", "step": 5}
        await store.publish([ResourceVersion(name="style", version=made, resource=shared, **step)])
        await store.save_scores([VersionScore(name="style", version=made, mean=mean, low=0, high=1, n=9, how="fresh")])
        await store.save_state({}, experiment=ExperimentRecord(name=name, live={"style": f"{name}-1-grpo-6"}))
    async with opened(store) as client:
        listed = {run["name"]: run["best"]["version"] for run in (await data_of(client, "/"))["runs"]}
        alone = (await data_of(client, "/runs/sums"))["best"]["version"]
    assert {"sums": "sums-1-grpo-5", other: f"{other}-1-grpo-5"} == listed
    assert "sums-1-grpo-5" == alone


async def test_runs_show_which_parameters_matter_with_the_runs_behind_it(opened: Open) -> None:
    async with opened() as client:
        (kept,) = (await data_of(client, "/"))["fits"]
        page = await text_of(client, "/")
        other = (await data_of(client, "/?compare=sums-slow&compare=refused"))["fits"]
    assert ["sums", "sums-slow", LONG_NAME] == [run["experiment"] for run in kept["fit"]["runs"]]
    assert [True, False] == [each["is_clear"] for each in kept["fit"]["parameters"]]
    assert "over 3 comparable runs" in page
    assert "<b>0.84</b>" in page
    assert 1 == page.count("may be chance")
    assert "leave out" in page
    assert HOSTILE not in page
    assert "The best run has the largest lr." in page
    assert [] == other, "a fit stands beside the run from which it was asked for"


async def test_versions_show_trials_beside_validation_scores(opened: Open) -> None:
    async with opened() as client:
        rows = {row["version"]: row for row in (await data_of(client, "/versions/style"))["versions"]}
        page = " ".join(re.sub("<[^>]+>", "", await text_of(client, "/versions/style")).split())
    assert 0.8 == rows["sums-1-grpo-2"]["score"]["mean"]
    (trial,) = rows["sums-1-grpo-2"]["trials"]
    assert "first" == trial["against"]
    found = trial["score"]["comparison"]
    assert (0.12, 20, "better") == tuple(found[name] for name in ("difference", "paired_tasks", "verdict"))
    assert [""] == [trial["against"] for trial in rows["first"]["trials"]]
    assert [] == rows["sums-1-grpo-1"]["trials"]
    assert "tried: 0.5 [0.4, 0.6], 20 of 40 validation tasks" in page
    assert "+0.12 [+0.02, +0.22] against first, paired by 20 tasks" in page


async def test_compared_runs_share_a_figure_and_show_the_settings_that_differ(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/?compare=sums&compare=sums-slow")
        page = await text_of(client, "/?compare=sums&compare=sums-slow")
    lines = {(line["run"], line["algorithm"]) for line in data["figures"][0]["series"]}
    assert {(run, algorithm) for run in ("sums", "sums-slow") for algorithm in ("grpo", "validate")} == lines
    assert [{"name": "grpo.lr", "values": ["0.05", "0.02"]}] == data["differences"]
    words = re.sub("<[^>]+>", "", page)
    assert "They differ in grpo.lr (0.05 in sums, 0.02 in sums-slow)." in words


def validated(experiment: str, rewards: Sequence[float], *, tasks: str = "t") -> dict[str, bytes]:
    """Return the saved state of a run's validation."""
    kept = {"turn": 1, "versions": {}, "rewards": list(rewards), "tasks": tasks}
    return {f"experiment/{experiment}/1/validation/00000001": to_json(kept)}


async def test_compared_runs_say_which_is_better_with_the_evidence(opened: Open) -> None:
    store = MemoryStore()
    zeros, ones = [0.0] * 12, [1.0] * 12
    states = {**validated("a", zeros), **validated("b<i>", ones), **validated("c", zeros, tasks="others")}
    for name in ("a", "b<i>", "c", "d"):
        await store.save_state(states, experiment=ExperimentRecord(name=name))
    address = "/?compare=a&compare=b%3Ci%3E&compare=c&compare=d"
    async with opened(store) as client:
        data, page = await data_of(client, address), await text_of(client, address)
        alone = await data_of(client, "/?compare=a")
    better, unclear, missing = data["against_first"]
    assert ("better", 1.0, 12) == tuple(better["comparison"][key] for key in ("verdict", "difference", "paired_tasks"))
    assert "<li>b&lt;i&gt; is better than a: its newest validation has 1.000 against 0.000, difference +1.0000" in page
    assert ("undecidable", 0) == tuple(unclear["comparison"][key] for key in ("verdict", "paired_tasks"))
    words = "Not enough validations to tell whether d is better than a: no validation of d is recorded"
    assert (None, words) == (missing["comparison"], missing["words"])
    assert [] == alone["against_first"]


async def test_learning_draws_intervals_and_pages_back_through_steps(opened: Open) -> None:
    async with opened() as client:
        first = await data_of(client, "/runs/sums")
        second = await data_of(client, f"/runs/sums?before={first['next']['before']}")
    shown = [figure["name"] for figure in (*first["health"], *first["figures"])]
    assert not {"reward", "reward_low", "reward_high", "clipped_low"} & set(shown)
    assert ["kl", "entropy"] == shown[:2][::-1]
    assert {"clipped_low": 0.01, "clipped_high": 0.02} == {
        n: first["constants"][n] for n in ("clipped_low", "clipped_high")
    }
    line = first["rewards"]["series"][0]
    assert 60 == len(line["steps"]) == len(line["low"])
    assert all(low < value < high for low, value, high in zip(line["low"], line["values"], line["high"], strict=True))
    steps = [row["step"] for page in (first, second) for row in page["tables"][0]["rows"]]
    assert list(range(60, 0, -1)) == steps
    assert {} == second["next"]


def rewarded(experiment: str, algorithm: str, values: Sequence[float]) -> list[Metric]:
    place = {"experiment": experiment, "algorithm": algorithm, "name": "reward"}
    return [Metric(step=n, experiment_step=2 * n, value=value, **place) for n, value in enumerate(values, 1)]


async def test_messages_are_searched_and_the_place_is_linked(opened: Open) -> None:
    def talked(recorder: Recorder, *, text: str, **_: Any) -> None:
        asked = [{"role": "user", "content": "Which planet\nis the largest?"}]
        recorder.add("chat", call=call(1, prompt=(), answer=(), version="v", messages=asked, said="the sun is a star"))
        recorder.add(
            "chat", call=call(2, prompt=(), answer=(), version="v", messages=asked, said="It is Jupiter, surely")
        )

    store = MemoryStore()
    await record(store, "right", spans=talked)
    await record(store, "other")
    async with opened(store) as client:
        data = await data_of(client, "/rollouts?said=JUPITER")
        page = await text_of(client, "/rollouts?said=JUPITER")
        asked = await data_of(client, "/rollouts?said=planet%0Ais")
        none = await data_of(client, "/rollouts?said=saturn")
    (row,) = data["rollouts"]
    assert ("right", "It is Jupiter, surely", 2) == (row["rollout_id"], row["found"], row["found_at"])
    assert 'href="/rollouts/right#s2"' in page
    assert ["right"] == [one["rollout_id"] for one in asked["rollouts"]]
    assert ([], 2) == (none["rollouts"], none["looked_through"])


@pytest.mark.parametrize("word", ["role", "content", "assistant"])
async def test_search_finds_what_was_said_and_no_key_or_role(opened: Open, word: str) -> None:
    store = MemoryStore()
    await record(store, "r", reward=1.0)
    async with opened(store) as client:
        assert [] == (await data_of(client, f"/rollouts?said={word}"))["rollouts"]


async def test_agents_of_the_run_are_offered_with_the_number_of_their_rollouts(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/rollouts?experiment=sums")
        assert {} == (await data_of(client, "/rollouts"))["agents"]
        page = await text_of(client, "/rollouts?experiment=sums")
    assert list(data["agents"].values()) == sorted(data["agents"].values(), reverse=True)
    first, count = next(iter(data["agents"].items()))
    assert f'<option value="{first}" label="{first}, {count} rollouts">' in page


async def test_range_of_steps_the_wrong_way_round_is_refused(opened: Open) -> None:
    async with opened() as client:
        answer = await client.get("/rollouts?step=5&until=2")
        assert 400 == answer.status
        assert "no step is from 5 to 2; exchange step and until" in await answer.text()


async def test_filters_read_as_a_sentence_whose_parts_are_left_out_by_links(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/rollouts?experiment=sums&algorithm=grpo&step=1&until=2&high=0.5&agent=writer")
        page = html.unescape(await text_of(client, "/rollouts?experiment=sums&high=0.5"))
    assert ["run sums", "agent writer", "reward below 0.5", "grpo", "step 1", "to step 2"] == [
        each["words"] for each in data["picked"]
    ]
    assert {1, 2} == {row["step"] for row in data["rollouts"]}
    assert all(row["reward"] < 0.5 for row in data["rollouts"])
    assert 'href="/rollouts?experiment=sums"' in page
    assert 'href="/rollouts?experiment=sums&high=0.5&status=failed"' in page


async def test_learning_says_what_to_change_with_its_evidence(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="cut"))
    numbers = [Metric(experiment="cut", algorithm="grpo", step=n, name="truncated_share", value=0.5) for n in (1, 2, 3)]
    await store.log_metrics(numbers)
    async with opened(store) as client:
        data, page = await data_of(client, "/runs/cut"), await text_of(client, "/runs/cut")
    assert ["cut-answers"] == [each["rule"] for each in data["suggestions"]]
    assert "What to change" in page
    assert "50% of the rollouts have an answer that was cut at a limit of tokens" in page
    async with opened() as client:
        page = await text_of(client, "/runs/sums")
    assert (False, True, True) == tuple(
        words in page for words in ("What to change", "Nothing to change was found.", "No alert was raised.")
    )


async def test_advice_on_silent_groups_names_their_reward_and_its_lowest_part(opened: Open) -> None:
    def graded(recorder: Recorder, *, reward: float, **_: Any) -> None:
        parts = {"form": 1.0, "exact": float(reward == 1)}
        recorder.add("grade", reward=Reward(value=reward, dimensions=parts, source="evaluator"))

    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="dumb"))
    place = {"experiment": "dumb", "algorithm": "grpo"}
    await store.log_metrics([Metric(**place, step=n, name="silent_share", value=2 / 3) for n in (1, 2, 3)])
    for number, reward in enumerate((0.1, 0.1, 0.1, 0.1, 0.1, 1.0)):
        name = f"dumb-1-grpo-train-00003-0000{number // 2}-00{number % 2}"
        await record(store, name, experiment="dumb", reward=reward, group=f"task-{number // 2}", spans=graded, step=3)
    async with opened(store) as client:
        (found,) = (await data_of(client, "/runs/dumb"))["suggestions"]
        page = await text_of(client, "/runs/dumb")
    ending = "; in step 3, 2 of 3 tasks got one reward, mostly 0.1, and exact is 0 in 5 of 6 rollouts"
    assert ("silent-groups", True) == (found["rule"], found["evidence"].endswith(ending))
    assert 'step=1&amp;until=3&amp;taught=nothing">grpo 1 to 3</a>' in page


async def test_step_of_the_table_leads_to_its_rollouts(opened: Open) -> None:
    async with opened() as client:
        page = await text_of(client, "/runs/sums?before=4")
        address = re.search(r'<a href="(/rollouts\?[^"]*step=2)"', page)
        assert address is not None
        data = await data_of(client, html.unescape(address[1]))
    assert {2} == {row["step"] for row in data["rollouts"]}
    assert 4 == len(data["rollouts"])


FILTERS = {
    "experiment=sums&status=failed": {"failed"},
    "status=queued": {"waiting"},
    "text=-failed": {"failed"},
    "step=3": {"00002", "00005", "00008", "00011"},
    "algorithm=ppo": set[str](),
    "agent=planner&group=task-3": {"00003", "00007", "00011"},
    "agent=nobody": set[str](),
    "low=0.8": {"00010", "00011"},
    "low=0.25&high=0.5": {"00003", "00004", "00005", "long"},
    "reward=none": {"failed", "waiting"},
    "experiment=other": set[str](),
}


@pytest.mark.parametrize(("query", "expected"), FILTERS.items())
async def test_filters_select_rollouts(opened: Open, query: str, expected: set[str]) -> None:
    async with opened() as client:
        data = await data_of(client, f"/rollouts?{query}")
    assert expected == {
        re.sub("^sums-1-grpo-(train-[0-9]*-)?|-000$", "", row["rollout_id"]) for row in data["rollouts"]
    }


async def test_bars_of_the_histogram_part_the_rollouts_and_filter_them(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/rollouts?experiment=sums")
        counts = [bar["count"] for bar in data["histogram"]]
        found = [(await client.get("/rollouts", params=bar["query"] | {"format": "json"})) for bar in data["histogram"]]
        pages = [await answer.json() for answer in found]
    assert 16 == sum(counts)
    assert counts == [len(page["rollouts"]) for page in pages]


async def test_figures_of_a_list_are_of_all_rollouts_that_its_filters_select(opened: Open) -> None:
    store = MemoryStore()
    for number in range(60):
        await record(store, f"r-{number:03d}", experiment="few", reward=1.0 if number == 3 else number % 2 / 10)
    async with opened(store) as client:
        data = await data_of(client, "/rollouts?experiment=few")
        page = await text_of(client, "/rollouts?experiment=few")
        low = await data_of(client, "/rollouts?experiment=few&high=0.5")
    assert 50 == len(data["rollouts"])
    assert [(0.0, 30), (0.1, 29), (1.0, 1)] == [(bar["low"], bar["count"]) for bar in data["histogram"]]
    assert [(0.0, 30), (0.1, 29)] == [(bar["low"], bar["count"]) for bar in low["histogram"]]
    assert [0.1, 0.5] == [float(low["histogram"][1]["query"][end]) for end in ("low", "high")]
    assert "r-003" not in [row["rollout_id"] for row in data["rollouts"]]
    assert "with a reward of 0.1" in page


async def test_mean_of_rollouts_is_over_tasks_and_has_an_interval(opened: Open) -> None:
    async with opened() as client:
        summary = (await data_of(client, "/rollouts?experiment=sums&text=sums-1-grpo-train"))["summary"]
    means = [sum((number + 4 * k) / 12 for k in range(3)) / 3 for number in range(4)]
    assert (12, 4) == (summary["rollouts"], summary["tasks"])
    assert summary["mean"] == pytest.approx(sum(means) / 4)
    assert summary["low"] < summary["mean"] < summary["high"]


async def test_pages_of_rollouts_show_each_once_the_newest_first(opened: Open) -> None:
    store = MemoryStore()
    made = [Rollout(rollout_id=f"r-{number:04d}", task=number) for number in range(2 * PAGE + 20)]
    await store.enqueue(made)
    async with opened(store) as client:
        seen: list[str] = []
        query: dict[str, str] = {"status": "queued"}
        while query:
            answer = await client.get("/rollouts", params=query | {"format": "json"})
            data = await answer.json()
            seen += [row["rollout_id"] for row in data["rollouts"]]
            query = data["next"]
    every = await store.rollouts(RolloutQuery(sort="created_at", is_newest_first=True, limit=1000))
    assert [rollout.rollout_id for rollout in every] == seen


async def test_page_reads_until_its_time_is_over_and_goes_on_from_there(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    made = [Rollout(rollout_id=f"r-{n:05d}", task=n) for n in range(1500)]
    wanted = {"algorithm": "grpo", "step": 7}
    await store.enqueue([replace(one, metadata=wanted if n == 250 else {}) for n, one in enumerate(made)])
    async with opened(store) as client:
        whole = await data_of(client, "/rollouts?step=7")
        monkeypatch.setattr(rollouts, "SECONDS", 0.0)
        pages = [await data_of(client, "/rollouts?step=7")]
        while query := pages[-1]["next"]:
            pages.append(await (await client.get("/rollouts", params=query | {"format": "json"})).json())
        page = await text_of(client, "/rollouts?step=7")
    assert (["r-00250"], 1500, {}) == ([row["rollout_id"] for row in whole["rollouts"]], 1500, whole["next"])
    assert [200] * 7 + [100] == [each["looked_through"] for each in pages]
    assert [["r-00250"]] == [[row["rollout_id"] for row in each["rollouts"]] for each in pages if each["rollouts"]]
    assert "None so far; 1,300 of 1,500 rollouts not searched yet. <a" in page


async def test_step_of_an_algorithm_is_looked_up_in_a_store_of_any_size(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="large"))
    await store.enqueue(
        [
            Rollout(
                rollout_id=f"large-1-grpo-{mode}-{step:05d}-{number:05d}-000",
                task=number,
                experiment="large",
                mode=mode,
                metadata={"algorithm": "grpo", "step": step},
            )
            for step in range(1, 30)
            for mode in ("train", "val")
            for number in range(40)
        ]
    )
    async with opened(store) as client:
        first = await data_of(client, "/rollouts?experiment=large&algorithm=grpo&step=2")
        answer = await client.get("/rollouts", params=first["next"] | {"format": "json"})
        second = await answer.json()
    assert 80 == first["looked_through"]
    rows = [*first["rollouts"], *second["rollouts"]]
    assert [2] * 80 == [row["step"] for row in rows]
    assert 80 == len({row["rollout_id"] for row in rows})
    assert {} == second["next"]


async def test_pages_of_a_step_end_with_its_last_rollout(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "SECONDS", 0.0)
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="large"))
    named = {"experiment": "large", "metadata": {"algorithm": "grpo", "step": 2}}
    names = [f"large-1-grpo-train-00002-{number:05d}-000" for number in range(400)]
    await store.enqueue([Rollout(rollout_id=name, task=1, **named) for name in names])
    async with opened(store) as client:
        page = await data_of(client, "/rollouts?experiment=large&algorithm=grpo&step=2&low=1")
        looked = [page["looked_through"]]
        while page["next"]:
            page = await (await client.get("/rollouts", params=page["next"] | {"format": "json"})).json()
            looked.append(page["looked_through"])
    assert [200, 200] == [count for count in looked if count]


async def test_rollout_shows_its_time_line_and_reasons(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/rollouts/sums-1-grpo-train-00001-00006-000")
    nodes = [(node["depth"], node["kind"], node["agent"]) for node in data["nodes"]]
    assert [
        (0, "step", ""),
        (1, "agent", "planner"),
        (2, "call", "planner"),
        (1, "agent", "writer"),
        (2, "call", "writer"),
        (2, "tool", "writer"),
        (2, "call", "writer"),
        (1, "handoff", ""),
        (1, "reward", ""),
    ] == nodes
    assert 0.5 == data["reward"]
    assert any("3 calls recorded, 0 rejected; 2 rows with 70 sampled tokens" in line for line in data["why"])


async def test_rollout_is_a_conversation_in_which_a_call_shows_its_new_messages(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, f"/rollouts/{rollout_name(6)}")
        page = await text_of(client, f"/rollouts/{rollout_name(6)}")
    turns = data["turns"]
    assert [("call", "planner"), ("call", "writer"), ("tool", "writer"), ("handoff", ""), ("call", "writer")] == [
        (turn["node"]["kind"], turn["node"]["agent"]) for turn in turns[:-1]
    ]
    said = [[(each["role"], each["text"]["text"]) for each in turn["messages"]] for turn in turns]
    assert [("system", "be brief"), ("user", "What is 2 + 3?"), ("assistant", "a plan")] == said[0]
    assert [("user", "go on"), ("assistant", "done")] == said[4]
    assert [0, 0, 0, 0, 2, 0] == [turn["repeated"] for turn in turns]
    assert [{"form": 1.0}] == [reward["dimensions"] for reward in turns[-1]["rewards"]]
    assert re.search(r'id="s8-4">.*?href="#s8-4"', page, re.DOTALL)


def asking(*, results: bool, spans: bool, thinking: str = "") -> Any:
    """Return a script in which a model asks for two tools at once, and answers when both have answered."""

    def fill(recorder: Recorder, **_: Any) -> None:
        names = [("call-a", '{"x": 1}'), ("call-b", '{"x": 2}')]
        tools = [{"id": name, "function": {"name": "add", "arguments": given}} for name, given in names]
        asked = {"role": "user", "content": "add"}
        wanted = {"role": "assistant", "content": thinking, "tool_calls": tools}
        first = call(1, prompt=[], answer=[], version="v", messages=[asked], said="")
        recorder.add("chat", call=replace(first, response={"choices": [{"message": wanted}]}))
        for value in (2, 1) if spans else ():
            tool = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "add"}
            given = {semconv.TOOL_ARGUMENTS: {"x": value}, semconv.TOOL_RESULT: value + 1}
            recorder.add("execute_tool add", attributes={**tool, **given}, lasts_ms=50)
        answers = [{"role": "tool", "tool_call_id": name, "content": f"from {name}"} for name, _ in names]
        messages = [asked, wanted, *(answers if results else [])]
        recorder.add("chat", call=call(2, prompt=[], answer=[], version="v", messages=messages, said="five"))

    return fill


@pytest.mark.parametrize(("results", "spans"), [(True, True), (True, False), (False, True)])
async def test_tool_call_stands_with_its_result(opened: Open, results: bool, spans: bool) -> None:
    store = MemoryStore()
    await record(store, "r", spans=asking(results=results, spans=spans), reward=None)
    async with opened(store) as client:
        first, second = (await data_of(client, "/rollouts/r"))["turns"]
    tools = first["messages"][-1]["tools"]
    assert ['{"x": 1}', '{"x": 2}'] == [tool["arguments"]["text"] for tool in tools]
    assert (["from call-a", "from call-b"] if results else ["2", "3"]) == [tool["result"]["text"] for tool in tools]
    assert ([3, 2] if spans else [0, 0]) == [tool["sequence"] for tool in tools]
    assert ["five"] == [each["text"]["text"] for each in second["messages"]]


def looking(digest: str) -> Any:
    """Return a script in which a model is asked about a picture, and a tool returns it again."""
    part: Json = {"type": "image_url", "image_url": {"url": digest}}
    asked: Json = {"role": "user", "content": [{"type": "text", "text": "which colour?"}, part]}
    use: Json = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "look"}}]}
    seen: Json = {"role": "tool", "tool_call_id": "a", "content": [part]}
    span = MediaSpan(offset=1, length=2, modality="image", digest=digest)

    def fill(recorder: Recorder, **_: Any) -> None:
        first = call(1, prompt=[7, 9, 9, 8], answer=[5], version="v", messages=[asked, use, seen], said="red")
        recorder.add("chat", call=replace(first, inputs=(digest,), media=(span,), processor="P 1 a"))

    return fill


async def test_pictures_stand_in_the_conversation_and_with_their_tokens(opened: Open) -> None:
    store, picture = MemoryStore(), b"\x89PNG\r\n\x1a\n..."
    digest = digest_of(picture)
    await store.save_blobs([Blob(digest=digest, media_type="image/png", data=picture)])
    await record(store, "r", spans=looking(digest), reward=1.0)
    async with opened(store) as client:
        page = await (await client.get("/rollouts/r")).text()
        (turn,) = (await data_of(client, "/rollouts/r"))["turns"]
        place = f"/rollouts/r/spans/{turn['node']['sequence']}"
        tokens = await (await client.get(place)).text()
        shown = await client.get(f"/media/{digest}")
        assert (picture, "image/png") == (await shown.read(), shown.content_type)
    assert 2 == page.count(f'src="/media/{quote(digest, safe="")}"')
    assert 1 == tokens.count(f'src="/media/{quote(digest, safe="")}"')
    assert "Tokens 1 to 2 stand for this image." in tokens
    question, used, _ = turn["messages"]
    assert [{"kind": "image", "reference": digest}] == question["media"] == used["tools"][0]["media"]
    assert f"which colour?\n[image {digest[7:19]}]" == question["text"]["text"]
    assert "" == turn["training"]  # a call with a picture of a known processor can train


def test_row_with_a_picture_shows_it_beside_its_tokens() -> None:
    span = MediaSpan(offset=1, length=2, modality="image", digest="sha256:0")
    segment = Segment(start=4, stop=5, span_id="s")
    packed = {"ids": pack_ids([7, 9, 9, 8, 5]), "mask": b"\0\0\0\0\1", "logprobs": pack_floats([0.0] * 5)}
    names = {"rollout_id": "r", "attempt_id": "a", "group_id": "g"}
    row = Row(**names, branch=0, **packed, segments=(segment,), media=(span,))
    episode = Episode(rollout=Rollout(rollout_id="r", experiment="e", task=None), attempt=None, reward=None, rows=[row])
    assert [span] == tokens_view(episode, TokensFilter(start=2), {}).media
    assert [] == tokens_view(episode, TokensFilter(start=3), {}).media


@pytest.mark.parametrize("media_type", ["image/svg+xml", "text/html", "application/pdf"])
async def test_media_that_browsers_could_run_are_files_to_save(opened: Open, media_type: str) -> None:
    store, data = MemoryStore(), b"<svg onload=alert(1)>"
    digest = digest_of(data)
    await store.save_blobs([Blob(digest=digest, media_type=media_type, data=data)])
    async with opened(store) as client:
        answer = await client.get(f"/media/{digest}")
        assert ("application/octet-stream", "attachment") == (
            answer.content_type,
            answer.headers["Content-Disposition"],
        )
        assert 404 == (await client.get("/media/sha256:0")).status


async def test_thinking_is_folded_apart_from_the_answer(opened: Open) -> None:
    store = MemoryStore()
    script = asking(results=True, spans=True, thinking="<think>\nboth at once\n</think>\n\nI add.")
    await record(store, "r", spans=script, reward=None)
    async with opened(store) as client:
        first = (await data_of(client, "/rollouts/r"))["turns"][0]["messages"][-1]
        page = await text_of(client, "/rollouts/r")
    assert ("both at once", "I add.") == (first["thinking"]["text"], first["text"]["text"])
    assert re.search(r"<details[^>]*><summary>thinking.*?<pre>both at once</pre></details>", page, re.DOTALL)


@pytest.mark.parametrize(("returned", "kinds"), [("gone", ["call"]), ("went", ["call", "step"])])
async def test_reward_stands_with_its_call_and_an_output_is_not_repeated(
    opened: Open, returned: str, kinds: list[str]
) -> None:
    def fill(recorder: Recorder, **_: Any) -> None:
        root = recorder.add("rollout", lasts_ms=900, attributes={semconv.OUTPUT: returned})
        made = recorder.add("chat", parent=root, call=call(0, prompt=[], answer=[], version="v", **WORDS))
        given = Reward(value=0.5, name="style", scope="span", span_id=made, source="evaluator", feedback="no style")
        recorder.add("evaluate style", parent=root, reward=given)

    store = MemoryStore()
    await record(store, "r", spans=fill, reward=None)
    async with opened(store) as client:
        turns = (await data_of(client, "/rollouts/r"))["turns"]
        page = await text_of(client, "/rollouts/r")
    assert "<pre>no style</pre>" in page
    assert kinds == [turn["node"]["kind"] for turn in turns]
    assert ["style"] == [reward["name"] for reward in turns[0]["rewards"]]


async def test_call_says_what_training_did_with_it(opened: Open) -> None:
    async with opened() as client:
        turns = (await data_of(client, f"/rollouts/{rollout_name(9)}"))["turns"]
    calls = [(turn["tone"], turn["training"]) for turn in turns if turn["node"]["kind"] == "call"]
    more = "Advantage +0.25: training made this answer more likely."
    assert [(3, more), (3, more), (None, "Did not train: its answer was cut at a limit of tokens.")] == calls


async def equal_group(store: MemoryStore) -> None:
    """Record four rollouts of a step in two groups; those of the first group earned the same."""
    for number, reward in enumerate((0.5, 0.5, 1.0, 0.0)):
        name = f"sums-1-grpo-train-00001-0000{number // 2}-00{number % 2}"
        await record(store, name, reward=reward, group=f"task-{number // 2}", trains=True)


async def test_advantage_of_0_is_explained_by_the_rewards_of_the_group(opened: Open) -> None:
    store = MemoryStore()
    await equal_group(store)
    async with opened(store) as client:
        silent = await data_of(client, "/rollouts/sums-1-grpo-train-00001-00000-000")
        tokens = await data_of(client, "/rollouts/sums-1-grpo-train-00001-00000-000/tokens?row=1")
        other = await data_of(client, "/rollouts/sums-1-grpo-train-00001-00001-000")
        trained = await data_of(client, "/rollouts/sums-1-grpo-train-00001-00001-000/tokens?row=0")
        page = await text_of(client, "/rollouts/sums-1-grpo-train-00001-00001-000")
    reason = "because all 2 rewards are 0.5"
    assert f"Advantage 0: training left this answer as likely as it was, {reason}." == silent["turns"][0]["training"]
    assert re.fullmatch(rf"[0-9]+ of [0-9]+ tokens could train; none changed the model, {reason}\.", silent["trained"])
    counts = "50 of 130 tokens trained; the other 80 are of answers left out, the prompt and tools."
    assert f"{counts} The advantage is 0.5." == other["trained"]
    assert (
        "20 of 50 tokens trained; the other 30 are of the prompt and tools. The advantage is 0.5." == trained["summary"]
    )
    assert f"<p>{other['trained']}</p>" in page
    assert "start the console with agl console sqlite:///runs.db --actions." in re.sub("<[^>]+>", "", page)
    assert f"30 of 80 tokens could train; none changed the model, {reason}." == tokens["summary"]
    assert any("2 of 3 calls could train, none changed the model" in line for line in silent["why"])
    said = "The reward 1 is above the mean 0.5 of its group of 2. Its advantage is 1 - 0.5, the distance from the mean"
    assert f"{said}: +0.5." == other["standing"]


async def test_silent_groups_of_a_step_lead_to_the_rollouts_that_taught_nothing(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="sums"))
    await equal_group(store)
    values = {"groups_silent": 1.0, "silent_share": 0.5}
    await store.log_metrics(
        [Metric(experiment="sums", algorithm="grpo", step=1, name=name, value=value) for name, value in values.items()]
    )
    async with opened(store) as client:
        learning, page = await data_of(client, "/runs/sums"), await text_of(client, "/runs/sums")
        address = re.search(r'<a href="(/rollouts\?[^"]*taught=nothing)"', page)
        assert address is not None
        found = await data_of(client, html.unescape(address[1]))
    assert [["groups_silent"]] == [table["names"] for table in learning["tables"]]
    assert {f"sums-1-grpo-train-00001-00000-00{k}" for k in (0, 1)} == {row["rollout_id"] for row in found["rollouts"]}
    assert "taught nothing" in [each["words"] for each in found["picked"]]


async def test_rollouts_follow_each_other_by_step_group_and_reward(opened: Open) -> None:
    store = MemoryStore()
    await equal_group(store)
    ids = [f"sums-1-grpo-train-00001-0000{group}-00{number}" for group in (0, 1) for number in (0, 1)]
    async with opened(store) as client:
        near = [
            (await data_of(client, f"/rollouts/{ids[2]}?by={by}"))["neighbours"] for by in ("step", "group", "reward")
        ]
        page = await text_of(client, f"/rollouts/{ids[2]}?by=reward")
    assert [(3, 4), (1, 2), (4, 4)] == [(each["place"], each["total"]) for each in near]
    assert [(ids[1], ids[3]), ("", ids[3]), (ids[1], "")] == [(each["previous"], each["next"]) for each in near]
    assert re.search(rf'rel="prev" href="[^"]*{ids[1]}\?by=reward"', page)
    assert 'rel="next"' not in page


async def test_rollouts_that_no_step_asked_for_follow_each_other_by_group(opened: Open) -> None:
    store = MemoryStore()
    await store.enqueue([Rollout(rollout_id=name, task=1, group_id="g" if name != "b" else "") for name in "abc"])
    async with opened(store) as client:
        grouped = (await data_of(client, "/rollouts/a"))["neighbours"]
        alone = (await data_of(client, "/rollouts/b"))["neighbours"]
    assert (1, 2, "c") == (grouped["place"], grouped["total"], grouped["next"])
    assert (2, 3, "a", "c") == tuple(alone[name] for name in ("place", "total", "previous", "next"))


async def test_task_and_request_can_be_tried_again_from_a_shell(opened: Open, tmp_path: Path) -> None:
    store = MemoryStore()
    await record(store, "r", text="it's $HOME `here`")
    async with opened(store) as client:
        commands = (await data_of(client, "/rollouts/r"))["dev"].splitlines()
        curl = (await data_of(client, "/rollouts/r/spans/3"))["curl"]
    subprocess.run(["sh", "-c", commands[0]], cwd=tmp_path, check=True)
    assert {"question": "it's $HOME `here`"} == json.loads((tmp_path / "task.jsonl").read_text())
    assert commands[1].startswith("agl dev ")
    sent = json.loads(shlex.split(curl)[-1])
    assert curl.startswith('curl "$OPENAI_BASE_URL/chat/completions" ')
    assert "it's $HOME `here`" == sent["messages"][1]["content"]


async def test_rollout_is_found_by_the_beginning_of_its_id(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/rollouts/sums-1-grpo-host")
    assert "sums-1-grpo-hostile" == data["rollout_id"]


async def test_attempts_with_the_same_span_ids_are_told_apart(opened: Open) -> None:
    store = MemoryStore()
    await store.enqueue([Rollout(rollout_id="r", task=1, retry=RetryPolicy(max_attempts=2))])
    for error in (ErrorInfo(type="ValueError", message="no"), None):
        (claim,) = await store.claim(worker="w")
        recorder = Recorder("r", claim.attempt.attempt_id)
        team(recorder, text="go", reward=1.0, version="v")
        status = "failed" if error else "succeeded"
        spans = tuple(recorder.spans)
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status=status, error=error, spans=spans)])
    await store.append_spans([training("r", recorder.spans, step=1, reward=1.0)])
    async with opened(store) as client:
        talks = [(await data_of(client, f"/rollouts/r?attempt={number}"))["turns"] for number in (1, 2)]
        shown = [await data_of(client, f"/rollouts/r/spans/3?attempt={number}") for number in (1, 2)]
    used = [[turn["training"] for turn in talk if turn["node"]["kind"] == "call"] for talk in talks]
    assert all(sentence.startswith("Cannot train: ") for sentence in used[0])
    assert "Advantage +0.5: training made this answer more likely." == used[1][0]
    assert [used[0][0], used[1][0]] == [span["training"] for span in shown]
    cells = [span["cells"][-1] for span in shown]
    assert [(False, None), (True, 1.0)] == [(cell["is_trained"], cell["advantage"]) for cell in cells]


async def test_failed_rollout_shows_its_error_and_traceback(opened: Open) -> None:
    async with opened() as client:
        page = await text_of(client, "/rollouts/sums-1-grpo-failed")
    assert "KeyError" in page
    assert "File &#34;team.py&#34;, line 3" in page


async def test_rollout_links_the_versions_that_it_ran_with(opened: Open) -> None:
    store = MemoryStore()
    await store.enqueue([Rollout(rollout_id="r", task=1, resources={"prompt": "v2"})])
    async with opened(store) as client:
        page = await text_of(client, "/rollouts/r")
    assert re.search(r'href="[^"]*versions/prompt\?version=v2">prompt@v2</a>', page)


async def test_long_rollout_is_shown_in_pages(opened: Open) -> None:
    def many(recorder: Recorder, **_: Any) -> None:
        for number in range(700):
            recorder.add(f"step {number}")

    store = MemoryStore()
    await record(store, "many", spans=many, experiment="")
    async with opened(store) as client:
        names: list[str] = []
        query: dict[str, str] = {"attempt": "1"}
        while query:
            answer = await client.get("/rollouts/many", params=query | {"format": "json"})
            data = await answer.json()
            assert len(data["nodes"]) <= SPANS
            names += [node["name"] for node in data["nodes"]]
            query = data["next"]
    assert [f"step {number}" for number in range(700)] == names


async def test_tokens_have_probabilities_versions_and_what_trains(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, f"/rollouts/{FIRST}/tokens?row=1")
        part = await data_of(client, f"/rollouts/{FIRST}/tokens?row=1&start=70")
    cells = data["cells"]
    assert list(range(100, 180)) == [cell["id"] for cell in cells]
    sampled = [*range(20, 50), *range(60, 80)]
    assert sampled == [cell["position"] for cell in cells if cell["is_trained"]]
    assert sampled == [cell["position"] for cell in cells if cell["logprob"] is not None]
    assert ["v1", "v1b"] == data["versions"]
    assert [None, 0, None, 1] == [cells[index]["version"] for index in (19, 20, 50, 60)]
    assert cells[70:] == part["cells"]


async def test_tokens_have_the_advantage_that_a_step_reported_for_their_call(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, f"/rollouts/{rollout_name(9)}/tokens?row=1")
        part = await data_of(client, f"/rollouts/{rollout_name(9)}/tokens?row=1&start=45")
        span = await data_of(client, f"/rollouts/{rollout_name(0)}/spans/3")
    cells = data["cells"]
    assert [*range(20, 50)] == [cell["position"] for cell in cells if cell["advantage"] == 0.25]
    assert {None, 3} == {cell["tone"] for cell in cells}
    assert cells[45:] == part["cells"]
    assert [0.25, None] == [segment["advantage"] for segment in data["rows"][1]["segments"]]
    assert [None] * 30 + [-3] * 20 == [cell["tone"] for cell in span["cells"]]


async def test_tokens_have_the_entropy_and_the_advantage_of_their_own_that_a_step_reported(opened: Open) -> None:
    async with opened() as client:
        writer = await data_of(client, f"/rollouts/{rollout_name(11)}/tokens?row=1")
        part = await data_of(client, f"/rollouts/{rollout_name(11)}/tokens?row=1&start=45")
        planner = await data_of(client, f"/rollouts/{rollout_name(11)}/tokens?row=0")
        span = await data_of(client, f"/rollouts/{rollout_name(11)}/spans/3")
        page = await text_of(client, f"/rollouts/{rollout_name(11)}/tokens?row=1")
    own = writer["cells"][20:50]
    assert [number / 8 for number in range(29)] + [None] == [cell["entropy"] for cell in own]
    assert [0, 2, 2, 2, 2, 3] == [cell["spread"] for cell in own[:6]]
    assert {None} == {cell["entropy"] for cell in [*writer["cells"][:20], *writer["cells"][50:]]}
    assert 14 / 8 == writer["rows"][1]["segments"][0]["entropy"]
    assert writer["cells"][45:] == part["cells"]
    assert "entropy 0.125 nats, advantage 0.4167" in page
    assert [-0.5] * 10 + [1.0] * 10 == [cell["advantage"] for cell in planner["cells"][30:]]
    assert [-2] * 10 + [3] * 10 == [cell["tone"] for cell in planner["cells"][30:]]
    assert planner["cells"][30:] == span["cells"][30:]


async def test_texts_of_tokens_are_escaped(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"<script>": 100, "\\u202e": 101}}}')
    store = SQLiteStore(f"sqlite:///{filled}")
    app = make_app(store, name="runs.db", vocabulary=Vocabulary(tmp_path))
    async with TestClient(TestServer(app)) as client:
        page = await text_of(client, f"/rollouts/{FIRST}/tokens?row=1")
    await store.close()
    assert ">&lt;script&gt;</span>" in page
    assert "\\u202e</span>" in page


def test_tones_of_advantages_are_thirds_of_the_largest() -> None:
    assert [-3, -2, -1, 0, 1, 2, 3] == [tone_of(value, 3.0) for value in (-3.0, -2.0, -0.1, 0.0, 1.0, 1.5, 2.5)]


async def test_tokens_of_a_rejected_call_do_not_train(opened: Open) -> None:
    def late(recorder: Recorder, **_: Any) -> None:
        failed = call(1, prompt=range(3), answer=range(3, 6), version="v", messages=[], said="x")
        recorder.add("chat small", call=replace(failed, is_complete=False))

    store = MemoryStore()
    await record(store, "cut", spans=late, experiment="")
    async with opened(store) as client:
        span = await data_of(client, "/rollouts/cut/spans/1")
        page = await text_of(client, "/rollouts/cut")
    assert span["training"].startswith("Cannot train: ")
    assert [False] * 6 == [cell["is_trained"] for cell in span["cells"]]
    assert span["training"] in html.unescape(page)


async def test_span_whose_packed_tokens_are_not_whole_shows_those_that_are(opened: Open) -> None:
    def broken(recorder: Recorder, **_: Any) -> None:
        made = call(1, prompt=range(3), answer=range(7, 9), version="v", **WORDS)
        parts = {"prompt_ids": made.prompt_ids[:-1], "response_ids": made.response_ids[:-2]}
        recorder.add("chat small", call=replace(made, **parts, logprobs=made.logprobs[:3]))

    store = MemoryStore()
    await record(store, "r-0", spans=broken)
    async with opened(store) as client:
        data = await data_of(client, "/rollouts/r-0/spans/1")
    assert [(0, 0), (1, 1), (2, 7)] == [(cell["position"], cell["id"]) for cell in data["cells"]]
    assert "are not whole int32 numbers" in data["training"]


async def test_span_shows_long_texts_further_than_the_rollout(opened: Open) -> None:
    async with opened() as client:
        tree = await text_of(client, "/rollouts/sums-1-grpo-long")
        whole = await text_of(client, "/rollouts/sums-1-grpo-long/spans/3")
    assert len(tree) < 60_000
    assert "1,000,000 characters in all" in tree
    assert LONG_LINE[:200_000] in whole
    assert len(whole) < 500_000


@pytest.mark.parametrize(
    "address", [view for view in VIEWS if "hostile" in view or view == "/rollouts" or view in WITH_HOSTILE_TEXTS]
)
async def test_what_models_wrote_is_shown_and_never_obeyed(opened: Open, address: str) -> None:
    async with opened() as client:
        page = await text_of(client, address)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert not set(page) & set("\x00\x1b\u202e\u202c")
    assert "&lt;script&gt;alert(1)" in page
    assert "{{ 7 * 7 }}" in page
    assert HOSTILE not in page


async def test_names_of_runs_and_algorithms_are_escaped_in_figures(opened: Open) -> None:
    name = "<img src=x onerror=alert(1)>"
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name=name))
    await store.log_metrics([Metric(experiment=name, algorithm="<i>", step=1, name="reward", value=1.0)])
    async with opened(store) as client:
        pages = [await text_of(client, "/"), await text_of(client, f"/runs/{name.replace(' ', '%20')}")]
    assert not any(
        "<img" in page or "<b>" in page.replace("<b>1</b>", "").replace("<b>reward</b>", "") for page in pages
    )


async def test_numbers_are_those_of_the_newest_run_over_the_steps_of_all_algorithms(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="calc", run=2))
    await store.save_state({}, experiment=ExperimentRecord(name="other"))
    common = {"experiment": "calc", "name": "reward", "step": 1}
    await store.log_metrics(
        [
            Metric(run=1, algorithm="grpo", value=0.9, experiment_step=1, **common),
            Metric(run=2, algorithm="grpo", value=0.1, experiment_step=6, **common),
            Metric(run=2, algorithm="older", value=0.2, **common),
        ]
    )
    async with opened(store) as client:
        addresses = ("/", "/runs/calc", "/?compare=calc&compare=other")
        runs, learning, compared = [await data_of(client, each) for each in addresses]
    assert {0.1, 0.2} == {last["value"] for last in runs["runs"][0]["rewards"]}
    for figure in (learning["rewards"], compared["figures"][0]):
        lines = {line["algorithm"]: line for line in figure["series"]}
        assert ([1], [6], [0.1]) == tuple(lines["grpo"][part] for part in ("steps", "places", "values"))
        assert ([1], [1], [0.2]) == tuple(lines["older"][part] for part in ("steps", "places", "values"))


async def test_agents_of_a_whole_run_are_summed_up_from_what_it_kept_with_its_steps(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/runs/sums/agents")
        validated = await data_of(client, "/runs/sums/agents?mode=val")
        page = await text_of(client, "/runs/sums/agents")
    assert (240, 60, "train") == (data["whole_rollouts"], data["whole_steps"], data["whole_mode"])
    writer, planner = (row["sums"] for row in data["whole"])
    assert ("writer", 480, 9600, 120.0, 60) == tuple(
        writer[name] for name in ("agent", "calls", "tokens", "seconds", "errors")
    )
    assert 0.75 == data["whole"][0]["share"]
    assert (pytest.approx(0.5083, abs=1e-3), 0) == (writer["credit"]["mean"], writer["reward"]["count"])
    assert pytest.approx(0.5083, abs=1e-3) == planner["reward"]["mean"]
    assert [("", 9, 1.0)] == [
        (row["sums"]["agent"], row["sums"]["rollouts"], row["share"]) for row in validated["whole"]
    ]
    (credit,) = data["figures"]
    assert ["writer"] == [line["algorithm"] for line in credit["series"]]
    assert "240 rollouts of 60 steps in mode train." in page


async def test_steps_have_an_interval_over_tasks_and_tokens_that_the_run_kept(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/runs/sums")
        runs = {run["name"]: run for run in (await data_of(client, "/"))["runs"]}
    table = next(table for table in data["tables"] if table["algorithm"] == "grpo")
    newest = dict(zip(table["names"], table["rows"][0]["values"], strict=True))
    assert 0.8 == newest["tokens_used"]
    assert 200 / 4 == newest["tokens_per_rollout"]
    assert newest["tokens_per_s"] == pytest.approx(200 / newest["collect_s"])
    sums = runs["sums"]
    assert 15 == sums["rollouts"]
    assert 15 * 70 == sums["tokens"]
    assert sums["has_failures"]
    assert (0, 0) == (runs["refused"]["rollouts"], runs["refused"]["tokens"])


async def test_agents_have_their_credit_tokens_errors_and_order(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/runs/sums/agents?mode=train")
    agents = {row["sums"]["agent"]: row["sums"] for row in data["agents"]}
    assert (15, 30) == (agents["planner"]["calls"], agents["writer"]["calls"])
    mean = sum(number / 12 for number in range(12)) / 12
    for row in agents.values():
        found = [row[name]["mean"] for name in ("credit", "advantage")]
        assert [pytest.approx(mean), pytest.approx(mean - 0.5)] == found
    assert 14 == agents["writer"]["reward"]["count"]
    assert (12 * 20, 12 * 30) == (agents["planner"]["trained"], agents["writer"]["trained"])
    assert 0.4 == pytest.approx(data["agents"][1]["share"])
    assert (0, 2) == (agents["planner"]["errors"], agents["writer"]["errors"])


async def test_agents_are_those_of_the_newest_rollouts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_console.agents.LOOKED", 3)
    async with opened() as client:
        data = await data_of(client, "/runs/sums/agents")
        page = await text_of(client, "/runs/sums/agents")
        empty = await text_of(client, f"/runs/{LONG_NAME}/agents")
    assert 3 == data["looked_through"]
    assert "The newest 3 rollouts." in page
    assert "no rollout was started" in empty


async def test_rollout_says_what_steps_made_of_its_calls(opened: Open) -> None:
    async with opened() as client:
        why = (await data_of(client, "/rollouts/sums-1-grpo-train-00001-00006-000"))["why"]
    assert any(
        "grpo, step 1: 2 of 3 calls could train, none changed the model; the step was not saved" in line for line in why
    )
    assert any("did not train: its answer was cut" in line for line in why)


Said = tuple[str, Sequence[int], Sequence[int], str]
"""A call of a scripted rollout: agent, tokens of the prompt, tokens of the answer, and text of the answer."""

DIFFERENCES: dict[str, tuple[list[Said], str | None]] = {
    "equal": ([("a", [1, 2], [3, 4], "yes"), ("b", [5], [6], "no")], None),
    "other answer": ([("a", [1, 2], [3, 9], "yes!"), ("b", [5], [6], "no")], "call 1, answer, token 2"),
    "other prompt": ([("a", [1, 2], [3, 4], "yes"), ("b", [7], [6], "no")], "call 2, prompt, token 1"),
    "other agent": ([("a", [1, 2], [3, 4], "yes"), ("c", [5], [6], "no")], "call 2, made by c and not by b"),
    "shorter": ([("a", [1, 2], [3, 4], "yes")], "call 2, which only the first one makes"),
    "without ids": ([("a", [], [], "yes"), ("b", [], [], "know")], "call 2, answer"),
}


@pytest.mark.parametrize("other", DIFFERENCES)
async def test_group_says_where_a_rollout_first_differs(opened: Open, other: str) -> None:
    def said(calls: Sequence[Said]) -> Any:
        def fill(recorder: Recorder, **_: Any) -> None:
            for number, (who, prompt, answer, text) in enumerate(calls):
                words = {"messages": WORDS["messages"], "said": text}
                parent = agent(recorder, "", who)
                made = call(number, prompt=prompt, answer=answer, version="v", **words)
                recorder.add("chat", parent=parent, call=made)

        return fill

    calls, words = DIFFERENCES[other]
    store = MemoryStore()
    await record(store, "r-0", spans=said(DIFFERENCES["equal"][0]), group="same", experiment="parts")
    await record(store, "r-1", spans=said(calls), group="same", experiment="parts")
    async with opened(store) as client:
        data = await data_of(client, "/group?experiment=parts&group=same")
    found = data["members"][1]["difference"]
    assert words == (found and found["words"])
    assert data["first"] == (found and found["call"])


async def test_rollouts_whose_spans_cannot_be_read_are_not_compared_and_are_no_agent(opened: Open) -> None:
    def lost(recorder: Recorder, **_: Any) -> None:
        recorder.add(semconv.UNREADABLE, status="error", status_message="the stored span cannot be read")

    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="parts"))
    for number in range(2):
        await record(store, f"r-{number}", spans=lost, group="same", experiment="parts")
    async with opened(store) as client:
        page = await text_of(client, "/group?experiment=parts&group=same")
        rollout, agents = await text_of(client, "/rollouts/r-0"), await data_of(client, "/runs/parts/agents")
    assert "2 rollouts cannot be compared" in page
    assert "All make the same calls" not in page
    assert "No model call was recorded" not in rollout
    assert "1 span cannot be read. Another version of agl wrote it" in rollout
    assert [] == agents["agents"]


async def test_answer_cut_off_at_the_token_limit_says_so_and_is_found(opened: Open) -> None:
    def cut(recorder: Recorder, **_: Any) -> None:
        made = call(1, prompt=[1], answer=[2], version="v", messages=WORDS["messages"], said="SELECT")
        recorder.add("chat", call=replace(made, finish_reason="length"))

    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="parts"))
    await record(store, "r-0", spans=cut, experiment="parts")
    await record(store, "r-1", experiment="parts")
    async with opened(store) as client:
        page = await text_of(client, "/rollouts/r-0")
        found = await data_of(client, "/rollouts?reject=cut_off")
        agents = await data_of(client, "/runs/parts/agents")
    assert '<span class="bad">cut off at the token limit</span>' in page
    assert ["r-0"] == [row["rollout_id"] for row in found["rollouts"]]
    assert ["with a call cut off at the token limit"] == [each["words"] for each in found["picked"]]
    assert 1 == agents["cut_off"]


async def test_empty_list_of_rollouts_says_which_filter_finds_nothing(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="sums"))
    agents = (AgentTally(agent="check"), AgentTally(agent="write"))
    tallies = [StepTally(algorithm="grpo", step=1, mode="train", rollouts=2, agents=agents)]
    await add_tallies(store, ExperimentRecord(name="sums"), tallies)
    for number, reward in enumerate((0.0, 1.0)):
        await record(store, f"sums-1-grpo-train-00001-0000{number}-000", reward=reward, group=f"task-{number}")
    await record(store, "v-1", experiment="measured", mode="val")
    async with opened(store) as client:

        async def nothing(query: str) -> Any:
            return (await data_of(client, f"/rollouts?experiment=sums&{query}"))["nothing"]

        assert "agents here: check, write." in (await nothing("agent=agent:solve"))["words"]
        assert "sft has no rollouts in this run" in (await nothing("algorithm=sft&step=2"))["words"]
        failed = await nothing("status=failed")
        low = await data_of(client, "/rollouts?experiment=sums&high=1.0")
        page, measured = [await text_of(client, f"/rollouts?experiment={name}") for name in ("sums", "measured")]
    assert ("1 with a reward below the best, 1", "1.0") == (failed["others"], failed["query"]["high"])
    assert 'high=1.0">below the best reward, 1</a>' in page
    assert "below the best reward" not in measured, "all of its rewards are equal"
    assert [0.0] == [row["reward"] for row in low["rollouts"]]
    assert ("side by side<" in page, "side by side<" in measured) == (True, False), "a validation runs a task once"


async def test_calls_that_a_group_shares_are_shown_once(opened: Open) -> None:
    def said(*texts: str) -> Any:
        def fill(recorder: Recorder, **_: Any) -> None:
            for number, text in enumerate(texts):
                made = call(number, prompt=[1], answer=[], version="v", messages=WORDS["messages"], said=text)
                recorder.add("chat", call=made)

        return fill

    store = MemoryStore()
    for number, last in enumerate(("left", "right", "left")):
        await record(store, f"r-{number}", spans=said("the same start", last), group="same", experiment="parts")
    async with opened(store) as client:
        page = await text_of(client, "/group?experiment=parts&group=same")
    assert 1 == page.count("the same start")
    assert "Their first 1 call is the same; they differ from call 2 on." in page
    assert ["right"] == re.findall("<mark>(.*?)</mark>", page)


async def test_group_says_who_got_which_advantage_and_why(opened: Open) -> None:
    store = MemoryStore()
    await equal_group(store)
    address = "/group?experiment=sums&algorithm=grpo&step=1&group=task-"
    async with opened(store) as client:
        silent = (await data_of(client, address + "0"))["members"]
        loud = (await data_of(client, address + "1"))["members"]
    assert {"No advantage, because all 2 rewards are 0.5."} == {one["why"] for one in silent}
    apart = "the distance from the mean"
    assert [
        f"The reward 1 is above the mean 0.5 of its group of 2. Its advantage is 1 - 0.5, {apart}: +0.5.",
        f"The reward 0 is below the mean 0.5 of its group of 2. Its advantage is 0 - 0.5, {apart}: -0.5.",
    ] == [one["why"] for one in loud]
    assert [3, -3] == [one["calls"][0]["tone"] for one in loud]


async def test_calls_that_differ_in_the_ids_of_tools_alone_are_equal(opened: Open) -> None:
    def used(name: str) -> Any:
        def fill(recorder: Recorder, **_: Any) -> None:
            asked = {"role": "assistant", "tool_calls": [{"id": name, "function": {"name": "add", "arguments": "{}"}}]}
            messages = [
                {"role": "user", "content": "1+1"},
                asked,
                {"role": "tool", "tool_call_id": name, "content": "2"},
            ]
            recorder.add("chat", call=call(0, prompt=[], answer=[], version="v", messages=messages, said="two"))

        return fill

    store = MemoryStore()
    for number, name in enumerate(("call-a", "call-b")):
        await record(store, f"r-{number}", spans=used(name), group="same", experiment="parts")
    async with opened(store) as client:
        data = await data_of(client, "/group?experiment=parts&group=same")
    assert data["members"][1]["difference"] is None


async def test_request_that_was_retried_is_no_difference_in_its_group(opened: Open) -> None:
    def used(retries: int) -> Any:
        def fill(recorder: Recorder, **_: Any) -> None:
            asked = call(0, prompt=[1], answer=[2], version="v", messages=[{"role": "user", "content": "?"}], said="x")
            for count in range(retries + 1):
                failed = {} if count == retries else {"is_complete": False, "error": "reset"}
                recorder.add("chat", call=replace(asked, request_id="one", retry_count=count, **failed))

        return fill

    store = MemoryStore()
    for retries in (0, 1):
        await record(store, f"r-{retries}", spans=used(retries), group="same", experiment="parts")
    async with opened(store) as client:
        data = await data_of(client, "/group?experiment=parts&group=same")
    assert [None, None] == [member["difference"] for member in data["members"]]


async def test_failed_call_has_no_answer_in_its_group(opened: Open) -> None:
    def fill(recorder: Recorder, **_: Any) -> None:
        made = call(0, prompt=[], answer=[], version="v", **WORDS)
        refused = replace(made, response={"error": {"message": "no"}}, status_code=500, error="HTTP 500: no")
        recorder.add("chat", call=refused)

    store = MemoryStore()
    await record(store, "r-0", spans=fill, group="same", experiment="parts")
    async with opened(store) as client:
        (member,) = (await data_of(client, "/group?experiment=parts&group=same"))["members"]
    assert [("", "")] == [(cell["same"], cell["other"]) for cell in member["calls"]]


async def test_rollout_that_others_are_compared_with_is_shown_beside_large_ones(opened: Open) -> None:
    def fill(recorder: Recorder, **_: Any) -> None:
        messages = [{"role": "user", "content": "x" * (3 << 20)}]
        recorder.add("chat", call=call(0, prompt=[], answer=[], version="v", messages=messages, said="done"))

    store = MemoryStore()
    for number in range(6):
        await record(store, f"r-{number}", spans=fill, group="same", experiment="parts")
    async with opened(store) as client:
        data = await data_of(client, "/group?experiment=parts&group=same&against=r-5")
    shown = [member["rollout_id"] for member in data["members"]]
    assert "r-5" == shown[0]
    assert 6 == len(shown) + data["left_out"]


async def test_group_has_the_rewards_and_what_the_step_made_of_them(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/group?experiment=sums&group=task-0&algorithm=grpo&step=2")
        newest = await data_of(client, "/group?experiment=sums&group=task-1&against=sums-1-grpo-hostile")
        rollout = await text_of(client, f"/rollouts/{rollout_name(4)}")
    (member,) = data["members"]
    numbers = [member[name] for name in ("reward", "credit", "advantage")]
    assert [4 / 12, 4 / 12, 4 / 12 - 0.5] == numbers
    assert {(1, 1), (2, 1), (3, 1)} == {(ran["step"], ran["rollouts"]) for ran in data["steps"]}
    assert ["sums-1-grpo-hostile", "sums-1-grpo-failed"] == [one["rollout_id"] for one in newest["members"]][:2]
    assert "/group?experiment=sums&amp;group=task-0&amp;algorithm=grpo&amp;step=2" in rollout


async def test_alerts_of_the_newest_run_are_events_of_its_chart(opened: Open) -> None:
    def alert(run: int, time: float, kind: str, **found: Json) -> dict[str, bytes]:
        common: dict[str, Json] = {"algorithm": "grpo", "step": 12}
        kept = to_json({"kind": kind, "time": time, "found": {**common, **found}})
        return {f"experiment/calc/{run}/alerts/{found['rule']}/{time}": kept}

    store = MemoryStore()
    silent = {"rule": "silent-groups", "evidence": f"80% taught nothing {HOSTILE}", "change": "easier tasks"}
    fallen = {"rule": "collapse", "evidence": "the validation reward has fallen", "change": ""}
    states = alert(2, 100.0, "suggestion", **silent) | alert(2, 200.0, "collapse", **fallen)
    older = alert(1, 50.0, "suggestion", rule="older", evidence="of the run before", change="")
    await store.save_state({**states, **older}, experiment=ExperimentRecord(name="calc", run=2))
    await store.log_metrics([Metric(experiment="calc", run=2, algorithm="grpo", step=12, name="reward", value=0.5)])
    async with opened(store) as client:
        page = await text_of(client, "/runs/calc")
    assert "2 alerts</span>" in page
    assert "No alert was raised" not in page
    assert re.search(r'step=12&amp;taught=nothing">80% taught nothing', page)
    assert re.search('grpo 12: <a href="/rollouts.*step=12">the validation reward has fallen</a>', page)
    assert 1 == page.count(". To change that: easier tasks</a>")
    assert "of the run before" not in page
    assert HOSTILE not in page


def without_ids(recorder: Recorder, **_: Any) -> None:
    recorder.add("chat small", call=call(1, prompt=[], answer=[], version="v1", **WORDS))


async def test_rollouts_are_filtered_by_the_reason_that_leaves_a_call_out(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "SECONDS", 0.0)
    store = MemoryStore()
    for number in range(130):
        spans = without_ids if number in (3, 128) else team
        await record(store, f"r-{number:03d}", experiment="ids", spans=spans)
    address = "/rollouts?experiment=ids&reject=missing_token_ids"
    async with opened(store) as client:
        first = await data_of(client, address)
        second = await data_of(client, "/rollouts?" + urlencode(first["next"]))
        third = await data_of(client, "/rollouts?" + urlencode(second["next"]))
        of_step = await data_of(client, f"{address}&algorithm=grpo&step=1")
        other = await data_of(client, "/rollouts?experiment=ids&reject=late")
        page = await text_of(client, address)
        wrong = await client.get("/rollouts?reject=nothing")
        answer = await wrong.text()
    assert (["r-128"], 50) == ([row["rollout_id"] for row in first["rollouts"]], first["looked_through"])
    assert "missing_token_ids" == first["next"]["reject"]
    assert ([], 50) == (second["rollouts"], second["looked_through"])
    assert (["r-003"], 30, {}) == (
        [row["rollout_id"] for row in third["rollouts"]],
        third["looked_through"],
        third["next"],
    )
    assert ["r-128"] == [row["rollout_id"] for row in of_step["rollouts"]]
    assert [] == other["rollouts"]
    assert '<option value="missing_token_ids" selected>missing token ids</option>' in page
    assert "<b>1</b> so far; 80 of 130 rollouts not searched yet" in page
    assert ">Search on</a>" in page
    assert 400 == wrong.status
    assert "nothing" in answer


async def test_run_that_failed_at_its_start_says_what_is_missing(opened: Open) -> None:
    async with opened() as client:
        assert "No numbers are logged yet" in await text_of(client, "/runs/refused")
        assert "no rollout was started" in await text_of(client, "/runs/refused/agents")


async def test_versions_stand_in_a_tree_that_keeps_the_newest_line_straight(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/versions/style")
        tried = await data_of(client, "/versions/style?tried=yes")
    rows = [(row["depth"], row["version"], row["parent"]) for row in data["versions"]]
    assert [
        (0, "first", ""),
        (1, "sums-1-grpo-1-b", "first"),
        (0, "sums-1-grpo-1", "first"),
        (0, "sums-1-grpo-2", "sums-1-grpo-1"),
    ] == rows
    assert ["sums-1-grpo-3-c"] == [row["version"] for row in tried["versions"] if row["is_tried"]]


def text_in(line: Any) -> str:
    return "".join(part["text"] for part in line["parts"])


async def test_changed_words_of_a_prompt_are_marked(opened: Open) -> None:
    store = MemoryStore()
    for number, text in enumerate(("Answer in one word.\nBe kind.", "Answer in two words.\nBe kind.")):
        parent = f"v{number - 1}" if number else ""
        made = PromptTemplate(template=text)
        await store.publish([ResourceVersion(name="style", version=f"v{number}", parent=parent, resource=made)])
    async with opened(store) as client:
        diff = (await data_of(client, "/versions/style"))["diff"]
        page = await text_of(client, "/versions/style")
    changed = {line["kind"]: [part["text"] for part in line["parts"] if part["is_changed"]] for line in diff}
    assert {"removed": ["one", "word"], "added": ["two", "words"]} == {k: changed[k] for k in ("removed", "added")}
    assert '<span class="added">+Answer in <b>two</b> <b>words</b>.</span>' in page


async def test_run_has_its_validation_curve_and_the_time_between_its_rewards(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="a"))
    for algorithm, values in (("grpo", [0.5, 0.6, 0.7]), ("validate", [0.2, 0.75, 0.5])):
        logged = rewarded("a", algorithm, values)
        await store.log_metrics([replace(each, time=100.0 * each.step) for each in logged])
    async with opened(store) as client:
        (run,) = (await data_of(client, "/"))["runs"]
        page = await text_of(client, "/")
    assert ("validate", [0.2, 0.75, 0.5]) == (run["curve"]["algorithm"], run["curve"]["values"])
    assert 200.0 == run["wall_s"]
    assert "0.2 → <b>0.75</b> → 0.5" in page
    assert "3 min 20 s" in page


async def test_run_whose_live_version_was_never_validated_is_not_measured_since(opened: Open) -> None:
    store = MemoryStore()
    await store.save_state({}, experiment=ExperimentRecord(name="a", live={"lm": "a-1-sft-1"}))
    await store.log_metrics(rewarded("a", "validate", [0.0]) + rewarded("a", "sft", [0.0]))
    shelf = validations_of("a", 1)

    async def shown(turn: int, version: str) -> tuple[Any, str]:
        found = Validation(turn=turn, versions={"lm": version}, rewards=(0.0,) * 4, tasks="t")
        await store.save_state(shelf.states({f"{turn:08d}": found}))
        async with opened(store) as client:
            data, page = await data_of(client, "/"), await text_of(client, "/")
            assert "Steps to a reward" not in await text_of(client, "/runs/a")
        return data["runs"][0]["now"], page

    now, page = await shown(0, "a-1-initial")
    assert now is None
    assert "0 → <b>0</b> → not measured since" in page
    now, page = await shown(1, "a-1-sft-1")
    assert 4 == now["tasks"]
    assert now["low"] < 0.001 < 0.4 < now["high"]
    assert "now [0, 0.4899], 4 tasks" in page


async def test_events_of_versions_are_marks_on_the_rewards(opened: Open) -> None:
    store, text = MemoryStore(), PromptTemplate(template="Answer.")
    logged = [replace(each, time=float(each.step)) for each in rewarded("a", "grpo", [0.1, 0.8, 0.2])]
    await store.log_metrics(logged)
    for step in (1, 2):
        made = ResourceVersion(name="style", version=f"a-1-grpo-{step}", algorithm="grpo", step=step, resource=text)
        await store.publish([made])
    for step in (1, 2):
        await store.move_label(LabelMove(name="style", label="live", version=f"a-1-grpo-{step}"))
    await store.move_label(LabelMove(name="style", label="live", version="a-1-grpo-1", is_back=True))
    await store.save_scores(
        [VersionScore(name="style", version="a-1-grpo-2", mean=0.8, low=0, high=1, n=9, how="fresh")]
    )
    await store.save_state({}, experiment=ExperimentRecord(name="a", live={"style": "a-1-grpo-1"}))
    async with opened(store) as client:
        marks = (await data_of(client, "/runs/a"))["rewards"]["marks"]
        page = await text_of(client, "/runs/a")
    assert '1 published</span> <span class="key-best">1 highest score</span>' in " ".join(page.split())
    assert "No alert was raised." in page
    assert "Nothing was rolled back" not in page
    assert [(2, "published"), (4, "best"), (6, "back")] == [(mark["place"], mark["kind"]) for mark in marks]
    assert "highest score, 0.8 (fresh): style@a-1-grpo-2" == marks[1]["text"]


async def test_version_is_compared_with_its_parent_or_a_chosen_one(opened: Open) -> None:
    async with opened() as client:
        newest = await data_of(client, "/versions/style")
        chosen = await data_of(client, "/versions/style?version=production&against=first")
        further = await data_of(client, "/versions/style?against=first")
        first = await data_of(client, "/versions/style?version=first")
        long = await data_of(client, f"/versions/{LONG_NAME}")
    assert ("sums-1-grpo-2", "sums-1-grpo-1") == (newest["shown"]["version"], newest["against"])
    assert [f"+{HOSTILE}"] == [text_in(line) for line in newest["diff"] if line["kind"] == "added"]
    assert ("sums-1-grpo-1", "first") == (chosen["shown"]["version"], chosen["against"])
    changed = [text_in(line) for line in chosen["diff"] if line["kind"] in ("added", "removed")]
    assert ["-Be brief.", "+Be kind."] == changed
    assert ["-Be brief.", "+Be kind.", f"+{HOSTILE}"] == [
        text_in(line) for line in further["diff"] if line["kind"] in ("added", "removed")
    ]
    assert ("", []) == (first["against"], first["diff"])
    assert (True, []) == (long["is_too_long"], long["diff"])


async def test_version_names_the_command_that_tries_it(opened: Open) -> None:
    store = MemoryStore()
    live = ResourceVersion(name="style", version="v1", resource=PromptTemplate(template="a"))
    origin: dict[str, Json] = {"experiment": "sums", "origin": "agl resources try", "candidate": True}
    edit = ResourceVersion(name="style", version="edit", resource=PromptTemplate(template="b"), metadata=origin)
    await store.publish([live, edit, ResourceVersion(name="llm", version="w1", resource=Weights(uri="w"))])
    await store.save_state({}, experiment=ExperimentRecord(name="sums", live={"style": "v1"}))
    async with opened(store) as client:
        newest = await data_of(client, "/versions/style")
        tried = await data_of(client, "/versions/style?version=edit&tried=yes")
        page = await text_of(client, "/versions/style?version=edit&tried=yes")
        weights = await data_of(client, "/versions/llm")
        await store.move_label(LabelMove(name="style", label="production", version="edit"))
        promoted = await data_of(client, "/versions/style")
    assert ("v1", "agl resources try FILE style --version v1 --edit") == (newest["shown"]["version"], newest["trial"])
    assert ("agl resources try", "agl resources try FILE style --version edit") == (
        tried["shown"]["origin"],
        tried["trial"],
    )
    words = re.sub("<[^>]+>", "", page)
    assert "it with what is live, on tasks of the experiment: agl resources try FILE style --version edit" in words
    assert "" == weights["trial"]
    assert ["v1", "edit"] == [row["version"] for row in promoted["versions"]]


async def test_version_names_its_maker_score_labels_and_promotions(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/versions/style")
        (style,) = [row for row in (await data_of(client, "/versions"))["resources"] if row["name"] == "style"]
    rows = {row["version"]: row for row in data["versions"]}
    assert ("grpo step 2", "sums", ["sums"]) == tuple(
        rows["sums-1-grpo-2"][field] for field in ("origin", "experiment", "live")
    )
    assert ("the experiment sums", "sums") == (rows["first"]["origin"], rows["first"]["experiment"])
    assert (0.8, 0.7, 0.9, 40) == tuple(rows["sums-1-grpo-2"]["score"][field] for field in ("mean", "low", "high", "n"))
    assert ["production"] == rows["sums-1-grpo-1"]["labels"]
    moves = [(move["version"], move["is_back"]) for move in data["moves"]]
    assert [("sums-1-grpo-1", True), ("sums-1-grpo-2", False), ("sums-1-grpo-1", False), ("first", False)] == moves
    assert ("prompt", {"production": "sums-1-grpo-1"}, 0.8) == (style["kind"], style["labels"], style["best"]["mean"])


async def test_versions_are_shown_in_pages_of_the_newest(opened: Open) -> None:
    store = MemoryStore()
    made = [
        ResourceVersion(name="p", version=f"v{number}", parent=f"v{number - 1}", resource=Weights(uri=str(number)))
        for number in range(VERSIONS + 30)
    ]
    await store.publish(made)
    async with opened(store) as client:
        first = await data_of(client, "/versions/p")
        answer = await client.get("/versions/p", params=first["next"] | {"format": "json"})
        second = await answer.json()
    shown = [row["version"] for page in (second, first) for row in page["versions"]]
    assert [version.version for version in made] == shown
    assert {} == second["next"]
    assert {0} == {row["depth"] for row in first["versions"]}


async def test_empty_store_says_what_records_a_run(opened: Open) -> None:
    async with opened(MemoryStore()) as client:
        page = re.sub("<[^>]+>", "", await text_of(client, "/"))
        assert "agl run experiment.toml" in page
        assert "agl exec" in await text_of(client, "/rollouts")
        assert "[resource.NAME]" in await text_of(client, "/versions")


WRONG = {
    "/nothing": (404, "the console has /"),
    "/runs/unknown": (404, "unknown"),
    "/rollouts/unknown": (404, "unknown"),
    f"/rollouts/{FIRST}/tokens?row=9": (404, "rows of the rollout sums-1-grpo-train-00001-00000-000: 2"),
    f"/rollouts/{FIRST}/tokens?start=50": (400, "50 tokens"),
    f"/rollouts/{FIRST}/spans/99": (404, "has no span"),
    f"/rollouts/{FIRST}?attempt=2": (404, "attempt"),
    f"/rollouts/{FIRST}?after=-1": (400, "after"),
    f"/rollouts/{FIRST}?after={1 << 63}": (400, "after"),
    "/runs/unknown/agents": (404, "unknown"),
    "/runs/sums/agents?mode=no": (400, "mode"),
    "/group": (400, "names no group"),
    "/group?experiment=sums&group=task-9": (404, "rollouts of it in the run"),
    "/group?experiment=sums&group=task-0&algorithm=grpo&step=9": (404, "step 9"),
    "/group?experiment=sums&group=task-0&against=other": (404, "other"),
    "/versions/unknown": (404, "unknown"),
    "/versions/style?version=v9": (404, "style@v9"),
    "/versions/style?tried=no": (400, "tried"),
    "/rollouts?step=first": (400, "step"),
    "/rollouts?steps=1": (400, "steps"),
    "/rollouts?status=done": (400, "status"),
    "/rollouts?low=2&high=1": (400, "exchange"),
    "/?compare=unknown": (400, "choose from"),
    "/rollouts/sums-1-grpo": (400, "several rollouts begin with"),
}


@pytest.mark.parametrize(("address", "expected"), WRONG.items())
async def test_wrong_address_is_answered_with_what_to_do(opened: Open, address: str, expected: tuple[int, str]) -> None:
    async with opened() as client:
        page = await client.get(address)
        data = await client.get(address + ("&" if "?" in address else "?") + "format=json")
        assert expected[0] == page.status == data.status
        assert expected[1] in await page.text()
        assert expected[1] in (await data.json())["error"]


def judged(recorder: Recorder, *, text: str, reward: float | None, version: str) -> None:
    """Record a call with a composite reward, a replaced reward, a reward of the call, and one sent by the agent."""
    root = recorder.add("rollout")
    asked = [{"role": "user", "content": text}]
    made = call(1, prompt=range(3), answer=range(3), version=version, messages=asked, said="yes")
    chat = recorder.add("chat small", parent=root, call=made)
    value = reward or 0.0
    parts = {"right": value, "short": 1.0}
    weights = {"right": 0.75, "short": 0.25}
    for each in (
        Reward(value=-1.0, source="evaluator", feedback="a first look"),
        Reward(value=value, dimensions=parts, weights=weights, source="evaluator", feedback=text),
        Reward(value=0.1, name="tools", scope="turn", span_id=chat, source="evaluator"),
        Reward(value=9.0, source="agent"),
    ):
        recorder.add("evaluate", parent=root, reward=each)


async def judged_store(*, rollouts: int = 5, text: str = "hello") -> MemoryStore:
    store = MemoryStore()
    for number in range(rollouts):
        await record(store, f"sums-1-grpo-{number:03d}", spans=judged, reward=number / 4, text=text)
    return store


async def test_rollout_shows_every_reward_with_its_parts_weights_and_use(opened: Open) -> None:
    async with opened(await judged_store()) as client:
        page = await text_of(client, "/rollouts/sums-1-grpo-003")
        scoring = (await data_of(client, "/rollouts/sums-1-grpo-003"))["scoring"]
    assert "the evaluator's reward" == scoring["rule"]
    assert [
        (-1.0, "not used"),
        (0.75, "the rollout's reward"),
        (0.1, "for the turn"),
        (9.0, "not trusted: it came with the agent's own token"),
    ] == [(row["reward"]["value"], row["use"]) for row in scoring["rows"]]
    deciding, of_turn = scoring["rows"][1:3]
    assert {"right": 0.75, "short": 1.0} == deciding["reward"]["dimensions"]
    assert (None, 2, "chat small") == (deciding["about"], of_turn["about"], of_turn["about_name"])
    assert deciding["at"] > 1.6e9
    assert 'href="/rollouts/sums-1-grpo-003/spans/4?attempt=1"' in page
    assert "weight 0.75" in html.unescape(re.sub("<[^>]+>", "", page))


async def test_last_of_equal_rewards_decides(opened: Open) -> None:
    def twice(recorder: Recorder, **_: Any) -> None:
        for _number in range(2):
            recorder.add("evaluate", reward=Reward(value=1.0, source="evaluator"))

    store = MemoryStore()
    await record(store, "twice", spans=twice)
    async with opened(store) as client:
        rows = (await data_of(client, "/rollouts/twice"))["scoring"]["rows"]
    assert [False, True] == [row["decides"] for row in rows]


async def test_rewards_beyond_the_table_are_counted(opened: Open) -> None:
    def many(recorder: Recorder, **_: Any) -> None:
        for number in range(ROWS + 30):
            reward = Reward(value=float((-1) ** number), name=f"r{number}" * 100, scope="span", feedback="x" * 1000)
            recorder.add("evaluate", reward=reward)

    store = MemoryStore()
    await record(store, "many", spans=many)
    async with opened(store) as client:
        scoring = (await data_of(client, "/rollouts/many"))["scoring"]
        page = await text_of(client, "/rollouts/many")
    assert (ROWS, ROWS + 30) == (len(scoring["rows"]), scoring["total"])
    assert f"the first {ROWS} of {ROWS + 30} rewards" in page
    assert "x" * 600 + "… <a href=" in page


async def test_rollouts_show_parts_and_reason_of_their_reward_and_are_found_by_a_part(opened: Open) -> None:
    async with opened(await judged_store(rollouts=9, text="too\nshort")) as client:
        page = await text_of(client, "/rollouts?experiment=sums")
        (row,) = (await data_of(client, "/rollouts?experiment=sums&part=right+%3D+0.75"))["rollouts"]
        none = await data_of(client, "/rollouts?experiment=sums&part=right+%3D+0.7")
        wrong = await client.get("/rollouts?part=right")
    assert ("sums-1-grpo-003", {"right": 0.75, "short": 1.0}) == (row["rollout_id"], row["parts"])
    assert "too short" == row["feedback"]
    assert [] == none["rollouts"]
    assert 'href="/rollouts?experiment=sums&amp;part=right+%3D+0.75"' in page
    assert 9 == page.count("short 1</a>")
    assert 400 == wrong.status


async def test_scores_say_of_which_parts_they_are(opened: Open) -> None:
    async def parted(store: Store, right: int) -> None:
        values = [1.0] * right + [0.0] * (96 - right)
        found = [Moments(count=1, mean=value) for value in values]
        parts = {"exact": functools.reduce(Moments.plus, found)}
        await store.save_scores([replace(SCORE, parts=parts, version=f"a-1-grpo-{right}")])

    store = MemoryStore()
    for step, text in ((10, "Answer.\n"), (30, "Answer in one word.\n")):
        made = {"algorithm": "grpo", "step": step, "parent": "a-1-grpo-10" if step > 10 else ""}
        prompt = PromptTemplate(template=text)
        await store.publish([ResourceVersion(name="style", version=f"a-1-grpo-{step}", resource=prompt, **made)])
        await parted(store, step)
    await store.save_scores([replace(SCORE, version="a-1-grpo-30", mean=0.3, low=0.2, high=0.4)])
    await parted(store, 10)
    await store.save_state({}, experiment=ExperimentRecord(name="a", live={"style": "a-1-grpo-10"}))
    async with opened(store) as client:
        pages = [await text_of(client, each) for each in ("/versions", "/versions/style")]
        versions = await data_of(client, "/versions/style")
    assert "exact 10 of 96" in pages[1]
    first, second = versions["versions"]
    assert first["gain"] is None
    assert pytest.approx(0.2) == second["gain"]["difference"]
    assert pytest.approx(0.2 - math.hypot(0.1, 0.1)) == second["gain"]["low"]
    assert ["removed", "added"] == [line["kind"] for line in second["changed"]]
    assert [" in one word"] == [part["text"] for part in second["changed"][1]["parts"] if part["is_changed"]]
    assert "+0.2</b> [+0.0586, +0.341]" in pages[1]


SCORE = VersionScore(name="style", version="", mean=0.1, low=0.0, high=0.2, n=96, how="validation")


async def test_steps_are_named_by_their_algorithm_along_the_chart(opened: Open) -> None:
    store = MemoryStore()
    steps = [("sft", step, step) for step in (1, 2, 3)] + [("grpo", step, step + 3) for step in (1, 2)]
    logged = [
        Metric(experiment="a", algorithm=name, step=step, experiment_step=place, name="loss", value=place)
        for name, step, place in steps
    ]
    validations = [
        Metric(experiment="a", algorithm="validate", step=n, experiment_step=n, name="reward", value=n) for n in (3, 5)
    ]
    await store.log_metrics([*logged, *validations])
    await store.save_state({}, experiment=ExperimentRecord(name="a", turn=5))
    moments = (Moments(count=4, mean=0.5), Moments(count=2, mean=2.0))
    tally = StepTally(algorithm="grpo", step=2, mode="train", rollouts=4, entropies=moments)
    await add_tallies(store, ExperimentRecord(name="a"), [tally])
    async with opened(store) as client:
        data, page = await data_of(client, "/runs/a"), await text_of(client, "/runs/a")
    stretches = [(each["algorithm"], each["first"], each["last"], each["step"]) for each in data["stretches"]]
    assert [("sft", 1, 3, 1), ("grpo", 4, 5, 1)] == stretches
    assert data["stretches"] == data["rewards"]["stretches"]
    rows = [re.sub("<.*?>", "", each) for each in re.findall('<tr><th scope="row">(.*?)</th>', page)]
    assert ["grpo 2", "grpo 1", "sft 3", "sft 2", "sft 1", "grpo 2", "sft 3"] == rows
    entropies = next(each for each in data["health"] if each["name"] == "entropy_by_turn")
    assert [("turn 1", [5], [0.5]), ("turn 2", [5], [2.0])] == [
        (line["algorithm"], line["places"], line["values"]) for line in entropies["series"]
    ]


async def test_comparison_of_one_run_asks_for_a_second(opened: Open) -> None:
    async with opened() as client:
        page = await text_of(client, "/?compare=sums")
    assert 'Choose a second run to compare with <span class="name">sums</span>.' in page
    assert 'value="sums" aria-label="Compare sums" checked' in page
    assert 'aria-label="Compare sums-slow">' in page


def test_numbers_and_times_are_written_as_fine_as_they_need() -> None:
    assert ["6,829", "0", "0", "1e-07"] == [pages.number(value) for value in (6829.0, 0.0, -5.8e-17, 1e-7)]
    assert "1970-01-01 00:00:02" == pages.clock(2.25)
    assert pages.clock(0) == pages.number(None)
