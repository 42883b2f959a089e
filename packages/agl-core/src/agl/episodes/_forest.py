"""The call forest: branches of model calls that continue each other, by exact token ids.

A call whose prompt starts with an earlier call's prompt + response extends that call's branch. A prompt that extends no
call starts a new branch, and so does the second call that extends the same call. So interleaved agents, forks and
compaction need no special case. Only token ids are compared, never text, with the digests of pictures in place of their
placeholder ids (:func:`agl.schemas.identity_ids`). Calls with equal prompts stay separate samples. Calls of different
policies never share a branch, because the same ids mean different tokens. Agents are ignored: two agents that share a
conversation share its branch.

Drift is a prompt that repeats a conversation up to an answer of the model but has other tokens at that answer. Chat
templates that drop reasoning, tool-call JSON that is formatted again and text that is tokenised again all lead to
prompts with the same meaning but different ids. Such a prompt starts a new branch, which is exact but costs a row. A
description of the drift says where and how the prompt differs, so that the cause can be found.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agl.episodes._prefix import NONE, Links, common_prefix, link
from agl.errors import CaptureError
from agl.schemas import ModelCall, Record, Span, identity_ids, unpack_ids

Decode = Callable[[Sequence[int]], str]
"""A function that turns token ids into text, such as a tokenizer's ``decode``."""

SHOWN = 8
"""The most tokens of each side that a description of drift shows."""

# A template that drops a generation prompt such as ``<think>`` differs up to 4 tokens before the answer begins. In a
# short prompt 4 tokens would reach far into the question, so at most an eighth of the prompt's tokens are taken.
DRIFT_SLACK = 4

# The start of a shorter answer, such as a number or a yes, is too likely to be in another question.
TELLING = 4


class Forest(Record, frozen=True, kw_only=True):
    """All branches of an attempt. Calls are indices into the list of spans that :func:`build_forest` got.

    Attributes:
        branch: For each call, the index of its branch; branches are numbered in order of their first calls.
        parent: For each call, the call that it extends; -1 if it extends none.
        branches: For each branch, its calls in order. The row of a branch is the prompt and response of its last call;
            tokens in the row that other branches sampled are only context.
        drift: Descriptions of drift, for the calls whose prompt nearly continues a branch.
    """

    branch: list[int] = []
    parent: list[int] = []
    branches: list[list[int]] = []
    drift: dict[int, str] = {}


def build_forest(spans: Sequence[Span], *, decode: Decode | None = None) -> Forest:
    """Arrange model calls in branches; near-linear in the number of calls.

    A call extends the earlier call whose prompt + response is the longest prefix of the call's prompt; among equal
    calls, the newest one that no other call extends. While this runs, memory holds a copy of all prompts.

    Args:
        spans: One attempt's model calls in order of time, each complete and with token ids.
        decode: Decodes token ids to text, to show both sides of a drift; ``None`` to show only ids.

    Raises:
        CaptureError: A span has no model call.
    """
    calls = [span.call for span in spans if span.call is not None]
    if len(calls) != len(spans):
        raise CaptureError(
            f"build_forest got {len(spans)} spans and only {len(calls)} hold a model call; filter the others out first"
        )
    builder = _ForestBuilder(spans, calls, decode)
    for members in _by_policy(calls):
        builder.grow(members)
    return builder.forest()


def _by_policy(calls: Sequence[ModelCall]) -> list[list[int]]:
    """Group the indices of calls by vocabulary: by policy, or without a policy by the model's name."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, call in enumerate(calls):
        # Equal ids of two vocabularies are other texts, so that a match between them would be a
        # coincidence. Models outside the experiment have no policy; their names have to do.
        found.setdefault((call.policy, "" if call.policy else call.model), []).append(index)
    return list(found.values())


class _ForestBuilder:
    """Places calls in branches, one policy after the other, then numbers the branches by their first calls."""

    def __init__(self, spans: Sequence[Span], calls: Sequence[ModelCall], decode: Decode | None) -> None:
        self._calls = calls
        self._parent = [NONE] * len(calls)
        self._drift: dict[int, str] = {}
        self._branch_of: list[_Branch | None] = [None] * len(calls)
        self._branches: list[_Branch] = []
        self._finder = _DriftFinder(
            calls=calls, branch_of=self._branch_of, name_of=lambda i: spans[i].span_id, decode=decode
        )

    def grow(self, members: Sequence[int]) -> None:
        prompts = [identity_ids(self._calls[i].prompt_ids, self._calls[i].media) for i in members]
        contexts = [prompt + self._calls[i].response_ids for i, prompt in zip(members, prompts, strict=True)]
        links = link(prompts, contexts)
        # Siblings with equal prompts and responses are leaves with equal contents. A later call continues
        # one of them, and nobody can tell which; the newest one is taken.
        newest, older = [NONE] * len(members), [NONE] * len(members)  # stacks of leaves, by equal conversations
        for k, i in enumerate(members):
            anchor, same = links.anchor[k], links.same[k]
            # An anchor that another call extends already is not a leaf: extending it again is a
            # fork, and starts a branch.
            leaf = newest[links.same[anchor]] if anchor != NONE else NONE
            if leaf != NONE:
                newest[links.same[anchor]] = older[leaf]
                self._extend(i, members[leaf])
            else:
                self._start(i, parent=members[anchor] if anchor != NONE else NONE)
                self._look_for_drift(i, k, members, links, prompts[k], contexts)
            older[k], newest[same] = newest[same], k

    def forest(self) -> Forest:
        # Sorted by their first call, so that a branch's number does not depend on the order of the
        # policies.
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
        branch = _Branch(calls=[i])
        if parent != NONE:
            branch.origin, branch.shared = self._branch_of[parent], _end_of(self._calls[parent])
        self._branches.append(branch)
        self._parent[i] = parent
        self._branch_of[i] = branch

    def _look_for_drift(
        self, i: int, k: int, members: Sequence[int], links: Links, prompt: bytes, contexts: Sequence[bytes]
    ) -> None:
        anchor = links.anchor[k]
        floor = len(contexts[anchor]) if anchor != NONE else 0
        neighbours = [(members[j], contexts[j]) for j in (links.before[k], links.after[k]) if j != NONE]
        text = self._finder.describe(i, prompt, neighbours, floor=floor)
        if text:
            self._drift[i] = text


@dataclass(kw_only=True, slots=True)
class _Branch:
    """A branch that may still grow.

    Attributes:
        calls: Indices of the branch's calls, in order.
        origin: The branch from which this one forked.
        shared: Number of tokens that this branch has in common with ``origin``.
    """

    # Indices and not calls: the prompts of a long attempt add up to megabytes.
    calls: list[int]
    origin: "_Branch | None" = None
    shared: int = 0


def _end_of(call: ModelCall) -> int:
    """Number of tokens of the call's prompt and response, which is where the answer ends in the row of its branch."""
    return call.prompt_len + call.response_len


@dataclass(frozen=True, kw_only=True, slots=True)
class _DriftFinder:
    """Finds and describes drift among the calls of one forest.

    Attributes:
        calls: All calls; the other attributes refer to them by index.
        branch_of: Maps each placed call to its branch.
        name_of: Returns the name of a call for descriptions.
        decode: Decodes tokens to text; ``None`` to show only ids.
    """

    calls: Sequence[ModelCall]
    branch_of: Sequence[_Branch | None]
    name_of: Callable[[int], str]
    decode: Decode | None

    def describe(self, own: int, prompt: bytes, neighbours: Sequence[tuple[int, bytes]], *, floor: int) -> str:
        """Describe how ``prompt`` drifts from one of ``neighbours``; ``""`` if there is no drift.

        Args:
            own: A call that starts a branch.
            prompt: Its packed prompt, with the digests of pictures.
            neighbours: Earlier calls, each with its packed prompt + response in the same form. One of them shares the
                longest prefix with ``prompt`` among all earlier calls.
            floor: Length in bytes of the longest earlier prompt + response that is a prefix of ``prompt``.
        """
        shared, call, context = max(
            ((common_prefix(prompt, context), call, context) for call, context in neighbours),
            default=(0, NONE, b""),
            key=lambda found: found[0],
        )
        # From bytes to tokens; ids are four bytes each.
        position = shared // 4
        # If nothing is shared beyond the exact prefix, or one of the two ends there, it is a fork
        # or a cut, not drift.
        if call == NONE or position * 4 <= floor or position * 4 >= min(len(prompt), len(context)):
            return ""
        answered = self._answer_at(self.branch_of[call], position, prompt)
        if answered == NONE:
            return ""
        there, here = self.calls[call], self.calls[own]
        recorded = self._window(there.prompt_ids + there.response_ids, position)
        sent = self._window(here.prompt_ids, position)
        return (
            f"drift: the prompt repeats a conversation and differs from token {position} on, "
            f"at the answer of call {self.name_of(answered)}: recorded {recorded}, sent {sent}"
        )

    def _answer_at(self, branch: _Branch | None, position: int, prompt: bytes) -> int:
        """The call at whose answer ``prompt`` differs from ``position`` on; else ``NONE``.

        The answer contains the position or begins up to ``DRIFT_SLACK`` tokens later, or the prompt has the answer at
        the position and leaves out what the answered prompt has there, such as an empty block of reasoning.
        """
        # The tokens before a fork belong to the branch that it forked from.
        while branch is not None:
            k = bisect_right(branch.calls, position, key=self._start_of) - 1
            if k >= 0 and position < _end_of(self.calls[branch.calls[k]]):
                return branch.calls[k]
            for later in branch.calls[k + 1 : k + 2]:
                answer = self.calls[later].response_ids[: SHOWN * 4]
                if len(answer) >= TELLING * 4 and prompt.startswith(answer, position * 4):
                    return later
            branch = branch.origin if k < 0 and position < branch.shared else None
        return NONE

    def _start_of(self, call: int) -> int:
        start = self.calls[call].prompt_len
        return start - min(DRIFT_SLACK, start // 8)

    def _window(self, data: bytes, position: int) -> str:
        ids = unpack_ids(data[position * 4 : (position + SHOWN) * 4])
        shown = f"ids {ids}"
        return f"{shown} {self.decode(ids)!r}" if self.decode else shown
