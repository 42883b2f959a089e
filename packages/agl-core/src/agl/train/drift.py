"""Drift: a prompt that repeats a conversation up to an answer of the model and then has other tokens there.

Chat templates that drop reasoning, tool-call JSON that is printed anew and text that is tokenised again all lead to
prompts that mean the same and whose ids differ. Such a prompt starts a new branch, which is exact but costs a row;
the words made here say where and how it differs, so that the cause can be found.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agl.schemas import ModelCall, unpack_ids
from agl.train.prefix import NONE, common_prefix

SHOWN = 8
"""How many tokens of either side are shown."""


@dataclass(kw_only=True)
class Branch:
    """A branch while it grows.

    Attributes:
        origin: The branch that it forked from, and ``shared`` the tokens that it has in common with it.
        calls: Indices of its calls, in order.
        starts: Where their answers begin, in tokens, ascending; ``stops`` where they end.
    """

    origin: "Branch | None" = None
    shared: int = 0
    calls: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=list[int])
    stops: list[int] = field(default_factory=list[int])

    def add(self, index: int, call: ModelCall) -> None:
        """Append a call that extends the newest one."""
        start = call.prompt_len
        self.calls.append(index)
        self.starts.append(start)
        self.stops.append(start + call.response_len)

    def answer_at(self, position: int, slack: int) -> int:
        """The call whose answer holds ``position``, or begins at most ``slack`` tokens after it."""
        branch: Branch | None = self
        while branch is not None:
            k = bisect_right(branch.starts, position, key=lambda start: start - min(slack, start // 8)) - 1
            if k >= 0:
                return branch.calls[k] if position < branch.stops[k] else NONE
            branch = branch.origin if position < branch.shared else None
        return NONE


def describe_drift(
    prompt: bytes,
    neighbours: Sequence[tuple[int, bytes]],
    *,
    floor: int,
    branch_of: Sequence[Branch | None],
    name_of: Callable[[int], str],
    slack: int,
    decode: Callable[[Sequence[int]], str] | None,
) -> str:
    """How ``prompt`` nearly continues one of ``neighbours``, in words; ``""`` if it does not.

    ``neighbours`` are earlier calls and their prompt + response, one of which shares the longest prefix with
    ``prompt``; ``floor`` is the length in bytes of what the prompt extends exactly.
    """
    shared, call, context = max(
        ((common_prefix(prompt, context), call, context) for call, context in neighbours),
        default=(0, NONE, b""),
        key=lambda found: found[0],
    )
    position = shared // 4
    branch = branch_of[call] if call != NONE else None
    if branch is None or position * 4 <= floor or position * 4 >= min(len(prompt), len(context)):
        return ""
    answered = branch.answer_at(position, slack)
    if answered == NONE:
        return ""
    recorded, sent = _window(context, position, decode), _window(prompt, position, decode)
    return (
        f"drift: the prompt repeats {position} tokens of a conversation and differs from token {position} on, "
        f"at the answer of call {name_of(answered)}: recorded {recorded}, sent {sent}"
    )


def _window(data: bytes, position: int, decode: Callable[[Sequence[int]], str] | None) -> str:
    ids = unpack_ids(data[position * 4 : (position + SHOWN) * 4])
    shown = f"ids {ids}"
    return f"{shown} {decode(ids)!r}" if decode else shown
