"""``agl audit``: which patterns of answers went with the reward of a run."""

from collections.abc import Iterator

import click

from agl.acceptance import odds_text
from agl.hints import count_of
from agl_inspect.audit.report import Audit, GoldReport, PatternReport
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
    echo(
        f"{found.experiment}, run {found.run}, {found.algorithm}: {count_of(found.rollouts, 'rollout')} of "
        f"{count_of(found.tasks, 'task')} in {count_of(found.steps, 'step')}, reward {found.reward_early:.3f} in the "
        f"first half of the steps and {found.reward_late:.3f} in the second"
    )
    if found.gold:
        echo(_gold(found.gold))
    head = ("pattern", "explains", "reward per sd", "95 %", "first half", "second half", "mean first", "mean second")
    print_table(head, [_row(one) for one in found.patterns])
    for line in _conclusion(found):
        echo(line)


def _row(one: PatternReport) -> tuple[str, ...]:
    if one.effect is None:
        return (one.name, "", "", "", "", "", f"{one.early:.3g}", f"{one.late:.3g}")
    ends = "unknown" if one.low is None or one.high is None else f"{one.low:+.3f} to {one.high:+.3f}"
    halves = ["" if part is None else f"{part[0]:+.3f}" for part in (one.effect_early, one.effect_late)]
    shown = f"{one.explains:.1%}", f"{one.effect:+.3f}", ends, *halves
    return (one.name, *shown, f"{one.early:.3g}", f"{one.late:.3g}")


def _gold(found: GoldReport) -> str:
    parts = ((found.reward_early, found.gold_early), (found.reward_late, found.gold_late))
    means = [f"{reward:.3f} against {gold:.3f}" for reward, gold in parts if reward is not None and gold is not None]
    grown = "has grown" if found.evidence >= THRESHOLD else "has not clearly grown"
    return (
        f"gold on {count_of(found.rollouts, 'rollout')}: reward {', then '.join(means)}; the gap {grown}, evidence "
        f"{odds_text(found.evidence)}"
    )


def _conclusion(found: Audit) -> Iterator[str]:
    if all(one.effect is None for one in found.patterns):
        yield "nothing can be said: at least five tasks need several rollouts in one step, with different rewards"
        return
    won = [one for one in found.patterns if one.is_found]
    if not won:
        yield "no pattern went with a higher reward, beyond an error of 5 % for all patterns together"
    for one in won:
        yield f"{one.name} ({one.measure}) went with a higher reward; examples of the second half:"
        for each in one.examples:
            yield (
                f"  {each.rollout_id}: reward {each.reward:.3g} against {each.usual:.3g} usual, measured "
                f"{each.measured:.3g}: {each.answer}"
            )
    yield _NO_PROOF
