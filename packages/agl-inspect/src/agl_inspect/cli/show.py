"""``agl show`` prints a rollout as a tree of its spans, a resource with its history, or the steps of a run.

``agl why``, or ``agl show --why``, explains the outcome of every recorded model call of a rollout: its training row,
or the reason for its rejection.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import click
from msgspec import to_builtins

from agl import semconv
from agl.contracts import SpanQuery, Store
from agl.episodes import ScoreOptions
from agl.errors import NotFoundError
from agl.hints import count_of
from agl.schemas import Attempt, Episode, ErrorInfo, Json, Record, Reward, Rollout, Span, to_json
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.records.metrics import RUN, LoggedRun, experiment_step, read_runs, step_line, version_of_step
from agl_inspect.records.names import ORIGIN
from agl_inspect.records.splits import served_facts
from agl_inspect.rollouts.answers import answer_counts, fork_origin
from agl_inspect.rollouts.conversations import ShownMessages, contents_of
from agl_inspect.rollouts.explanations import call_facts, explain, explain_training
from agl_inspect.rollouts.span_reader import SpanReader, in_tree, read_episode
from agl_inspect.rollouts.training import TrainingRecord, is_saved, training_of
from agl_inspect.terminal.opening import (
    LATEST,
    Reading,
    complete_experiment,
    complete_rollout,
    reads_store,
)
from agl_inspect.terminal.output import echo, json_line, print_json, when, write_json
from agl_inspect.terminal.program import Modes
from agl_inspect.terminal.query import find, find_exact, span_options
from agl_inspect.text import short
from agl_inspect.versions import ListedVersion, diff_versions, list_versions

CUT = 200
"""The most characters of a text that are shown without ``--full``."""

TRACEBACK_LINES = 8
"""The most lines of a traceback that are shown without ``--full``; they are its last ones, with the error."""

_ON_THE_LINE = ("says", "returned")
"""Labels of texts whose beginning is already in the line of their span."""


class Contents:
    """Formats the contents of spans, one span after the other; messages that were shown before are not repeated.

    Args:
        is_full: True to show every text whole.

    Attributes:
        is_full: Whether every text is shown whole.
        is_cut: Whether anything was shortened so far.
    """

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full
        self._shown = ShownMessages()
        self.is_cut = False

    def of(self, span: Span) -> list[str]:
        """Return the lines with the span's contents, which follow the line of the span."""
        repeated, texts = contents_of(span, self._shown)
        lines = [f"({count_of(repeated, 'message')} as above)"] if repeated else []
        for role, label, value in texts:
            if role == "error":
                lines += self.traceback(str(value)) if self.is_full else []
            elif self.is_full or label not in _ON_THE_LINE:
                lines += self.text(label, value)
        return lines

    def of_error(self, error: ErrorInfo) -> list[str]:
        """Return the lines about an attempt's error: the traceback and, if ``is_full``, a long message."""
        message = self.text("message", error.message) if self.is_full and len(error.message) > CUT else []
        return [*self.traceback(error.traceback), *message]

    def text(self, label: str, value: Any) -> list[str]:
        """Return a text with its label: all lines if ``is_full``, else its beginning on one line."""
        text = value if isinstance(value, str) else to_json(value).decode()
        if self.is_full:
            first, *rest = text.splitlines() or [""]
            return [f"{label}: {first}", *(f"  {line}" for line in rest)]
        text = " ".join(text.split())
        if len(text) <= CUT:
            return [f"{label}: {text}"]
        self.is_cut = True
        return [f"{label}: {text[:CUT]}… ({len(text)} characters)"]

    def traceback(self, text: str) -> list[str]:
        """Return the lines of a traceback: all of them if ``is_full``, else only the last ones."""
        lines = text.rstrip().splitlines()
        if self.is_full:
            return lines
        left_out = max(0, len(lines) - TRACEBACK_LINES)
        kept = [line if len(line) <= CUT else f"{line[:CUT]}…" for line in lines[left_out:]]
        self.is_cut = self.is_cut or kept != lines
        return [f"… ({count_of(left_out, 'line')} before)", *kept] if left_out else kept


async def read_steps(store: Store, experiment: str | None, run: int | None) -> list[dict[str, Json]]:
    """Read the steps of an experiment in the order in which they ended, as JSON objects.

    Args:
        store: The store.
        experiment: The experiment's name; ``None`` for the only experiment that has metrics.
        run: The run's number, 0 for all runs, ``None`` for the newest run.

    Raises:
        ConfigError: The experiment or run does not exist or has no metrics; the message names those that have some.
    """
    runs = await read_runs(store, (experiment,) if experiment else (), run, None, ())
    newest = await store.resources()
    versions = {version.version for each in newest for version in await store.resources(each.name)}
    return [step for each in runs for step in _steps(each, versions)]


def _steps(logged: LoggedRun, versions: set[str]) -> Iterator[dict[str, Json]]:
    places: dict[tuple[str, int], int] = {}
    numbers: dict[tuple[str, int], dict[str, float]] = {}
    for metric in logged.found:
        key = (metric.algorithm, metric.step)
        places[key] = experiment_step(metric)
        numbers.setdefault(key, {})[metric.name] = metric.value
    for name, step in sorted(numbers, key=lambda key: (places[key], key[0] == VALIDATE, key)):
        found = numbers[name, step]
        metrics = {key: found[key] for key in sorted(found, key=lambda key: (key != "reward", key))}
        version = version_of_step(logged.experiment, logged.run, name, step)
        line = step_line(name, step, metrics=metrics, has_published=version in versions)
        yield {
            "experiment": logged.experiment,
            "run": logged.run,
            "algorithm": name,
            "step": step,
            "experiment_step": places[name, step],
            "line": line,
            "metrics": dict(metrics),
        }


@dataclass(frozen=True, kw_only=True)
class ShownRollout:
    """A rollout to show.

    Attributes:
        readers: The readers of the chosen attempt's spans, and of the spans without an attempt.
        is_filtered: Whether options of the command select spans.
        origin: The call from which a fork continues; ``""`` for a rollout that is not a fork.
    """

    rollout: Rollout
    attempts: list[Attempt]
    readers: tuple[SpanReader, ...]
    is_filtered: bool = False
    origin: str = ""


class ShownSpan(Record, frozen=True, kw_only=True):
    """A span reduced to its position in the tree and the text of its line.

    Attributes:
        reader: Index of the reader that can read the whole span.
    """

    span_id: str
    parent_id: str | None
    start_ns: int
    sequence: int
    line: str
    reader: int = 0


class ShownTraining(Record, frozen=True, kw_only=True):
    """A training record of a rollout, and whether the step that made it was saved."""

    record: TrainingRecord
    is_saved: bool


@click.command()
@click.argument("rollout_id", shell_complete=complete_rollout)
@click.option("--agents", help="Regular expression: agents whose calls an algorithm would train.")
@click.option("--policy", help="Policy whose calls an algorithm would train.")
@reads_store
def why(store: Reading, rollout_id: str, agents: str | None, policy: str | None) -> None:
    """Explain the outcome of every model call of ROLLOUT_ID, and what each step of an algorithm did with it.

    A unique beginning of an id is enough; "latest" is the newest rollout.
    """

    async def load(store: Store) -> tuple[Episode, list[Span], list[ShownTraining], ScoreOptions]:
        rollout = await find(store, rollout_id)
        attempts = await store.attempts(rollout.rollout_id)
        episode, spans, scores = await read_episode(store, rollout, attempts, agent_match=agents, policy=policy)
        training = [
            ShownTraining(record=record, is_saved=await is_saved(store, rollout.rollout_id, record))
            for record in training_of(spans)
        ]
        return episode, spans, training, scores

    episode, spans, training, scores = store.read(load)
    lines = explain(episode, spans, scores=scores)
    lines += [line for shown in training for line in explain_training(shown.record, is_saved=shown.is_saved)]
    if store.as_json:
        calls = [
            {"span_id": call.span_id, "agent": call.agent, "turn": call.turn, "row": call.branch, "start": call.start}
            | {"reject": call.reject, "detail": call.detail, "reward": call.reward}
            for call in episode.transitions
        ]
        found = {"rollout_id": episode.rollout.rollout_id, "reward": episode.reward, "rewards": episode.rewards}
        steps = [{**to_builtins(shown.record), "is_saved": shown.is_saved} for shown in training]
        print_json({**found, "calls": calls, "training": steps, "text": lines})
        return
    for line in lines:
        echo(line)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the names of experiments if ``--steps`` is given, else the ids of rollouts."""
    complete = complete_experiment if ctx.params.get("has_steps") else complete_rollout
    return complete(ctx, param, incomplete)


@click.command(cls=Modes, modes={"--why": why})
@click.argument("rollout_id", required=False, shell_complete=_complete)
@click.option("--steps", "has_steps", is_flag=True, help="Show the steps of an experiment's run, one per line.")
@click.option(
    "--run",
    type=RUN,
    metavar="N|all",
    help="With --steps: number of the run (1 is the first), or all; by default the newest.",
)
@click.option(
    "--attempt",
    "number",
    type=click.IntRange(min=1),
    help="Attempt to show; by default the one that decided the outcome, or is running.",
)
@click.option("--full", "is_full", is_flag=True, help="Show every text and traceback in full.")
@span_options
@reads_store
def show(
    store: Reading,
    rollout_id: str | None,
    has_steps: bool,
    run: int | None,
    number: int | None,
    is_full: bool,
    chosen: SpanQuery | None,
) -> None:
    """Show ROLLOUT_ID as a tree of its spans, with messages, tool calls, results and the traceback of a failure.

    A unique beginning of an id is enough; "latest" is the newest rollout. Given the name of a resource instead, show
    its versions with their scores and reasons, and the changes since the first one.

    With --steps, give the name of an experiment instead: the steps of its newest run are shown as agl run printed them.
    The name may be left out if the store has only one experiment.
    """
    if has_steps:
        _refuse_options(number, chosen, is_full=is_full)
        steps = store.read(lambda opened: read_steps(opened, rollout_id, run))
        has_runs = len({step["run"] for step in steps}) > 1
        store.show(steps, lambda: (f"run {s['run']} {s['line']}" if has_runs else str(s["line"]) for s in steps))
        return
    if rollout_id is None:
        raise click.UsageError("give the id of a rollout, latest, or the name of a resource; agl runs lists rollouts")
    if run is not None:
        raise click.UsageError("--run goes with --steps; a rollout is named by its id")
    contents = Contents(is_full=is_full)

    async def work(opened: Store) -> None:
        found = await _find(opened, rollout_id, number, chosen)
        if isinstance(found, ShownRollout):
            await (_print_json(found) if store.as_json else _print(found, contents))
        else:
            store.show(found, lambda: _story(found))

    store.read(work)
    if contents.is_cut:
        echo("… texts are cut; --full shows them whole")


def _refuse_options(number: int | None, chosen: SpanQuery | None, *, is_full: bool) -> None:
    """Raise :class:`click.UsageError` if an option for rollouts is given together with ``--steps``."""
    spans = {"--span": chosen.contains, "--agent": chosen.agent, "--kind": chosen.kind} if chosen else {}
    option = next((name for name, value in {"--attempt": number, "--full": is_full, **spans}.items() if value), "")
    if option:
        raise click.UsageError(f"{option} is for a rollout; leave it out, or --steps")


async def _find(
    store: Store, name: str, number: int | None, chosen: SpanQuery | None
) -> "ShownRollout | list[ListedVersion]":
    if name != LATEST and await find_exact(store, name) is None and await store.resources(name):
        return await list_versions(store, name, has_candidates=True)
    return await _load(store, name, number, chosen)


def _story(versions: Sequence[ListedVersion]) -> Iterator[str]:
    """Describe the versions of a resource with their parents and scores, then the diff from the first to the last."""
    published = [item for item in versions if not item.is_only_tried] or list(versions)
    name = published[0].version.name
    candidates = count_of(len(versions) - len(published), "candidate")
    yield f"{name}: {count_of(len(published), 'published version')}, {candidates}"
    for item in versions:
        version = item.version
        is_made = version.algorithm or item.origin == ORIGIN
        made = f"by {item.origin}" if is_made else f"given by {item.origin}" if item.origin else "given"
        names = f", labels {', '.join(item.labels)}" if item.labels else ""
        tried = " (candidate)" if version.metadata.get("candidate") else ""
        score = f", score {item.score}" if item.score else ""
        why = f"; {item.why}" if item.why else ""
        trials = f"; trials: {item.tried}" if item.tried else ""
        yield f"- {version.version}{tried} from {version.parent or '-'}, {made}{score}{names}{why}{trials}"
    yield from diff_versions(published[0].version, published[-1].version)


async def _load(store: Store, rollout_id: str, number: int | None, chosen_spans: SpanQuery | None) -> ShownRollout:
    rollout = await find(store, rollout_id)
    attempts = await store.attempts(rollout.rollout_id)
    chosen = next((attempt.attempt_id for attempt in attempts if attempt.number == number), None)
    if number is not None and chosen is None:
        raise NotFoundError("attempt", str(number), f"the rollout {rollout.rollout_id} has {len(attempts)}")
    ids = (chosen, "")
    readers = tuple(SpanReader(store, rollout.rollout_id, attempt_id, chosen=chosen_spans) for attempt_id in ids)
    return ShownRollout(
        rollout=rollout,
        attempts=attempts,
        readers=readers,
        is_filtered=chosen_spans is not None,
        origin=await fork_origin(store, rollout),
    )


async def _print_json(found: ShownRollout) -> None:
    """Print the rollout as one line of JSON, reading the spans in small pages."""
    write_json(f'{{"rollout":{json_line(found.rollout)},"attempts":{json_line(found.attempts)},"spans":[')
    comma = ""
    for reader in found.readers:
        async for span in reader:
            write_json(comma + json_line(span))
            comma = ","
    write_json("]}\n")


async def _print(found: ShownRollout, contents: Contents) -> None:
    """Print the rollout and its attempts, then its spans as a tree."""
    for line in _rollout(found, contents):
        echo(line)
    spans: list[ShownSpan] = []
    versions: list[str] = []
    for index, reader in enumerate(found.readers):
        async for span in reader:
            spans.append(shown(span, index))
            if span.call is not None:
                versions.append(span.call.model_version)
    if found.origin:
        counts = answer_counts(versions)
        answered = f"; answers from the recording: {counts.replayed}, of models: {counts.live}"
        echo(f"fork of {found.origin}{'' if found.is_filtered else answered}")
    if not spans:
        echo("no span fits --span, --agent and --kind" if found.is_filtered else "no spans were recorded")
    for depth, span, is_circular in in_tree(spans):
        indent = "  " * depth
        echo(f"{indent}- {span.line}{' (its parents form a circle)' if is_circular else ''}")
        if not is_circular:
            recorded = await found.readers[span.reader].at(span.sequence)
            for line in contents.of(recorded):
                echo(f"{indent}    {line}")


def _rollout(found: ShownRollout, contents: Contents) -> Iterator[str]:
    """Yield the lines about the rollout and its attempts, without the spans."""
    rollout = found.rollout
    yield f"{rollout.rollout_id}: {rollout.status}, {rollout.mode}, experiment {rollout.experiment or '-'}"
    yield f"created {when(rollout.created_at)} UTC, group {rollout.group_id or '-'}, task {short(rollout.task, 100)}"
    if rollout.resources:
        yield f"with {', '.join(f'{name}@{version}' for name, version in sorted(rollout.resources.items()))}"
    if facts := served_facts(rollout):
        yield ", ".join(facts)
    if contents.is_full:
        yield from contents.text("task", rollout.task)
    for attempt in found.attempts:
        seconds = max(0.0, attempt.finished_at - attempt.started_at)
        took = f", {seconds:.2f} s" if attempt.finished_at else ""
        yield f"attempt {attempt.number}: {attempt.status}, by {attempt.worker}{took}{_error(attempt.error)}"
        yield from (f"    {line}" for line in (contents.of_error(attempt.error) if attempt.error else ()))


def shown(span: Span, reader: int = 0) -> ShownSpan:
    """Reduce a span to what the tree shows."""
    return ShownSpan(
        span_id=span.span_id,
        parent_id=span.parent_id,
        start_ns=span.start_ns,
        sequence=span.sequence,
        line=line_of(span),
        reader=reader,
    )


def line_of(span: Span) -> str:
    """Format a span on one line."""
    parts = [span.name]
    if span.reward is not None:
        parts.append(_reward(span.reward))
    parts += call_facts(span)
    parts += [f"{key} {span.attributes[name]}" for key, name in _SHOWN.items() if name in span.attributes]
    for word, name in _SAMPLING.items():
        if asked := cast("list[str]", span.attributes.get(name, [])):
            parts.append(f"{word} {' and '.join(asked)}")
    if span.end_ns > span.start_ns:
        parts.append(f"{(span.end_ns - span.start_ns) / 1e9:.3f} s")
    if span.status == "error":
        parts.append(f"ERROR {span.attributes.get(semconv.ERROR_TYPE, '')} {span.status_message}".rstrip())
    if span.is_late:
        parts.append("late")
    return short(", ".join(parts), 240)


_SHOWN = {
    "agent": semconv.AGENT_NAME,
    "tool": semconv.TOOL_NAME,
    "node": semconv.NODE,
    "to": semconv.HANDOFF_TARGET,
    "says": semconv.OBSERVATION_CONTENT,
    "returned": semconv.OUTPUT,
}

_SAMPLING = {"sampled without": semconv.SAMPLING_OVERRIDDEN, "sampled with": semconv.SAMPLING_KEPT}
"""Span attributes that list sampling parameters of a request, with the words for them.

Some parameters were overridden, because a policy in training must sample from its full distribution; others were kept.
"""


def _reward(reward: Reward) -> str:
    value = "None" if reward.value is None else f"{reward.value:g}"
    dimensions = "".join(f" {name}={part}" for name, part in reward.dimensions.items())
    about = "" if reward.scope == "rollout" else f" about this {reward.scope}"
    name = f" {reward.name}" if reward.name else ""
    return f"reward{name} {value}{dimensions} by {reward.source}{about}"


def _error(error: ErrorInfo | None) -> str:
    return f": {error.type}: {short(error.message, 200)}" if error else ""
