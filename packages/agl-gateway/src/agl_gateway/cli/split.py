"""``agl resources split``: reports the rewards of a serving split's arms, and promotes on that evidence."""

from functools import partial

import click

from agl import PluginManager
from agl.contracts import LabelMove, Store
from agl.errors import ConfigError
from agl_gateway.traffic.splits import SplitReport, check_labels, pins_of, samples, split_report
from agl_inspect.records.labels import move
from agl_inspect.records.splits import SERVED, ArmReport, decided
from agl_inspect.statistics import compare
from agl_inspect.terminal.opening import pass_manager, store_option, with_store
from agl_inspect.terminal.output import json_option, print_json, print_table
from agl_inspect.text import ends

_DEFAULT = ("production", "candidate")


@click.command("split")
@click.argument("labels", nargs=-1)
@click.option("--experiment", help="Only rollouts of this experiment.")
@click.option("--error", default=0.05, show_default=True, help="Largest probability of a wrong verdict.")
@click.option("--promote", "promoted", metavar="NAME", help="Promote the second arm's version of NAME if it is better.")
@click.option("--min-gain", default=0.0, show_default=True, help="With --promote: gain above which an arm is better.")
@click.option("--reason", default="", help="With --promote: reason to record in the history.")
@store_option
@json_option
@pass_manager
def split_(
    manager: PluginManager,
    labels: tuple[str, ...],
    experiment: str | None,
    error: float,
    promoted: str | None,
    min_gain: float,
    reason: str,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Report the rewards of the arms of a serving split.

    LABELS are the arms, the baseline first. Without LABELS, the report is about the split that `agl learn` serves, or,
    if there is none, about production and candidate. The report counts finished rollouts that a split divided between
    the arms' present versions. A failed rollout counts as 0, and one without a reward is left out. With --promote the
    first label moves to the second one's version of NAME, if that is better.
    """
    names = labels or _DEFAULT
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"the arms {' '.join(names)} cannot be compared; name two different labels or more")
    if promoted:
        rule = {"error": error, "gain": min_gain}
        promote = partial(_promote, name=promoted, labels=names, rule=rule, experiment=experiment, reason=reason)
        made, numbers = with_store(manager, store_url, promote)
        if as_json:
            print_json(made)
        else:
            click.echo(f"{promoted}: {names[0]} is now {made.version} ({numbers})")
        return

    async def work(store: Store) -> SplitReport:
        served = None if labels else await SERVED.get(store)
        if served is None:
            await check_labels(store, names)
        pins = await pins_of(store, names) if served is None else served.versions
        return await split_report(store, pins, experiment=experiment, error=error)

    report = with_store(manager, store_url, work)
    if as_json:
        print_json(report)
        return
    columns = ("arm", "rollouts", "failed", "no reward", "mean", "95% interval", "versions")
    print_table(columns, [_row(arm) for arm in report.arms])
    for line in _lines(report):
        click.echo(line)


async def better_arm(
    store: Store, name: str, pair: tuple[str, str], rule: dict[str, float], *, experiment: str | None
) -> str:
    """Check that the second arm's version of ``name`` is better than the first one's; returns the evidence as text.

    Raises:
        ConfigError: The criterion is not met, or the arms differ in other resources than ``name``, so their rewards do
            not show which change helped.
    """
    await check_labels(store, pair)
    pins = await pins_of(store, pair)
    names = decided(pins)
    if names != [name]:
        what = f"in {', '.join(names)}" if names else "in no resource"
        raise ConfigError(
            f"the arms {pair[0]} and {pair[1]} differ {what}, so their rewards say nothing about {name!r} alone; "
            "read agl resources split, and promote resources that change together with agl resources promote"
        )
    found = await samples(store, pins, experiment=experiment)
    old, new = (found[label].rewards for label in pair)
    result = compare(old, new, error=min(2 * rule["error"], 0.999), gain=rule["gain"])
    if result.verdict != "better":
        raise ConfigError(f"{pair[1]} is not shown to be better than {pair[0]}: {result.words}; serve more rollouts")
    return result.words


async def _promote(
    store: Store, *, name: str, labels: tuple[str, ...], rule: dict[str, float], experiment: str | None, reason: str
) -> tuple[LabelMove, str]:
    if len(labels) != 2:
        raise ConfigError(f"--promote compares two arms and got {len(labels)}: {' '.join(labels)}; name two labels")
    old, new = labels
    numbers = await better_arm(store, name, (old, new), rule, experiment=experiment)
    version = (await pins_of(store, (old, new)))[new][name]
    return await move(store, name, old, version, reason=reason or numbers), numbers


def _row(arm: ArmReport) -> tuple[str, ...]:
    interval = ends(arm.low, arm.high, ".4f").strip() or "-"
    mean = "-" if arm.mean is None else f"{arm.mean:.4f}"
    versions = ", ".join(f"{name}@{version}" for name, version in arm.versions.items()) or "-"
    return (arm.label, str(arm.rollouts), str(arm.failed), str(arm.unrewarded), mean, interval, versions)


def _lines(report: SplitReport) -> list[str]:
    if len(report.arms) == 1:
        return ["all traffic gets these versions: there is nothing to compare"]
    if not report.differing:
        return ["the labels name the same version of every resource: there is nothing to compare"]
    baseline = report.arms[0].label
    missing = "an arm has no rewards"
    return [
        f"{label} against {baseline}: {result.words if result else missing}" for label, result in report.against.items()
    ]
