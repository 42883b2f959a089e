"""The call forest: branches of model calls that continue each other, by exact token ids.

A call whose prompt starts with an earlier call's prompt + response extends that call's branch. Interleaved agents,
forks and compaction need no special case: several branches live side by side, a second call that extends the same
call starts a branch of its own, and so does a prompt that extends nothing. Nothing is compared as text, and calls
with equal prompts stay separate samples. Calls of different policies never share a branch: their ids mean different
tokens. Agents play no role; two agents that share a conversation share its branch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agl.episodes._drift import Branch, DriftFinder, end_of
from agl.episodes._prefix import NONE, Links, link
from agl.errors import CaptureError
from agl.schemas import ModelCall, Record, Span

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, such as a tokenizer's ``decode``."""


@dataclass(frozen=True, kw_only=True)
class ForestOptions:
    """The settings by which a forest is built and described.

    Attributes:
        drift_slack: Number of tokens before a recorded answer at which a prompt may differ and still count as a
            drifted continuation: templates that drop a generation prompt such as ``<think>`` differ there. At most
            an eighth of the tokens before the answer; 0 counts differences within answers only.
        decode: Shows both sides of a drift as text; ids alone without it.
    """

    drift_slack: int = 4
    decode: Decode | None = None


class Forest(Record, frozen=True, kw_only=True):
    """All branches of an attempt; calls are indices in the order given.

    Attributes:
        branch: For each call the index of its branch, numbered in order of the branches' first calls.
        parent: For each call the one that it extends, -1 for none.
        branches: Per branch its calls, in order. The row of a branch is the last one's prompt and response; tokens
            that other branches sampled are in it as context only.
        drift: Descriptions of drift by call, for calls whose prompt nearly continues a branch.
    """

    branch: list[int] = []
    parent: list[int] = []
    branches: list[list[int]] = []
    drift: dict[int, str] = {}


def build_forest(spans: Sequence[Span], *, options: ForestOptions | None = None) -> Forest:
    """Arrange model calls in branches; near-linear in the number of calls.

    ``spans`` are one attempt's model calls in order of time, each complete and with token ids. A call extends the
    earlier one with the longest prompt + response that its prompt starts with; of several equal ones the newest
    that nothing extends yet. A copy of all prompts lives while this runs. Raises :class:`CaptureError` when a span
    holds no call.
    """
    calls = [span.call for span in spans if span.call is not None]
    if len(calls) != len(spans):
        raise CaptureError(
            f"build_forest got {len(spans)} spans and only {len(calls)} hold a model call; filter the others out first"
        )
    builder = _ForestBuilder(spans, calls, options or ForestOptions())
    for members in _by_policy(calls):
        builder.grow(members)
    return builder.forest()


def _by_policy(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Indices of calls that share a vocabulary: those of one policy, else of one model name."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, call in enumerate(calls):
        found.setdefault((call.policy, "" if call.policy else call.model), []).append(index)
    return list(found.values())


class _ForestBuilder:
    """Places calls in branches, one policy after the other, then numbers the branches by their first calls."""

    def __init__(self, spans: Sequence[Span], calls: Sequence[ModelCall], options: ForestOptions) -> None:
        self._calls = calls
        self._parent = [NONE] * len(calls)
        self._drift: dict[int, str] = {}
        self._branch_of: list[Branch | None] = [None] * len(calls)
        self._branches: list[Branch] = []
        self._finder = DriftFinder(
            calls=calls,
            branch_of=self._branch_of,
            name_of=lambda i: spans[i].span_id,
            slack=options.drift_slack,
            decode=options.decode,
        )

    def grow(self, members: Sequence[int]) -> None:
        prompts = [self._calls[i].prompt_ids for i in members]
        contexts = [self._calls[i].prompt_ids + self._calls[i].response_ids for i in members]
        links = link(prompts, contexts)
        newest, older = [NONE] * len(members), [NONE] * len(members)  # stacks of leaves, by equal conversations
        for k, i in enumerate(members):
            anchor, same = links.anchor[k], links.same[k]
            leaf = newest[links.same[anchor]] if anchor != NONE else NONE
            if leaf != NONE:
                newest[links.same[anchor]] = older[leaf]
                self._extend(i, members[leaf])
            else:
                self._start(i, parent=members[anchor] if anchor != NONE else NONE)
                self._look_for_drift(i, k, members, links, contexts)
            older[k], newest[same] = newest[same], k

    def forest(self) -> Forest:
        branches = sorted(branch.calls for branch in self._branches)
        number = [NONE] * len(self._calls)
        for index, calls in enumerate(branches):
            for call in calls:
                number[call] = index
        return Forest(branch=number, parent=self._parent, branches=branches, drift=self._drift)

    def _extend(self, i: int, parent: int) -> None:
        branch = self._branch_of[parent]
        assert branch is not None  # noqa: S101  # parents are placed before their children
        self._parent[i] = parent
        self._branch_of[i] = branch
        branch.calls.append(i)

    def _start(self, i: int, *, parent: int) -> None:
        branch = Branch(calls=[i])
        if parent != NONE:
            branch.origin, branch.shared = self._branch_of[parent], end_of(self._calls[parent])
        self._branches.append(branch)
        self._parent[i] = parent
        self._branch_of[i] = branch

    def _look_for_drift(self, i: int, k: int, members: Sequence[int], links: Links, contexts: Sequence[bytes]) -> None:
        anchor = links.anchor[k]
        floor = len(contexts[anchor]) if anchor != NONE else 0
        neighbours = [(members[j], contexts[j]) for j in (links.before[k], links.after[k]) if j != NONE]
        text = self._finder.describe(self._calls[i].prompt_ids, neighbours, floor=floor)
        if text:
            self._drift[i] = text
