"""Helpers that all credits of this package share: an episode's training calls, group, players and reward."""

from collections.abc import Sequence

from agl.errors import ConfigError
from agl.schemas import Episode, Transition


def live_calls(episode: Episode) -> list[Transition]:
    """Return the calls that train, in order of time."""
    return [call for call in episode.transitions if not call.reject]


def group_of(episode: Episode) -> str:
    """Return the id of the episode's group; a rollout without one is alone in a group, named by the rollout's id."""
    return episode.rollout.group_id or episode.rollout.rollout_id


def players_of(episode: Episode) -> tuple[str, ...]:
    """Return the names of the agents whose calls train, sorted."""
    return tuple(sorted({call.agent for call in live_calls(episode)}))


def return_of(episode: Episode) -> float:
    """Return the episode's reward; raises :class:`ConfigError` if there is none."""
    return final_of(episode, has_other=False)


def final_of(episode: Episode, *, has_other: bool) -> float:
    """Return the episode's reward; without one, return 0.0 if ``has_other`` says that other rewards were recorded.

    Raises:
        ConfigError: The episode has no reward, and ``has_other`` is false.
    """
    if episode.reward is not None:
        return episode.reward
    if has_other:
        return 0.0
    raise ConfigError(
        f"rollout {episode.rollout.rollout_id} has model calls to train on and no reward; return or emit one, add a "
        "reward emitter, or let the experiment drop or penalise rollouts without a reward"
    )


def by_group(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    """Return the episodes of each group, by group id, in the order in which the groups first appear."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(group_of(episode), []).append(episode)
    return groups
