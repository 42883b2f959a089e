"""Registers the credits of this distribution."""

from collections.abc import Iterable

from agl import CreditEntry, hookimpl


@hookimpl
def agl_credits() -> Iterable[CreditEntry]:
    """Credits per turn and role, among equal states, and by replaying rollouts without an agent."""
    yield CreditEntry(name="turn", factory="agl_credit.turn:TurnCredit", summary="discounted rewards per turn")
    yield CreditEntry(
        name="role", factory="agl_credit.role:RoleCredit", summary="rewards, baselines and discount per agent"
    )
    yield CreditEntry(
        name="hierarchical",
        factory="agl_credit.hierarchical:HierarchicalCredit",
        summary="the episode's advantage plus that of the step among equal states (GiGPO)",
    )
    yield CreditEntry(
        name="leave-one-out",
        factory="agl_credit.leave_one_out:LeaveOneOutCredit",
        summary="the run's reward less its reward without the agent, by replay",
    )
    yield CreditEntry(
        name="shapley",
        factory="agl_credit.shapley:ShapleyCredit",
        summary="each agent's Shapley value over coalitions, by replay",
    )
    yield CreditEntry(
        name="fork",
        factory="agl_credit.fork:ForkCredit",
        summary="the run's reward less that of runs that went on otherwise from the call",
    )
