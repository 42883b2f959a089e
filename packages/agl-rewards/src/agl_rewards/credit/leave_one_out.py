"""Leave-one-out credit: gives an agent the reward of the run less the reward of the run without it.

    A_i = R - R(without i)

R(without i) is the mean reward of ``samples`` replays in which agent i's answers are replaced. The other agents give
their recorded answers as long as they are asked the same; where they are asked something else, the model answers anew.

This is the difference reward of Wolpert and Tumer 2001 ("Optimal Payoff Functions for Members of Collectives"), and
with ``replace = "sibling"`` a one-sample form of the counterfactual baseline of COMA (Foerster et al. 2018,
arXiv 1705.08926, equation 4). The baseline does not depend on agent i's own answers, so subtracting it leaves the
policy gradient unbiased and removes the noise that comes from the other agents.

Costs one replay per rollout, agent and sample: at most ``rollouts * agents * samples`` per step.
The formula is in `games`, the replays in `counterfactual`.
"""

from collections.abc import Sequence
from typing import Literal

from agl.contracts import ReplayFn
from agl.schemas import CallCredit, Episode
from agl_rewards.credit import games
from agl_rewards.credit.counterfactual import Baseline, CounterfactualSettings, ReplayCredit

NAME = "leave-one-out"


class _LeaveOneOut:
    def coalitions(self, players: Sequence[str], name: str) -> list[games.Replaced]:  # SharingRule's signature
        # N without i, for each i: n coalitions, and nothing to draw, so the name is not needed.
        return [frozenset({player}) for player in players]

    def shares(self, players: Sequence[str], name: str, worth: games.Worth) -> dict[str, float]:
        # A_i = v(N) - v(N without i)
        return games.leave_one_out(players, worth)


class LeaveOneOutCredit:
    """Credit by replays without the agent; see the module.

    Rollouts that are not replayed (steps that ``every`` skips, groups beyond ``max_replays``) get their return,
    compared with the same role in the other rollouts of the task.

    Args:
        replace: Replacement for a missing agent: ``silent`` says ``text`` at every turn and calls no tool,
            ``sibling`` repeats the same agent's answer at that turn in another rollout of the task.
        text: The answer of a silent agent.
        samples: Replays per rollout and agent. More than one helps where the other agents answer anew.
        every: Replay in every n-th step only, beginning with the first.
        max_replays: Replays per step at most; whole groups are left out beyond it, in turns.
        failed: The worth of a replay that fails or gets no reward.
        baseline: ``centred``: the advantage is the difference less the mean of the same agent's in the task's other
            rollouts. ``counterfactual``: it is the difference as it is; where silence earns nothing, failures get 0
            and only successes train. ``group``: the difference is a return, which the algorithm's estimator
            compares with the same role in the other rollouts of the task.

    Raises:
        ConfigError: For an unknown or impossible setting.
    """

    def __init__(
        self,
        *,
        replace: Literal["silent", "sibling"] = "silent",
        text: str = "",
        samples: int = 1,
        every: int = 1,
        max_replays: int = 1024,
        failed: float = 0.0,
        baseline: Baseline = "centred",
    ) -> None:
        settings = CounterfactualSettings(
            replace=replace,
            text=text,
            samples=samples,
            every=every,
            max_replays=max_replays,
            failed=failed,
            baseline=baseline,
        )
        self._shared = ReplayCredit(NAME, _LeaveOneOut(), settings)

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> list[Episode]:
        """Replay every episode once without each agent, and attach the differences as the reward ``leave-one-out``.

        Raises :class:`ConfigError` when no call names its agent, or when not even one group fits into the budget.
        """
        return await self._shared.prepare(episodes, step=step, replay=replay)

    def assign(self, group: Sequence[Episode]) -> list[list[CallCredit]]:
        """Return one list per episode, in order of time.

        Raises :class:`ConfigError` for a trained episode without reward.
        """
        return self._shared.assign(group)
