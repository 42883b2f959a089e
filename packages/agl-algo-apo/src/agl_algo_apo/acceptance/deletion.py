"""Undoes the useless changes of the best candidate, when nothing beats it for long and when the search is over.

A change is a line that was added, or a group of lines that replaced others; a text of one line is split into sentences.
The text without the change races against the best candidate, and a tie is enough to win: lines that a merge carried
along, or that fit only training tasks, bring nothing on tasks that their author did not see.

It waits until the search is stuck, because a race without a useless line takes all validation tasks, for which a search
that still finds better texts has more use. A change whose absence did harm has earned its place; it is not tried again.
"""

import difflib
import re
from itertools import pairwise

from agl.schemas import Record
from agl_algo_apo.acceptance.contest import contest
from agl_algo_apo.search.tools import SearchTools
from agl_algo_apo.texts.demonstrations import without_demonstrations


class Change(Record, frozen=True, kw_only=True):
    """One change of a text.

    Attributes:
        key: The new lines, which identify the change in later texts too.
        without: The text with this change undone.
    """

    key: str
    without: str


def changes(first: str, text: str) -> list[Change]:
    """Return the changes that turn the text ``first`` into ``text``, in order; pure deletions are left out."""
    pattern = r"(?<=\n)" if "\n" in text.strip() else r"(?<=[.!?]) +(?=\S)"
    base, parts = (_parts(pattern, whole) for whole in (first, text))
    found: list[Change] = []
    matcher = difflib.SequenceMatcher(a=base, b=parts, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        # Added lines are undone one by one; lines that replaced others only together.
        spans = [(j, j + 1) for j in range(j1, j2)] if tag == "insert" else [(j1, j2)] if tag == "replace" else []
        for start, stop in spans:
            key = "".join(parts[start:stop]).strip()
            if key:
                found.append(Change(key=key, without="".join([*parts[:start], *base[i1:i2], *parts[stop:]])))
    return found


def without(first: str, text: str, key: str) -> str:
    """Return ``text`` with the change that has this key undone, so that ``first`` shows in its place."""
    return next((change.without for change in changes(first, text) if change.key == key), text)


def _parts(pattern: str, text: str) -> list[str]:
    """Split a text; each part includes the space after it, so that joining the parts gives the text."""
    cuts = [0, *(match.end() for match in re.finditer(pattern, text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts) if start < stop]


async def prune(search: SearchTools, step: int) -> None:
    """Race the best candidate without each unproven change, one after another; a win stays if the budget ends."""
    first = search.lineage[search.progress.seed].texts
    for number, (name, key) in enumerate(_unproven(search)):
        best = search.best
        texts = {**best.instructions, name: without(first[name], best.instructions[name], key)}
        shown = without_demonstrations(best.demonstrations, {name: (key,)})
        words = f"without {key!r}"
        shorter = search.proposal([best], texts, step=step, operator="delete", critique=words, demonstrations=shown)
        if shorter.id == best.id:  # an earlier deletion took this change along
            continue
        known = search.lineage.get(shorter.id)
        child = known if known is not None and known.status == "pool" else await search.screen(shorter, best)
        if child is None:  # the rest breaks a rule, or has lost too often
            continue
        won = await contest(search, [child], best, step=step, purpose=f"prune{number}", may_tie=True)
        if not search.evaluator.scores.rewards(child.id, "val"):  # infrastructure broke all of it
            return
        if not won:
            search.progress.proven.setdefault(name, []).append(key)
            if child.status == "pool":  # the race has called it beaten; it remains a parent
                search.lineage.put(child)


def _unproven(search: SearchTools) -> list[tuple[str, str]]:
    """Return the changes and demonstrations of the best candidate that have not earned their place, with their text."""
    first, best = search.lineage[search.progress.seed].texts, search.best
    keys = [(name, change.key) for name, text in best.instructions.items() for change in changes(first[name], text)]
    keys += [(name, each.key) for name, shown in best.demonstrations.items() for each in shown]
    return [(name, key) for name, key in keys if key not in search.progress.proven.get(name, ())]
