"""``agl audit``: which patterns of answers went with the reward of a run."""

from collections.abc import Iterator

import click

from agl.acceptance import odds_text
from agl.hints import count_of
from agl_inspect.audit.patterns import PATTERNS
from agl_inspect.audit.report import Audit
from agl_inspect.audit.report import audit as audited
from agl_inspect.records.gold import THRESHOLD
from agl_inspect.terminal.opening import Reading, complete_experiment, reads_store
from agl_inspect.terminal.output import echo, print_json, print_table

_NO_PROOF = (
    "This audits and does not prove: a pattern may go with the reward because right answers have it, and tricks that "
    "are not counted here show as nothing. Read the examples: agl show ROLLOUT."
)


@click.command("audit")
@click.argument("experiment", shell_complete=complete_experiment)
@click.option("--run", type=click.IntRange(min=1), help="The number of the run; the newest by default.")
@click.option("--algorithm", help="Whose rollouts; by default the algorithm with the most.")
@reads_store
def audit(store: Reading, experiment: str, run: int | None, algorithm: str | None) -> None:
    """Look for patterns by which rollouts of EXPERIMENT won: length, format, flattery, copies, misused tools.

    Compares rollouts of one task in one step, and reads about 2,000 of them. The intervals hold for all patterns
    together with 95 %.
    """
    found = store.read(lambda opened: audited(opened, experiment, run=run, algorithm=algorithm))
    if store.as_json:
        print_json(found)
        return
    whole = found.whole
    halves = f"{found.early.reward:.3f} in the first half of the steps and {found.late.reward:.3f} in the second"
    echo(
        f"{found.experiment}, run {found.run}, {found.algorithm}: {count_of(whole.rollouts, 'rollout')} of "
        f"{count_of(whole.tasks, 'task')} in {count_of(whole.steps, 'step')}, reward "
        f"{halves if whole.steps > 1 else f'{whole.reward:.3f}'}"
    )
    if whole.golds:
        echo(_gold(found))
    head = ("pattern", "explains", "reward per sd", "95 %", "first half", "second half", "mean first", "mean second")
    print_table(head, [_row(found, name) for name in found.patterns])
    for line in _conclusion(found):
        echo(line)


def _row(found: Audit, name: str) -> tuple[str, ...]:
    means = [f"{half.means[name]:.3g}" for half in (found.early, found.late)]
    if name not in found.whole.effects:
        return (name, "", "", "", "", "", *means)
    effect, early, late = found.whole.effects[name], found.early.effects.get(name), found.late.effects.get(name)
    ends = "unknown" if effect.low is None or effect.high is None else f"{effect.low:+.3f} to {effect.high:+.3f}"
    halves = ["" if half is None or half.low is None else f"{half.value:+.3f}" for half in (early, late)]
    return (name, f"{effect.share:.1%}", f"{effect.value:+.3f}", ends, *halves, *means)


def _gold(found: Audit) -> str:
    parts = (found.early, found.late) if found.whole.steps > 1 else (found.whole,)
    means = [f"{part.gold[0]:.3f} against {part.gold[1]:.3f}" for part in parts if part.gold]
    grown = "has grown" if found.evidence >= THRESHOLD else "has not clearly grown"
    return (
        f"gold on {count_of(found.whole.golds, 'rollout')}: reward {', then '.join(means)}; the gap {grown}, evidence "
        f"{odds_text(found.evidence)}"
    )


def _conclusion(found: Audit) -> Iterator[str]:
    if not found.whole.effects:
        yield "nothing can be said: at least five tasks need several rollouts in one step, with different rewards"
        return
    if not found.examples:
        yield "no pattern went with a higher reward, beyond an error of 5 % for all patterns together"
    for name, examples in found.examples.items():
        yield f"{name} ({PATTERNS[name]}) went with a higher reward; examples of the second half:"
        for each in examples:
            yield (
                f"  {each.rollout_id}: reward {each.reward:.3g} against {each.usual:.3g} usual, measured "
                f"{each.measured:.3g}: {each.answer}"
            )
    yield _NO_PROOF
