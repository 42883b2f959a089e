"""Plans of replays: recorded rollouts that run again with some agents replaced."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from agl.contracts import Credit
from agl.errors import AglError
from agl.schemas import Episode, Record, Rollout

REPLAY = "replay"
"""Metadata key of a replay's plan."""


class ReplayPlan(Record, frozen=True, kw_only=True):
    """The plan of a replay: some agents get replaced answers, the others their recorded ones.

    A call of an agent that is not replaced gets the recorded answer if that agent sent the same conversation
    in the recording; otherwise the model answers anew.

    Attributes:
        rollout_id: The recorded rollout.
        replaced: Names of the agents whose answers are replaced, as in :attr:`Transition.agent`; sorted.
        how: ``silent``: the answer is ``text``, without tool calls; ``sibling``: the answer is that of the same agent
            at the same turn in the rollout ``sibling``, or ``text`` at turns that this rollout lacks.
        text: The answer of silent agents.
        sibling: A recorded rollout of the same task.
        sample: Number that distinguishes otherwise equal replays.
    """

    rollout_id: str
    replaced: tuple[str, ...] = ()
    how: Literal["silent", "sibling"] = "silent"
    text: str = ""
    sibling: str = ""
    sample: int = 0


def replay_of(rollout: Rollout) -> ReplayPlan | None:
    """Return the plan of a replay, ``None`` for any other rollout; raises :class:`AglError` for a malformed one."""
    found = rollout.metadata.get(REPLAY)
    if found is None:
        return None
    try:
        return msgspec.convert(found, ReplayPlan)
    except msgspec.ValidationError as error:
        raise AglError(
            f"rollout {rollout.rollout_id} has the metadata {REPLAY!r}, which is reserved for replays, and its value "
            f"is no replay plan: {error}. Use another key for it"
        ) from error


class ReplayFn(Protocol):
    """Runs recorded rollouts of one step again, each according to a plan."""

    async def __call__(self, plans: Sequence[ReplayPlan]) -> list[Episode]:
        """Run the replays and return them in the order of the plans, failed ones included; equal plans run once.

        Replays are ordinary rollouts of mode ``test`` with the recorded task and pinned resources, and are never
        trained on. Their ids follow from (experiment, algorithm, step, plan), so that a step that is repeated after
        a crash finds the replays that it already ran.

        Raises:
            AglError: A plan names a rollout that is not of this step.
            CaptureError: A replaced agent's call bypassed the hook that answers it, and reached a model.
        """
        ...


@runtime_checkable
class CounterfactualCredit(Credit, Protocol):
    """A credit that measures an agent's contribution by replaying rollouts without it."""

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> Sequence[Episode]:
        """Return the episodes in order, with the data for :meth:`assign` attached as further rewards.

        Called with a step's training episodes after they are collected, before the algorithm gets them. Episodes
        that an algorithm collects with ``keeps_all``, or reads from another one, are not prepared.
        """
        ...
