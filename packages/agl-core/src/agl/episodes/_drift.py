"""Drift: a prompt repeats a conversation up to an answer of the model, and has other tokens at that answer.

Chat templates that drop reasoning, tool-call JSON that is printed again and text that is tokenised again all lead to
prompts of equal meaning with different ids. Such a prompt starts a new branch, which is exact but costs a row. The
description made here says where and how it differs, so that the cause can be found.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agl.episodes._prefix import NONE, common_prefix
from agl.schemas import ModelCall, unpack_ids

SHOWN = 8
"""Number of tokens shown of either side."""


@dataclass(kw_only=True, slots=True)
class Branch:
    """A branch while it grows.

    Attributes:
        calls: Indices of its calls, in order.
        origin: The branch that it forked from, and ``shared`` the tokens that it has in common with it.
    """

    calls: list[int]
    origin: "Branch | None" = None
    shared: int = 0


def end_of(call: ModelCall) -> int:
    """Number of tokens of the call's prompt and response: the end of its answer in its branch's row."""
    return call.prompt_len + call.response_len


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftFinder:
    """Finds and describes drift among the calls of one forest.

    Attributes:
        calls: All calls; the other attributes hold indices into it.
        branch_of: The branch of each call that was placed.
        name_of: Names a call in descriptions.
        slack: Number of tokens before an answer that count as its own, at most an eighth of what precedes it.
        decode: Shows tokens as text; ``None`` for ids alone.
    """

    calls: Sequence[ModelCall]
    branch_of: Sequence[Branch | None]
    name_of: Callable[[int], str]
    slack: int
    decode: Callable[[Sequence[int]], str] | None

    def describe(self, prompt: bytes, neighbours: Sequence[tuple[int, bytes]], *, floor: int) -> str:
        """Describe how ``prompt`` nearly continues one of ``neighbours``; ``""`` if it does not.

        ``neighbours`` are earlier calls and their prompt + response, one of which shares the longest prefix with
        ``prompt``; ``floor`` is the length in bytes of what the prompt extends exactly.
        """
        shared, call, context = max(
            ((common_prefix(prompt, context), call, context) for call, context in neighbours),
            default=(0, NONE, b""),
            key=lambda found: found[0],
        )
        position = shared // 4
        if call == NONE or position * 4 <= floor or position * 4 >= min(len(prompt), len(context)):
            return ""
        answered = self._answer_at(self.branch_of[call], position)
        if answered == NONE:
            return ""
        recorded, sent = self._window(context, position), self._window(prompt, position)
        return (
            f"drift: the prompt repeats {position} tokens of a conversation and differs from token {position} on, "
            f"at the answer of call {self.name_of(answered)}: recorded {recorded}, sent {sent}"
        )

    def _answer_at(self, branch: Branch | None, position: int) -> int:
        """The call whose answer holds ``position``, or begins at most ``slack`` tokens after it."""
        while branch is not None:
            k = bisect_right(branch.calls, position, key=self._start_of) - 1
            if k >= 0:
                return branch.calls[k] if position < end_of(self.calls[branch.calls[k]]) else NONE
            branch = branch.origin if position < branch.shared else None
        return NONE

    def _start_of(self, call: int) -> int:
        start = self.calls[call].prompt_len
        return start - min(self.slack, start // 8)

    def _window(self, data: bytes, position: int) -> str:
        ids = unpack_ids(data[position * 4 : (position + SHOWN) * 4])
        shown = f"ids {ids}"
        return f"{shown} {self.decode(ids)!r}" if self.decode else shown
