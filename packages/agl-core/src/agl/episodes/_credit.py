"""Credit assignment ``episode``: every model call gets the episode's return.

The values are returns, not advantages. An algorithm's estimator compares values with the same ``baseline`` key, and
counts each rollout once in its statistics. An episode with calls to train on but without a reward is refused: the
experiment's setting for missing rewards should have been applied before.
"""

from collections.abc import Sequence

from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode


class EpisodeCredit:
    """Every call gets the episode's return: the identical assignment of the Agent Lightning paper (section 3.3).

    The baseline key is the group: rollouts of one task are compared.
    """

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """One list per episode; raises :class:`ConfigError` for a trained episode without a reward."""
        return [_assign(episode) for episode in group]


def _assign(episode: Episode) -> list[CallCredit]:
    # A rejected call reaches no row, so a number for it would be used by nobody.
    live = [call for call in episode.transitions if not call.reject]
    if not live:
        return []
    if episode.reward is None:
        raise ConfigError(
            f"rollout {episode.rollout.rollout_id} has model calls to train on and no reward; return or emit one, add "
            "a reward emitter, or let the experiment drop or penalise rollouts without a reward"
        )
    # A rollout without a group is compared only with itself, so an estimator gives it no advantage.
    baseline = episode.rollout.group_id or episode.rollout.rollout_id
    return [CallCredit(span_id=call.span_id, value=episode.reward, baseline=baseline) for call in live]
