from typing import Any

import msgspec
import pytest

from agl.errors import ConfigError
from agl_rewards.source import text_source, unfenced

from .cases import agent, chat, emitted, root, tool

CALL = {"id": "c", "type": "function", "function": {"name": "run_sql", "arguments": '{"query": "SELECT 1"}'}}
LATER = {"id": "d", "type": "function", "function": {"name": "run_sql", "arguments": '{"query": "SELECT 2"}'}}
OTHER = {"id": "e", "type": "function", "function": {"name": "stop", "arguments": "no json"}}

SPANS = [
    root({"sql": "SELECT 3", "rows": [1]}),
    agent(1, "write", seconds=2),
    chat(2, "from write", parent="s1"),
    agent(4, "check", seconds=2),
    chat(5, "from check", parent="s4"),
    chat(6, None, tools=[CALL, LATER, OTHER]),
    emitted(7, "query", {"sql": "SELECT 4"}),
    emitted(8, "query", "SELECT 5"),
    emitted(9, "parts", {"sql": "SELECT 6"}),
    tool(10, "lookup", arguments='{"word": "sun"}'),
]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("answer", "from check"),
        ("answer:write", "from write"),
        ("answer:w.*|rewrite", "from write"),
        ("answer:writ", ""),
        ("output", '{"sql":"SELECT 3","rows":[1]}'),
        ("output:sql", "SELECT 3"),
        ("output:rows", "[1]"),
        ("output:none", ""),
        ("object:query", "SELECT 5"),
        ("object:parts:sql", "SELECT 6"),
        ("object:other", ""),
        ("tool:run_sql:query", "SELECT 2"),
        ("tool:run_sql:other", ""),
        ("tool:stop:reason", ""),
        ("tool:lookup:word", "sun"),
        ("tool:none:word", ""),
    ],
)
def test_source_finds_the_newest_text_of_its_kind(source: str, text: str) -> None:
    assert text == text_source(source)(SPANS[::-1])


@pytest.mark.parametrize("source", ["answer", "answer:a", "output", "output:k", "object:a", "object:a:k", "tool:a:k"])
def test_source_of_an_empty_run_is_empty(source: str) -> None:
    assert "" == text_source(source)([])


def test_what_an_agent_or_a_command_put_out_is_no_answer() -> None:
    assert "" == text_source("answer")([root("task: 42")])


def test_output_that_is_text_with_json_has_keys() -> None:
    assert "SELECT 1" == text_source("output:sql")([root('{"sql": "SELECT 1"}')])
    assert "" == text_source("output:sql")([root("plain")])


def test_late_calls_are_no_source() -> None:
    late = msgspec.structs.replace(chat(2, "late", tools=[LATER]), is_late=True)
    spans = [chat(1, "in time", tools=[CALL]), late]
    assert ["SELECT 1", "in time"] == [text_source(source)(spans) for source in ("tool:run_sql:query", "answer")]


@pytest.mark.parametrize("source", ["", "answers", "tool:run_sql", "object", "output:a:b", "answer:(", "answer:a:b"])
def test_source_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        text_source(source)


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        ("SELECT 1 ", "SELECT 1"),
        ("Here:\n```sql\nSELECT 1\n```\nand\n```\nSELECT 2\n```", "SELECT 2"),
        ("```SQL\r\nSELECT 1\r\n```", "SELECT 1"),
        ("```python\nprint()\n```", "```python\nprint()\n```"),
        ("```sql\nSELECT 1", "```sql\nSELECT 1"),
    ],
)
def test_fenced_block_is_taken_out_of_the_text(text: str, inner: Any) -> None:
    assert inner == unfenced(text, "sql")
