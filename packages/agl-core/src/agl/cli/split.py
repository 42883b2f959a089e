"""``agl resources split``: what the arms of a serving split earned, and promotion on that evidence."""

import click

from agl.cli.context import pass_manager
from agl.cli.opening import store_option, with_store
from agl.cli.output import json_option, print_json, print_table
from agl.cli.split_report import ArmReport, Criterion, SplitReport, check_better, samples, says, split_report
from agl.contracts import Store
from agl.errors import ConfigError
from agl.experiment.split import check_labels, differing, pins_of
from agl.plugins import PluginManager

_DEFAULT = ("production", "candidate")


@click.command("split")
@click.argument("labels", nargs=-1)
@click.option("--experiment", help="Only rollouts of this experiment.")
@click.option("--confidence", default=0.95, show_default=True, help="Of the intervals.")
@store_option
@json_option
@pass_manager
def split_(
    manager: PluginManager,
    labels: tuple[str, ...],
    experiment: str | None,
    confidence: float,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Report what the arms LABELS of a serving split earned, the baseline first; by default production, candidate.

    Counted are finished rollouts that a split placed between the versions that the labels name now; a failed one
    counts 0, and one without a reward is left out.
    """
    names = labels or _DEFAULT
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"the arms {' '.join(names)} cannot be compared; name two different labels or more")

    async def work(store: Store) -> SplitReport:
        await check_labels(store, names)
        return await split_report(store, names, experiment=experiment, confidence=confidence)

    report = with_store(manager, store_url, work)
    if as_json:
        print_json(report)
        return
    columns = ("arm", "rollouts", "failed", "no reward", "mean", f"{confidence:.0%} interval", "versions")
    print_table(columns, [_row(arm) for arm in report.arms])
    for line in _lines(report):
        click.echo(line)


async def better_arm(store: Store, name: str, pair: tuple[str, str], bar: Criterion, *, experiment: str | None) -> str:
    """Why the second arm's version of ``name`` is better than the first one's, in words with the numbers.

    Raises:
        ConfigError: The criterion is not met, or the arms differ in more than ``name``, so that their rewards do not
            say which of the changes helped.
    """
    await check_labels(store, pair)
    pins = await pins_of(store, pair)
    names = differing(pins)
    if names != [name]:
        what = f"in {', '.join(names)}" if names else "in nothing"
        raise ConfigError(
            f"the arms {pair[0]} and {pair[1]} differ {what}, so that their rewards say nothing about {name!r} alone; "
            "look at agl resources split, and promote without --if-better what shall change together"
        )
    found = await samples(store, pins, experiment=experiment)
    old, new = (((f"{label} ({pins[label][name]})"), found[label].rewards) for label in pair)
    return check_better(old, new, bar)


def _row(arm: ArmReport) -> tuple[str, ...]:
    interval = "-" if arm.low is None else f"[{arm.low:.4f}, {arm.high:.4f}]"
    mean = "-" if arm.mean is None else f"{arm.mean:.4f}"
    versions = ", ".join(f"{name}@{version}" for name, version in arm.versions.items()) or "-"
    return (arm.label, str(arm.rollouts), str(arm.failed), str(arm.unrewarded), mean, interval, versions)


def _lines(report: SplitReport) -> list[str]:
    if not report.differing:
        return ["the labels name the same versions of every resource: there is nothing to compare"]
    baseline = report.arms[0].label
    missing = "an interval needs two rewards of each arm at least"
    return [
        f"{label} against {baseline}: {says(result) if result else missing}" for label, result in report.against.items()
    ]
