"""Describes a rollout in a few lines."""

from agl.schemas import Episode
from agl_inspect.text import visible


def describe_episode(episode: Episode, *, is_trained: bool = True) -> str:
    """Describe a rollout in a few lines: its status, reward and calls, with the reasons of rejected ones."""
    rollout = episode.rollout
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    lines = [f"{rollout.rollout_id}: {rollout.status}, {reward}, {len(episode.rows)} rows"]
    if episode.attempt and episode.attempt.error:
        lines.append(f"  {episode.attempt.error.type}: {episode.attempt.error.message}")
    for call in episode.transitions:
        who = call.agent or "agent"
        prompt, response = len(call.prompt_ids) // 4, len(call.response_ids) // 4
        tokens = f"{prompt} + {response} tokens" if prompt or response else "no token ids"
        fate = f"rejected: {call.reject} {call.detail}".rstrip() if call.reject else f"row {call.branch}"
        if call.reject == "missing_token_ids" and not is_trained:
            fate = "recorded"
        lines.append(f"  {who} turn {call.turn}: {tokens}, {fate}")
    return visible("\n".join(lines))
