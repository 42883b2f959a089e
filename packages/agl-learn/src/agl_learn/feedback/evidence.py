"""Reads a recorded conversation as the turns between a user and an agent, and measures its answers.

Agents repeat earlier turns in every call, and may make several calls for one question. A text counts as often as it
occurs in the call that has it most often, so a question that the user asks twice stays two turns. The texts of users
have to be their own words: a prompt that is rendered around a question counts as a part of it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from agl.contracts import Recording
from agl.dialects import call_messages
from agl.episodes import chronological, is_answered
from agl.schemas import ModelCall, Rollout, Span
from agl_learn.feedback.words import normalised

_REFUSALS = tuple(
    map(normalised, ("I can't", "I cannot", "I'm unable", "I am not able", "I won't", "I'm sorry, but I can't"))
)
_REFUSED = ("refusal", "content_filter")


class Turn(NamedTuple):
    """A message: its role, ``user``, ``assistant`` or ``tool``, and its text."""

    role: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A recorded conversation.

    Attributes:
        spans: The spans of the deciding attempt in order of time.
        calls: The model calls among them, without late ones.
        turns: The messages without system prompts, each once.
        tokens: The tokens of all calls.
        is_over: Whether the user has not said anything for the settling time.
        asked_next: The first question of the user's next conversation, if it began within the settling time; else
            ``""``.
    """

    rollout: Rollout
    spans: Sequence[Span]
    calls: Sequence[ModelCall]
    turns: Sequence[Turn]
    tokens: int = 0
    is_over: bool = True
    asked_next: str = ""

    @property
    def questions(self) -> list[str]:
        """The user's messages."""
        return [turn.text for turn in self.turns if turn.role == "user"]

    @property
    def reactions(self) -> list[str]:
        """The user's messages after the first answer."""
        first = next((at for at, turn in enumerate(self.turns) if turn.role == "assistant"), len(self.turns))
        return [turn.text for turn in self.turns[first:] if turn.role == "user"]

    @property
    def answer(self) -> str:
        """The last answer that has text."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "assistant" and turn.text), "")

    @property
    def is_cut(self) -> bool:
        """Whether the last call has no whole answer."""
        return not is_answered(self.calls[-1])

    def numbers(self) -> dict[str, float]:
        """Measure the guards: ``latency`` and ``cost`` per question, ``refusals`` and ``length`` of the last answer."""
        count = max(1, len(self.questions))
        return {
            "latency": sum(call.latency_s for call in self.calls) / count,
            "refusals": float(self._is_refused()),
            "cost": self.tokens / count,
            "length": float(len(self.answer)),
        }

    def _is_refused(self) -> bool:
        is_flagged = bool(self.calls) and self.calls[-1].finish_reason in _REFUSED
        return is_flagged or normalised(self.answer).startswith(_REFUSALS)


def evidence_of(recording: Recording, *, until: float, asked_next: str = "") -> Evidence:
    """Read a recording; the conversation counts as over if its last call ended by ``until``, in Unix seconds."""
    rollout = recording.rollout
    spans = chronological([span for span in recording.spans if span.attempt_id == rollout.attempt_id]).spans
    calling = [span for span in spans if span.call is not None and not span.is_late]
    calls = [span.call for span in calling if span.call is not None and span.call.dialect != "embeddings"]
    tally = next((each.tally for each in recording.attempts if each.attempt_id == rollout.attempt_id), None)
    last = max((span.end_ns for span in calling), default=0) / 1e9
    return Evidence(
        rollout=rollout,
        spans=spans,
        calls=calls,
        turns=_turns(calls),
        tokens=tally.prompt_tokens + tally.response_tokens if tally else 0,
        is_over=rollout.is_finished or last <= until,
        asked_next=asked_next,
    )


def _turns(calls: Iterable[ModelCall]) -> list[Turn]:
    found: list[Turn] = []
    known: Counter[Turn] = Counter()
    for call in calls:
        inside: Counter[Turn] = Counter()
        for message in call_messages(call):
            turn = Turn(str(message.get("role", "")), _text(message.get("content") or message.get("refusal")))
            inside[turn] += 1
            if turn.role in ("user", "assistant", "tool") and inside[turn] > known[turn]:
                known[turn] += 1
                found.append(turn)
    return found


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))
