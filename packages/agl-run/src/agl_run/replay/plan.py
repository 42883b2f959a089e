"""Replays: a recorded rollout run again with the part of some agents replaced."""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from agl.contracts import Credit
from agl.errors import AglError
from agl.schemas import Episode, Record, Rollout

REPLAY = "replay"
"""The key of a rollout's metadata under which its plan is, when it is a replay."""


class ReplayPlan(Record, frozen=True, kw_only=True):
    """The way in which a recorded rollout is run again: some agents say something else, the others what they said then.

    A call of an agent that is not replaced gets the recorded answer when that agent asked the same conversation
    then; otherwise the model answers anew.

    Attributes:
        rollout_id: The recorded rollout.
        replaced: Names of the agents whose answers are replaced, as in :attr:`Transition.agent`; sorted.
        how: ``silent``: they say ``text`` and call no tool; ``sibling``: at each turn they say what the same agent
            said at that turn in the rollout ``sibling``, and ``text`` at turns which that one lacks.
        text: What silent agents say.
        sibling: A recorded rollout of the same task.
        sample: Tells replays apart that are otherwise equal.
    """

    rollout_id: str
    replaced: tuple[str, ...] = ()
    how: Literal["silent", "sibling"] = "silent"
    text: str = ""
    sibling: str = ""
    sample: int = 0


def replay_of(rollout: Rollout) -> ReplayPlan | None:
    """The plan of a rollout that is a replay, ``None`` for any other; raises :class:`AglError` for a malformed one."""
    found = rollout.metadata.get(REPLAY)
    if found is None:
        return None
    try:
        return msgspec.convert(found, ReplayPlan)
    except msgspec.ValidationError as error:
        raise AglError(
            f"rollout {rollout.rollout_id} has the metadata {REPLAY!r}, which is reserved for replays, and its value "
            f"is no plan of one: {error}. Name that metadata differently"
        ) from error


class ReplayFn(Protocol):
    """Runs recorded rollouts of one step again, each as a plan says."""

    async def __call__(self, plans: Sequence[ReplayPlan]) -> list[Episode]:
        """The finished replays in the order of the plans, failed ones included; equal plans run once.

        Replays are ordinary rollouts of mode ``test`` with the recorded task and pinned resources, and are never
        trained on. Their ids follow from (experiment, algorithm, step, plan), so that a step that is repeated after
        a crash finds what it had already paid for.

        Raises:
            AglError: A plan names a rollout that is not of this step.
            CaptureError: A replaced agent's call reached a model: it left past the hook that answers it.
        """
        ...


@runtime_checkable
class CounterfactualCredit(Credit, Protocol):
    """A credit that asks what would have happened without an agent's part, by replaying rollouts."""

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> Sequence[Episode]:
        """The episodes in order, with what :meth:`assign` needs attached as further rewards.

        Called with a step's training episodes after they were collected, before an algorithm sees them. Episodes
        that an algorithm collects with ``keeps_all``, or reads from another one, are not prepared.
        """
        ...
