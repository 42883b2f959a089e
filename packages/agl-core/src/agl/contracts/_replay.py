"""Plans for running recorded rollouts again: with some agents replaced (replay), or anew from one call on (fork)."""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from agl.contracts._training import Credit
from agl.errors import AglError, RunError
from agl.schemas import Episode, Mode, Record, Rollout

T = TypeVar("T")

REPLAY = "replay"
"""Key in a rollout's metadata of the :class:`ReplayPlan`."""

FORK = "fork"
"""Key in a rollout's metadata of the :class:`ForkPlan`."""

TRAINED_POLICIES = "agl.trains"
"""Key in a training rollout's metadata of the names of the policies that train on the rollout."""

REPLAY_VERSION = "replay:"
"""Prefix of the recorded model version of a call that was answered from a recording."""

DIVERGED = f"{REPLAY_VERSION}diverged"
"""The recorded model version of a call that a fork refused, because the recorded rollout has no such call."""


class ReplayPlan(Record, frozen=True, kw_only=True):
    """The plan of a replay: some agents get replaced answers, the others their recorded ones.

    A call of any other agent gets the recorded answer if that agent sent the same conversation in the recording;
    otherwise the model answers it. If no agent is replaced, the model and the sampling parameters must be the same too.

    Attributes:
        rollout_id: The recorded rollout.
        replaced: Names of the agents whose answers are replaced, as in :attr:`Transition.agent`; sorted.
        how: The source of the replacements. With ``silent`` the answer is ``text``, without tool calls. With
            ``sibling`` it is the answer of the same agent at the same turn in the rollout ``sibling``, or ``text`` if
            that rollout lacks the turn.
        text: The answer of silent agents.
        sibling: Id of another recorded rollout of the same task.
        sample: Number that distinguishes otherwise equal replays.
        mode: Mode of the recorded rollout. Calls that a model answers are sampled as in this mode, so that replays of a
            training rollout are drawn from the same distribution as the rollout itself.
    """

    rollout_id: str
    replaced: tuple[str, ...] = ()
    how: Literal["silent", "sibling"] = "silent"
    text: str = ""
    sibling: str = ""
    sample: int = 0
    mode: Mode = "test"


class ForkPlan(Record, frozen=True, kw_only=True):
    """The plan of a fork: a recorded rollout runs again unchanged up to one call, and freely from that call on.

    Calls before the fork get their recorded answers, and their requests must equal the recorded ones: the first request
    that differs is a divergence, and the fork fails.

    Attributes:
        rollout_id: The recorded rollout.
        span_id: The span of the recorded call to fork at.
        answer_rollout: The rollout that has the new answer for the call to fork at; ``""`` if a model answers it.
        answer_span: The span of that answer's call, in ``answer_rollout``.
        is_coupled: Whether a later call whose request equals the recorded one also gets the recorded answer; if not, a
            model answers all later calls. Both give a fair sample, because the recorded answer was drawn for the same
            request. A coupled fork differs from the recorded run only by the effects of the new answer.
        sample: Number that distinguishes otherwise equal forks.
        mode: Mode of the recorded rollout. Calls that a model answers are sampled as in this mode, so that forks of a
            training rollout are drawn from the same distribution as the rollout itself.
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
    """A fork made a call that differs from the recorded ones before it reached the call to fork at."""


def replay_of(rollout: Rollout) -> ReplayPlan | None:
    """Return the plan if the rollout is a replay, else ``None``; raises :class:`AglError` if it is malformed."""
    return _plan(rollout, REPLAY, ReplayPlan)


def fork_of(rollout: Rollout) -> ForkPlan | None:
    """Return the plan if the rollout is a fork, else ``None``; raises :class:`AglError` if it is malformed."""
    return _plan(rollout, FORK, ForkPlan)


def trains(rollout: Rollout, policy: str) -> bool:
    """Return true if a policy in training trains on a rollout, so that its sampling rules apply to its calls.

    A training rollout that names no policies (:data:`TRAINED_POLICIES`) trains every policy. A replay or fork follows
    the recorded rollout.
    """
    try:
        again = fork_of(rollout) or replay_of(rollout)
    except AglError:  # metadata of the user's own
        again = None
    named = rollout.metadata.get(TRAINED_POLICIES)
    mode = rollout.mode if again is None else again.mode
    return mode == "train" and (not isinstance(named, list) or policy in named)


def is_diverged(episode: Episode) -> bool:
    """Return true if an episode is a fork that diverged, and so says nothing about the call to fork at."""
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
    """Runs recorded rollouts of one step again, once for each plan."""

    async def __call__(self, plans: Sequence[AnyPlan]) -> list[Episode]:
        """Run the replays and forks and return their episodes in the order of the plans, failed ones included.

        Equal plans run once. Replays and forks are ordinary rollouts of mode ``test`` with the recorded task and
        pinned resources, and are never trained on. Their ids follow from (experiment, algorithm, step, plan), so a
        step that is repeated after a crash finds those that have already run.

        Raises:
            AglError: A plan names a rollout that is neither of this step nor a replay of such a rollout.
            CaptureError: A replaced agent's call bypassed the responder and reached a model.
        """
        ...


@runtime_checkable
class CounterfactualCredit(Credit, Protocol):
    """A credit that measures an agent's contribution by replaying rollouts without it."""

    async def prepare(self, episodes: Sequence[Episode], *, step: int, replay: ReplayFn) -> Sequence[Episode]:
        """Return the episodes in the same order, with the additional rewards that :meth:`assign` needs.

        Called with the training episodes of a step after they are collected and before the algorithm gets them. Not
        called for episodes that an algorithm collects with ``keeps_all`` or reads from another algorithm.
        """
        ...
