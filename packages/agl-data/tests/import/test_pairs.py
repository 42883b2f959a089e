"""Preference pairs of imported runs, as ``agl data export --format dpo`` writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from agl_testing.commands import invoke_agl

from .logs import chat, write_lines


@pytest.fixture
def exported(tmp_path: Path) -> Any:
    def export(lines: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
        write_lines(tmp_path / "chats.jsonl", lines)
        invoke_agl("data", "import", "chats.jsonl", "--reward", "score", folder=tmp_path)
        invoke_agl("data", "export", "--format", "dpo", "--output", "pairs.jsonl", *options, folder=tmp_path)
        return [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]

    return export


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_best_run_of_a_task_is_paired_with_the_worst(exported: Any) -> None:
    runs = [chat("2 + 2?", answer, score=score) for answer, score in (("5", 0.5), ("4", 1), ("22", 0))]
    equal = [chat("3 + 3?", answer, score=1) for answer in ("6", "six")]
    (pair,) = exported([*runs, chat("2 + 2?", "none"), *equal, chat("1?", "1", score=1)])

    assert [said("user", "2 + 2?")] == pair["prompt"]
    assert ([said("assistant", "4")], [said("assistant", "22")]) == (pair["chosen"], pair["rejected"])
    assert (1.0, 0.0) == (pair["score_chosen"], pair["score_rejected"])


def test_turns_that_both_runs_have_are_part_of_the_prompt(exported: Any) -> None:
    start = [said("system", "Be short."), said("user", "Hello"), said("assistant", "Hi"), said("user", "2 + 2?")]
    better = {"messages": [*start, said("assistant", "4"), said("user", "Sure?"), said("assistant", "Yes")], "score": 1}
    worse = {"messages": [*start, said("assistant", "5")], "score": 0}
    (pair,) = exported([worse, better])

    assert start == pair["prompt"]
    assert ["4", "Sure?", "Yes"] == [message["content"] for message in pair["chosen"]]
    assert ["5"] == [message["content"] for message in pair["rejected"]]


def test_conversations_are_paired_by_agent_and_those_with_other_beginnings_left_out(exported: Any) -> None:
    agents = [chat("a", answer, agent=name, score=score) for answer, name, score in (("b", "x", 1), ("c", "y", 0))]
    starts = [
        {"messages": [said("system", name), *chat("d", name)["messages"]], "score": score}
        for name, score in (("e", 1), ("f", 0))
    ]
    assert [] == exported([*agents, *starts])


def test_least_reward_is_that_of_the_best_run(exported: Any) -> None:
    runs = [chat(task, answer, score=len(answer)) for task in ("a", "b") for answer in ("c", "cc")]
    runs += [chat("b", "ccc", score=3)]

    assert ["b"] == [pair["prompt"][0]["content"] for pair in exported(runs, "--min-reward", "3")]
