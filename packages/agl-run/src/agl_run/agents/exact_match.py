"""The simplest reward: the final answer compared with the task's hidden one."""

from collections.abc import Sequence
from typing import Any, cast

from agl.episodes import final_text
from agl.errors import ConfigError
from agl.schemas import Reward, Rollout, Span


class ExactMatch:
    """1.0 when the final text equals the task's answer, else 0.0.

    White space is normalised to single spaces before the comparison, and case is ignored unless ``case``.
    A task without the answer is an error, because its reward would be silently 0; an attempt that ended without any
    text gets 0.0.

    Args:
        answer: Key of the task that holds the answer, or a list of accepted ones; usually a hidden field.
        case: Whether upper and lower case differ.
        name: The reward's name.
    """

    def __init__(self, *, answer: str = "answer", case: bool = False, name: str = "") -> None:
        self._answer = answer
        self._case = case
        self._name = name

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """The reward of one attempt; raises :class:`ConfigError` when the task has no such answer."""
        accepted = self._accepted(rollout)
        text = final_text(spans)
        is_right = self._normal(text) in {self._normal(answer) for answer in accepted}
        feedback = "" if is_right else f"expected {accepted[0]!r}, got {text!r}"
        return Reward(value=float(is_right), name=self._name, source="evaluator", feedback=feedback)

    def _accepted(self, rollout: Rollout) -> list[str]:
        task: Any = rollout.task
        found: Any = cast("dict[str, Any]", task).get(self._answer) if isinstance(task, dict) else None
        answers: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [found]
        if not answers or None in answers:
            raise ConfigError(
                f"the reward exact-match compares with the task's {self._answer!r}, which rollout "
                f"{rollout.rollout_id} does not have; add it to the dataset, or name another key with answer = ..."
            )
        return [str(answer) for answer in answers]

    def _normal(self, text: str) -> str:
        joined = " ".join(text.split())
        return joined if self._case else joined.casefold()
