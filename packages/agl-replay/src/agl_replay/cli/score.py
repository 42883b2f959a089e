"""``agl replay --score``: score recorded rollouts again with a changed reward, running no agent and writing nothing."""

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click
from msgspec.structs import replace

from agl import PluginManager
from agl.contracts import Recording, RolloutQuery, Store
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Record, Reward, to_json
from agl.stores import read_recordings
from agl_inspect.records.names import TRIAL
from agl_inspect.rollouts.explanations import reward_text
from agl_inspect.stores import MEMORY
from agl_inspect.terminal.opening import complete_rollout, pass_manager, resolve_url, store_option, with_store
from agl_inspect.terminal.output import STOPPED, echo, json_option, print_json, print_table
from agl_inspect.terminal.query import check_experiment, filter_options, find_ids, make_query
from agl_inspect.text import short
from agl_replay.rescoring import Rescored, make_rescorer, rewards_plan
from agl_replay.reward_change import Agreement, GroupChange, PartChange, RewardChange, Values, sum_up
from agl_run import load_config
from agl_run.engine import score_options
from agl_run.terminal import experiment_argument, read_experiment, store_of

_PAGE = 16
"""Number of rollouts that are read at once, with all their spans."""

_FEEDBACK = 300
_SHOWN = 12
"""Largest number of rewards of a kind that are printed for a rollout; spans and turns may have thousands."""

_PARTS = 40
_ERRORS = 10
_LONGEST = 500


class _Report(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The output of ``--json``; ``is_complete`` is false after an interrupt."""

    is_complete: bool
    change: RewardChange
    rollouts: list[Rescored]


@click.command("score")
@experiment_argument
@click.argument("rollout_ids", nargs=-1, metavar="[ROLLOUT]...", shell_complete=complete_rollout)
@store_option
@filter_options
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Largest number of rollouts, unless ids are given.",
)
@click.option(
    "--concurrency", type=click.IntRange(min=1, max=1000), default=8, show_default=True, help="Rollouts at once."
)
@click.option("--summary", "is_short", is_flag=True, help="Print the summary only.")
@json_option
@pass_manager
def score(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    rollout_ids: tuple[str, ...],
    store_url: str | None,
    experiment: str | None,
    status: tuple[str, ...],
    mode: str | None,
    limit: int,
    concurrency: int,
    is_short: bool,
    as_json: bool,
) -> None:
    """Score recorded rollouts again with the rewards of FILE; run no agent and write nothing.

    ROLLOUT is an id, the beginning of one, or latest; without any, the newest rollouts of FILE's experiment that
    succeeded, or those that the filters select. The exit status is 1 when a reward raised an exception.
    """
    if rollout_ids and (experiment or status or mode):
        raise click.UsageError("name rollouts, or select them with --experiment, --status and --mode, not both")
    recorded = load_config(file)
    config, plugins = read_experiment(file, settings, manager=manager)
    plan = rewards_plan(config, folder=file.absolute().parent, manager=plugins)
    url = resolve_url(store_url) if store_url else store_of(config, file)
    if url.startswith(MEMORY):
        raise ConfigError(
            f"the experiment keeps its rollouts in {url}, which ended with its process; name another store with --store"
        )
    query = make_query(experiment or config.experiment.name, status or ("succeeded",), mode, limit=_PAGE)
    most = len(rollout_ids) or limit
    found: list[Rescored] = []

    async def work(store: Store) -> None:
        rescorer = await make_rescorer(plan, before=score_options(recorded.experiment))
        chosen = await _chosen(store, query, rollout_ids)
        async for one in rescorer.run(_first(read_recordings(store, chosen), most), concurrency=concurrency):
            found.append(one)
            if not (as_json or is_short):
                _print_rollout(one)

    is_complete = False
    with suppress(KeyboardInterrupt):
        with_store(plugins, url, work)
        is_complete = True
    change = sum_up(found)
    if as_json:
        print_json(_Report(is_complete=is_complete, change=change, rollouts=found))
    else:
        _print_change(change)
    if not is_complete:
        click.echo("stopped; scored so far:", err=True)
        _leave(STOPPED)
    sys.exit(1 if change.failed else 0)


def _leave(status: int) -> NoReturn:
    """End the process at once, because threads of judges may wait a minute for an answer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def _chosen(store: Store, query: RolloutQuery, names: Sequence[str]) -> RolloutQuery:
    """Return a query for the named rollouts, or else ``query``; raises :class:`ConfigError` if that matches nothing."""
    if names:
        ids = tuple(dict.fromkeys(await find_ids(store, names)))
        return RolloutQuery(ids=ids, limit=_PAGE)
    await _check_ran(store, query.experiment or "")
    if not await store.rollouts(replace(query, limit=1)):
        mode = f" in mode {query.mode}" if query.mode else ""
        raise ConfigError(
            f"no rollout of {query.experiment!r} with the status {' or '.join(query.status)}{mode} is recorded; agl "
            "runs lists the others"
        )
    return replace(query, sort="created_at", is_newest_first=True)


async def _check_ran(store: Store, experiment: str) -> None:
    """Raise :class:`ConfigError` if an experiment has no rollout; the message says if ``agl dev`` recorded some."""
    trial = f"{experiment}{TRIAL}"
    if await _has_rollout(store, trial) and not await _has_rollout(store, experiment):
        raise ConfigError(
            f"no rollout of {experiment!r} is recorded, only those of agl dev; to score them, pass --experiment {trial}"
        )
    await check_experiment(store, experiment)


async def _has_rollout(store: Store, experiment: str) -> bool:
    return bool(await store.rollouts(RolloutQuery(experiment=experiment, limit=1)))


async def _first(recordings: AsyncIterator[Recording], limit: int) -> AsyncIterator[Recording]:
    async for recording in recordings:
        yield recording
        limit -= 1
        if not limit:
            return


def _print_rollout(one: Rescored) -> None:
    if one.skipped:
        echo(f"{one.rollout_id}: not scored, {one.skipped}")
        return
    moved = "" if one.before is None or one.after is None else f" ({one.after - one.before:+g})"
    echo(f"{one.rollout_id}: {_number(one.before)} -> {_number(one.after)}{moved}")
    if one.after is None and not one.errors:
        echo(f"  none because {one.rule}")
    recorded, now = ({to_json(each) for each in rewards} for rewards in (one.recorded, one.rewards))
    _print_rewards("same", [each for each in one.rewards if to_json(each) in recorded])
    _print_rewards("was", [each for each in one.recorded if to_json(each) not in now])
    _print_rewards("now", [each for each in one.rewards if to_json(each) not in recorded])
    _print_rewards("kept", one.kept)
    for error in one.errors:
        echo(f"  error  {short(error.message, _LONGEST)}")


def _print_rewards(label: str, rewards: Sequence[Reward]) -> None:
    for each in rewards[:_SHOWN]:
        echo(f"  {label:<5}  {short(reward_text(each), _FEEDBACK)}")
    if len(rewards) > _SHOWN:
        echo(f"  {label:<5}  and {len(rewards) - _SHOWN} more; --json has all")


def _print_change(change: RewardChange) -> None:
    echo(f"scored {count_of(change.scored, 'rollout')}{f', skipped {change.skipped}' if change.skipped else ''}")
    if change.before is not None and change.after is not None:
        tasks, moved = count_of(change.tasks, "task"), change.after - change.before
        echo(f"mean over {tasks}: {_number(change.before)} recorded, {_number(change.after)} now ({moved:+.4g})")
    if change.lost or change.gained:
        echo(f"{change.lost} of them lost their reward, and {change.gained} got their first")
    for line in _group_lines(change.groups) if change.scored else ():
        echo(line)
    for when, agreed in (("recorded", change.agreed_before), ("now", change.agreed_after)):
        if agreed is not None:
            echo(f"{when}: {agreement_text(agreed)}")
    if change.parts:
        print_table(_COLUMNS, [row for part in change.parts[:_PARTS] for row in _part_rows(part)], whole=("when",))
    for text, count in list(change.errors.items())[:_ERRORS]:
        echo(f"error in {count_of(count, 'rollout')}: {short(text, _LONGEST)}")
    if left := max(0, len(change.parts) - _PARTS) + max(0, len(change.errors) - _ERRORS):
        echo(f"and {left} more parts and errors; --json has all")


def _group_lines(groups: GroupChange) -> list[str]:
    if not groups.groups:
        return ["no task has several rollouts of one step, whose order would matter to an algorithm that compares them"]
    before, after = (f"{count / groups.groups:.0%}" for count in (groups.silent_before, groups.silent_after))
    return [
        f"{groups.groups} groups of {groups.rollouts} rollouts: {groups.reordered} change their order, "
        f"{groups.turned} rollouts change sides of their group's mean",
        f"silent groups, which teach nothing: {before} recorded, {after} now",
    ]


def agreement_text(found: Agreement) -> str:
    """Return an agreement with people in one line."""
    return (
        f"agreement with people on {count_of(found.rated, 'rated rollout')}: kappa {found.kappa:.2f} "
        f"({found.low:.2f} to {found.high:.2f}); {found.praised} called good that people do not, {found.missed} missed"
    )


_COLUMNS = ("reward", "when", "n", "none", "mean", "spread", "least", "share", "greatest", "share")


def _part_rows(part: PartChange) -> list[tuple[str, ...]]:
    name = " · ".join(filter(None, (part.name or "(unnamed)", part.part)))
    label = short(name if part.scope == "rollout" else f"{name} of a {part.scope}", 60)
    given = (("recorded", part.before), ("now", part.after))
    return [(label, when, *_cells(values)) for when, values in given if values is not None]


def _cells(values: Values) -> tuple[str, ...]:
    low, high = f"{values.at_least:.0%}", f"{values.at_greatest:.0%}"
    spread = _number(values.mean), _number(values.spread)
    return str(values.n), str(values.missing), *spread, _number(values.least), low, _number(values.greatest), high


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
