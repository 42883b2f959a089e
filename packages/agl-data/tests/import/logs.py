"""Writes files as other tools do: sessions of Claude Code and Codex, trajectories, and chats."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SESSION = "5d0c7a3e-0000-4000-8000-000000000001"
USAGE = {"input_tokens": 12, "cache_read_input_tokens": 900, "output_tokens": 34}


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write values as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    """Return a conversation with one question and one answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


class ClaudeLog:
    """Writes the lines of a session, each with the previous line as its parent."""

    def __init__(self, *, agent: str = "", first: int = 0) -> None:
        self.lines: list[dict[str, Any]] = []
        self._agent, self._number, self._above = agent, first, None

    def add(self, kind: str, message: dict[str, Any] | None, **more: Any) -> str:
        """Add a line; returns its uuid."""
        self._number += 1
        uuid = f"{self._agent or 'main'}-{self._number:03}"
        line = {
            "parentUuid": self._above,
            "isSidechain": bool(self._agent),
            "userType": "external",
            "cwd": "/repo",
            "sessionId": SESSION,
            "version": "2.1.197",
            "gitBranch": "main",
            "type": kind,
            "uuid": uuid,
            "timestamp": f"2026-05-01T10:00:{self._number:02}.500Z",
            **({"agentId": self._agent} if self._agent else {}),
            **({"message": message} if message is not None else {}),
            **more,
        }
        self.lines.append(line)
        self._above = uuid
        return uuid

    def ask(self, content: Any, **more: Any) -> str:
        """Add a message of the user, or results of tools."""
        return self.add("user", {"role": "user", "content": content}, **more)

    def answer(self, number: int, blocks: Sequence[dict[str, Any]], reason: str = "end_turn") -> list[str]:
        """Add an answer: one line for each of its blocks, all with one message id."""
        return [
            self.add(
                "assistant",
                {
                    "id": f"msg_{self._agent}{number}",
                    "type": "message",
                    "role": "assistant",
                    "model": "claude-opus-4-8",
                    "content": [block],
                    "stop_reason": reason,
                    "stop_sequence": None,
                    "usage": USAGE,
                },
                requestId=f"req_{number}",
            )
            for block in blocks
        ]

    def rewind(self, uuid: str | None) -> None:
        """Make the next line a child of an earlier line."""
        self._above = uuid


def text(words: str) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": words}


def use(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    """Return a block that calls a tool."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def result(call_id: str, content: Any, **more: Any) -> dict[str, Any]:
    """Return a block with a tool's result."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def claude_session(path: Path) -> Path:
    """Write a session with parallel tool calls, and with a sub-agent in a separate file."""
    log = ClaudeLog()
    log.ask("<command-name>/init</command-name>", isMeta=True)
    log.ask("Mend the tests")
    thinking = {"type": "thinking", "thinking": "Look first.", "signature": "c2ln"}
    lines = log.answer(
        1, [thinking, use("toolu_1", "Bash", command="ls"), use("toolu_2", "Read", path="a.py")], "tool_use"
    )
    log.rewind(lines[1])
    log.ask([result("toolu_1", "a.py")])
    log.rewind(lines[2])
    log.ask([result("toolu_2", "no such file", is_error=True)])
    log.answer(2, [use("toolu_3", "Agent", subagent_type="Explore", prompt="Find the tests")], "tool_use")
    log.ask(
        [result("toolu_3", [text("They are in tests/")])], toolUseResult={"agentId": "abc123", "status": "completed"}
    )
    log.answer(3, [text("Done.")])
    summary = {"type": "summary", "summary": "Mending", "leafUuid": "main-002"}
    write_lines(path, [summary, *log.lines])
    below = ClaudeLog(agent="abc123", first=20)
    below.ask("Find the tests")
    below.answer(1, [text("They are in tests/")])
    write_lines(path.with_suffix("") / "subagents" / "agent-abc123.jsonl", below.lines)
    return path


def codex_session(path: Path) -> Path:
    """Write a session with two tool calls, token counts after each answer, and a compaction."""

    def line(second: int, kind: str, **payload: Any) -> dict[str, Any]:
        return {"timestamp": f"2026-05-02T09:00:{second:02}.123Z", "type": kind, "payload": payload}

    def said(second: int, role: str, words: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return line(second, "response_item", type="message", role=role, content=[{"type": kind, "text": words}])

    def count(second: int, given: int, answered: int) -> dict[str, Any]:
        last = {
            "input_tokens": given,
            "cached_input_tokens": 0,
            "output_tokens": answered,
            "total_tokens": given + answered,
        }
        return line(second, "event_msg", type="token_count", info={"total_token_usage": last, "last_token_usage": last})

    def call(second: int, call_id: str, command: str) -> dict[str, Any]:
        arguments = json.dumps({"cmd": command})
        return line(
            second, "response_item", type="function_call", name="exec_command", arguments=arguments, call_id=call_id
        )

    def output(second: int, call_id: str, words: str) -> dict[str, Any]:
        return line(second, "response_item", type="function_call_output", call_id=call_id, output=words)

    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    return write_lines(
        path,
        [
            line(
                0,
                "session_meta",
                id="0199-codex",
                cwd="/repo",
                originator="codex_cli_rs",
                cli_version="0.169.0",
                source="cli",
                base_instructions={"text": "You are Codex."},
            ),
            said(1, "user", "<environment_context>\n<cwd>/repo</cwd>"),
            line(1, "turn_context", cwd="/repo", model="gpt-6", effort="high"),
            said(2, "user", "Add a Dockerfile"),
            line(2, "event_msg", type="user_message", message="Add a Dockerfile"),
            line(3, "response_item", **reasoning),
            call(4, "call_1", "ls"),
            output(5, "call_1", "main.py"),
            call(5, "call_2", "cat main.py"),
            output(6, "call_2", "print()"),
            count(6, 100, 20),
            count(6, 100, 20),
            said(8, "assistant", "Written."),
            count(8, 150, 5),
            line(9, "compacted", message="The Dockerfile is written."),
            said(10, "user", "Thanks"),
            said(11, "assistant", "You are welcome."),
            count(11, 30, 4),
            line(12, "event_msg", type="task_complete", last_agent_message="You are welcome."),
        ],
    )


def trajectory(**more: Any) -> dict[str, Any]:
    """Return a trajectory with token ids, a tool call, a sub-agent and a copied step."""
    below = {
        "schema_version": "ATIF-v1.8",
        "trajectory_id": "child",
        "agent": {"name": "searcher", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "Search"},
            {"step_id": 2, "source": "agent", "message": "Found it"},
        ],
    }
    called = {"tool_call_id": "c1", "function_name": "search", "arguments": {"q": "harbour", "id": 10**30}}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": "session",
        "trajectory_id": "main",
        "agent": {
            "name": "terminus-2",
            "version": "2.0",
            "model_name": "qwen",
            "tool_definitions": [{"type": "function"}],
        },
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be short."},
            {"step_id": 2, "source": "user", "message": "Where?", "timestamp": "2026-05-03T08:00:00Z"},
            {"step_id": 3, "source": "agent", "message": "From before", "is_copied_context": True},
            {
                "step_id": 4,
                "source": "agent",
                "message": "",
                "timestamp": "2026-05-03T08:00:01.5Z",
                "reasoning_content": "Search for it.",
                "tool_calls": [called],
                "observation": {
                    "results": [
                        {
                            "source_call_id": "c1",
                            "content": "a harbour",
                            "subagent_trajectory_ref": [{"trajectory_id": "child"}],
                        }
                    ]
                },
                "metrics": {
                    "prompt_tokens": 3,
                    "completion_tokens": 2,
                    "cost_usd": 0.25,
                    "prompt_token_ids": [1, 2, 3],
                    "completion_token_ids": [4, 5],
                    "logprobs": [-0.5, -0.25],
                },
            },
            {"step_id": 5, "source": "agent", "message": "There.", "timestamp": "2026-05-03T08:00:02+00:00"},
        ],
        "subagent_trajectories": [below],
        "extra": {"reward": 0.5},
        **more,
    }


def lightning_events() -> list[dict[str, Any]]:
    """Return the events of two rollouts of Agent Lightning 1.0, each with a call that has token ids, and a reward."""

    def event(rollout: str, kind: str, data: object) -> dict[str, object]:
        return {"event_type": kind, "rollout_id": rollout, "attempt_id": "0", "timestamp": 1.7e9, "data": data}

    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "4"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"token": "4", "logprob": -0.25}, {"token": "", "logprob": -0.5}]},
    }
    call = {
        "model": "m",
        "model_version": 3,
        "request": {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]},
        "response": {"model": "m", "choices": [choice], "prompt_token_ids": [1, 2, 3]},
        "latency_ms": 250.0,
        "http_status": 200,
    }
    events = [event("a", "model_request", call), event("a", "reward", {"value": 0.5}), event("a", "log", {})]
    return [*events, event("b", "model_request", call), event("b", "reward", {"value": 0})]
