"""The static gate for demonstrations: none may hold a task on which candidates are compared or scored.

A demonstration holds a memorised answer by nature, to a training task. Answers to held-out tasks would make those
worthless. They come in where a training task repeats one, or where an agent looks things up in files that hold both.
"""

import re
from collections.abc import Collection, Sequence

from agl.schemas import Json, Record
from agl_algo_apo.acceptance.static_gate import identifiers_of, runs_of, task_text, visible, words_of
from agl_algo_apo.texts.demonstrations import Demonstrations, as_text


class HeldOut(Record, frozen=True, kw_only=True):
    """The marks of tasks that no demonstration may come from: those on which candidates are compared and scored.

    Attributes:
        names: Words with letters and digits that one held-out task has and no training task.
        runs: Runs of words that held-out tasks have and training tasks lack.
        inputs: Texts of the held-out tasks, as the agent sees them.
    """

    names: frozenset[str] = frozenset()
    runs: frozenset[tuple[str, ...]] = frozenset()
    inputs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, held_out: Sequence[Json], train: Sequence[Json], *, hidden: Collection[str] = ()) -> "HeldOut":
        """Return the marks of tasks that are not trained on."""
        names = identifiers_of(held_out, train, hidden=hidden)
        ours, theirs = ([_text(visible(task, hidden)) for task in tasks] for tasks in (held_out, train))
        return cls(
            # A number alone may well be an answer in training too.
            names=frozenset(name for name in names if re.search(r"[^\W\d_]", name)),
            runs=frozenset(run for text in ours for run in runs_of(text))
            - {r for text in theirs for r in runs_of(text)},
            inputs=frozenset(ours) | {as_text(visible(task, hidden)) for task in held_out},
        )

    def violation(self, shown: Demonstrations) -> str:
        """Return the reason why demonstrations may not be tried, ``""`` if they may."""
        for demonstration in [demonstration for found in shown.values() for demonstration in found]:
            text = f"{demonstration.input}\n{demonstration.output}"
            named = sorted(words_of(text) & self.names)
            copied = sorted(runs_of(text) & self.runs)
            if named or copied or demonstration.input in self.inputs:
                what = named[0] if named else " ".join(copied[0]) if copied else demonstration.input[:80]
                return f"{demonstration.key} holds a validation task: {what!r}"
        return ""


def _text(task: Json) -> str:
    """Return a task's texts, or all of it as JSON where it has none."""
    return task_text(task) or as_text(task)
