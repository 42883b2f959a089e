"""Registers the reward emitters of this distribution, without importing any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl import CreditEntry, RewardEntry, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def agl_rewards() -> Iterable[RewardEntry]:
    """Register rewards from answers, databases, spans and judge models, and their weighted sum."""
    yield RewardEntry(
        name="numeric-match", factory="agl_rewards.numeric:NumericMatch", summary="1.0 when the number is the answer"
    )
    yield RewardEntry(
        name="sql-match",
        factory="agl_rewards.sql:SqlMatch",
        summary="1.0 when a query gives the rows of the task's query",
        takes_setup=True,
    )
    yield RewardEntry(
        name="sql-executes",
        factory="agl_rewards.sql:SqlExecutes",
        summary="1.0 when a query runs within its limits",
        takes_setup=True,
    )
    yield RewardEntry(
        name="sql-syntax", factory="agl_rewards.sql:SqlSyntax", summary="1.0 when a text is one query in SQLite's SQL"
    )
    yield RewardEntry(
        name="format",
        factory="agl_rewards.format:Format",
        summary="1.0 when a text has the declared pattern, tags, JSON and length",
    )
    yield RewardEntry(
        name="spans",
        factory="agl_rewards.spans:SpanRewards",
        summary="intermediate rewards from tools, exceptions, steps and retries",
    )
    yield RewardEntry(
        name="composite",
        factory="agl_rewards.composite:Composite",
        summary="weighted sum of other rewards, its parts kept as dimensions",
        takes_setup=True,
    )
    yield RewardEntry(
        name="judge",
        factory="agl_rewards.judge:Judge",
        summary="a score from a judge model",
        takes_setup=True,
    )
    yield RewardEntry(
        name="group-judge",
        factory="agl_rewards.group_judge:GroupJudge",
        summary="the rank among the rollouts of a group, from a judge model",
        takes_setup=True,
    )
    yield RewardEntry(
        name="gold",
        factory="agl_rewards.gold:Gold",
        summary="another reward that measures a sample of the rollouts and never trains",
        takes_setup=True,
    )


@hookimpl
def agl_credits() -> Iterable[CreditEntry]:
    """Register credits per turn and role, among equal states, and by replays and forks of rollouts."""
    yield CreditEntry(name="turn", factory="agl_rewards.credit.turn:TurnCredit", summary="discounted rewards per turn")
    yield CreditEntry(
        name="role", factory="agl_rewards.credit.role:RoleCredit", summary="rewards, baselines and discount per agent"
    )
    yield CreditEntry(
        name="hierarchical",
        factory="agl_rewards.credit.hierarchical:HierarchicalCredit",
        summary="the episode's advantage plus that of the step among equal states (GiGPO)",
    )
    yield CreditEntry(
        name="leave-one-out",
        factory="agl_rewards.credit.counterfactual:LeaveOneOutCredit",
        summary="the run's reward less its reward without the agent, by replay",
    )
    yield CreditEntry(
        name="shapley",
        factory="agl_rewards.credit.counterfactual:ShapleyCredit",
        summary="each agent's Shapley value over coalitions, by replay",
    )
    yield CreditEntry(
        name="fork",
        factory="agl_rewards.credit.fork:ForkCredit",
        summary="the run's reward less that of runs that went on otherwise from the call",
    )
