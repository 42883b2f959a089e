"""``agl resources split`` and ``variant``: rewards and promotion of a split's arms, and versions of one user's own."""

from functools import partial

import click

from agl import PluginManager
from agl.contracts import LabelMove, Store
from agl.errors import ConfigError, NotFoundError
from agl_gateway.traffic.splits import (
    SplitReport,
    check_labels,
    compare_placed,
    pins_of,
    placed_rollouts,
    split_report,
)
from agl_inspect.records.labels import move
from agl_inspect.records.spending import spend
from agl_inspect.records.splits import SERVED, VARIANTS, ArmReport, Pins, Variant, decided
from agl_inspect.statistics import declared_span
from agl_inspect.terminal.opening import (
    Reading,
    given_options,
    pass_manager,
    range_option,
    reads_store,
    store_option,
    with_store,
)
from agl_inspect.terminal.output import json_option, print_json, print_table
from agl_inspect.text import ends
from agl_inspect.versions import shown

_DEFAULT = ("production", "candidate")
_CONDITIONS = frozenset({"min_gain", "ends", "reason"})
"""The parameters of the command that have an effect only with ``--promote``."""

_MISSING = "an arm has no rewards yet"
_UNSPLIT = "the store has no split of agl learn, so only gateways with --split serve this"


@click.command("split")
@click.argument("labels", nargs=-1)
@click.option("--experiment", help="Only rollouts of this experiment.")
@click.option(
    "--error",
    type=click.FloatRange(0.0, 0.5, min_open=True),
    default=0.05,
    show_default=True,
    help="Largest probability of a wrong verdict; with --promote, of any wrong promotion of the first label.",
)
@click.option("--promote", "promoted", metavar="NAME", help="Promote the second arm's version of NAME if it is better.")
@click.option("--min-gain", default=0.0, show_default=True, help="With --promote: gain above which an arm is better.")
@range_option
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
    ends: tuple[float, float],
    reason: str,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Report the rewards of the arms of a serving split.

    LABELS are the arms, the baseline first. Without LABELS, the report covers the split that `agl learn` serves, and
    without such a split production and candidate. The report counts finished rollouts that a split divided between
    the arms' present versions. A failed rollout counts as 0, and one without a reward is left out. Rollouts of one user
    or conversation enter the comparison once, by their mean. With --promote the first label moves to the second one's
    version of NAME, if that is better.
    """
    names = labels or _DEFAULT
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"the arms {' '.join(names)} cannot be compared; name two different labels or more")
    if promoted:
        rule = {"error": error, "gain": min_gain, "ends": ends}
        promote = partial(_promote, name=promoted, labels=names, experiment=experiment, reason=reason, **rule)
        made, numbers = with_store(manager, store_url, promote)
        if as_json:
            print_json(made)
        else:
            click.echo(f"{promoted}: {names[0]} is now {made.version} ({numbers})")
        return

    given = given_options(click.get_current_context())
    if unused := " and ".join(option for key, option in given.items() if key in _CONDITIONS):
        raise ConfigError(f"{unused} would do nothing without --promote NAME; add it, or leave out {unused}")

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


async def _promote(
    store: Store,
    *,
    name: str,
    labels: tuple[str, ...],
    error: float,
    gain: float,
    ends: tuple[float, float],
    experiment: str | None,
    reason: str,
) -> tuple[LabelMove, str]:
    if len(labels) != 2:
        raise ConfigError(f"--promote compares two arms and got {len(labels)}: {' '.join(labels)}; name two labels")
    await check_labels(store, labels)
    pins = await pins_of(store, labels)
    _check_only(name, pins)
    old, new = labels
    compared = f"{pins[new][name]} against {pins[old][name]} in a split{f' of {experiment}' if experiment else ''}"
    placed = await placed_rollouts(store, pins, experiment=experiment)
    rewards = [[each.counted for each in placed if each.arm == arm and each.counted is not None] for arm in labels]
    span = declared_span(*rewards, ends=ends, gain=gain)
    share = await spend(store, name, old, compared, error=error)
    found = compare_placed(placed, old, new, error=share, gain=gain, span=span)
    if found is None or found.verdict != "better":
        raise ConfigError(f"{new} is not shown to be better than {old}: {found.words if found else _MISSING}")
    return await move(store, name, old, pins[new][name], reason=reason or found.words), found.words


def _check_only(name: str, pins: Pins) -> None:
    """Raise :class:`ConfigError` if the arms differ in other resources than ``name``."""
    names = decided(pins)
    if names != [name]:
        what = f"in {', '.join(names)}" if names else "in no resource"
        raise ConfigError(
            f"the arms {' and '.join(pins)} differ {what}, so their rewards say nothing about {name!r} alone; "
            "read agl resources split, and promote resources that change together with agl resources promote"
        )


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
    baseline, found = report.arms[0].label, report.against
    return [f"{label} against {baseline}: {one.words if one else _MISSING}" for label, one in found.items()]


@click.command("variant")
@click.argument("name", required=False)
@click.argument("version", required=False)
@click.option("--user", default="", help="The user who gets the version.")
@click.option("--agent", default="", help="The agent that gets the version.")
@click.option("--remove", is_flag=True, help="Give the user or the agent the shared version again.")
@reads_store
def variant(store: Reading, name: str | None, version: str | None, user: str, agent: str, remove: bool) -> None:
    """Give a user or an agent its own version, or list these.

    VERSION is a version of NAME, or a label. It is served from the next conversation on, by gateways that serve a
    split, such as that of agl learn. Everybody else, and every other resource, keeps the shared version. A user's
    variant comes before an agent's. Conversations with a variant count in no comparison of versions.
    """
    if name is None:
        found = store.read(VARIANTS.read)
        rows = [(who, each, own) for who, one in found.items() for each, own in one.versions.items()]
        store.show(found, lambda: ()) if store.as_json else print_table(("for", "name", "version"), rows)
        return
    if bool(user) == bool(agent) or (version is None) != remove:
        raise ConfigError(
            f"write agl resources variant {name} VERSION --user USER, with --agent AGENT instead of --user for an "
            "agent, and with --remove instead of VERSION to take it back"
        )
    whose = f"user:{user}" if user else f"agent:{agent}"

    async def work(opened: Store) -> tuple[Variant, list[str]]:
        known = await VARIANTS.get(opened, whose) or Variant(versions={})
        if remove and name not in known.versions:
            raise NotFoundError("variant", f"{name} for {whose}", "agl resources variant lists the variants")
        others = {each: own for each, own in known.versions.items() if each != name}
        own = {} if version is None else {name: (await shown(opened, name, version)).version.version}
        changed = Variant(versions={**others, **own})
        states = VARIANTS.states({whose: changed})
        await opened.save_state(states if changed.versions else dict.fromkeys(states, b""))
        is_served = remove or await SERVED.get(opened) is not None
        return changed, [] if is_served else [_UNSPLIT]

    made, note = store.read(work)
    store.show(made, lambda: [f"{name} for {whose}: {made.versions.get(name, 'the shared version')}", *note])
