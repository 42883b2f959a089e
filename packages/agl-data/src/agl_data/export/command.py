"""``agl data export``: writes rollouts as JSON lines, prompts as text, JSON or Python constants, weights as files."""

import pprint
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from agl import PluginManager
from agl.contracts import RolloutQuery, SpanQuery, Store
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import (
    PromptTemplate,
    ResourceVersion,
    Row,
    Transition,
    to_json,
    unpack_floats,
    unpack_ids,
)
from agl.stores import read_recordings
from agl_data.export.dialogues import dialogues
from agl_data.export.formats import ExportCommand, FormatName, export_with_plugin
from agl_data.export.models import OF_WEIGHTS, model_card, write_model
from agl_data.export.pictures import with_payloads
from agl_data.export.preferences import pairs, recorded
from agl_data.export.target import STDOUT, print_losses, target_of
from agl_inspect.exports import Exported, Losses
from agl_inspect.rollouts.span_reader import CHOSEN_PAGE, SpanReader
from agl_inspect.terminal.opening import complete_rollout, pass_manager, store_option, with_store
from agl_inspect.terminal.query import check_experiment, filter_options, find_ids, make_query, span_options
from agl_inspect.versions import ShownVersion, resource_text, shown

FORMATS = ("messages", "dpo", "transitions", "rows", "spans", "text", "json", "python", "model", "gguf")


@click.command(cls=ExportCommand)
@click.argument("rollout_ids", nargs=-1, metavar="[IDS]...", shell_complete=complete_rollout)
@click.option(
    "--format",
    "form",
    type=FormatName(FORMATS),
    metavar="FORMAT",
    default="messages",
    show_default=True,
    help="messages: OpenAI chat dialogues, as fine-tuning reads them; dpo: of each task the best run against the worst "
    "one, as pairs of chat messages; transitions: one model call a line; "
    "rows: one training row a line; spans: everything, as recorded. "
    "Of a resource: text, json, or python for a constant; model: the files of trained weights; gguf: a file for "
    "llama.cpp. Plugins add others, such as those of agl-data for other trainers and tools: --help lists them at its "
    "end.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="File to write, - or by default standard output; for weights, the directory or the .gguf file to create.",
)
@click.option(
    "--min-reward", type=float, help="Only rollouts with at least this reward; for dpo, this limits the better one."
)
@click.option("--agents", help="Only calls of agents that match this regular expression.")
@store_option
@filter_options
@span_options
@pass_manager
def export(
    manager: PluginManager,
    rollout_ids: tuple[str, ...],
    form: str,
    output: Path | None,
    min_reward: float | None,
    agents: str | None,
    store_url: str | None,
    experiment: str | None,
    status: tuple[str, ...],
    mode: str | None,
    chosen: SpanQuery | None,
) -> None:
    """Write rollouts as JSON lines.

    IDS are ids, unique beginnings of ids, or latest; without any, all rollouts that match the filters are written.

    --span, --agent and --kind select the spans that --format spans writes, from the deciding attempts. With --format
    text, json, python, model, merged or gguf, IDS are resources, NAME or NAME@VERSION, where VERSION may be a label; by
    default the present version is written, see agl resources list.
    """
    if form in (*_OF_RESOURCES, *OF_WEIGHTS):
        _export_resources(manager, store_url, rollout_ids, form, output)
        return
    is_parquet = form not in FORMATS and ".parquet" in manager.command(f"export {form}").summary
    if output is not None and output.suffix.lower() == ".parquet" and not is_parquet:
        raise ConfigError(
            f"--format {form} writes JSON lines, and {str(output)!r} says Parquet; name an --output that ends in "
            ".jsonl. Parquet comes from --format trl and verl, and from agl data archive, whose tables pandas reads"
        )
    query = make_query(experiment, status, mode, limit=100)
    if chosen is not None and (form != "spans" or min_reward is not None or agents is not None):
        raise ConfigError(
            "--span, --agent and --kind choose spans: pass --format spans, without --min-reward, --agents"
        )

    async def work(store: Store) -> int:
        count = 0
        await check_experiment(store, experiment)
        named = msgspec.structs.replace(query, ids=await find_ids(store, rollout_ids))
        if form not in FORMATS:
            return await export_with_plugin(
                manager, store, named, form=form, output=output, agents=agents, min_reward=min_reward
            )
        losses = Losses()
        with target_of(output, losses) as target:
            if chosen is not None:
                return await _write_spans(store, named, chosen, target)
            if form == "dpo":
                found = pairs(store, named, agents, min_reward=min_reward, losses=losses)
                count = await _write_pairs(found, target)
            else:
                has_blobs = form == "messages"
                async for item in recorded(store, named, agents, min_reward=min_reward, has_blobs=has_blobs):
                    for line in _LINES[form](item, losses):
                        target.write(to_json(line) + b"\n")
                        count += 1
        print_losses(losses, form)
        return count

    count = with_store(manager, store_url, work)
    written = count_of(count, "line" if form in FORMATS else "record")
    click.echo(f"{written} of {form} written to {_shown(output)}", err=True)


def _export_resources(
    manager: PluginManager, store_url: str | None, names: tuple[str, ...], form: str, output: Path | None
) -> None:
    if not names:
        raise ConfigError(
            f"--format {form} writes a resource; name one, such as: agl data export my_prompt --format {form}"
        )

    if form in OF_WEIGHTS and len(names) > 1:
        raise ConfigError(f"--format {form} writes one model, and {len(names)} resources are named; name one")

    async def work(store: Store) -> tuple[list[ShownVersion], str]:
        pairs = [name.partition("@") for name in names]
        found = [await shown(store, name, version or None) for name, _, version in pairs]
        return found, await model_card(store, found[0]) if form in OF_WEIGHTS else ""

    found, card = with_store(manager, store_url, work)
    versions = [each.version for each in found]
    for each in found:
        if each.chosen:
            click.echo(f"no version was named: {each.version.name}@{each.version.version} is {each.chosen}", err=True)
    if form in OF_WEIGHTS:
        click.echo(write_model(manager, versions[0], card, output, form=form), err=True)
        return
    with target_of(output) as target:
        for version in versions:
            target.write(_OF_RESOURCES[form](version).encode() + b"\n")
    click.echo(", ".join(f"{v.name}@{v.version}" for v in versions) + f" written to {_shown(output)}", err=True)


def _shown(output: Path | None) -> str:
    return "stdout" if output is None or output == STDOUT else str(output)


def _as_python(version: ResourceVersion) -> str:
    """Return a version's value as a Python assignment, under a comment with its name and version."""
    constant = re.sub(r"\W", "_", version.name).upper()
    resource = version.resource
    value: Any = resource.template if isinstance(resource, PromptTemplate) else msgspec.to_builtins(resource)
    constant = f"_{constant}" if constant[:1].isdigit() else constant
    return f"# {version.name}@{version.version}\n{constant} = {pprint.pformat(value, width=100, sort_dicts=False)}"


_OF_RESOURCES: dict[str, Callable[[ResourceVersion], str]] = {
    "text": lambda version: resource_text(version.resource),
    "json": lambda version: to_json(version).decode(),
    "python": _as_python,
}


async def _write_spans(store: Store, query: RolloutQuery, spans: SpanQuery, target: BinaryIO) -> int:
    """Write the spans that match, holding a few pages of them in memory; returns the number of spans written."""
    count = 0
    first = msgspec.structs.replace(spans, limit=CHOSEN_PAGE)
    async for recording in read_recordings(store, query, spans=first):
        target.writelines(to_json(span) + b"\n" for span in recording.spans)
        count += len(recording.spans)
        if not recording.is_whole:
            reader = SpanReader(store, recording.rollout.rollout_id, spans.attempt_id, chosen=spans)
            async for span in reader.behind(recording.spans[-1].sequence):
                target.write(to_json(span) + b"\n")
                count += 1
    return count


async def _write_pairs(found: AsyncIterator[list[dict[str, Any]]], target: BinaryIO) -> int:
    """Write preference pairs, and print the number of tasks without a pair; returns the number of pairs."""
    count = empty = 0
    async for lines in found:
        target.writelines(to_json(line) + b"\n" for line in lines)
        count, empty = count + len(lines), empty + int(not lines)
    if empty:
        click.echo(
            f"{empty} {'task gives' if empty == 1 else 'tasks give'} no pair: fewer than two runs with a reward, equal "
            "rewards, the best one below --min-reward, or conversations without a common beginning",
            err=True,
        )
    return count


def _plain(record: Transition | Row) -> dict[str, Any]:
    """Convert a record to a dict, with packed token ids, masks and numbers as lists."""
    unpack: dict[str, Callable[[bytes], list[Any]]] = {"mask": list, "logprobs": unpack_floats}
    unpack |= {"advantages": unpack_floats}
    fields = msgspec.structs.asdict(record)
    return {
        name: unpack.get(name, unpack_ids)(value) if isinstance(value, bytes) else value
        for name, value in fields.items()
    }


def _dialogues(item: Exported, losses: Losses) -> Iterator[dict[str, Any]]:
    for line in dialogues(item.episode, item.recording.spans):
        yield {**line, "messages": with_payloads(line["messages"], item, losses)}


_LINES: dict[str, Callable[[Exported, Losses], Iterable[Any]]] = {
    "messages": _dialogues,
    "transitions": lambda item, _: (
        {**_plain(call), "episode_reward": item.episode.reward} for call in item.episode.transitions
    ),
    "rows": lambda item, _: ({**_plain(row), "reward": item.episode.reward} for row in item.episode.rows),
    "spans": lambda item, _: item.recording.spans,
}
