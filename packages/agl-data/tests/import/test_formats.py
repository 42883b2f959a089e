"""Importing chats and trajectories, with their tokens, agents, tasks and rewards."""

import json
from pathlib import Path

import pytest

from agl.dialects import call_messages
from agl.errors import DatasetError
from agl.schemas import unpack_floats, unpack_ids

from .conftest import Imports
from .logs import chat, lightning_events, trajectory, write_lines


def test_chat_becomes_a_call_for_each_answer_that_was_sampled(tmp_path: Path, imports: Imports) -> None:
    record = {
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "agent": "guide",
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "an example", "weight": 0},
            {"role": "user", "content": "Will it rain?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "yes"},
            {"role": "assistant", "content": "It will."},
        ],
    }
    done = imports(write_lines(tmp_path / "chats.jsonl", [record]))
    (recording,) = imports.recordings()
    calls = [span.call for span in recording.spans if span.call]

    assert (2, {"guide": 1}) == (done.calls, done.agents)
    assert [4, 6] == [len(call_messages(call)) for call in calls]
    assert record["tools"] == calls[0].request["tools"]
    (tool,) = [span for span in recording.spans if span.name == "execute_tool weather"]
    assert ("{}", "yes") == (tool.attributes["gen_ai.tool.call.arguments"], tool.attributes["gen_ai.tool.call.result"])
    assert ["guide", "guide"] == [call.agent for call in imports.episodes()[0].transitions]


def test_same_task_is_one_group_and_the_same_chat_twice_two_samples(tmp_path: Path, imports: Imports) -> None:
    lines = [chat("2 + 2?", "4"), chat("2 + 2?", "5"), chat("2 + 2?", "4"), chat("3 + 3?", "6")]
    done = imports(write_lines(tmp_path / "chats.jsonl", lines))

    assert (4, 2) == (done.rollouts, done.tasks)
    groups = [recording.rollout.group_id for recording in imports.recordings()]
    assert [3, 1] == sorted((groups.count(group) for group in set(groups)), reverse=True)


def test_importing_again_adds_only_the_rewards_that_were_missing(tmp_path: Path, imports: Imports) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [chat("2 + 2?", "4", score=1), chat("2 + 2?", "5", score=False)])
    first = imports(path)
    second = imports(path, reward_from="score")
    third = imports(path, reward_from="score")

    assert (2, 0, 0) == (first.rollouts, first.known, first.rewards)
    assert (0, 2, 2) == (second.rollouts, second.known, second.rewards)
    assert (0, 2, 0) == (third.rollouts, third.known, third.rewards)
    assert [0.0, 1.0] == sorted(episode.reward or 0.0 for episode in imports.episodes())


def test_reward_that_is_other_than_in_the_store_stays_and_is_counted(tmp_path: Path, imports: Imports) -> None:
    imports(write_lines(tmp_path / "a.jsonl", [chat("a", "b", score=0), chat("c", "d", score=1)]), reward_from="score")
    path = write_lines(tmp_path / "a.jsonl", [chat("a", "b", score=1), chat("c", "d", score=1)])
    done = imports(path, reward_from="score")

    assert (0, 2, 0) == (done.rollouts, done.known, done.rewards)
    assert 1 == done.lost["rewards that the store has with another value: they stay as they are"]
    assert [0.0, 1.0] == sorted(episode.reward or 0.0 for episode in imports.episodes())


def test_same_chat_in_two_files_is_one_run_with_one_reward(tmp_path: Path, imports: Imports) -> None:
    paths = [write_lines(tmp_path / f"{name}.jsonl", [chat("a", "b", score=1)]) for name in "xy"]
    done = imports(*paths, reward_from="score")

    assert (1, 1, 0, 1) == (done.rollouts, done.known, done.changed, done.rewards)


def test_reward_and_task_come_from_fields_of_the_record(tmp_path: Path, imports: Imports) -> None:
    record = chat("Hello", "Hi", meta={"task": {"question": "Hello", "answer": "Hi"}, "score": 0.75})
    done = imports(write_lines(tmp_path / "a.jsonl", [record]), task_from="meta.task", reward_from="meta.score")

    (episode,) = imports.episodes()
    assert ({"question": "Hello", "answer": "Hi"}, 0.75) == (episode.rollout.task, episode.reward)
    assert {"runs without times: they carry the time of the import": 1} == {
        text: count for text, count in done.lost.items() if "times" in text
    }


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"task_from": "first"}, "line 2 has no field 'first' for the task .*it has messages"),
        ({"reward_from": "score"}, "line 2: the field 'score' for the reward is 'good'.*a number, true or false"),
    ],
    ids=["task", "reward"],
)
def test_field_that_does_not_serve_is_refused_before_anything_is_written(target, says, tmp_path, imports) -> None:
    lines = [chat("a", "b", first="a", score=1), chat("c", "d", score="good")]

    with pytest.raises(DatasetError, match=f"{says}|nothing was imported"):
        imports(write_lines(tmp_path / "a.jsonl", lines), **target)
    assert [] == imports.recordings()


def test_chat_that_was_exported_comes_back_the_same(tmp_path: Path, imports: Imports) -> None:
    given = [
        chat("2 + 2?", "4", agent="sums", reward=1.0),
        chat("Hello\0", "Hi \ud83d\ude00", agent="guide", reward=0.5),
    ]
    imports(write_lines(tmp_path / "chats.jsonl", given), reward_from="reward")

    found = [
        {
            "messages": call_messages(call),
            "agent": episode.transitions[0].agent,
            "reward": episode.reward,
        }
        for recording, episode in zip(imports.recordings(), imports.episodes(), strict=True)
        for call in [span.call for span in recording.spans if span.call]
    ]
    key = json.dumps
    assert sorted(map(key, json.loads(json.dumps(given)))) == sorted(map(key, found))


def test_halves_of_characters_are_replaced_and_counted(tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\\ud800"}]}\n')
    done = imports(path)

    (recording,) = imports.recordings()
    (call,) = [span.call for span in recording.spans if span.call]
    assert "b\ufffd" == call_messages(call)[-1]["content"]
    assert 1 == sum(count for text, count in done.lost.items() if "halves of characters" in text)


def test_trajectory_brings_token_ids_logprobs_agents_and_times(tmp_path: Path, imports: Imports) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(trajectory(), indent=2))
    done = imports(path, reward_from="extra.reward")
    (recording,) = imports.recordings()
    (episode,) = imports.episodes()

    assert ({"atif": 1}, 3, 1) == (done.files, done.calls, done.calls_with_ids)
    call = next(span.call for span in recording.spans if span.call and not span.call.ids_missing)
    assert ([1, 2, 3], [4, 5]) == (unpack_ids(call.prompt_ids), unpack_ids(call.response_ids))
    assert [-0.5, -0.25] == unpack_floats(call.logprobs)
    (row,) = episode.rows
    assert ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1]) == (unpack_ids(row.ids), list(row.mask))
    assert 0.5 == episode.reward
    assert ["terminus-2", "terminus-2", "searcher"] == sorted((c.agent for c in episode.transitions), reverse=True)
    below = next(each for each in episode.transitions if each.agent == "searcher")
    assert ("terminus-2", "search", "searcher") == below.path
    assert (1777795200.0, 1777795202.0) == (recording.rollout.created_at, recording.rollout.finished_at)
    assert 0.25 == next(s.attributes["agl.cost_usd"] for s in recording.spans if "agl.cost_usd" in s.attributes)


def test_run_without_a_message_of_a_user_is_counted(tmp_path: Path, imports: Imports) -> None:
    record = {"messages": [{"role": "assistant", "content": "Good morning"}]}
    done = imports(write_lines(tmp_path / "a.jsonl", [record]))

    assert 1 == done.lost["runs without a message of a user: they share one empty task"]
    assert {"prompt": None} == imports.recordings()[0].rollout.task


def test_copied_steps_of_a_trajectory_are_part_of_requests_only(tmp_path: Path, imports: Imports) -> None:
    imports(write_lines(tmp_path / "a.json", [trajectory()]))

    (recording,) = imports.recordings()
    answers = [call_messages(span.call)[-1]["content"] for span in recording.spans if span.call]
    assert "From before" not in answers


@pytest.mark.parametrize("version", ["ATIF-v1.9", "ATIF-v2.0", "ATIF"])
def test_trajectory_of_another_version_is_refused(version: str, tmp_path: Path, imports: Imports) -> None:
    with pytest.raises(DatasetError, match=rf"schema_version '{version}', and ATIF-v1.0 to ATIF-v1.8 are read"):
        imports(write_lines(tmp_path / "a.json", [trajectory(schema_version=version)]))


@pytest.mark.parametrize("place", ["../outside.json", "/etc/hostname", "link/outside.json"])
def test_sub_agent_outside_of_the_folder_is_refused(place: str, tmp_path: Path, imports: Imports) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    write_lines(tmp_path / "outside.json", [trajectory()])
    given = trajectory()
    results = given["steps"][3]["observation"]["results"]
    results[0]["subagent_trajectory_ref"] = [{"session_id": "s", "trajectory_path": place}]

    with pytest.raises(DatasetError, match="outside of its folder; nothing was imported"):
        imports(write_lines(folder / "a.json", [given]))
    assert [] == imports.recordings()


def test_file_of_a_sub_agent_comes_with_the_trajectory_that_names_it(tmp_path: Path, imports: Imports) -> None:
    below, given = trajectory()["subagent_trajectories"][0], trajectory(subagent_trajectories=[])
    results = given["steps"][3]["observation"]["results"]
    results[0]["subagent_trajectory_ref"] = [{"trajectory_path": "logs/below.json"}] * 2
    write_lines(tmp_path / "runs" / "main.json", [given])
    named = write_lines(tmp_path / "runs" / "logs" / "below.json", [below])
    done = imports(tmp_path / "runs")

    assert ({"atif": 1}, 1, 3) == (done.files, done.rollouts, done.calls)
    assert 2 == imports(tmp_path / "runs", named, is_dry=True).files["atif"]


def test_reward_about_no_call_is_about_the_run(tmp_path: Path, imports: Imports) -> None:
    record = {"value": 0.5, "source": "evaluator"}
    imports(write_lines(tmp_path / "a.json", [trajectory(extra={"agl": {"rewards": [record]}})]))

    (reward,) = imports.episodes()[0].rewards
    assert (0.5, None) == (reward.value, reward.span_id)


def test_sub_agent_that_names_itself_is_refused(tmp_path: Path, imports: Imports) -> None:
    given = trajectory()
    results = given["steps"][3]["observation"]["results"]
    results[0]["subagent_trajectory_ref"] = [{"session_id": "s", "trajectory_path": "a.json"}]

    with pytest.raises(DatasetError, match="look for a trajectory that names itself"):
        imports(write_lines(tmp_path / "a.json", [given]))


def test_same_file_may_be_imported_into_two_experiments(tmp_path: Path, imports: Imports) -> None:
    path = write_lines(tmp_path / "a.jsonl", [chat("a", "b")])
    imports(path)
    imports(path, experiment="other")

    assert {"old", "other"} == {recording.rollout.experiment for recording in imports.recordings()}


def test_events_of_agent_lightning_become_calls_with_their_tokens_and_a_reward(
    tmp_path: Path, imports: Imports
) -> None:
    path = tmp_path / "events.json"
    path.write_text(json.dumps(lightning_events()))

    done = imports(path)

    assert (2, 2, 1) == (done.rollouts, done.calls, done.lost["events that are neither model calls nor rewards"])
    assert [0.5, 0.0] == [episode.reward for episode in imports.episodes()]
    (row, *_) = imports.episodes()[0].transitions
    assert ([1, 2, 3], [7, 8]) == (list(unpack_ids(row.prompt_ids)), list(unpack_ids(row.response_ids)))
    assert [-0.25, -0.5] == list(unpack_floats(row.logprobs))
    assert {"prompt": "2 + 2?"} == imports.recordings()[0].rollout.task
