"""``agl replay --align``: fit a judge to people's ratings, and print how far both agree before and after."""

import asyncio
from pathlib import Path

import click

from agl import PluginManager
from agl.contracts import Store
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import PromptTemplate
from agl_inspect.terminal.opening import pass_manager, resolve_url, store_option, with_store
from agl_inspect.terminal.output import echo
from agl_replay.align import RESOURCE, TemplateJudge, agreements, divide, rated_rollouts, search_template
from agl_replay.cli.score import agreement_text
from agl_run.terminal import experiment_argument, read_experiment, store_of


@click.command("align")
@experiment_argument
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("judge.txt"),
    show_default=True,
    help="File for the new template.",
)
@click.option("--optimizer", help="Policy of FILE that writes templates; the judge's own model by default.")
@click.option(
    "--budget", type=click.IntRange(min=1), default=400, show_default=True, help="Most verdicts of the search."
)
@store_option
@pass_manager
def align(
    manager: PluginManager,
    file: Path,
    settings: tuple[str, ...],
    output: Path,
    optimizer: str | None,
    budget: int,
    store_url: str | None,
) -> None:
    """Fit the template of FILE's judge to the ratings that people gave to recorded rollouts.

    Searches with half of the rated tasks, and prints Cohen's kappa between judge and people on the other half, before
    and after, without the rollouts for which the judge gives no score. Writes the new template only if the lower end
    of kappa's interval rose; the exit status is 1 otherwise.
    """
    config, plugins = read_experiment(file, settings, manager=manager)
    url = resolve_url(store_url) if store_url else store_of(config, file)
    folder = file.absolute().parent
    if optimizer is not None and optimizer not in config.policy:
        raise ConfigError(f"--optimizer names the policy {optimizer!r}, which {file} lacks; add [policy.{optimizer}]")
    judge = TemplateJudge(config, folder=folder, manager=plugins)
    parts = divide(with_store(plugins, url, lambda store: rated_rollouts(store, config.experiment.name)))
    old = asyncio.run(judge.measure(judge.template, parts.held))
    searched = len(parts.train) + len(parts.val)
    echo(f"{count_of(searched + len(parts.held), 'rated task')}: {searched} for the search, {len(parts.held)} held out")
    echo(f"before: {agreement_text(*agreements(parts.held, old))}")
    version = search_template(
        judge,
        parts,
        config=config,
        store=url,
        optimizer=optimizer or judge.entry.params["model"],
        budget=budget,
        folder=folder,
        manager=plugins,
    )
    template = with_store(plugins, url, lambda store: _template(store, version))
    if template == judge.template:
        echo("the template stays: the search found nothing better")
        raise SystemExit(1)
    new = asyncio.run(judge.measure(template, parts.held))
    before, after = agreements(parts.held, old, new)
    if missing := len(parts.held) - after.rated:
        echo(f"the judge gave no score for {count_of(missing, 'held-out rollout')}; both measurements leave these out")
        echo(f"before, of the others: {agreement_text(before)}")
    echo(f"after: {agreement_text(after)}")
    if after.low <= before.low:
        echo("the template stays: the lower end of the interval did not rise")
        raise SystemExit(1)
    output.write_text(template, encoding="utf-8")
    echo(f"wrote {output}; for its history: agl resources show {RESOURCE}@{version}")


async def _template(store: Store, version: str) -> str:
    found = (await store.resource(RESOURCE, version)).resource
    assert isinstance(found, PromptTemplate)  # noqa: S101  # as the search began with one
    return found.template
