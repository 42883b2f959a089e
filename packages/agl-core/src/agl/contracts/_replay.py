"""Plans of replays: recorded rollouts that run again with some agents replaced, or as recorded up to one call."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from agl.contracts._training import Credit
from agl.errors import AglError, RunError
from agl.schemas import Episode, Mode, Record, Rollout

T = TypeVar("T")

REPLAY = "replay"
"""Metadata key of a replay's plan."""

FORK = "fork"
"""Metadata key of a fork's plan."""


REPLAY_VERSION = "replay:"
"""Prefix of the model version of a call that a replay answered."""

DIVERGED = f"{REPLAY_VERSION}diverged"
"""The model version of a call that a fork refused, because the agent did not make it in the recording."""


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
        mode: Mode of the recorded rollout: calls that a model answers are sampled as in this mode, so that the replays
            of a training rollout are drawn from the distribution that it was drawn from.
    """

    rollout_id: str
    replaced: tuple[str, ...] = ()
    how: Literal["silent", "sibling"] = "silent"
    text: str = ""
    sibling: str = ""
    sample: int = 0
    mode: Mode = "test"


class ForkPlan(Record, frozen=True, kw_only=True):
    """The plan of a fork: a recorded rollout runs again as it was up to one call, and goes on from there anew.

    Calls before it get their recorded answers, and must be the recorded ones: the first request that differs is a
    divergence, which fails the fork.

    Attributes:
        rollout_id: The recorded rollout.
        span_id: The span of the recorded call to fork at.
        answer_rollout: A rollout whose answer this call gets; ``""`` if a model answers.
        answer_span: The span of the call that got that answer.
        is_coupled: Later calls whose request stayed the same get the recorded answer too; otherwise a model answers all
            of them. A recorded answer was drawn for the same request, so that the fork is a fair sample either way;
            coupled, it differs from the recorded run only by what the new answer changed.
        sample: Number that distinguishes otherwise equal forks.
        mode: Mode of the recorded rollout: calls that a model answers are sampled as in this mode, so that the forks of
            a training rollout are drawn from the distribution that it was drawn from.
    """

    rollout_id: str
    span_id: str
    answer_rollout: str = ""
    answer_span: str = ""
    is_coupled: bool = False
    sample: int = 0
    mode: Mode = "test"


AnyPlan = ReplayPlan | ForkPlan
"""The plan of a replay or of a fork."""


class DivergenceError(RunError):
    """A fork did not make the calls of its recorded rollout before the one that it forks at."""


def replay_of(rollout: Rollout) -> ReplayPlan | None:
    """Return the plan of a replay, ``None`` for any other rollout; raises :class:`AglError` for a malformed one."""
    return _plan(rollout, REPLAY, ReplayPlan)


def fork_of(rollout: Rollout) -> ForkPlan | None:
    """Return the plan of a fork, ``None`` for any other rollout; raises :class:`AglError` for a malformed one."""
    return _plan(rollout, FORK, ForkPlan)


def sampling_mode(rollout: Rollout) -> Mode:
    """Return the mode by whose rules models sample for a rollout: a fork's or replay's is its recorded rollout's."""
    try:
        again = fork_of(rollout) or replay_of(rollout)
    except AglError:  # metadata of the user's own
        again = None
    return rollout.mode if again is None else again.mode


def is_diverged(episode: Episode) -> bool:
    """Return true if an episode is a fork that failed because it diverged, and so says nothing about its call."""
    error = episode.attempt.error if episode.attempt else None
    return error is not None and error.type == f"{DivergenceError.__module__}.{DivergenceError.__qualname__}"


def _plan(rollout: Rollout, key: str, kind: type[T]) -> T | None:
    found = rollout.metadata.get(key)
    if found is None:
        return None
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise AglError(
            f"rollout {rollout.rollout_id} has the metadata {key!r}, which is reserved for {key}s, and its value "
            f"is no {key} plan: {error}. Use another key for it"
        ) from error


class ReplayFn(Protocol):
    """Runs recorded rollouts of one step again, each according to a plan."""

    async def __call__(self, plans: Sequence[AnyPlan]) -> list[Episode]:
        """Run the replays and forks and return them in the order of the plans, failed ones included.

        Equal plans run once. Replays and forks are ordinary rollouts of mode ``test`` with the recorded task and
        pinned resources, and are never trained on. Their ids follow from (experiment, algorithm, step, plan), so that
        a step that is repeated after a crash finds those that it already ran.

        Raises:
            AglError: A plan names a rollout that is not of this step, nor one of its replays.
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
