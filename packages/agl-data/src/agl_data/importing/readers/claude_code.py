"""Reads session logs of Claude Code, ``~/.claude/projects/*/SESSION.jsonl``: one file is one run.

A line is a message and names the preceding line in ``parentUuid``. The lines therefore form a tree, which branches at
each rewind and each compaction. An answer takes one line for each of its blocks, all with the same message id. The
lines of sub-agents (side chains) are in the same file, or in ``SESSION/subagents/agent-ID.jsonl``. The log has neither
the system prompt nor the tool definitions. A call's start time is the time of the preceding line.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agl import semconv
from agl.schemas import ErrorInfo, Json, ModelCall
from agl_data.importing.runs import CHANGED_TEXT, IDS_MISSING, Run
from agl_data.importing.source import read_lines
from agl_data.importing.values import as_dict, as_text, dicts_in, ns_of, text_of

MAIN = "claude-code"
_MESSAGES = ("user", "assistant")
_NO_SYSTEM = "calls without their system prompt and tools, which the log leaves out"
_NO_AGENT = "sub-agents without a name in the log"
_OUTSIDE = "logs of sub-agents that are links out of the session's folder: left out"


def fits(record: Json) -> bool:
    """Return whether a record is a line of a session."""
    fields = as_dict(record)
    is_line = "type" in fields and ("sessionId" in fields or "leafUuid" in fields)
    return is_line and "payload" not in fields and "messages" not in fields


class _Entry(NamedTuple):
    """A line of the tree, with or without a message, and its position among all lines that were read."""

    position: int
    line: dict[str, Any]
    agent: str
    at_ns: int

    @property
    def message(self) -> dict[str, Any]:
        return as_dict(self.line.get("message"))

    @property
    def answer(self) -> str:
        """The id of the answer that this line holds a block of; ``""`` for lines that are not part of an answer."""
        is_answer = self.line.get("type") == "assistant" and self.message.get("model") != "<synthetic>"
        return (as_text(self.message.get("id")) or as_text(self.line.get("uuid"))) if is_answer else ""


def read(path: Path) -> Iterator[Run]:
    """Read a session as one run; yields nothing for a log without model calls."""
    session = _Session(path)
    if session.run.calls:
        yield session.run


class _Session:
    """Reads the lines of a session and of its sub-agents, and makes the run."""

    def __init__(self, path: Path) -> None:
        self.run = Run("", place=str(path), grows=True)
        self._entries: dict[str, _Entry] = {}
        self._side_chains: dict[int, str] = {}
        self._load(path)
        for log in self._logs(path):
            self._load(log)
        if path.parent.name == "subagents":
            self.run.key += f"/{path.stem}"  # a sub-agent's log carries the id of its session
        self._answers: defaultdict[tuple[str, str], list[_Entry]] = defaultdict(list)
        self._results: dict[str, tuple[_Entry, dict[str, Any]]] = {}
        self._agent_of: dict[str, str] = {}
        self._index()
        self._make()

    def _load(self, path: Path) -> None:
        for line in read_lines(path):
            fields = as_dict(line.value)
            self.run.lost[CHANGED_TEXT] += int(line.is_changed)
            self.run.key = as_text(fields.get("sessionId")) or self.run.key
            if self.run.fields is None and fields.get("type") in _MESSAGES:
                self.run.fields = fields
            uuid = as_text(fields.get("uuid"))
            if not uuid or uuid in self._entries:
                continue
            is_side = fields.get("isSidechain") is True
            agent = (as_text(fields.get("agentId")) or "side") if is_side else ""
            entry = _Entry(len(self._entries), fields, agent, ns_of(fields.get("timestamp")))
            self._entries[uuid] = entry

    def _logs(self, path: Path) -> Iterator[Path]:
        """Yield the logs of the session's sub-agents; skips and counts links that lead out of the session's folder."""
        folder = path.with_suffix("") / "subagents"
        for log in sorted(folder.glob("agent-*.jsonl")):
            if log.resolve().parent == folder.resolve() and folder.resolve().parent.parent == path.resolve().parent:
                yield log
            else:
                self.run.lost[_OUTSIDE] += 1

    def _index(self) -> None:
        """Find the blocks of each answer, the results of tools, and the tool call that started each sub-agent."""
        for entry in self._entries.values():
            if entry.answer:
                self._answers[self._chain(entry), entry.answer].append(entry)
            for block in _blocks(entry.message):
                if block.get("type") == "tool_result":
                    call_id = as_text(block.get("tool_use_id"))
                    self._results.setdefault(call_id, (entry, block))
                    agent = as_text(as_dict(entry.line.get("toolUseResult")).get("agentId"))
                    if agent:
                        self._agent_of.setdefault(agent, call_id)
        prompts = {
            text_of(as_dict(block.get("input")).get("prompt")): as_text(block.get("id")) for block in self._uses()
        }
        for entry in self._entries.values():
            chain, asked = self._chain(entry), text_of(entry.message.get("content"))
            if chain and chain not in self._agent_of and entry.line.get("type") == "user" and asked:
                call_id = prompts.get(asked)
                if call_id:
                    self._agent_of[chain] = call_id

    def _uses(self) -> Iterator[dict[str, Any]]:
        for entry in self._entries.values():
            yield from (block for block in _blocks(entry.message) if block.get("type") == "tool_use")

    def _chain(self, entry: _Entry) -> str:
        """Return the id of a line's sub-agent; ``""`` for the main agent.

        A side chain without an agent id is identified by the ``uuid`` of its first line.
        """
        if entry.agent != "side":
            return entry.agent
        known = self._side_chains.get(entry.position)
        if known is None:
            root = next(each for each in self._path(entry) if each.agent == "side")
            known = self._side_chains[entry.position] = as_text(root.line.get("uuid"))
        return known

    def _path(self, entry: _Entry) -> list[_Entry]:
        """Return the lines of a conversation from its first line up to and including the given one."""
        found, seen = [entry], {entry.position}
        while (above := self._entries.get(as_text(found[-1].line.get("parentUuid")))) and above.position not in seen:
            found.append(above)
            seen.add(above.position)
        return found[::-1]

    def _make(self) -> None:
        times: defaultdict[str, list[int]] = defaultdict(list)
        for entry in self._entries.values():
            if entry.line.get("type") in _MESSAGES:
                times[self._chain(entry)].append(entry.at_ns)
        tools = {as_text(block.get("id")): block for block in self._uses()}
        for chain, found in times.items():
            self._add_agent(chain, tools, start_ns=min(found), end_ns=max(found))
        for (chain, answer), blocks in self._answers.items():
            self._add_call(chain, answer, blocks)
        main = [entry for entry in self._entries.values() if not entry.agent and entry.line.get("type") in _MESSAGES]
        whole = main or list(self._entries.values())
        asked = (_prompt(entry) for entry in whole)
        self.run.prompt = next((text for text in asked if text), None)
        if whole and whole[-1].line.get("isApiErrorMessage") is True:
            self.run.error = ErrorInfo(type="APIError", message=text_of(whole[-1].message.get("content"))[:2000])

    def _add_agent(self, chain: str, tools: dict[str, dict[str, Any]], *, start_ns: int, end_ns: int) -> None:
        call_id = self._agent_of.get(chain, "")
        name, parent = MAIN, ""
        if chain:
            name = as_text(as_dict(tools.get(call_id, {}).get("input")).get("subagent_type")) or "sub-agent"
            parent = f"tool {call_id}" if call_id in tools else "agent "
            self.run.lost[_NO_AGENT] += int(name == "sub-agent")
        about = {semconv.AGENT_ID: chain, semconv.CONVERSATION_ID: self.run.key}
        self.run.add_agent(f"agent {chain}", name, parent=parent, start_ns=start_ns, end_ns=end_ns, attributes=about)

    def _add_call(self, chain: str, answer: str, blocks: Sequence[_Entry]) -> None:
        path = self._path(blocks[0])
        last = blocks[-1].message
        content = [block for entry in blocks for block in _blocks(entry.message)]
        kept = ("id", "type", "role", "model", "stop_reason", "stop_sequence", "usage")
        response = {**{name: last[name] for name in kept if name in last}, "content": content}
        reason = as_text(last.get("stop_reason"))
        call = ModelCall(
            request_id=f"{chain}/{answer}",
            dialect="messages",
            model=as_text(last.get("model")),
            request={"model": as_text(last.get("model")), "messages": self._history(path[:-1], blocks[0])},
            response=response,
            ids_missing=IDS_MISSING,
            finish_reason=reason,
        )
        before = path[-2].at_ns if len(path) > 1 else blocks[0].at_ns
        end_ns = blocks[-1].at_ns
        parent = f"agent {chain}"
        self.run.lost[_NO_SYSTEM] += 1
        self.run.add_call(f"call {chain} {answer}", call, parent=parent, start_ns=min(before, end_ns), end_ns=end_ns)
        for block in content:
            if block.get("type") == "tool_use":
                self._add_tool(block, parent, end_ns)

    def _add_tool(self, block: dict[str, Any], parent: str, start_ns: int) -> None:
        call_id = as_text(block.get("id"))
        if call_id not in self._results:
            return
        entry, result = self._results[call_id]
        self.run.add_tool(
            f"tool {call_id}",
            as_text(block.get("name")),
            parent=parent,
            call_id=call_id,
            arguments=block.get("input"),
            result=result.get("content"),
            is_error=result.get("is_error") is True,
            start_ns=min(start_ns, entry.at_ns),
            end_ns=entry.at_ns,
        )

    def _history(self, path: Sequence[_Entry], until: _Entry) -> list[Json]:
        """Return the messages of a conversation: complete answers, each followed by the results of all its tools.

        Results that were written after the line ``until`` are left out.
        """
        messages: list[Json] = []
        answers: set[str] = set()
        given: set[str] = set()
        for entry in path:
            if entry.answer and entry.answer not in answers:
                answers.add(entry.answer)
                blocks = [
                    block for each in self._answers[self._chain(entry), entry.answer] for block in _blocks(each.message)
                ]
                messages.append({"role": "assistant", "content": blocks})
                uses = [as_text(block.get("id")) for block in blocks if block.get("type") == "tool_use"]
                results = [
                    self._results[use][1]
                    for use in uses
                    if use in self._results and self._results[use][0].position < until.position
                ]
                given.update(filter(None, (as_text(result.get("tool_use_id")) for result in results)))
                messages += [{"role": "user", "content": results}] if results else []
            elif entry.line.get("type") == "user":
                content = entry.message.get("content")
                rest = [block for block in _blocks(entry.message) if as_text(block.get("tool_use_id")) not in given]
                if isinstance(content, str) or rest:
                    messages.append({"role": "user", "content": content if isinstance(content, str) else rest})
        return messages


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else dicts_in(content)


def _prompt(entry: _Entry) -> str:
    """Return the text that a person wrote on a line; ``""`` for answers, tool results and the program's own notes."""
    is_asked = entry.line.get("type") == "user" and entry.line.get("isMeta") is not True
    is_asked = is_asked and entry.line.get("isCompactSummary") is not True
    return text_of(entry.message.get("content")) if is_asked else ""
