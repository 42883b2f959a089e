"""Builds the rows that the teacher of `sdpo` reads: the recorded calls of rollouts, with a lesson in each prompt.

`feedback` finds the content of a lesson. The lesson becomes one more user message in the recorded prompt, directly
before the tokens that open the answer. A group is silent if it gives no lesson or has nothing left to learn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from jinja2 import TemplateError

from agl.errors import ConfigError
from agl.schemas import unpack_ids
from agl_algo_torch.data.feedback import Lesson, Source, answers_of, find_feedback, find_sibling
from agl_algo_torch.learner.batch import RowSample, from_row, from_tokens
from agl_objectives.settings import Count, Settings, Share
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.contracts import CallUse, Store
    from agl.schemas import Episode, Span, Transition
    from agl_algo_torch.data.credited_rows import PreparedBatch
    from agl_algo_torch.learner.model import LoadedModel
    from agl_algo_torch.learner.pictures import Pictures

_REASONS = {
    "nothing": "nothing was said about its rollout, and no sibling succeeded",
    "unplaced": "its prompt has no place where an answer of the chat template begins",
    "too_long": "its prompt with the lesson is longer than the model's context",
}


SIBLING_WORDS = "Here is an answer to this task that was right:\n\n{sibling}"
FEEDBACK_WORDS = "This was said about an earlier answer to this task:\n\n{feedback}"
CLOSING_WORDS = "Answer the task again, and get it right."


class SelfTeacher(Settings, frozen=True, kw_only=True):
    """The policy as its own teacher: the same weights, with a lesson in the prompt about how an answer turned out.

    Attributes:
        sources: The sources of lessons: `tools`, `rewards`, `siblings`.
        success: Smallest reward of a rollout that succeeded. Its answers are shown to the teacher of its siblings.
        teach_successes: The tokens from which a successful rollout without feedback learns: `agreed`, where the
            teacher finds the token at least as likely as the policy does, or `all`.
        start: Weight, from 0 to 1, of the policy at this algorithm's start in the teacher.
        max_tokens: Largest number of tokens of a sibling's answers in a lesson, and of feedback; the rest is cut off.
        sibling_words: Text of the lesson that shows a sibling, with `{sibling}` for the answers.
        feedback_words: Text of the lesson that gives feedback, with `{feedback}` for the feedback.
        closing_words: The end of every lesson.
    """

    sources: Annotated[tuple[Source, ...], msgspec.Meta(min_length=1)] = ("tools", "rewards", "siblings")
    success: float = 1.0
    teach_successes: Literal["agreed", "all"] = "agreed"
    start: Share = 0.9
    max_tokens: Count = 1024
    sibling_words: str = SIBLING_WORDS
    feedback_words: str = FEEDBACK_WORDS
    closing_words: str = CLOSING_WORDS

    def __post_init__(self) -> None:
        for name, text in (("sibling", self.sibling_words), ("feedback", self.feedback_words)):
            if f"{{{name}}}" not in text:
                raise ValueError(f"{name}_words = {text!r} shows nothing; write {{{name}}} in it")

    def message(self, lesson: Lesson) -> str:
        """Return the text of the user message that gives a lesson."""
        parts = [
            self.sibling_words.replace("{sibling}", lesson.sibling) if lesson.sibling else "",
            self.feedback_words.replace("{feedback}", lesson.feedback) if lesson.feedback else "",
            self.closing_words,
        ]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtRow:
    """A row of the policy, and its trained calls once more in the teacher's contexts.

    Attributes:
        policy: The row as the policy wrote it; the calls with a lesson train.
        teacher: One sample per trained call, in the order of the row: the prompt with the lesson, and the answer.
        is_solved: Whether the rollout succeeded and got no feedback.
    """

    policy: RowSample
    teacher: tuple[RowSample, ...]
    is_solved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The rows to train with a self-teacher, and the calls without a lesson.

    Attributes:
        rows: The rows with at least one call that trains.
        untaught: For each rollout id, the calls that do not train: span id to reason.
        counts: Counters for `metrics`.
    """

    rows: list[TaughtRow] = field(default_factory=list[TaughtRow])
    untaught: dict[str, dict[str, str]] = field(default_factory=dict[str, "dict[str, str]"])
    counts: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: Lessons) -> None:
        """Add the lessons of other rollouts to these."""
        self.rows.extend(other.rows)
        self.untaught.update(other.untaught)
        self.counts.update(other.counts)

    def metrics(self) -> dict[str, float]:
        """Return how many rollouts have each kind of lesson, how many calls train, and the others by reason."""
        names = {
            "with_sibling": "rollouts_with_sibling",
            "with_feedback": "rollouts_with_feedback",
            "taught": "calls_taught",
        }
        names |= {reason: f"calls_untaught_{reason}" for reason in _REASONS}
        return {name: float(self.counts[key]) for key, name in names.items()}

    def uses(
        self, groups: Sequence[Sequence[Episode]], *, grpo: PreparedBatch | None
    ) -> dict[str, tuple[CallUse, ...]]:
        """Return the use of every call, by rollout id; with `grpo`, a call without a lesson has that batch's use."""
        uses: dict[str, tuple[CallUse, ...]] = {}
        for episode in (episode for group in groups for episode in group):
            rollout = episode.rollout.rollout_id
            untaught = self.untaught[rollout]
            trained = {call.span_id for call in episode.transitions} - set(untaught)
            reasons = {span_id: _REASONS[reason] for span_id, reason in untaught.items()}
            found = call_uses(episode, trained=trained, refused=reasons)
            if grpo is not None:  # a call without a lesson may still have an advantage
                of_grpo = {use.span_id: use for use in grpo.uses[rollout]}
                found = tuple(use if use.row >= 0 else of_grpo[use.span_id] for use in found)
            uses[rollout] = found
        return uses


class Teaching:
    """Builds the lessons of one step's groups, and builds those of each group only once.

    Args:
        store: The store with the spans of the rollouts.
        loaded: The model in training.
        teacher: The settings of the lessons.
        pictures: The pictures of the rollouts, if the model reads any.

    Raises:
        ConfigError: A lesson cannot be inserted with the model's chat template.
    """

    def __init__(
        self, store: Store, loaded: LoadedModel, teacher: SelfTeacher, *, pictures: Pictures | None = None
    ) -> None:
        self._store, self._teacher, self._most, self._pictures = store, teacher, loaded.context_length, pictures
        self._retelling = Retelling(loaded.tokenizer, max_tokens=teacher.max_tokens)
        self._known: dict[tuple[str, ...], Lessons] = {}

    async def lessons(self, groups: Sequence[Sequence[Episode]]) -> Lessons:
        """Return the lessons of all rollouts in `groups`."""
        found = Lessons()
        for group in groups:
            found.add(await self._of(group))
        return found

    async def is_silent(self, group: Sequence[Episode]) -> bool:
        """Return true if no call of the group has a lesson, or if all rollouts succeeded and no one got feedback."""
        found = await self._of(group)
        return not found.rows or (all(map(self._is_solved, group)) and not found.counts["with_feedback"])

    def _is_solved(self, episode: Episode) -> bool:
        return episode.reward is not None and episode.reward >= self._teacher.success

    async def _of(self, group: Sequence[Episode]) -> Lessons:
        ids = tuple(episode.rollout.rollout_id for episode in group)
        if ids not in self._known:
            self._known[ids] = await self._built(group)
        return self._known[ids]

    async def _built(self, group: Sequence[Episode]) -> Lessons:
        found = Lessons()
        for index, episode in enumerate(group):
            spans = await self._spans(episode)
            said = find_feedback(episode, spans, sources=self._teacher.sources, clean=self._retelling.harmless)
            sibling = (
                find_sibling(group, index, success=self._teacher.success)
                if "siblings" in self._teacher.sources
                else None
            )
            found.counts.update({"with_sibling": sibling is not None, "with_feedback": bool(said)})
            untaught: dict[str, str] = {}
            taught: dict[str, RowSample] = {}
            for call in (call for call in episode.transitions if not call.reject):
                sample = self._teacher_sample(call, self._lesson(call, sibling=sibling, said=said))
                if isinstance(sample, str):
                    untaught[call.span_id] = sample
                else:
                    taught[call.span_id] = sample
            found.untaught[episode.rollout.rollout_id] = untaught
            found.counts.update(taught=len(taught), **Counter(untaught.values()))
            is_solved = self._is_solved(episode) and not said
            found.rows.extend(_rows(episode, taught, is_solved=is_solved, pictures=self._pictures))
        return found

    async def _spans(self, episode: Episode) -> list[Span]:
        """Return the spans of a rollout's deciding attempt; empty unless `tools` is a source of lessons."""
        if "tools" not in self._teacher.sources or episode.attempt is None:
            return []
        spans: list[Span] = []
        while True:
            after = spans[-1].sequence if spans else 0
            page = await self._store.spans(episode.rollout.rollout_id, after=after)
            if not page:
                return spans
            spans += page

    def _lesson(self, call: Transition, *, sibling: Episode | None, said: str) -> Lesson:
        answers = answers_of(sibling, agent=call.agent) if sibling is not None else []
        shown = "\n".join(self._retelling.text(unpack_ids(answer.response_ids)) for answer in answers)
        return Lesson(feedback=self._retelling.cut(said), sibling=self._retelling.cut(shown))

    def _teacher_sample(self, call: Transition, lesson: Lesson) -> RowSample | str:
        """Return the call's answer after a prompt with the lesson, or the reason why the call cannot be taught."""
        if not lesson:
            return "nothing"
        prompt = self._retelling.prompt(unpack_ids(call.prompt_ids), self._teacher.message(lesson))
        if prompt is None:
            return "unplaced"
        answer = unpack_ids(call.response_ids)
        if len(prompt) + len(answer) > self._most:
            return "too_long"
        mask = [0] * len(prompt) + [1] * len(answer)
        # The lesson comes after all messages, so the pictures stay where they are.
        pictures = self._pictures.of(call.media) if self._pictures else None
        return from_tokens(
            call.rollout_id, [*prompt, *answer], mask, temperature=call.temperature or 1.0, pictures=pictures
        )


def _rows(
    episode: Episode, taught: Mapping[str, RowSample], *, is_solved: bool, pictures: Pictures | None
) -> list[TaughtRow]:
    """Return the rows of an episode that contain a call in `taught`, which maps span ids to the teacher's samples."""
    temperatures = {call.span_id: call.temperature for call in episode.transitions}
    rows: list[TaughtRow] = []
    for row in episode.rows:
        calls = [part.span_id for part in row.segments if part.span_id in taught]
        if calls:
            policy = from_row(row, advantages=dict.fromkeys(calls, 1.0), temperatures=temperatures, pictures=pictures)
            teacher = tuple(taught[span_id] for span_id in calls)
            rows.append(TaughtRow(policy=policy, teacher=teacher, is_solved=is_solved))
    return rows


_PROBE = "a lesson"
_OPENINGS = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ],
)


class Retelling:
    """Builds the prompts of a self-teacher with a model's tokenizer and chat template.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        max_tokens: Largest number of tokens that `cut` leaves.

    Raises:
        ConfigError: The template has no recognisable user message, or puts nothing before an answer.
    """

    def __init__(self, tokenizer: Any, *, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._before, self._after = self._user_message()
        asked, opened = (self._rendered(_OPENINGS[0], is_open=is_open) for is_open in (False, True))
        begin = opened.removeprefix(asked) if opened.startswith(asked) else ""
        self._begin = self._encode(begin)
        if not self._begin:
            raise ConfigError("sdpo cannot tell where answers begin: the chat template puts nothing before them.")
        frame = self._before + self._after + begin
        self._structure = [text for text in tokenizer.all_special_tokens if text in frame]

    def prompt(self, prompt_ids: Sequence[int], message: str) -> list[int] | None:
        """Return the prompt with `message` as a user message before the tokens that open the answer; None without such
        tokens.

        `message` must not contain the special tokens that frame messages, see `harmless`.
        """
        at = _last(prompt_ids, self._begin)
        if at < 0:
            return None
        lesson = self._encode(self._before + message + self._after)
        return [*prompt_ids[:at], *lesson, *prompt_ids[at:]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without the special tokens that frame messages."""
        return self.harmless(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)).strip()

    def cut(self, text: str) -> str:
        """Return the text cut to its first `max_tokens` tokens."""
        ids = self._encode(text)
        return (
            text if len(ids) <= self._max_tokens else self._tokenizer.decode(ids[: self._max_tokens]).rstrip("\ufffd")
        )

    def harmless(self, text: str) -> str:
        """Return the text without the special tokens that frame messages, so that it cannot end its own message."""
        while found := next((token for token in self._structure if token in text), None):
            text = text.replace(found, "")
        return text

    def _user_message(self) -> tuple[str, str]:
        """Return the texts that the chat template puts before and after the content of a user message."""
        for (
            opening
        ) in _OPENINGS:  # some templates want the roles to alternate, others change an answer that is not last
            try:
                before = self._rendered(opening)
                whole = self._rendered([*opening, {"role": "user", "content": _PROBE}])
            except TemplateError:
                continue
            if whole.startswith(before) and _PROBE in whole[len(before) :]:
                start, _, end = whole[len(before) :].partition(_PROBE)
                return start, end
        raise ConfigError(
            "sdpo cannot put feedback into this model's prompts: its chat template writes no user message that follows "
            "others as it stands. Use a model whose template appends messages, such as ChatML's."
        )

    def _rendered(self, messages: Sequence[dict[str, str]], *, is_open: bool = False) -> str:
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=is_open)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _last(ids: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the index at which the last occurrence of `wanted` in `ids` begins; -1 if it does not occur."""
    size = len(wanted)
    found = (at for at in range(len(ids) - size, -1, -1) if list(ids[at : at + size]) == list(wanted))
    return next(found, -1)
