"""Puts a lesson into a recorded prompt: one more user message, right before the place where the answer begins.

The recorded tokens stay as they are; only the message's tokens are put between them. The conversation is not rendered
again, so that this works for any framework and any number of turns, and the teacher's context differs from the
policy's in this message alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl_algo_torch.feedback import Lesson

_PROBE = "a lesson"
_OPENINGS = (
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The message's parts: around a sibling's answers, around feedback, and at its end.

    Raises:
        ConfigError: A part has no place for what it is about.
    """

    sibling: str
    feedback: str
    closing: str

    def __post_init__(self) -> None:
        for name, text in (("sibling", self.sibling), ("feedback", self.feedback)):
            if f"{{{name}}}" not in text:
                raise ConfigError(f"sdpo got {name}_words = {text!r}, which shows nothing; write {{{name}}} in it.")

    def message(self, lesson: Lesson) -> str:
        """Return the user message that tells the lesson."""
        parts = [
            self.sibling.replace("{sibling}", lesson.sibling) if lesson.sibling else "",
            self.feedback.replace("{feedback}", lesson.feedback) if lesson.feedback else "",
            self.closing,
        ]
        return "\n\n".join(part for part in parts if part)


class Retelling:
    """Builds the prompts of a self-teacher with a model's tokenizer and chat template.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        max_tokens: Most tokens of a sibling's answers, and of feedback; the rest is cut off.

    Raises:
        ConfigError: The template has no recognisable user message, or nothing that begins an answer.
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
        """Return the prompt with a harmless message in it; None where no answer of the template begins in it."""
        at = _last(prompt_ids, self._begin)
        if at < 0:
            return None
        told = self._encode(self._before + message + self._after)
        return [*prompt_ids[:at], *told, *prompt_ids[at:]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer without the tokens that frame messages."""
        return self.harmless(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)).strip()

    def cut(self, text: str) -> str:
        """Return the beginning of a text, `max_tokens` long."""
        ids = self._encode(text)
        return (
            text if len(ids) <= self._max_tokens else self._tokenizer.decode(ids[: self._max_tokens]).rstrip("\ufffd")
        )

    def harmless(self, text: str) -> str:
        """Return a text that cannot end the message that it is in."""
        while found := next((token for token in self._structure if token in text), None):
            text = text.replace(found, "")
        return text

    def _user_message(self) -> tuple[str, str]:
        """Return what the template writes before and after the text of a user message within a conversation."""
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
    """Return where `wanted` last begins in `ids`, -1 for nowhere."""
    size = len(wanted)
    found = (at for at in range(len(ids) - size, -1, -1) if list(ids[at : at + size]) == list(wanted))
    return next(found, -1)
