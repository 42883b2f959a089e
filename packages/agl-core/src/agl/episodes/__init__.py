"""Turns recorded spans into training data: the call forest, transitions, rows, scores and credit."""

from agl._actors import Enclosing, Who
from agl.episodes._agreement import Agreement, Verdict, find_disagreement
from agl.episodes._credit import EpisodeCredit
from agl.episodes._forest import Forest, build_forest
from agl.episodes._rejects import Reject
from agl.episodes._scores import Score, ScoreOptions, call_rewards, counts, episode_reward, score
from agl.episodes._timeline import Timeline, chronological, final_text, is_answered
from agl.episodes._transitions import (
    EpisodeOptions,
    admitted_rewards,
    build_episode,
    make_rows,
    recorded_rewards,
)

__all__ = [
    "Agreement",
    "Enclosing",
    "EpisodeCredit",
    "EpisodeOptions",
    "Forest",
    "Reject",
    "Score",
    "ScoreOptions",
    "Timeline",
    "Verdict",
    "Who",
    "admitted_rewards",
    "build_episode",
    "build_forest",
    "call_rewards",
    "chronological",
    "counts",
    "episode_reward",
    "final_text",
    "find_disagreement",
    "is_answered",
    "make_rows",
    "recorded_rewards",
    "score",
]
