"""Finds the content of a lesson in the trace of a rollout: errors of tools, feedback of rewards, a sibling's answers.

Everything here is text, without tokens. There are three sources, all of which are recorded anyway:

    tools     tools that failed: spans of tools with status `error`, and messages of tools that begin with "error"
    rewards   the text feedback of rewards (`Reward.feedback`): failed checks, and the reasons of a judge
    siblings  the answers of another rollout of the same task that succeeded

The text of a reward or a tool may quote fields of the task that are hidden from the agent. Such quotes are masked, so
that the teacher never reads them: whole values, single lines of longer values, and any three words in a row. The
answers of siblings are not masked, because the policy wrote them without seeing a hidden field.
Limits: a hidden value is not recognised if a text paraphrases it or computes with it. Keys within a hidden field are
not masked, because they only name values.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from agl import semconv
from agl.dialects import call_messages
from agl_objectives.tasks import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agl.schemas import Episode, Json, Span, Transition

Source = Literal["tools", "rewards", "siblings"]

MASKED = "[...]"
"""The text that replaces a quote of a hidden field."""

_RUN = 3
"""Number of consecutive words by which a hidden value is recognised."""
_WORD = re.compile(r"[\w\u0300-\u036f]+")  # with combining accents, which follow their letters
_SHORT = 4
"""Values with fewer characters than this are masked only as a whole word or a whole number."""
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """The texts that a call's teacher also reads: feedback, and the answers of a sibling rollout."""

    feedback: str = ""
    sibling: str = ""

    def __bool__(self) -> bool:
        return bool(self.feedback or self.sibling)


class HiddenFields:
    """Masks the values of a task's hidden fields in texts."""

    def __init__(self, task: Json, hidden: Sequence[str]) -> None:
        fields: dict[str, Json] = cast("dict[str, Json]", task) if isinstance(task, dict) else {}
        leaves = [leaf for key in hidden if key in fields for leaf in _leaves(fields[key])]
        texts = {_folded(text)[0] for leaf in leaves for text in _spellings(leaf)}
        self._whole = sorted(texts)
        self._runs = frozenset(run for text in texts for run in _runs(_WORD.findall(text)))
        self._lengths = {len(run) for run in self._runs}

    def masked(self, text: str) -> str:
        """Return `text` with `[...]` in place of every hidden value, whatever the value's case and Unicode form."""
        folded, places = _folded(text)
        spans = [span for value in self._whole for span in _found(value, folded)]
        words = list(_WORD.finditer(folded))
        spans += [
            (run[0].start(), run[-1].end())
            for length in self._lengths
            for run in (words[at : at + length] for at in range(len(words) - length + 1))
            if tuple(word.group() for word in run) in self._runs
        ]
        return _without(text, [(places[start], places[end - 1] + 1) for start, end in spans])


def find_feedback(
    episode: Episode, spans: Sequence[Span], *, sources: Sequence[str], clean: Callable[[str], str]
) -> str:
    """Return the feedback about a rollout, one remark per paragraph, with hidden fields masked; `""` without feedback.

    `spans` are the spans of the rollout's deciding attempt; only the source `tools` reads them. `clean` removes text
    that must not be in a message. It is applied before the masking, because removed text could hide a hidden value.
    """
    remarks: list[str] = []
    if "tools" in sources:
        remarks += _failed_tools(spans)
    if "rewards" in sources:
        # An agent's feedback about itself is not evidence.
        remarks += [reward.feedback for reward in episode.rewards if reward.source != "agent"]
    hidden = HiddenFields(episode.rollout.task, episode.rollout.hidden)
    masked = (hidden.masked(clean(remark).strip()) for remark in remarks)
    return "\n\n".join(dict.fromkeys(remark for remark in masked if remark.strip(f" {MASKED}\n")))


def find_sibling(group: Sequence[Episode], index: int, *, success: float) -> Episode | None:
    """Return the other rollout of the same task with the highest reward, or None if that reward is below `success`.

    Of several with that reward, it is the next one in the group after the rollout, cyclically. Rollouts of other tasks,
    which a group may have (`group_key`), are not siblings.
    """
    # Starting after the rollout itself spreads the choice over equal siblings, and a repeated step chooses the same.
    task = canonical(group[index].rollout.task)
    others = [e for e in (*group[index + 1 :], *group[:index]) if canonical(e.rollout.task) == task]
    good = [episode for episode in others if episode.reward is not None and episode.reward >= success]
    return max(good, key=lambda episode: episode.reward or 0.0, default=None)


def answers_of(episode: Episode, *, agent: str) -> list[Transition]:
    """Return the calls of one agent in a rollout that have an answer, in order of time."""
    return [call for call in episode.transitions if not call.reject and call.agent == agent and call.response_ids]


def _failed_tools(spans: Sequence[Span]) -> Iterator[str]:
    """Yield the errors of tools in order of time: first those in tool spans, then those in tool messages."""
    ordered = [span for span in spans if not span.is_late]
    for span in ordered:
        if span.status == "error" and span.attributes.get(semconv.OPERATION) == semconv.OP_EXECUTE_TOOL:
            name = span.attributes.get(semconv.TOOL_NAME) or span.name
            said = span.status_message or _text(span.attributes.get(semconv.TOOL_RESULT))
            yield f"{name}: {said}" if said else f"{name} failed"
    for span in ordered:
        for message in call_messages(span.call) if span.call is not None else ():
            content = _text(message.get("content"))
            if message.get("role") == "tool" and content.lstrip().casefold().startswith("error"):
                yield content


def _leaves(value: Json) -> Iterator[Json]:
    """Yield the numbers and texts in a JSON value."""
    if isinstance(value, dict):
        for inner in cast("dict[str, Json]", value).values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in cast("list[Json]", value):
            yield from _leaves(inner)
    elif value is not None:
        yield value


def _spellings(leaf: Json) -> set[str]:
    """Return the ways to write a value: unchanged, by lines, as Python, as JSON, or as a number with grouped digits."""
    if isinstance(leaf, str):
        escaped = {repr(leaf)[1:-1], json.dumps(leaf)[1:-1]}
        found = {leaf.strip(), *(line.strip() for line in leaf.splitlines()), *escaped}
    else:
        found = {str(leaf), json.dumps(leaf)}
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            found |= {f"{leaf:,}", f"{leaf:_}"}
        if isinstance(leaf, float):
            found |= {f"{leaf:g}", str(int(leaf)) if leaf.is_integer() else str(leaf)}
    return {text for text in found if text}


def _folded(text: str) -> tuple[str, list[int]]:
    """Return a text with case and Unicode forms removed, and for each of its characters the index in `text`.

    Forms of a character are, for example, an accented letter and the letter with a combining accent, or digits of full
    and of half width.
    """
    parts = [_form(character) for character in text]  # one character may become several
    return "".join(parts), [at for at, part in enumerate(parts) for _ in part]


def _form(character: str) -> str:
    if character.isascii():
        return character.casefold()
    apart = unicodedata.normalize("NFKD", character.casefold())
    return unicodedata.normalize("NFKD", apart.casefold())


def _found(value: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of every occurrence of a value in a text; both must be folded (`_folded`).

    A number also matches with more zeros before it or, after a decimal point, at its end.
    """
    pattern = re.escape(value)
    if number := _NUMBER.fullmatch(value):
        pattern = f"0*{pattern}{'0*' if number[1] else ''}"
    for match in re.finditer(pattern, text):
        start, end = match.span()
        if len(value) >= _SHORT or not (_goes_on(text[start - 1 : start + 1]) or _goes_on(text[end - 1 : end + 1])):
            yield start, end


def _goes_on(pair: str) -> bool:
    """Return true if two neighbouring characters belong to the same word or the same number."""
    kinds = {_kind(character) for character in pair}
    return len(pair) == 2 and len(kinds) == 1 and "" not in kinds


def _kind(character: str) -> str:
    """Return `digit`, `letter`, or `""` for any other character, such as letters of scripts without spaces."""
    if character.isdecimal():
        return "digit"
    category = unicodedata.category(character)
    return "letter" if category in ("Lu", "Ll", "Lt", "Lm", "Mn") else ""


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    """Return every sequence of three consecutive words; fewer words form one sequence."""
    if len(words) <= _RUN:
        return {tuple(words)} if words else set()
    return {tuple(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)}


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return `text` with `[...]` in place of the spans, which may overlap."""
    parts: list[str] = []
    at = 0
    for start, end in sorted(spans):
        if start >= at:
            parts += [text[at:start], MASKED]
        at = max(at, end)
    return "".join([*parts, text[at:]])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
