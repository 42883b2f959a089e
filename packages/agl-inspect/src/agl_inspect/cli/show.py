"""``agl show`` prints a rollout's conversation and time line, a resource with its history, or the steps of a run.

``agl why``, or ``agl show --why``, explains the outcome of every recorded model call of a rollout: its training row,
or the reason for its rejection.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
from msgspec import to_builtins

from agl.contracts import SpanQuery, Store
from agl.episodes import ScoreOptions
from agl.errors import NotFoundError
from agl.hints import count_of
from agl.schemas import Attempt, Episode, ErrorInfo, Json, Record, Rollout, Span, to_json
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.records.metrics import RUN, LoggedRun, experiment_step, read_runs, step_line, version_of_step
from agl_inspect.records.names import ORIGIN
from agl_inspect.records.splits import served_facts
from agl_inspect.rollouts.answers import answer_counts, fork_origin
from agl_inspect.rollouts.explanations import explain, explain_training
from agl_inspect.rollouts.span_reader import SpanReader, read_episode
from agl_inspect.rollouts.training import TrainingRecord, is_saved, training_of, uses_of
from agl_inspect.rollouts.tree import ends_of
from agl_inspect.rollouts.turns import Conversation, transitions_of
from agl_inspect.terminal.opening import (
    LATEST,
    Reading,
    complete_experiment,
    complete_rollout,
    reads_store,
)
from agl_inspect.terminal.output import echo, json_line, print_json, when, write_json
from agl_inspect.terminal.pictures import media_of_turn
from agl_inspect.terminal.program import Modes
from agl_inspect.terminal.query import find, find_exact, span_options
from agl_inspect.terminal.talk import Talk
from agl_inspect.text import short
from agl_inspect.versions import ListedVersion, diff_versions, list_versions


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
        readers: The readers of the chosen attempt's spans, and of the spans without an attempt, by the attempt's id.
        is_filtered: Whether options of the command select spans.
        origin: The call from which a fork continues; ``""`` for a rollout that is not a fork.
    """

    rollout: Rollout
    attempts: list[Attempt]
    readers: dict[str, SpanReader]
    is_filtered: bool = False
    origin: str = ""


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
    """Show the conversation of ROLLOUT_ID: messages, tool calls, results, rewards and errors; then its spans in time.

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
    talk = Talk(is_full=is_full)

    async def work(opened: Store) -> None:
        found = await _find(opened, rollout_id, number, chosen)
        if isinstance(found, ShownRollout):
            await (_print_json(found) if store.as_json else _print(opened, found, talk))
        else:
            store.show(found, lambda: _story(found))

    store.read(work)
    if talk.is_cut:
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
    chosen = next((attempt.attempt_id for attempt in attempts if attempt.number == number), rollout.attempt_id)
    if number is not None and all(attempt.number != number for attempt in attempts):
        raise NotFoundError("attempt", str(number), f"the rollout {rollout.rollout_id} has {len(attempts)}")
    readers = {name: SpanReader(store, rollout.rollout_id, name, chosen=chosen_spans) for name in (chosen or "", "")}
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
    for reader in found.readers.values():
        async for span in reader:
            write_json(comma + json_line(span))
            comma = ","
    write_json("]}\n")


async def _print(store: Store, found: ShownRollout, talk: Talk) -> None:
    """Print the rollout and its attempts, then its conversation, and its spans along a time line."""
    rollout = found.rollout
    episode, every, _ = await read_episode(store, rollout, found.attempts)
    spans = await _spans(found, every)
    for line in _rollout(found, episode.reward, talk):
        echo(line)
    if found.origin:
        counts = answer_counts([span.call.model_version for span in spans if span.call is not None])
        answered = f"; answers from the recording: {counts.replayed}, of models: {counts.live}"
        echo(f"fork of {found.origin}{'' if found.is_filtered else answered}")
    if not spans:
        echo("no span fits --span, --agent and --kind" if found.is_filtered else "no spans were recorded")
        return
    attempt_id = next(iter(found.readers))
    uses = uses_of(every) if attempt_id == rollout.attempt_id else {}
    said = Conversation(spans, transitions_of(episode, attempt_id), uses, limit=talk.limit)
    for span in said.order:
        said.add(await found.readers[span.attempt_id].at(span.sequence) if span.call else span)
    for turn in said.turns:
        talk.turn(turn, await media_of_turn(store, turn))
    first, last = ends_of(spans)
    talk.time_line(said.nodes, (last - first) / 1e9)


async def _spans(found: ShownRollout, every: Sequence[Span]) -> list[Span]:
    """Return the spans to show, with calls that lack requests and responses."""
    own = [span for span in every if span.attempt_id in found.readers and not training_of([span])]
    if not found.is_filtered:
        return own
    chosen = {(name, span.sequence) for name, reader in found.readers.items() async for span in reader}
    return [span for span in own if (span.attempt_id, span.sequence) in chosen]


def _rollout(found: ShownRollout, reward: float | None, talk: Talk) -> Iterator[str]:
    """Yield the lines about the rollout and its attempts, without the spans."""
    rollout = found.rollout
    earned = "" if reward is None else f", reward {reward:g}"
    yield f"{rollout.rollout_id}: {rollout.status}, {rollout.mode}, experiment {rollout.experiment or '-'}{earned}"
    yield f"created {when(rollout.created_at)} UTC, group {rollout.group_id or '-'}, task {short(rollout.task, 100)}"
    if rollout.resources:
        yield f"with {', '.join(f'{name}@{version}' for name, version in sorted(rollout.resources.items()))}"
    if facts := served_facts(rollout):
        yield ", ".join(facts)
    if talk.is_full:
        yield f"task: {to_json(rollout.task).decode()}"
    for attempt in found.attempts:
        seconds = max(0.0, attempt.finished_at - attempt.started_at)
        took = f", {seconds:.2f} s" if attempt.finished_at else ""
        yield f"attempt {attempt.number}: {attempt.status}, by {attempt.worker}{took}{_error(attempt.error)}"
        if attempt.error:
            talk.error(attempt.error)


def _error(error: ErrorInfo | None) -> str:
    return f": {error.type}: {short(error.message, 200)}" if error else ""
