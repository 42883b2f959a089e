"""The conversation of a rollout: what each agent was asked and said, with its tools, rewards and training.

A call shows only the messages that no earlier call has shown. A tool's call, its result and its span are one entry.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from agl import semconv
from agl.contracts import CallUse
from agl.dialects import call_messages
from agl.schemas import Episode, Record, Reward, Span, Transition
from agl_inspect.rollouts.conversations import MediaPart, media_of, parts_of
from agl_inspect.rollouts.tree import CUT, Contents, Node, Text, facts_of, kind_of, seconds_of, tree_of

_THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
"""The way in which many open models write their thinking at the start of an answer."""


class ToolUse(msgspec.Struct, kw_only=True):
    """A tool call of a model; later requests and spans fill in the result.

    Attributes:
        result: The tool's result; ``None`` if neither a later request nor a span has it.
        media: The stored pictures and other media of the result.
        sequence: The sequence number of the span that ran the tool, or 0 if no span was recorded.
    """

    name: str
    arguments: Text
    result: Text | None = None
    media: list[MediaPart] = []
    sequence: int = 0
    seconds: float | None = None
    is_error: bool = False


class Said(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A message.

    Attributes:
        number: The message's number in its call's conversation, from 1.
        thinking: The model's reasoning; ``None`` without any.
        media: The stored pictures and other media of the message.
    """

    number: int
    role: str
    thinking: Text | None
    text: Text | None
    media: list[MediaPart]
    tools: list[ToolUse]


class Turn(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A model call, or another span that says something: a tool, a hand-off, a reward, an error.

    Attributes:
        message: The span's error as text.
        repeated: The number of the call's messages that were shown before.
        texts: The span's other texts.
        rewards: The rewards about this span, and the span's own.
        tone: The advantage of the call on the scale of the rollout, from -3 to 3; ``None`` without an advantage.
        training: What training did with the call, in a sentence; ``""`` if nothing yet.
    """

    node: Node
    message: str
    facts: list[str]
    repeated: int
    messages: list[Said]
    texts: list[Text]
    rewards: list[Reward]
    tone: int | None
    training: str


class Conversation:
    """Makes turns of spans, in the order in which they were said.

    Calls may lack requests and responses in ``spans``, which saves memory; :meth:`add` needs them.

    Args:
        spans: All spans of the conversation.
        transitions: Its calls by span id, with the reasons why they cannot train.
        uses: What steps did with its calls, by span id.
        reason: The end of the sentence about an advantage of 0.
        limit: The most characters of each text; ``None`` for whole texts.

    Attributes:
        nodes: The rows of the time line.
        order: The spans in the order in which to add them.
        turns: The turns of the spans that were added.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        transitions: Mapping[str, Transition],
        uses: Mapping[str, CallUse],
        *,
        reason: str = "",
        limit: int | None = CUT,
    ) -> None:
        self.nodes = tree_of(spans)
        self.order = sorted(spans, key=_when)
        self.turns: list[Turn] = []
        self._known = {(node.span_id, node.sequence): node for node in self.nodes}
        self._talk, self._rewards = _Talk(limit), _rewards(spans)
        self._transitions, self._uses, self._reason = transitions, uses, reason
        self._largest = max((abs(use.advantage) for use in uses.values() if use.advantage is not None), default=0.0)

    def add(self, span: Span) -> None:
        """Add the next span; it makes a turn if it says something."""
        if kind_of(span) == "tool" and self._talk.takes(span):
            return
        repeated, messages = self._talk.messages(span)
        texts, facts = self._talk.texts(span), facts_of(span)
        rewards = self._rewards.get(span.span_id, [])
        if not (span.call or texts or facts or span.status == "error" or rewards):
            return
        use = self._uses.get(span.span_id) if span.call else None
        self.turns.append(
            Turn(
                node=self._known[span.span_id, span.sequence],
                message=span.status_message,
                facts=facts,
                repeated=repeated,
                messages=messages,
                texts=texts,
                rewards=rewards,
                tone=None if use is None or use.advantage is None else tone_of(use.advantage, self._largest),
                training=training_of_call(self._transitions.get(span.span_id), use, reason=self._reason),
            )
        )


def transitions_of(episode: Episode, attempt_id: str) -> dict[str, Transition]:
    """Return an attempt's calls by span id, without those for which nobody asked for token ids."""
    is_for_training = episode.rollout.mode == "train"
    own = (call for call in episode.transitions if call.attempt_id == attempt_id)
    return {call.span_id: call for call in own if is_for_training or call.reject != "missing_token_ids"}


def training_of_call(transition: Transition | None, use: CallUse | None, *, reason: str = "") -> str:
    """Return in a sentence what training did with a call, or why it cannot train; ``""`` if nothing yet."""
    if transition is not None and transition.reject:
        return f"Cannot train: {transition.detail or transition.reject}."
    if use is None:
        return ""
    if use.row < 0:
        return f"Did not train: {use.note}."
    if use.advantage is None:
        return "Trained on this answer."
    if not use.advantage:
        return f"Advantage 0: training left this answer as likely as it was{reason}."
    likely = "more likely" if use.advantage > 0 else "less likely"
    return f"Advantage {use.advantage:+.4g}: training made this answer {likely}."


def tone_of(advantage: float, largest: float) -> int:
    """Return -3 (lowest) to 3 (highest advantage), on a scale that ends at ``largest``; 0 for no advantage."""
    if not advantage or not math.isfinite(advantage):
        return 0
    size = 1 if abs(advantage) <= largest / 3 else 2 if abs(advantage) <= largest * 2 / 3 else 3
    return size if advantage > 0 else -size


class _Talk:
    """Reads spans in order, and remembers the tool calls that wait for a result or a span."""

    def __init__(self, limit: int | None) -> None:
        self._contents = Contents(limit=limit)
        self._unanswered: dict[str, ToolUse] = {}
        self._unseen: list[ToolUse] = []
        self._last = ""

    def messages(self, span: Span) -> tuple[int, list[Said]]:
        """Return the number of a call's messages that were shown before, and the new ones."""
        every = call_messages(span.call) if span.call else []
        repeated = self._contents.shown.add(every)
        return repeated, list(self._said(every[repeated:], first=repeated + 1))

    def _said(self, messages: Sequence[Mapping[str, Any]], *, first: int) -> Iterator[Said]:
        for number, message in enumerate(messages, start=first):
            role, (thinking, content, asked) = str(message.get("role", "message")), parts_of(message)
            media = [each for each in media_of(message) if each.is_stored]
            waiting = self._unanswered.pop(str(message.get("tool_call_id", "")), None) if role == "tool" else None
            if waiting is not None:
                waiting.result, waiting.media = self._contents.text("result", content), media
                continue
            if not thinking and role == "assistant" and (match := _THINKING.match(content)):
                thinking, content = match[1].strip(), content[match.end() :].lstrip()
            tools = [ToolUse(name=name, arguments=self._contents.text("arguments", given)) for _, name, given in asked]
            self._unanswered |= {name: tool for (name, _, _), tool in zip(asked, tools, strict=True) if name}
            self._unseen += tools
            self._last = content
            yield Said(
                number=number,
                role=role,
                thinking=self._contents.text("thinking", thinking) if thinking else None,
                text=self._contents.text(role, content) if content else None,
                media=media,
                tools=tools,
            )

    def takes(self, span: Span) -> bool:
        """Add a tool's span to the call that asked for it; false if no call did."""
        named = [tool for tool in self._unseen if tool.name == span.attributes.get(semconv.TOOL_NAME)]
        if not named:
            return False
        given = _parsed(span.attributes.get(semconv.TOOL_ARGUMENTS))
        tool = next((tool for tool in named if _parsed(tool.arguments.text) == given), named[0])
        self._unseen.remove(tool)
        tool.sequence, tool.seconds, tool.is_error = span.sequence, seconds_of(span), span.status == "error"
        if tool.result is None and semconv.TOOL_RESULT in span.attributes:
            tool.result = self._contents.text("result", span.attributes[semconv.TOOL_RESULT])
        return True

    def texts(self, span: Span) -> list[Text]:
        """Return a span's texts without messages, feedback, and an output that repeats the last message."""
        found = self._contents.others(span if span.reward is None else replace(span, reward=None))
        return [text for text in found if (text.label, text.text) != ("returned", self._last)]


def _rewards(spans: Sequence[Span]) -> dict[str, list[Reward]]:
    """Return the rewards by the id of the span that they are about; a reward about none of these spans is its own."""
    known = {span.span_id for span in spans}
    found: dict[str, list[Reward]] = {}
    for span in spans:
        if span.reward is not None:
            about = span.reward.span_id or (span.parent_id if span.reward.scope == "span" else None)
            found.setdefault(about if about in known and about else span.span_id, []).append(span.reward)
    return found


def _when(span: Span) -> tuple[int, int]:
    """Return the time at which a span says something: a call when it starts, other spans when they end."""
    return (span.start_ns if span.call else max(span.start_ns, span.end_ns)), span.sequence


def _parsed(arguments: Any) -> Any:
    """Return arguments as JSON values; models and frameworks write them as text or as objects."""
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments or {}
    except msgspec.DecodeError:
        return arguments
