"""``agl resources``: versions of prompts, weights and other resources, their lineage and labels."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from agl import PluginManager
from agl.contracts import LabelMove, Store
from agl.errors import ConfigError
from agl_inspect.cli.search_report import report
from agl_inspect.records import labels
from agl_inspect.records.saved_versions import DEFERRED
from agl_inspect.statistics.comparison import Criterion, check_better
from agl_inspect.terminal.completion import complete_experiment
from agl_inspect.terminal.context import given_options, pass_manager
from agl_inspect.terminal.opening import store_option, with_store
from agl_inspect.terminal.output import echo, json_option, print_json, print_table, short, when
from agl_inspect.terminal.program import OpenGroup
from agl_inspect.text import visible
from agl_inspect.versions.candidates import COLUMNS, Candidate, candidates_of
from agl_inspect.versions.lineage import (
    Arm,
    ListedVersion,
    ShownVersion,
    arms,
    diff_versions,
    list_versions,
    origin_of,
    resource_text,
    shown,
)
from agl_inspect.versions.pairing import compare_arms

_confidence = click.FloatRange(0.0, 1.0, min_open=True, max_open=True)
_CONDITIONS = frozenset({"confidence", "min_gain", "min_rollouts", "experiment"})
"""The parameters of a promotion that mean something with ``--if-better`` only."""

_NOT_SAVED = (
    "these weights were served from memory and never written, because save_every lets steps wait; rollouts name them, "
    "and they can be neither served again nor promoted"
)
_label_option = click.option("--label", default="production", show_default=True, help="The label to move.")


@click.group(cls=OpenGroup)
def resources() -> None:
    """List, compare and promote versions of prompts, weights and other resources."""


@resources.command("list")
@click.argument("name", required=False)
@click.option("--candidates", is_flag=True, help="Also versions that an algorithm only tried.")
@click.option("--why", is_flag=True, help="The candidates of NAME's searches, with the decisions and their costs.")
@store_option
@json_option
@pass_manager
def list_(
    manager: PluginManager, name: str | None, candidates: bool, why: bool, store_url: str | None, as_json: bool
) -> None:
    """List the newest version of every resource, or all versions of NAME, oldest first.

    Weights that were served from memory and never written are "not saved".

    With --why every candidate that a prompt search made for NAME, also those that were refused before they ran: its
    parents, how it was made, the decision and its reason, the rollouts of the agent for it with their tokens, and the
    questions to the optimiser's model with theirs.
    """
    if why:
        _list_candidates(manager, name, store_url, as_json=as_json)
        return
    found = with_store(manager, store_url, lambda store: list_versions(store, name, has_candidates=candidates))
    if as_json:
        print_json(found)
        return
    columns = ("name", "version", "parent", "made by", "step", "created", "labels", "score", "trials", "what")
    print_table(columns, [_row(item) for item in found], whole=("version",))


def _list_candidates(manager: PluginManager, name: str | None, store_url: str | None, *, as_json: bool) -> None:
    if name is None:
        raise ConfigError("--why lists the candidates of one resource; write agl resources list NAME --why")
    found = with_store(manager, store_url, lambda store: candidates_of(store, name))
    if as_json:
        print_json(found)
    elif found:
        print_table(COLUMNS, [candidate.row for candidate in found], least=("money", "step", "their tokens"))
    else:
        echo(f"no prompt search has tried candidates of {name!r} in this store")


@resources.command("show")
@click.argument("name")
@click.argument("version", required=False)
@store_option
@json_option
@pass_manager
def show_(manager: PluginManager, name: str, version: str | None, store_url: str | None, as_json: bool) -> None:
    """Show VERSION of NAME (a version, a label or a candidate; by default the newest) with its lineage and labels.

    Of a version that a prompt search made also the candidate: the critique that led to it, the rollouts that its
    critic was shown, every gate with its numbers, the decision, and the costs.
    """

    async def work(store: Store) -> ShownVersion | Candidate:
        tried = [c for c in await candidates_of(store, name) if c.id == version and not c.versions]
        return tried[-1] if tried else await shown(store, name, version)

    found = with_store(manager, store_url, work)
    if as_json:
        print_json(found)
        return
    for line in _lines(found) if isinstance(found, ShownVersion) else (*found.lines(), "", found.texts[name]):
        echo(line)


@resources.command("report")
@click.argument("name")
@click.option("--experiment", help="The experiment whose search is meant, where several tuned NAME.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, such as report.md, by default stdout.",
)
@store_option
@pass_manager
def report_(
    manager: PluginManager, name: str, experiment: str | None, output: Path | None, store_url: str | None
) -> None:
    """Report on the prompt search that tuned NAME, as Markdown.

    It holds the reason for the end, the scores of the first text and of the winner with their intervals on validation
    and test tasks, the costs, both texts and their difference, and a table of all candidates. Of several runs the
    newest counts.
    """
    text = with_store(manager, store_url, lambda store: report(store, name, experiment=experiment))
    if output is None:
        echo(text.rstrip())
        return
    try:
        output.write_text(visible(text), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(output)!r}: {error}") from error
    echo(f"report on {name} in {output}")


@resources.command("diff")
@click.argument("name")
@click.argument("old")
@click.argument("new", required=False)
@store_option
@pass_manager
def diff_(manager: PluginManager, name: str, old: str, new: str | None, store_url: str | None) -> None:
    """Compare the version or label OLD of NAME with NEW, by default the newest. Exit status 1 when they differ."""

    async def work(store: Store) -> list[str]:
        before, after = await shown(store, name, old), await shown(store, name, new)
        return diff_versions(before.version, after.version)

    lines = with_store(manager, store_url, work)
    for line in lines or ["no difference"]:
        echo(line)
    sys.exit(1 if lines else 0)


@resources.command()
@click.argument("name")
@click.argument("version")
@_label_option
@click.option("--if-better", is_flag=True, help="Only if its rewards are better than those of the label's version.")
@click.option(
    "--confidence",
    type=_confidence,
    default=0.95,
    show_default=True,
    help="Of the interval that must lie above --min-gain.",
)
@click.option("--min-gain", default=0.0, show_default=True, help="Least difference of the mean rewards.")
@click.option("--min-rollouts", default=20, show_default=True, help="Least number of rewards of either version.")
@click.option("--split", "is_split", is_flag=True, help="With --if-better: VERSION and the label as arms of a split.")
@click.option(
    "--experiment", shell_complete=complete_experiment, help="With --if-better: only rollouts of this experiment."
)
@click.option("--reason", default="", help="Why, for the history.")
@store_option
@json_option
@pass_manager
@click.pass_context
def promote(
    ctx: click.Context,
    manager: PluginManager,
    name: str,
    version: str,
    label: str,
    if_better: bool,
    is_split: bool,
    experiment: str | None,
    reason: str,
    store_url: str | None,
    as_json: bool,
    **criterion: Any,
) -> None:
    """Point a label at VERSION of NAME (a version or another label).

    With --if-better the rewards of all finished rollouts that ran with either version are compared (Welch's interval
    of the difference of means), and the label stays where it is unless there are --min-rollouts of each and the
    interval's lower end is above --min-gain. With --split only rollouts count that a serving split gave to the arms
    VERSION, a label then, and --label.
    """
    if is_split and not if_better:
        raise ConfigError("--split limits the rewards that --if-better compares; give both, or neither")
    unused = [] if if_better else [option for name, option in given_options(ctx).items() if name in _CONDITIONS]
    if unused:
        names = " and ".join(unused)
        raise ConfigError(
            f"{names} would do nothing without --if-better: the label moves whatever the rewards are. Add "
            f"--if-better, or leave out {names}"
        )
    if is_split:
        split = resources.get_command(ctx, "split")
        assert split is not None  # noqa: S101  # a group of plugins' commands raises for an unknown one
        options = {"experiment": experiment, "reason": reason, "store_url": store_url, "as_json": as_json}
        ctx.invoke(split, labels=(label, version), promoted=name, **options, **criterion)
        return

    async def work(store: Store) -> tuple[LabelMove, str]:
        found = await shown(store, name, version)
        if not found.is_saved:
            raise ConfigError(
                f"{name}@{found.version.version} is not saved: {_NOT_SAVED}. agl resources list {name} shows those "
                "that are saved; save_every = 1 saves every step"
            )
        chosen = found.version.version
        if not if_better:
            return await labels.move(store, name, label, chosen, reason=reason), ""
        present = await labels.labelled(store, name, label)
        if present is None:
            raise ConfigError(f"{name!r} has no label {label!r} to be better than; promote once without --if-better")
        bar = Criterion(**criterion)
        numbers = _better(await arms(store, name, [present.version, chosen], experiment=experiment), bar)
        return await labels.move(store, name, label, chosen, reason=reason or numbers), numbers

    made, numbers = with_store(manager, store_url, work)
    if as_json:
        print_json(made)
        return
    click.echo(f"{name}: {label} is now {made.version}{f' ({numbers})' if numbers else ''}")


@resources.command()
@click.argument("name")
@_label_option
@store_option
@json_option
@pass_manager
def rollback(manager: PluginManager, name: str, label: str, store_url: str | None, as_json: bool) -> None:
    """Point a label back at its previous version; each repetition goes one version further back."""
    made = with_store(manager, store_url, lambda store: labels.move_back(store, name, label))
    if as_json:
        print_json(made)
        return
    click.echo(f"{name}: {label} is now {made.version} ({made.reason})")


@resources.command("compare")
@click.argument("name")
@click.argument("old")
@click.argument("new")
@click.option("--experiment", shell_complete=complete_experiment, help="Only rollouts of this experiment.")
@click.option("--confidence", type=_confidence, default=0.95, show_default=True, help="Of the interval.")
@store_option
@json_option
@pass_manager
def compare_(
    manager: PluginManager,
    name: str,
    old: str,
    new: str,
    experiment: str | None,
    confidence: float,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Compare the rewards of rollouts that ran with the versions or labels OLD and NEW of NAME.

    Where both were validated on the same tasks, these validations are paired by task: Student's interval of the
    differences. Otherwise all rollouts count, by Welch's interval of the difference of means; the answer says which.
    """

    async def work(store: Store) -> Sequence[Arm]:
        names = [(await shown(store, name, which)).version.version for which in (old, new)]
        if names[0] == names[1]:
            raise ConfigError(f"{old!r} and {new!r} are both the version {names[0]!r} of {name!r}; name two versions")
        return await arms(store, name, names, experiment=experiment)

    before, after = with_store(manager, store_url, work)
    result, counted, note = compare_arms(before, after, confidence=confidence)
    if as_json:
        print_json(result)
        return
    for arm in counted:
        click.echo(f"{arm.version}: {arm.summary(confidence)}")
    click.echo(result.words)
    if note:
        click.echo(note)


def _better(pair: Sequence[Arm], bar: Criterion) -> str:
    old, new = pair
    return check_better((old.version, old.rewards), (new.version, new.rewards), bar)


def _row(item: ListedVersion) -> tuple[str, ...]:
    version = item.version
    return (
        version.name,
        version.version,
        version.parent or "-",
        version.algorithm or item.origin or "-",
        str(version.step or "-"),
        when(version.created_at),
        ", ".join(item.labels) or "-",
        item.score or "-",
        item.tried or "-",
        short(resource_text(version.resource), 40) if item.is_saved else "not saved",
    )


def _lines(found: ShownVersion) -> list[str]:
    version = found.version
    maker = version.algorithm or origin_of(version) or "a person"
    lines = [f"{version.name} {version.version}, made by {maker}, {when(version.created_at)}"]
    lines += [f"labels: {', '.join(found.labels)}"] if found.labels else []
    lines += [f"lineage: {' <- '.join([version.version, *found.ancestors])}"]
    lines += [f"{key}: {short(value, 200)}" for key, value in version.metadata.items() if key != DEFERRED]
    lines += [] if found.is_saved else [f"not saved: {_NOT_SAVED}"]
    lines += [] if found.candidate is None else list(found.candidate.lines())
    return [*lines, "", resource_text(version.resource)]
