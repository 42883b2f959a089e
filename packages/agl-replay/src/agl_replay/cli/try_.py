"""``agl resources try``: run versions of a prompt, or an edited text, on tasks, and compare them task by task."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from agl import PluginManager
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Json
from agl_inspect.stores import MEMORY, command, without_password
from agl_inspect.terminal.opening import pass_manager, with_store
from agl_inspect.terminal.output import STOPPED, echo, json_option, print_json
from agl_inspect.text import visible
from agl_inspect.versions import add_trial
from agl_replay.candidates import Contender, Given, contenders, new_placeholders, resource_of
from agl_replay.trials import Contest, Contested, TrialReport, best_of, print_report, report_of, scores_of, try_versions
from agl_run.engine import Plan, check_hidden, default_progress, load_dataset, run_blocking, store_url_of
from agl_run.terminal import experiment_argument, make_trainer

LIMIT = 20
"""Number of tasks that run unless the command line chooses tasks."""

_GIVEN = "agl_replay.cli.try_.given"
_OPTIONS = {"versions": "version", "texts": "text", "text_files": "text-file", "is_edited": "edit"}
"""The options that name candidates, by argument of the command's function."""


class _InOrder(click.Command):
    """A command that remembers the order of the options that name candidates."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and store the order of the candidates' options in the context."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_GIVEN] = [item.name for item in order if item.name in _OPTIONS]
        return super().parse_args(ctx, args)


@click.command("try", cls=_InOrder)
@experiment_argument
@click.argument("resource", required=False)
@click.option("--version", "versions", multiple=True, metavar="V", help="A version, a label, or NAME@V; repeatable.")
@click.option("--text", "texts", multiple=True, help="A new text; repeatable.")
@click.option(
    "--text-file", "text_files", multiple=True, metavar="PATH", help="A file with a new text, or - for standard input."
)
@click.option("--edit", "is_edited", is_flag=True, help="Edit the previous candidate, or the live version, in $EDITOR.")
@click.option("--tasks", "path", type=click.Path(path_type=Path), help="A file of tasks to use instead of FILE's.")
@click.option("--task", "given_tasks", multiple=True, metavar="JSON", help="One task; repeatable.")
@click.option("--pick", metavar="0,3,7-9", help="Only these tasks, counted from 0.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first tasks; 20 unless --pick or --task chooses.")
@click.option(
    "--samples", type=click.IntRange(1, 1000), default=1, show_default=True, help="Rollouts of each task per candidate."
)
@click.option("--full", "is_full", is_flag=True, help="Print every task and the answers.")
@json_option
@pass_manager
@click.pass_context
def try_(
    ctx: click.Context,
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    resource: str | None,
    is_full: bool,
    as_json: bool,
    samples: int,
    **chosen: Any,
) -> None:
    """Compare versions or new texts of RESOURCE on tasks.

    The agent of FILE runs with each of them, and their rewards are compared task by task. RESOURCE is a prompt or
    another [resource.NAME], and may be left out if FILE has only one. Give any number of candidates; the first is the
    baseline, and a single one is compared with the live version. Nothing is trained or promoted. The exit status is 1
    if no rollout succeeded.
    """
    plan = make_trainer(file, settings, manager=manager).plan()
    given = _given(ctx)
    name = resource_of(plan, resource, given)
    tasks, source = _tasks(plan, **{key: chosen[key] for key in ("path", "given_tasks", "pick", "limit")})
    present, found = contenders(plan, name, given)
    for line in new_placeholders(plan, present, found):
        click.echo(visible(line), err=True)
    contested = _run(plan, name, present, found, tasks, samples=samples, source=source)
    if not contested.ran:
        click.echo("stopped before a rollout ended; nothing was compared", err=True)
        sys.exit(STOPPED)
    report = report_of(name, found, tasks, contested, source=source)
    _keep(report, plan, manager)
    if as_json:
        print_json(report)
    else:
        _print(report, plan, is_full=is_full)
    if not report.is_complete:
        sys.exit(STOPPED)
    sys.exit(0 if any(each.failed < each.rollouts for each in report.candidates) else 1)


def _given(ctx: click.Context) -> list[Given]:
    """Return the candidates in the order in which the command line names them."""
    left = {name: iter(ctx.params[name]) for name in _OPTIONS if name != "is_edited"}
    order: list[str] = ctx.meta[_GIVEN]
    return [Given(option=_OPTIONS[name], value=next(left[name]) if name in left else "") for name in order]


def _tasks(
    plan: Plan, *, path: Path | None, given_tasks: tuple[str, ...], pick: str | None, limit: int | None
) -> tuple[list[tuple[int, Json]], str]:
    """Return the chosen tasks with their positions, and a description such as ``3 of 9 validation tasks``."""
    if given_tasks:
        if path is not None or pick is not None or limit is not None:
            raise ConfigError(
                "--task gives the tasks themselves; leave out --tasks, --pick and --limit, or leave it out"
            )
        return [(number, _task(text)) for number, text in enumerate(given_tasks)], _count(len(given_tasks), "given")
    if path is not None:
        every, source = load_dataset(path), path.name
        check_hidden(every, plan.config.experiment.hidden, name=str(path))
    elif plan.val:
        every, source = list(plan.val), "validation"
    else:
        every, source = list(plan.train), "training"
    if not every:
        raise ConfigError(
            "the experiment has no tasks of its own; name a file of them with --tasks, or one with --task"
        )
    chosen = (
        list(enumerate(every)) if pick is None else [(number, every[number]) for number in _picked(pick, len(every))]
    )
    kept = chosen[: limit or (LIMIT if pick is None else None)]
    words = _count(len(every), source)
    return kept, words if len(kept) == len(every) else f"{len(kept)} of {words}"


def _count(number: int, source: str) -> str:
    return f"{number} {source} task{'' if number == 1 else 's'}"


def _task(text: str) -> Json:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f'--task {text[:60]!r} is not JSON: {error}; write one such as \'{{"question": "2 + 2?"}}\''
        ) from None


def _picked(text: str, count: int) -> list[int]:
    """Return the positions in a list such as ``0,3,7-9``."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ConfigError(f"--pick {text[:60]!r} is not a list of positions; write one such as 0,3,7-9")
        start, end = int(first), int(last or first)
        if start > end or end >= count:
            raise ConfigError(f"--pick names {part.strip()[:30]}, and the positions of the tasks are 0 to {count - 1}")
        found += range(start, end + 1)
    return list(dict.fromkeys(found))


def _run(
    plan: Plan,
    name: str,
    present: Contender,
    found: Sequence[Contender],
    tasks: Sequence[tuple[int, Json]],
    *,
    samples: int,
    source: str,
) -> Contested:
    """Run the candidates, and return the results; after an interrupt, the results so far."""
    contest = Contest(
        name=name,
        present=present.version.version if present.version else "",
        versions=[each.version for each in found],
        tasks=[task for _, task in tasks],
        samples=samples,
    )
    count = len(tasks) * len(found) * samples
    click.echo(visible(f"{count_of(count, 'rollout')}: {count_of(len(found), 'candidate')} on {source}"), err=True)
    contested = Contested()
    try:
        run_blocking(lambda: try_versions(plan, contest, progress=default_progress(on_errors=True), found=contested))
    except KeyboardInterrupt:
        click.echo("\nstopped; done so far:", err=True)
    return contested


def _keep(report: TrialReport, plan: Plan, manager: PluginManager) -> None:
    """Save a complete trial with the versions, except in a store in memory, which ends with this process."""
    url = store_url_of(plan)
    if not report.is_complete or url.startswith(MEMORY):
        return
    facts = {"experiment": report.experiment, "resource": report.resource, "source": report.source}
    with_store(manager, url, lambda store: add_trial(store, scores=scores_of(report), **facts))


def _print(report: TrialReport, plan: Plan, *, is_full: bool) -> None:
    samples = f", {report.samples} rollouts of each with each candidate" if report.samples > 1 else ""
    stopped = "" if report.is_complete else "; stopped before its end"
    echo(f"{report.resource} on {report.source}{samples}{stopped}")
    print_report(report, is_full=is_full)
    url = without_password(store_url_of(plan))
    if url.startswith(MEMORY):
        return
    best, label = best_of(report), plan.label(report.resource)
    if best is None:
        promote = f"nothing is shown to be better than {report.candidates[0].mark}, so there is nothing to promote"
    else:
        words = ("resources", "promote", report.resource, best.version, *(("--label", label) if label else ()))
        promote = f"promote {best.mark} with: {command(*words, store_url=url)}"
    echo(f"{promote}; look at a rollout with: {command('show', _example(report), store_url=url)}")


def _example(report: TrialReport) -> str:
    """Return the id of a rollout of the last candidate, a failed one if there is one."""
    mark = report.candidates[-1].mark
    every = [each for task in report.tasks for each in task.rollouts[mark]]
    every = every or [each for task in report.tasks for rollouts in task.rollouts.values() for each in rollouts]
    return next((each.rollout_id for each in every if each.error), every[0].rollout_id)
