"""Finds the longest earlier byte string that is a prefix of a string, for many strings at once.

The call forest needs, for every prompt, the longest earlier prompt + response that is a prefix of it. Comparing all
pairs is quadratic, walking tokens in Python is slow, and a table by length degenerates if all lengths differ. So all
strings are sorted once (comparisons run in C), a sweep with a stack finds the prefixes of each string, and a pass
backwards in time removes strings again and jumps over the gaps as union-find does. The cost is O(n log n) comparisons,
each of at most the length of the prefix that two strings share. The time is near linear in the number of strings,
whatever their order, depth or fan-out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NONE = -1
"""In lists of indices, stands for "no string"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Relations between queries and entries, as indices; :data:`NONE` where there is no relation.

    Attributes:
        anchor: For each query, the longest earlier entry that is a prefix of it or equal to it, [n].
        before: For each query, its next smaller neighbour among the earlier entries in lexicographic order, [n].
        after: For each query, its next larger neighbour among the earlier entries, [n]. Of all earlier entries, one of
            the two neighbours shares the longest prefix with the query.
        same: For each entry, a representative of the entries with equal content: the first of them in the sorted
            order, [n].
    """

    anchor: list[int]
    before: list[int]
    after: list[int]
    same: list[int]


def link(queries: Sequence[bytes], entries: Sequence[bytes]) -> Links:
    """Link every query to the earlier entries; query ``i`` sees the entries ``0`` to ``i - 1`` only.

    ``entries[i]`` must start with ``queries[i]``, as a prompt with its response starts with the prompt.
    """
    sweep = _sweep(queries, entries)
    n = len(queries)
    anchor, before, after = [NONE] * n, [NONE] * n, [NONE] * n
    # Backwards in time: each step takes away the entries that are too new for all earlier queries.
    for i in range(n - 1, -1, -1):
        anchor[i] = _earlier(sweep.enclosing, sweep.inside[i], i)
        before[i] = _earlier(sweep.left, sweep.left[i], i)
        after[i] = _earlier(sweep.right, sweep.right[i], i)
    return Links(anchor=anchor, before=before, after=after, same=sweep.same)


def common_prefix(a: bytes, b: bytes) -> int:
    """Length in bytes of the longest common prefix of ``a`` and ``b``."""
    # Slices compare in C, and the first block that differs is searched by arithmetic on one large
    # integer.
    block, start, end = 4096, 0, min(len(a), len(b))
    while start < end and a[start : start + block] == b[start : start + block]:
        start += block
    if start >= end:
        return end
    stop = min(start + block, end)
    # x & -x keeps the lowest set bit; in little-endian order that is in the first byte that
    # differs.
    difference = int.from_bytes(a[start:stop], "little") ^ int.from_bytes(b[start:stop], "little")
    if not difference:
        return stop
    return start + ((difference & -difference).bit_length() - 1) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """Results of the sorted sweep, as indices: prefixes, neighbours and equal entries."""

    enclosing: list[int]
    inside: list[int]
    left: list[int]
    right: list[int]
    same: list[int]


def _sweep(queries: Sequence[bytes], entries: Sequence[bytes]) -> _Sweep:
    """Visit entries and queries in lexicographic order; a stack holds the entries that are prefixes of the current one.

    Sorting is stable and entries come first, so an entry precedes the queries that equal it. A query precedes its own
    entry, and all strings between the two start with the query as well. So the neighbours of the entry also serve as
    the query's neighbours among earlier entries: one of them shares the longest prefix.
    """
    n = len(queries)
    keys = [*entries, *queries]
    enclosing, inside, same = [NONE] * n, [NONE] * n, list(range(n))
    left, right = [NONE] * n, [NONE] * n
    stack: list[int] = []
    newest = NONE
    # One sort of all strings; the keys are not copied.
    for item in sorted(range(2 * n), key=keys.__getitem__):
        key = keys[item]
        # In sorted order the strings with a common prefix are contiguous, so an entry that does not
        # enclose this string encloses no later one.
        while stack and not key.startswith(entries[stack[-1]]):
            stack.pop()
        top = stack[-1] if stack else NONE
        if item >= n:
            inside[item - n] = top
            continue
        enclosing[item], left[item] = top, newest
        if newest != NONE:
            right[newest] = item
        if top != NONE and len(entries[top]) == len(key):
            same[item] = same[top]
        stack.append(item)
        newest = item
    return _Sweep(enclosing=enclosing, inside=inside, left=left, right=right, same=same)


def _earlier(links: list[int], j: int, i: int) -> int:
    """Follow ``links`` from ``j`` to an index below ``i``, halving the path on the way.

    ``i`` only falls from call to call, so that a skipped index is never needed again.
    """
    while j >= i:
        above = links[j]
        if above >= i:
            # Path halving, as in union-find: amortised nearly constant time for each step.
            above = links[j] = links[above]
        j = above
    return j
