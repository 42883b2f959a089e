"""``agl why``: explain the outcome of every recorded model call: its training row, or the reason for its rejection."""

import click
from msgspec import to_builtins

from agl.contracts import Store
from agl.episodes import ScoreOptions
from agl.schemas import Episode, Record, Span
from agl_inspect.rollouts.explanations import explain, explain_training
from agl_inspect.rollouts.span_reader import read_episode
from agl_inspect.rollouts.training import TrainingRecord, is_saved, training_of
from agl_inspect.terminal.opening import Reading, complete_rollout, reads_store
from agl_inspect.terminal.output import echo, print_json
from agl_inspect.terminal.query import find


class ShownTraining(Record, frozen=True, kw_only=True):
    """A record of training, and whether the step that it is about was saved."""

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
