"""``agl why``: explain the outcome of every recorded model call: its training row, or the reason for its rejection."""

import click
from msgspec import to_builtins
from msgspec.structs import replace

from agl import PluginManager
from agl.contracts import Store
from agl.episodes import ScoreOptions, build_episode
from agl.schemas import Episode, Json, Record, Span
from agl_inspect.records.rules import rules_of
from agl_inspect.rollouts.explanations import explain, explain_training
from agl_inspect.rollouts.saved_training import is_saved
from agl_inspect.rollouts.span_reader import SpanReader
from agl_inspect.rollouts.training_records import TrainingRecord, training_of
from agl_inspect.terminal.completion import complete_rollout
from agl_inspect.terminal.context import pass_manager
from agl_inspect.terminal.opening import store_option, with_store
from agl_inspect.terminal.output import echo, json_option, print_json
from agl_inspect.terminal.query import deciding, find


class ShownTraining(Record, frozen=True, kw_only=True):
    """A record of training, and whether the step that it is about was saved."""

    record: TrainingRecord
    is_saved: bool


@click.command()
@click.argument("rollout_id", shell_complete=complete_rollout)
@click.option("--agents", help="Regular expression: which agents' calls an algorithm would train.")
@click.option("--policy", help="Which policy's calls an algorithm would train.")
@store_option
@json_option
@pass_manager
def why(
    manager: PluginManager,
    rollout_id: str,
    agents: str | None,
    policy: str | None,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Explain the outcome of every model call of ROLLOUT_ID, and what each step of an algorithm did with it.

    The beginning of an id suffices where it is unique; "latest" is the newest rollout.
    """

    async def load(store: Store) -> tuple[Episode, list[Span], list[ShownTraining], ScoreOptions]:
        rollout = await find(store, rollout_id)
        attempts = await store.attempts(rollout.rollout_id)
        readers = [SpanReader(store, rollout.rollout_id, name) for name in ("", *(one.attempt_id for one in attempts))]
        spans = [_without_text(span) for reader in readers async for span in reader]
        attempt = deciding(rollout, attempts)
        training = [
            ShownTraining(record=record, is_saved=await is_saved(store, rollout.rollout_id, record))
            for record in training_of(spans)
        ]
        rules = await rules_of(store, rollout.experiment)
        episode = build_episode(rollout, attempt, spans, agent_match=agents, policy=policy, options=rules)
        return episode, spans, training, rules.score

    episode, spans, training, scores = with_store(manager, store_url, load)
    lines = explain(episode, spans, scores=scores)
    lines += [line for shown in training for line in explain_training(shown.record, is_saved=shown.is_saved)]
    if as_json:
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


def _without_text(span: Span) -> Span:
    """Drop a call's request and response, which decide nothing and are most of its size."""
    if span.call is None:
        return span
    response: Json = None if span.call.response is None else {}
    return replace(span, call=replace(span.call, request={}, response=response))
