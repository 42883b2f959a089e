"""Records and types of Agent Lightning on the schemas of this project."""

from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from agl import schemas
from agl.schemas import Json

T_co = TypeVar("T_co", covariant=True)

TaskInput: TypeAlias = Any
"""A task; any JSON value."""

RolloutRawResult: TypeAlias = Any
"""An agent's result: a number or a dict of numbers is the reward, other JSON the output; ``None`` adds nothing."""

AttributeValue: TypeAlias = Json
"""The value of a span's attribute."""

Attributes: TypeAlias = dict[str, Any]
"""The attributes of a span."""


class Dataset(Protocol[T_co]):
    """A sequence of tasks, such as a list."""

    def __getitem__(self, index: Any, /) -> T_co:
        """Return one task."""
        ...

    def __len__(self) -> int:
        """Return the number of tasks."""
        ...


class Triplet(schemas.Record, frozen=True, kw_only=True):
    """One model call as training data.

    Attributes:
        prompt: ``{"token_ids": [...]}``.
        response: ``{"token_ids": [...], "logprobs": [...]}``.
        reward: The call's reward, on the last call the rollout's; ``None`` without one.
        metadata: The agent's name and the id of the call's span.
    """

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = {}


class Attempt(schemas.Attempt, frozen=True, kw_only=True):
    """One try at a rollout."""

    @property
    def sequence_id(self) -> int:
        """The attempt's number, from 1."""
        return self.number


class Rollout(schemas.Rollout, frozen=True, kw_only=True):
    """One run of the agent on one task."""

    @property
    def input(self) -> Json:
        """The task."""
        return self.task


class AttemptedRollout(Rollout, frozen=True, kw_only=True):
    """A rollout with its running attempt, in the form that agents get."""

    @property
    def attempt(self) -> Attempt:
        """The running or deciding attempt."""
        return Attempt(attempt_id=self.attempt_id or "", rollout_id=self.rollout_id, number=self.attempts, worker="")


def attempted(rollout: schemas.Rollout) -> AttemptedRollout:
    """Return a rollout in the form that agents get."""
    return AttemptedRollout(**{name: getattr(rollout, name) for name in msgspec.structs.asdict(rollout)})
