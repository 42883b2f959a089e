"""Shapley credit: gives an agent the worth that it adds to the agents before it, averaged over the agents' orders.

    phi_i = mean over orders of  v(those before i, and i) - v(those before i)

(Shapley 1953, "A Value for n-Person Games"). v of all agents is the recorded reward; v of fewer is the mean reward of
replays in which the others are replaced. The shares add up to v(all) - v(nobody) exactly, whatever is sampled. All
orders are taken when there are at most ``orders`` of them, else that many random ones (Castro et al. 2009, "Polynomial
calculation of the Shapley value based on sampling"), each followed by its reverse.

Unlike leave-one-out it also credits an agent whose good work another one spoilt: alone, it would have earned.

A coalition is replayed once, however many orders pass through it. The one in which all agents are silent is replayed
once per task, because nothing of a rollout is left in it. For n agents that makes at most
``samples * min(2^n - 1, orders * n)`` replays per rollout: 7 for three agents with all 6 orders.
The formula is in `games`, the replays in `counterfactual`.
"""

import random
from collections.abc import Sequence
from typing import Literal

from agl.contracts import ReplayFn
from agl.errors import ConfigError
from agl.schemas import CallCredit, Episode
from agl_rewards.credit import games
from agl_rewards.credit.counterfactual import Baseline, CounterfactualSettings, ReplayCredit

NAME = "shapley"


class _Shapley:
    def __init__(self, orders: int, seed: int) -> None:
        self._limit, self._seed = orders, seed

    def coalitions(self, players: Sequence[str], name: str) -> list[games.Replaced]:
        # All prefixes of the orders, each once: with all n! orders these are all 2^n - 1 proper coalitions.
        return games.coalitions_of(self._orders(players, name))

    def shares(self, players: Sequence[str], name: str, worth: games.Worth) -> dict[str, float]:
        # phi_i, or its unbiased estimate when the orders are a sample
        return games.shapley(players, self._orders(players, name), worth)

    def _orders(self, players: Sequence[str], name: str) -> list[games.Order]:
        # Seeded by the rollout's id: both methods, and a step that is repeated after a crash, draw the same orders,
        # while the rollouts of a task draw different ones, whose errors average out.
        return games.orders_of(players, limit=self._limit, draw=random.Random(f"{self._seed}/{name}"))


class ShapleyCredit:
    """Credit by sampled coalitions; see the module.

    Rollouts that are not replayed (steps that ``every`` skips, groups beyond ``max_replays``) get their return,
    compared with the same role in the other rollouts of the task.

    Args:
        orders: Orders of the agents per rollout; all of them when there are no more.
        seed: Seed of the sampled orders, together with the rollout's id.
        replace: Replacement for a missing agent: ``silent`` says ``text`` at every turn and calls no tool,
            ``sibling`` repeats the same agent's answer at that turn in another rollout of the task.
        text: The answer of a silent agent.
        samples: Replays per coalition. More than one helps where the other agents answer anew.
        every: Replay in every n-th step only, beginning with the first.
        max_replays: Replays per step at most; whole groups are left out beyond it, in turns.
        failed: The worth of a replay that fails or gets no reward.
        baseline: ``centred``: the advantage is the share less the mean of the same agent's in the task's other
            rollouts. ``counterfactual``: it is the share as it is; where silence earns nothing, failures get 0
            and only successes train. ``group``: the share is a return, which the algorithm's estimator
            compares with the same role in the other rollouts of the task.

    Raises:
        ConfigError: For an unknown or impossible setting.
    """

    def __init__(
        self,
        *,
        orders: int = 8,  # all 6 of three agents; four agents have 24
        seed: int = 0,
        replace: Literal["silent", "sibling"] = "silent",
        text: str = "",
        samples: int = 1,
        every: int = 1,
        max_replays: int = 1024,
        failed: float = 0.0,
        baseline: Baseline = "centred",
    ) -> None:
        if orders < 1:
            raise ConfigError(f"{NAME} got orders = {orders}; it must be at least 1")
        settings = CounterfactualSettings(
            replace=replace,
            text=text,
            samples=samples,
            every=every,
            max_replays=max_replays,
            failed=failed,
            baseline=baseline,
        )
        self._shared = ReplayCredit(NAME, _Shapley(orders, seed), settings)

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Replay every episode with each needed coalition, and attach the shares as the reward ``shapley``.

        Raises :class:`ConfigError` when no call names its agent, or when not even one group fits into the budget.
        """
        return await self._shared.prepare(episodes, step=step, replay=replay)

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return one list per episode, in order of time.

        Raises :class:`ConfigError` for a trained episode without reward.
        """
        return self._shared.assign(group)
