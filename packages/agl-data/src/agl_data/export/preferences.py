"""Makes preference pairs from recorded runs: each task's best run against its worst, as text for training."""

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from agl.contracts import RolloutQuery, Store
from agl.episodes import EpisodeOptions, build_episode
from agl.stores import read_recordings
from agl_data.export.dialogues import begins_alike, dialogues
from agl_data.export.pictures import blobs_of, with_payloads
from agl_inspect.exports import Exported, Losses
from agl_inspect.terminal.query import deciding

GAP = 1e-6
"""Smallest difference between two rewards that makes a preference, in the unit of the reward."""


class Ends(NamedTuple):
    """The best and the worst run of a task, each as a reward and a rollout id."""

    best: tuple[float, str]
    worst: tuple[float, str]

    @property
    def is_pair(self) -> bool:
        """True if the two rewards differ enough to make a preference."""
        return self.best[0] - self.worst[0] >= GAP


async def recorded(
    store: Store, query: RolloutQuery, agents: str | None, *, min_reward: float | None = None, has_blobs: bool = True
) -> AsyncIterator[Exported]:
    """Yield the rollouts that a query finds, with their episodes.

    Args:
        store: The store.
        query: Chooses the rollouts.
        agents: Regular expression for the names of the agents; an episode rejects the calls of all others.
        min_reward: Smallest reward of a rollout that is yielded; ``None`` for no limit.
        has_blobs: Read the pictures and other inputs of the calls.
    """
    options = EpisodeOptions(processor=None)
    async for recording in read_recordings(store, query, spans="all"):
        attempt = deciding(recording.rollout, recording.attempts)
        episode = build_episode(recording.rollout, attempt, recording.spans, agent_match=agents, options=options)
        if min_reward is None or (episode.reward is not None and episode.reward >= min_reward):
            yield Exported(recording, episode, await blobs_of(store, recording) if has_blobs else {})


async def ends_of(found: AsyncIterable[Exported]) -> dict[str, Ends]:
    """Return the best and the worst run of each task, by group id; among equal rewards the smallest rollout id wins."""
    ends: dict[str, Ends] = {}
    async for item in found:
        rollout, reward = item.episode.rollout, item.episode.reward
        if reward is None:
            continue
        own = (reward, rollout.rollout_id)
        known = ends.get(rollout.group_id, Ends(own, own))
        best = min((known.best, own), key=lambda each: (-each[0], each[1]))
        ends[rollout.group_id] = Ends(best, min(known.worst, own))
    return ends


async def pairs(
    store: Store, query: RolloutQuery, agents: str | None, *, min_reward: float | None, losses: Losses
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield one list per task: a preference pair for each conversation in which the task's best and worst runs differ.

    The list may be empty.

    Args:
        store: The store. It is read twice: for the rewards of all runs, and for the calls of the best and worst runs.
        query: Chooses the runs.
        agents: Regular expression for the names of the agents whose calls count; ``None`` for all.
        min_reward: Smallest reward of the best run for which a task gives pairs; ``None`` for no limit.
        losses: Counts the pictures that the store no longer has.
    """
    ends = await ends_of(recorded(store, query, agents, has_blobs=False))
    for each in ends.values():
        if not each.is_pair or (min_reward is not None and each.best[0] < min_reward):
            yield []
            continue
        both = msgspec.structs.replace(query, ids=[each.best[1], each.worst[1]])
        runs = {item.episode.rollout.rollout_id: item async for item in recorded(store, both, agents)}
        yield list(_lines(runs[each.best[1]], runs[each.worst[1]], losses))


def _lines(best: Exported, worst: Exported, losses: Losses) -> Iterator[dict[str, Any]]:
    """Yield a pair for each conversation in which both runs answer differently after a common prefix.

    Conversations are matched by agent and order.
    """
    others = dialogues(worst.episode, worst.recording.spans)
    for chosen in dialogues(best.episode, best.recording.spans):
        rejected = next((each for each in others if each["agent"] == chosen["agent"]), None)
        if rejected is None:
            continue
        others.remove(rejected)
        start = begins_alike(chosen["messages"], rejected["messages"])
        sides = chosen["messages"][start:], rejected["messages"][start:]
        if not start or not all(map(_has_answer, sides)) or chosen.get("tools") != rejected.get("tools"):
            continue
        yield {
            "prompt": with_payloads(chosen["messages"][:start], best, losses),
            "chosen": with_payloads(sides[0], best, losses),
            "rejected": with_payloads(sides[1], worst, losses),
            **({"tools": chosen["tools"]} if "tools" in chosen else {}),
            "agent": chosen["agent"],
            "rollout_ids": [chosen["rollout_id"], rejected["rollout_id"]],
            "score_chosen": best.episode.reward,
            "score_rejected": worst.episode.reward,
        }


def _has_answer(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message.get("role") == "assistant" for message in messages)
