"""The conversation of a rollout: what each agent was asked and said, with its tools, rewards and training.

A call shows only the messages that no earlier call has shown. A tool's call, its result and its span are one entry.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from agl import semconv
from agl.contracts import CallUse
from agl.dialects import call_messages
from agl.episodes import Enclosing
from agl.schemas import Record, Reward, Span, Transition
from agl_console.tokens import tone_of
from agl_console.tree import Contents, Text, facts_of, kind_of, seconds_of
from agl_inspect.rollouts.conversations import parts_of

_THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
"""The way in which many open models write their thinking at the start of an answer."""


class ToolUse(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A tool call of a model.

    Attributes:
        result: What the tool returned; ``None`` if neither a span nor a later request has it.
        sequence: The number of the tool's span; 0 if there is none.
    """

    name: str
    arguments: Text
    result: Text | None = None
    sequence: int = 0
    seconds: float | None = None
    is_error: bool = False


class Said(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A message.

    Attributes:
        number: The message's number in its call's conversation, from 1.
        thinking: The model's reasoning; ``None`` without any.
    """

    number: int
    role: str
    thinking: Text | None
    text: Text | None
    tools: list[ToolUse]


class Turn(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A model call, or another span that says something: a tool, a hand-off, a reward, an error.

    Attributes:
        kind: As in :class:`agl_console.tree.Node`.
        path: Names of the enclosing agents, nodes and tools, outermost first.
        repeated: The number of the call's messages that were shown before.
        texts: What the span recorded besides messages.
        rewards: The rewards about this span, and the span's own.
        advantage: The advantage that a step reported for the call; ``None`` without a report.
        tone: The advantage on the scale of the rollout, from -3 to 3.
        training: What training did with the call, in a sentence; ``""`` for other spans.
    """

    sequence: int
    kind: str
    name: str
    agent: str
    path: list[str]
    seconds: float
    is_error: bool
    message: str
    facts: list[str]
    repeated: int
    messages: list[Said]
    texts: list[Text]
    rewards: list[Reward]
    advantage: float | None
    tone: int | None
    training: str


class _Tool:
    """A tool call whose result and span may come later."""

    def __init__(self, name: str, arguments: str) -> None:
        self.name, self.arguments = name, arguments
        self.result: str | None = None
        self.span: Span | None = None

    def is_of(self, span: Span) -> bool:
        given = span.attributes.get(semconv.TOOL_ARGUMENTS)
        return _parsed(given) == _parsed(self.arguments)


class _Message(NamedTuple):
    number: int
    role: str
    thinking: str
    content: str
    tools: list[_Tool]


class _Conversation:
    """Reads spans in order, and keeps the tool calls that wait for a result or a span."""

    def __init__(self) -> None:
        self.contents = Contents()
        self._unanswered: dict[str, _Tool] = {}
        self._unseen: list[_Tool] = []
        self._last = ""

    def messages(self, span: Span) -> tuple[int, list[_Message]]:
        """Return the number of a call's messages that were shown before, and the parts of the new ones."""
        every = call_messages(span.call) if span.call else []
        repeated = self.contents.shown.add(every)
        found: list[_Message] = []
        for number, message in enumerate(every[repeated:], start=repeated + 1):
            role, (thinking, content, asked) = str(message.get("role", "message")), parts_of(message)
            waiting = self._unanswered.pop(str(message.get("tool_call_id", "")), None) if role == "tool" else None
            if waiting is not None:
                waiting.result = content
                continue
            if not thinking and role == "assistant" and (match := _THINKING.match(content)):
                thinking, content = match[1].strip(), content[match.end() :].lstrip()
            tools = [_Tool(name, arguments) for _, name, arguments in asked]
            self._unanswered |= {name: tool for (name, _, _), tool in zip(asked, tools, strict=True) if name}
            self._unseen += tools
            self._last = content
            found.append(_Message(number, role, thinking, content, tools))
        return repeated, found

    def takes(self, span: Span) -> bool:
        """Give a tool's span to the call that asked for it; false if no call did."""
        named = [tool for tool in self._unseen if tool.name == span.attributes.get(semconv.TOOL_NAME)]
        if not named:
            return False
        tool = next((tool for tool in named if tool.is_of(span)), named[0])
        self._unseen.remove(tool)
        tool.span = span
        if tool.result is None and (result := span.attributes.get(semconv.TOOL_RESULT)) is not None:
            tool.result = self.contents.text("", result).text
        return True

    def texts(self, span: Span) -> list[Text]:
        """Return what a span recorded besides messages, without an output that repeats the last message."""
        return [text for text in self.contents.others(span) if text.label != "returned" or text.text != self._last]


def conversation_of(
    spans: Sequence[Span], transitions: Mapping[str, Transition], uses: Mapping[str, CallUse], *, reason: str
) -> list[Turn]:
    """Return the spans that say something, in the order in which they were said.

    ``reason`` ends the sentence about an advantage of 0.
    """
    talk, rewards = _Conversation(), _rewards(spans)
    found: list[tuple[Span, int, list[_Message], list[Text]]] = []
    for span in sorted(spans, key=_when):
        if kind_of(span) == "tool" and talk.takes(span):
            continue
        repeated, messages = talk.messages(span)
        texts = talk.texts(span)
        if span.call or texts or span.status == "error" or span.span_id in rewards or facts_of(span):
            found.append((span, repeated, messages, texts))
    around = Enclosing(spans)
    largest = max((abs(use.advantage) for use in uses.values() if use.advantage is not None), default=0.0)
    turns: list[Turn] = []
    for span, repeated, messages, texts in found:
        who, use = around.who(span), uses.get(span.span_id) if span.call else None
        advantage = use.advantage if use else None
        turns.append(
            Turn(
                sequence=span.sequence,
                kind=kind_of(span),
                name=span.name,
                agent=who.agent,
                path=list(who.path),
                seconds=seconds_of(span),
                is_error=span.status == "error",
                message=span.status_message,
                facts=facts_of(span),
                repeated=repeated,
                messages=[_said(talk.contents, message) for message in messages],
                texts=texts,
                rewards=rewards.get(span.span_id, []),
                advantage=advantage,
                tone=None if advantage is None else tone_of(advantage, largest),
                training=training_of_call(transitions.get(span.span_id), use, reason=reason) if span.call else "",
            )
        )
    return turns


def _rewards(spans: Sequence[Span]) -> dict[str, list[Reward]]:
    """Return the rewards by the id of the span that they are about; a reward about none of these spans is its own."""
    known = {span.span_id for span in spans}
    found: dict[str, list[Reward]] = {}
    for span in spans:
        if span.reward is not None:
            about = span.reward.span_id or (span.parent_id if span.reward.scope == "span" else None)
            found.setdefault(about if about and about in known else span.span_id, []).append(span.reward)
    return found


def training_of_call(transition: Transition | None, use: CallUse | None, *, reason: str = "") -> str:
    """Return in a sentence what training did with a call, or why it did not train."""
    if transition is not None and transition.reject:
        return f"Cannot train: {transition.detail or transition.reject}."
    if use is None:
        return "No step has trained on this answer."
    if use.row < 0:
        return f"Did not train: {use.note}."
    if use.advantage is None:
        return "Trained on this answer."
    if not use.advantage:
        return f"Advantage 0: training left this answer as likely as it was{reason}."
    return f"Advantage {use.advantage:+.4g}: training made this answer {'more' if use.advantage > 0 else 'less'} likely."


def _said(contents: Contents, message: _Message) -> Said:
    thinking, content = message.thinking, message.content
    return Said(
        number=message.number,
        role=message.role,
        thinking=contents.text("thinking", thinking) if thinking else None,
        text=contents.text(message.role, content) if content else None,
        tools=[_use(contents, tool) for tool in message.tools],
    )


def _use(contents: Contents, tool: _Tool) -> ToolUse:
    result = None if tool.result is None else contents.text("result", tool.result)
    use = ToolUse(name=tool.name, arguments=contents.text("arguments", tool.arguments), result=result)
    if tool.span is None:
        return use
    is_error = tool.span.status == "error"
    return replace(use, sequence=tool.span.sequence, seconds=seconds_of(tool.span), is_error=is_error)


def _when(span: Span) -> tuple[int, int]:
    """Return the time at which a span says something: a call when it starts, other spans when they end."""
    return (span.start_ns if span.call else max(span.start_ns, span.end_ns)), span.sequence


def _parsed(arguments: Any) -> Any:
    """Return arguments as JSON values; models and frameworks write them as text or as objects."""
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else cast("Any", arguments) or {}
    except msgspec.DecodeError:
        return arguments
