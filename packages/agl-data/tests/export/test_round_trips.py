"""Rollouts that are exported and imported again have equal ids, masks, agents and rewards, in every format."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from agl.contracts import Recording
from agl.schemas import Episode, ModelCall, pack_floats, pack_ids, unpack_floats, unpack_ids

from .conftest import episode_of, export, imported
from .worlds import call_span, recording_of, recordings, replaced

pytestmark = pytest.mark.alone

LEFT_OUT = {"error", "incomplete", "not_final", "late"}
FEW = settings(max_examples=25, deadline=None)


def calls_of(episode: Episode) -> list[tuple[Any, ...]]:
    """Return the calls that a format of texts can hold, each with its agent, tokens, reward and reject reason."""
    return [
        (c.agent, c.turn, c.prompt_ids, c.response_ids, c.logprobs, c.reward, c.policy, c.model_version, c.reject)
        for c in episode.transitions
        if c.reject not in LEFT_OUT
    ]


def without_turn(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the calls without their turns, which failed calls shift."""
    return [(agent, *rest) for agent, _, *rest in calls]


def rows_of(episode: Episode) -> list[tuple[Any, ...]]:
    """Return the rows, with the agent and the reward of each segment."""
    rewards = {call.span_id: call.reward for call in episode.transitions}
    return [
        (
            row.ids,
            row.mask,
            row.logprobs,
            [(each.start, each.stop, each.agent, each.model_version, rewards[each.span_id]) for each in row.segments],
        )
        for row in episode.rows
    ]


def rewards_of(episode: Episode) -> list[tuple[Any, ...]]:
    return [(r.value, r.name, r.dimensions, r.scope, r.source, r.feedback) for r in episode.rewards]


@pytest.mark.parametrize("form", ["atif", "langfuse", "otlp", "otlp .pb"])
@given(recording=recordings())
@FEW
def test_calls_rows_agents_and_rewards_come_back(form: str, folder: Path, recording: Recording) -> None:
    name, _, suffix = form.partition(" ")
    made = export(name, [recording], suffix=suffix or ".jsonl")
    path = folder / f"{name}{suffix or '.jsonl'}"
    path.write_bytes(made.data)
    before = episode_of(recording)
    if not calls_of(before):
        assert not made.data or name != "atif"
        return
    (after,) = imported(path)

    assert without_turn(calls_of(before)) == without_turn(calls_of(after))
    assert rows_of(before) == rows_of(after)
    assert before.reward == after.reward
    assert rewards_of(before) == rewards_of(after)


def lines_of(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def made_rows(form: str, recording: Recording) -> list[Any] | None:
    """Return the lines of a format of token ids; ``None`` if it refuses the rollout because it has only texts."""
    episode = episode_of(recording)
    if not episode.rows and any(call.reject == "missing_token_ids" for call in episode.transitions):
        return None
    return lines_of(export(form, [recording]).data)


def about_of(about: dict[str, Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    segments = [
        (each["start"], each["stop"], each.get("agent", ""), each.get("model_version", ""), each.get("reward"))
        for each in about["segments"]
    ]
    return about.get("reward"), segments


@given(recording=recordings())
@FEW
def test_rows_of_verl_are_the_rows_of_agl(recording: Recording) -> None:
    lines, episode = made_rows("verl", recording), episode_of(recording)
    found = [
        (
            line["prompt_ids"] + line["response_ids"],
            [0] * len(line["prompt_ids"]) + line["response_mask"],
            [0.0] * len(line["prompt_ids"]) + line["response_logprobs"],
            line["reward_score"],
            *about_of(line["extra_fields"]["agl"]),
        )
        for line in lines or []
    ]
    expected = [
        (unpack_ids(ids), list(mask), unpack_floats(logprobs), episode.reward, episode.reward, segments)
        for ids, mask, logprobs, segments in rows_of(episode)
    ]
    assert expected == found
    assert all(line["response_mask"][0] == 1 and line["num_turns"] >= 2 for line in lines or [])


@given(recording=recordings())
@FEW
def test_datums_of_tinker_are_the_rows_of_agl(recording: Recording) -> None:
    lines, episode = made_rows("tinker", recording), episode_of(recording)
    found = [
        (
            line["datum"]["model_input"]["chunks"][0]["tokens"][:1]
            + line["datum"]["loss_fn_inputs"]["target_tokens"]["data"],
            [0.0, *line["datum"]["loss_fn_inputs"]["weights"]["data"]],
            [0.0, *line["datum"]["loss_fn_inputs"]["logprobs"]["data"]],
            *about_of(line["agl"]),
        )
        for line in lines or []
    ]
    expected = [
        (unpack_ids(ids), list(map(float, mask)), unpack_floats(logprobs), episode.reward, segments)
        for ids, mask, logprobs, segments in rows_of(episode)
    ]
    assert expected == found


@pytest.mark.parametrize("form", ["atif", "langfuse", "otlp"])
def test_calls_without_times_keep_the_order_in_which_they_were_recorded(form: str, folder: Path) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    spans = []
    for number, messages in enumerate(([asked], [{**asked, "content": "other"}], [asked, said, asked]), start=1):
        call = ModelCall(
            request_id=f"r{number}",
            dialect="chat",
            model="small",
            prompt_ids=pack_ids([number]),
            response_ids=pack_ids([9]),
            logprobs=pack_floats([-1.0]),
            request={"messages": messages},
            response={"choices": [{"index": 0, "message": said}]},
        )
        span = call_span(f"{number:016x}", call, parent="", at_ns=0)
        spans.append(replaced(span, sequence=number, start_ns=0, end_ns=0))
    before = recording_of(spans)
    path = folder / f"untimed-{form}.jsonl"
    path.write_bytes(export(form, [before]).data)
    (after,) = imported(path)

    assert rows_of(episode_of(before)) == rows_of(after)
    assert [1, 2, 3] == [unpack_ids(row.ids)[0] for row in after.rows]
