"""Preference pairs of recorded runs: of each task the best run against the worst one, as text to train from."""

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from agl.contracts import RolloutQuery, Store
from agl.episodes import build_episode
from agl.schemas import Episode
from agl.stores import read_recordings
from agl_data.export.dialogues import begins_alike, dialogues
from agl_inspect.exports import Exported
from agl_inspect.terminal.query import deciding

GAP = 1e-6
"""Least difference of two rewards that is a preference, in the unit of the reward."""


class Ends(NamedTuple):
    """The best and the worst run of a task: reward and rollout id of each."""

    best: tuple[float, str]
    worst: tuple[float, str]

    @property
    def is_pair(self) -> bool:
        """True if the rewards of the two differ enough to be a preference."""
        return self.best[0] - self.worst[0] >= GAP


async def recorded(store: Store, query: RolloutQuery, agents: str | None) -> AsyncIterator[Exported]:
    """Yield the rollouts that a query finds; calls of agents whose names do not fit are rejected in their episodes."""
    async for recording in read_recordings(store, query, spans="all"):
        attempt = deciding(recording.rollout, recording.attempts)
        yield Exported(recording, build_episode(recording.rollout, attempt, recording.spans, agent_match=agents))


def is_good(episode: Episode, min_reward: float | None) -> bool:
    """Return true for an episode with at least the reward that was asked for."""
    return min_reward is None or (episode.reward is not None and episode.reward >= min_reward)


async def ends_of(found: AsyncIterable[Exported]) -> dict[str, Ends]:
    """Return the best and the worst run of each task by its group; of equal rewards the earlier run counts."""
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
    store: Store, query: RolloutQuery, agents: str | None, *, min_reward: float | None
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the pairs of each task, one for each conversation in which its best and worst run differ; perhaps none.

    Args:
        store: The store, which is read twice: for the rewards, and for the calls of the runs in pairs.
        query: The runs.
        agents: Regular expression of the agents whose calls count.
        min_reward: The least reward of a best run; ``None`` for any.
    """
    ends = await ends_of(recorded(store, query, agents))
    for each in ends.values():
        if not each.is_pair or (min_reward is not None and each.best[0] < min_reward):
            yield []
            continue
        both = msgspec.structs.replace(query, ids=[each.best[1], each.worst[1]])
        runs = {item.episode.rollout.rollout_id: item async for item in recorded(store, both, agents)}
        yield list(_lines(runs[each.best[1]], runs[each.worst[1]]))


def _lines(best: Exported, worst: Exported) -> Iterator[dict[str, Any]]:
    """Yield a line for each conversation that both runs have, by agent and in order, from where they differ."""
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
            "prompt": chosen["messages"][:start],
            "chosen": sides[0],
            "rejected": sides[1],
            **({"tools": chosen["tools"]} if "tools" in chosen else {}),
            "agent": chosen["agent"],
            "rollout_ids": [chosen["rollout_id"], rejected["rollout_id"]],
            "score_chosen": best.episode.reward,
            "score_rejected": worst.episode.reward,
        }


def _has_answer(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message.get("role") == "assistant" for message in messages)
