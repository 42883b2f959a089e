"""``agl resources``: versions of prompts, weights and other resources, their lineage, labels and search reports."""

import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex

import click
from msgspec.structs import replace

from agl import PluginManager
from agl.contracts import LabelMove, Store
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import PromptTemplate, ResourceVersion
from agl_inspect.records import labels
from agl_inspect.records.spending import spend
from agl_inspect.records.splits import SERVED
from agl_inspect.records.state import DEFERRED
from agl_inspect.searches import COLUMNS, Candidate, Search, candidates_of, searches_of
from agl_inspect.statistics import declared_span
from agl_inspect.terminal.opening import (
    Reading,
    complete_experiment,
    given_options,
    pass_manager,
    range_option,
    reads_store,
    store_option,
    with_store,
)
from agl_inspect.terminal.output import echo, print_json, print_table, when
from agl_inspect.terminal.program import OpenGroup
from agl_inspect.text import short, visible
from agl_inspect.versions import (
    Arm,
    ListedVersion,
    ShownVersion,
    arms,
    compare_arms,
    diff_versions,
    list_versions,
    origin_of,
    resource_text,
    shown,
)

_error = click.FloatRange(0.0, 0.5, min_open=True)
_CONDITIONS = frozenset({"error", "min_gain", "ends", "experiment"})
"""The parameters of :func:`promote` that have an effect only with ``--if-better``."""

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
@click.option("--candidates", is_flag=True, help="Also list versions that an algorithm only tried.")
@click.option("--why", is_flag=True, help="List the candidates of NAME's searches, with decisions and costs.")
@reads_store
def list_(store: Reading, name: str | None, candidates: bool, why: bool) -> None:
    """List the present versions of resources, or all versions of NAME.

    The present version is the newest one if a person published it, else the one that gateways serve to most traffic,
    else the newest that is live in an experiment, else the one with the label best, else the newest. Trials, replays
    and rounds of agl learn do not make a version live. Commands take the present version for a NAME without a version.
    All versions are listed from the oldest to the newest. Weights that were only served from memory are marked "not
    saved".

    With --why, list every candidate that a prompt search made for NAME, including candidates refused before they ran:
    its parents, its origin, the decision and its reason, and the rollouts and questions to the optimiser's model that
    it cost, each with their tokens.
    """
    if why:
        _list_candidates(store, name)
        return
    found = store.read(lambda opened: list_versions(opened, name, has_candidates=candidates))
    if store.as_json:
        print_json(found)
        return
    columns = ("name", "version", "parent", "made by", "step", "created", "labels", "score", "trials", "what")
    print_table(columns, [_row(item) for item in found], whole=("version",))


def _list_candidates(store: Reading, name: str | None) -> None:
    if name is None:
        raise ConfigError("--why lists the candidates of one resource; write agl resources list NAME --why")
    found = store.read(lambda opened: candidates_of(opened, name))
    if store.as_json:
        print_json(found)
    elif found:
        print_table(COLUMNS, [candidate.row for candidate in found], least=("money", "step", "their tokens"))
    else:
        echo(f"no prompt search has tried candidates of {name!r} in this store")


@resources.command("show")
@click.argument("name")
@click.argument("version", required=False)
@reads_store
def show_(store: Reading, name: str, version: str | None) -> None:
    """Show a version of NAME with its lineage and labels.

    VERSION is a version, a label or a candidate; by default the present version, see agl resources list.

    For a version that a prompt search made, also show the candidate: the critique behind it, the rollouts that its
    critic saw, every check and race with its numbers, the decision, and the costs.
    """

    async def work(opened: Store) -> ShownVersion | Candidate:
        tried = [c for c in await candidates_of(opened, name) if c.id == version and not c.versions]
        return tried[-1] if tried else await shown(opened, name, version)

    found = store.read(work)
    store.show(
        found, lambda: _lines(found) if isinstance(found, ShownVersion) else (*found.lines(), "", found.texts[name])
    )


@resources.command("publish")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@store_option
@pass_manager
def publish_(manager: PluginManager, name: str, file: Path, store_url: str | None) -> None:
    """Publish the text in FILE as the next version of the prompt NAME.

    Rollouts that start later get this version.
    """
    text = file.read_text(encoding="utf-8").strip()
    version = with_store(manager, store_url, lambda store: _publish(store, name, text))
    echo(f"published {name} {version}")


async def _publish(store: Store, name: str, text: str) -> str:
    listed = {found.version.name: found.version for found in await list_versions(store, None, has_candidates=False)}
    newest = listed.get(name)
    before = PromptTemplate(template="", engine="plain") if newest is None else newest.resource
    if not isinstance(before, PromptTemplate):
        raise ConfigError(f"{name!r} is no prompt ({type(before).__name__}); only a text can be published from a file")
    after = replace(before, template=text)
    if unknown := sorted(after.fields - before.fields):
        raise ConfigError(
            f"the text has the placeholders {unknown}, which agents do not fill; write {{{{...}}}} for braces"
        )
    parent = "" if newest is None else newest.version
    made = ResourceVersion(name=name, version=f"{name}-{token_hex(4)}", resource=after, parent=parent)
    await store.publish([made])
    return made.version


@resources.command("report")
@click.argument("name")
@click.option("--experiment", help="The experiment of the search, if several experiments tuned NAME.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write, such as report.md; standard output by default.",
)
@store_option
@pass_manager
def report_(
    manager: PluginManager, name: str, experiment: str | None, output: Path | None, store_url: str | None
) -> None:
    """Report on the prompt search that tuned NAME, as Markdown.

    It holds the reason for the end, the scores of the first text and of the winner with their intervals on validation
    and test tasks, the costs, both texts and their difference, and a table of all candidates. It covers the newest
    run.
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
    """Show the difference between two versions of NAME.

    OLD and NEW are versions or labels; by default, NEW is the version that agl resources show NAME shows. If they
    differ, the exit status is 1.
    """

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
@click.option("--if-better", is_flag=True, help="Only if VERSION's rewards are better than the label's.")
@click.option(
    "--error",
    type=_error,
    default=0.05,
    show_default=True,
    help="Largest probability that any promotion of the label is to a version that is no better.",
)
@click.option("--min-gain", default=0.0, show_default=True, help="The gain above which VERSION counts as better.")
@range_option
@click.option(
    "--experiment", shell_complete=complete_experiment, help="With --if-better: only rollouts of this experiment."
)
@click.option("--reason", default="", help="Reason to record in the history.")
@reads_store
def promote(
    store: Reading,
    name: str,
    version: str,
    label: str,
    if_better: bool,
    experiment: str | None,
    reason: str,
    error: float,
    min_gain: float,
    ends: tuple[float, float],
) -> None:
    """Point a label at VERSION of NAME (a version or another label).

    With --if-better, compares the rewards of both versions as agl resources compare does, and moves the label only if
    the evidence for a gain above --min-gain is strong enough. The promotions of a label share --error, so each new
    version needs stronger evidence than the one before; looking at a version again costs nothing. For versions that a
    serving split gives to callers, see agl resources split --promote.
    """
    unused = (
        []
        if if_better
        else [option for name, option in given_options(click.get_current_context()).items() if name in _CONDITIONS]
    )
    if unused:
        names = " and ".join(unused)
        raise ConfigError(
            f"{names} would do nothing without --if-better: the label moves regardless of the rewards. Add "
            f"--if-better, or leave out {names}"
        )

    async def moved(opened: Store) -> tuple[LabelMove, str]:
        found = await shown(opened, name, version)
        if not found.is_saved:
            raise ConfigError(
                f"{name}@{found.version.version} is not saved: {_NOT_SAVED}. agl resources list {name} shows those "
                "that are saved; save_every = 1 saves every step"
            )
        chosen = found.version.version
        present = await labels.labelled(opened, name, label)
        if not if_better or (present is not None and present.version == chosen):
            return await labels.move(opened, name, label, chosen, reason=reason), ""
        if present is None:
            raise ConfigError(f"{name!r} has no label {label!r} to be better than; promote once without --if-better")
        old, new = await arms(opened, name, [present.version, chosen], experiment=experiment)
        compared = f"{chosen} against {present.version}{f' in {experiment}' if experiment else ''}"
        span = declared_span(old.rewards, new.rewards, ends=ends, gain=min_gain)
        share = await spend(opened, name, label, compared, error=error)
        numbers = _better(old, new, error=share, gain=min_gain, span=span)
        return await labels.move(opened, name, label, chosen, reason=reason or numbers), numbers

    async def work(opened: Store) -> tuple[LabelMove, str, list[str]]:
        made, numbers = await moved(opened)
        return made, numbers, await _served_note(opened, made)

    made, numbers, note = store.read(work)
    store.show(made, lambda: [f"{name}: {label} is now {made.version}{f' ({numbers})' if numbers else ''}", *note])


@resources.command()
@click.argument("name")
@_label_option
@reads_store
def rollback(store: Reading, name: str, label: str) -> None:
    """Point a label back at its previous version.

    Each repetition goes one version further back.
    """

    async def work(opened: Store) -> tuple[LabelMove, list[str]]:
        made = await labels.move_back(opened, name, label)
        return made, await _served_note(opened, made)

    made, note = store.read(work)
    store.show(made, lambda: [f"{name}: {label} is now {made.version} ({made.reason})", *note])


async def _served_note(store: Store, made: LabelMove) -> list[str]:
    """Return a line if gateways serve the split of a learner, which has not followed the label."""
    split = await SERVED.get(store)
    served = made.version if split is None else split.versions.get(made.label, {}).get(made.name, made.version)
    if split is None or served == made.version:
        return []
    return [
        f"gateways serve {served} until agl learn, which follows the label, runs again; if the learner "
        f"{split.learner!r} has stopped for good, run: agl learn end"
    ]


@resources.command("compare")
@click.argument("name")
@click.argument("old")
@click.argument("new")
@click.option("--experiment", shell_complete=complete_experiment, help="Only rollouts of this experiment.")
@click.option("--error", type=_error, default=0.05, show_default=True, help="Largest probability of a wrong verdict.")
@reads_store
def compare_(store: Reading, name: str, old: str, new: str, experiment: str | None, error: float) -> None:
    """Compare the rewards of two versions of NAME.

    OLD and NEW are versions or labels. The verdict is better, worse, or that they cannot be told apart. If both were
    validated on nine tasks or more of the same content, these validations are paired by task. Otherwise all rollouts
    are paired, the newest with the newest, and each user or task counts once. The output says which, and how many
    rollouts are left out.
    """

    async def work(opened: Store) -> Sequence[Arm]:
        names = [(await shown(opened, name, which)).version.version for which in (old, new)]
        if names[0] == names[1]:
            raise ConfigError(f"{old!r} and {new!r} are both the version {names[0]!r} of {name!r}; name two versions")
        return await arms(opened, name, names, experiment=experiment)

    before, after = store.read(work)
    result, counted, note = compare_arms(before, after, error=error / 2)
    lines = [f"{arm.version}: {arm.summary}" for arm in counted]
    store.show(result, lambda: [*lines, result.words, *([note] if note else [])])


def _better(old: Arm, new: Arm, *, error: float, gain: float, span: float) -> str:
    """Return the comparison as text if ``new`` is better than ``old``; raises :class:`ConfigError` otherwise."""
    # A promotion asks for one direction only, which may have the whole error.
    found, _, _ = compare_arms(old, new, error=error, gain=gain, span=span)
    if found.verdict != "better":
        raise ConfigError(
            f"{new.version} is not shown to be better than {old.version}: {found.words}. To promote it anyway, leave "
            "out --if-better"
        )
    return found.words


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
    lines += [f"chosen because no version was named: {found.chosen}"] if found.chosen else []
    lines += [f"labels: {', '.join(found.labels)}"] if found.labels else []
    lines += [f"lineage: {' <- '.join([version.version, *found.ancestors])}"]
    lines += [f"{key}: {short(value, 200)}" for key, value in version.metadata.items() if key != DEFERRED]
    lines += [] if found.is_saved else [f"not saved: {_NOT_SAVED}"]
    lines += [] if found.candidate is None else list(found.candidate.lines())
    return [*lines, "", resource_text(version.resource)]


async def report(store: Store, name: str, *, experiment: str | None) -> str:
    """Return the report on the searches of one experiment's newest run that tuned a resource.

    Raises:
        ConfigError: No search tuned the resource, or searches of several experiments did and no experiment is named.
    """
    every = await searches_of(store, name)
    names = sorted({search.experiment for search in every})
    if not every or (experiment is not None and experiment not in names):
        where = f" in the experiment {experiment!r}" if experiment and names else ""
        known = f"; it was tuned in: {', '.join(names)}" if names else "; agl resources list shows what there is"
        raise ConfigError(f"no prompt search has tuned {name!r}{where}{known}")
    if experiment is None and len(names) > 1:
        raise ConfigError(f"{name!r} was tuned in several experiments; name one of {', '.join(names)} by --experiment")
    found = [search for search in every if search.experiment == (experiment or names[0])]
    newest = [search for search in found if search.run == found[-1].run]
    return "\n".join(line for search in newest for line in _search(search, name)) + "\n"


def _search(search: Search, name: str) -> Iterator[str]:
    first = search.candidates[0]
    winner = next((c for c in search.candidates if c.id == search.winner), first)
    yield from (f"# {name}: {search.algorithm} in {search.experiment}, run {search.run}", "")
    yield from (f"Ended by {search.stop_reason}" if search.stop_reason else "Not ended yet.", "")
    yield from ("## Scores", "", *_scores(first, winner), "")
    final = [check.words for check in winner.checks if check.name.startswith("final measurement")]
    yield from (f"The winner {final[-1]}.", "") if final else ()
    yield from ("## Costs", "", *_costs(search), "")
    if winner.id == first.id:
        yield from ("## The first text stays", "", *_fenced(first.texts[name], "text"), "")
    else:
        yield from ("## First text", "", *_fenced(first.texts[name], "text"), "")
        yield from (f"## Winner {winner.id}", "", *_fenced(winner.texts[name], "text"), "")
        changes = difflib.unified_diff(
            first.texts[name].splitlines(), winner.texts[name].splitlines(), first.id, winner.id, lineterm=""
        )
        yield from ("## Changes", "", *_fenced("\n".join(changes), "diff"), "")
    yield from ("## Candidates", "", *_table(COLUMNS, [candidate.row for candidate in search.changed(name)]), "")


def _scores(first: Candidate, winner: Candidate) -> Iterator[str]:
    """Yield a Markdown table of the mean rewards of the first text and of the winner, by dataset."""
    origins = list(dict.fromkeys([*first.scores, *winner.scores]))
    owners = {"first text": first, "winner": winner} if winner.id != first.id else {"first text": first}
    cells = [
        (label, *(owner.scores[origin].words if origin in owner.scores else "-" for origin in origins))
        for label, owner in owners.items()
    ]
    yield from _table(("", *origins), cells)


def _costs(search: Search) -> Iterator[str]:
    spent, tokens = search.spent, sum(candidate.agent.tokens for candidate in search.candidates)
    rollouts = count_of(spent.rollouts, "rollout")
    yield f"- {rollouts} of the agent, {tokens} tokens in the recorded model calls of the candidates"
    yield f"- {count_of(spent.calls, 'question')} to the optimiser's model, {spent.tokens} tokens"
    if spent.money:
        yield f"- {spent.money:.4g} in money"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate((columns, *rows)):
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
        if number == 0:
            yield f"|{'---|' * len(columns)}"


def _fenced(text: str, language: str) -> Iterator[str]:
    """Yield a Markdown code block; its fence is longer than every run of backticks in the text."""
    fence = "`" * max(3, 1 + max((len(found) for found in re.findall("`+", text)), default=0))
    yield from (f"{fence}{language}", *text.splitlines(), fence)
