"""Hierarchical credit: compares an episode with its siblings, and a step with other steps in the same state.

Paper: Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training" (GiGPO, arXiv 2505.10978),
section 4, equations 3, 7 and 8. R(tau) is the sum of an episode's rewards, including those of its turns; G_t is its
discounted return from step t on (as in the credit ``turn``; the paper's R_t of equation 5); s_t is the step's state:

    A^E(tau)   = (R(tau) - mean_group R) / F_group                      episode groups: rollouts of one task
    A^S(a_t)   = (G_t - mean_state G) / F_state                         step groups: steps with the same s_t
    A(a_t)     = A^E(tau) + omega * A^S(a_t)

F is the standard deviation of the compared values (``norm = "std"``), or 1 (``norm = "none"``, the paper's
leave-one-out form).

Deviations from the paper, and why:
- The paper's environments name their states. Here a state is the model's input: a call's agent and its exact prompt
  tokens. With ``state = "turn"`` it is instead the agent and the number of the turn, for agents whose prompts contain
  their whole history and never recur.
- A rollout counts once in both statistics, with the mean of its steps in that state, however often the state recurs.
  Otherwise an agent that walks in circles would determine the mean with which it is compared.
- Deviations are unbiased (divide by n - 1). A step whose state was reached by only one rollout has A^S = 0, and a group
  of one rollout has A^E = 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from agl.schemas import CallCredit, Episode, Transition, identity_ids
from agl_rewards.credit.episodes import group_of, live_calls
from agl_rewards.credit.turn import Discount, TurnCredit

ROUNDING = 1e-9
"""A standard deviation below this, relative to the largest value (at least 1), is due to rounding and counts as 0."""

Key = tuple[str, object]


class HierarchicalCredit:
    """Episode advantage plus ``omega`` times step advantage; see the module.

    Args:
        omega: Weight of the step advantages, at least 0; with 0 only the episode advantages remain.
        gamma: Discount per turn, in [0, 1].
        state: ``prompt`` compares steps with the same prompt, ``turn`` steps at the same turn of an agent.
        norm: ``std`` divides by the standard deviation, ``none`` does not.
    """

    def __init__(
        self,
        *,
        omega: Annotated[float, msgspec.Meta(ge=0)] = 1.0,  # omega and gamma are those of the paper's experiments
        gamma: Discount = 0.95,
        state: Literal["prompt", "turn"] = "prompt",
        norm: Literal["std", "none"] = "std",
    ) -> None:
        self._turns = TurnCredit(gamma=gamma)
        self._omega, self._state, self._has_norm = omega, state, norm == "std"

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return final advantages, in one list per episode and in order of time.

        Raises:
            ConfigError: An episode with calls to train on has no reward at all.
        """
        trained = [episode for episode in group if live_calls(episode)]
        credits = self._turns.assign(trained)
        # G_t of every live call, by rollout and span
        returns = {
            _id(episode): {c.span_id: c.value for c in found} for episode, found in zip(trained, credits, strict=True)
        }
        # A^E of every rollout: R(tau) is undiscounted, so a long episode is not worth less for being long.
        overall = _advantages({_id(episode): [_total(episode)] for episode in trained}, has_norm=self._has_norm)
        # mean_state G and 1 / F_state of every state
        steps = self._steps(trained, returns)

        def credit(episode: Episode, call: Transition) -> CallCredit:
            mean, scale = steps[self._key(call)]
            step = (returns[_id(episode)][call.span_id] - mean) * scale  # A^S(a_t)
            value = overall[_id(episode)] + self._omega * step  # A(a_t) = A^E + omega A^S
            # Both terms are normalised already, so the algorithm's estimator must leave the sum alone.
            return CallCredit(span_id=call.span_id, value=value, baseline=group_of(episode), is_advantage=True)

        return [[credit(episode, call) for call in live_calls(episode)] for episode in group]

    def _steps(
        self, episodes: Sequence[Episode], returns: Mapping[str, Mapping[str, float]]
    ) -> dict[Key, tuple[float, float]]:
        """Return two numbers for every state: the mean return of the rollouts that reached it, and the factor 1 / F."""
        # State -> rollout -> the returns of its steps there. Dict keys compare by value, so "the same state" means
        # the same agent and byte for byte the same prompt ids.
        found: dict[Key, dict[str, list[float]]] = {}
        for episode in episodes:
            for call in live_calls(episode):
                reached = found.setdefault(self._key(call), {})
                reached.setdefault(_id(episode), []).append(returns[_id(episode)][call.span_id])
        return {key: _statistics(values, has_norm=self._has_norm) for key, values in found.items()}

    def _key(self, call: Transition) -> Key:
        return call.agent, identity_ids(call.prompt_ids, call.media) if self._state == "prompt" else call.turn


def _id(episode: Episode) -> str:
    return episode.rollout.rollout_id


def _advantages(values: Mapping[str, Sequence[float]], *, has_norm: bool) -> dict[str, float]:
    """Return each rollout's advantage (x - mean) / F, where x is the mean of the rollout's values."""
    mean, scale = _statistics(values, has_norm=has_norm)
    return {name: (_mean(found) - mean) * scale for name, found in values.items()}


def _statistics(values: Mapping[str, Sequence[float]], *, has_norm: bool) -> tuple[float, float]:
    """Return the mean over rollouts of their mean values, and the factor 1 / F, which is 0 if all values are equal."""
    scores = [_mean(found) for found in values.values()]
    if len(scores) < 2:  # one rollout is its own mean, and n - 1 would be 0
        return (scores[0] if scores else 0.0), 0.0
    mean = _mean(scores)
    # std = sqrt(sum (x - mean)^2 / (n - 1)) over the n rollouts
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
    # A difference by rounding counts as 0: divided by itself it would become an advantage of size 1.
    if deviation <= ROUNDING * max(1.0, *(abs(score) for score in scores)):
        return mean, 0.0
    return mean, 1.0 / deviation if has_norm else 1.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _total(episode: Episode) -> float:
    """Return R(tau), the undiscounted sum of the rewards of the episode and of its turns."""
    # Rejected calls earn too: they happened, even if their tokens cannot be trained.
    earned = [call.reward or 0.0 for call in episode.transitions]
    return math.fsum([episode.reward or 0.0, *earned])
