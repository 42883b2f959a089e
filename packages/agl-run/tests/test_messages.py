"""Prompts of several messages, as agents get them."""

from pathlib import Path

import pytest

import agl
from agl.errors import ConfigError
from agl.schemas import JsonResource
from agl.stores import MemoryStore
from agl_run import Messages, Quiet

PROMPT = [
    {"role": "system", "content": "Answer in JSON: {{}}."},
    {"role": "user", "content": "{question}"},
]
AGENT = """
def solve(task, solve_prompt, tools):
    expected = [{"role": "system", "content": "Answer in JSON: {}."}, {"role": "user", "content": "2 + 2"}]
    assert expected == solve_prompt.format(question=task["question"])
    assert {"role": "user", "content": "{question}"} == solve_prompt[1]
    assert [{"role": "calculator", "content": "adds"}] == tools and list is type(tools)
    return 1.0
"""


def test_placeholders_of_all_messages_are_filled() -> None:
    filled = Messages(PROMPT).format(question="2 + 2", unused=1)
    assert [{"role": "system", "content": "Answer in JSON: {}."}, {"role": "user", "content": "2 + 2"}] == filled
    assert "{question}" == PROMPT[1]["content"]


def test_placeholder_without_a_value_is_named() -> None:
    with pytest.raises(ConfigError, match="needs \\['question'\\] and got only \\['query'\\]"):
        Messages(PROMPT).format(query="2 + 2")


@pytest.mark.parametrize("runner", ["async", "process"])
def test_agent_gets_messages_to_fill_in_whatever_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    (tmp_path / "messages_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = agl.Trainer(
        name="solve",
        runner=runner,
        store=MemoryStore("memory://"),
        initial_resources={
            "solve_prompt": JsonResource(value=PROMPT),
            "tools": JsonResource(value=[{"role": "calculator", "content": "adds"}]),
        },
        folder=tmp_path,
        progress=Quiet(),
    )
    found = trainer.dev("messages_agent:solve", [{"question": "2 + 2"}])
    assert [1.0] == [episode.reward for episode in found.episodes]
