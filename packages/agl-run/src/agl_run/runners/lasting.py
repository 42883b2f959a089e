"""The parts of a runner's contract beyond :class:`agl.contracts.Runner`: what outlasts an attempt, and what is lost."""

from typing import Protocol, runtime_checkable

from agl.errors import RunError
from agl.schemas import Claim, Outcome


class LostError(RunError):
    """Something that an attempt needs went away, such as its sandbox, which says nothing about the agent.

    The worker gives the attempt back, and it is repeated; ``max_losses`` of the runner bounds how often.
    """


@runtime_checkable
class LastingRunner(Protocol):
    """A runner that leaves something of an attempt for the rewards, such as a workspace."""

    async def release(self, claim: Claim, outcome: Outcome | None) -> None:
        """Remove what is left of an attempt; called once it is judged, and before its outcome is written.

        Args:
            claim: The attempt that :meth:`execute` was called with.
            outcome: Its outcome; ``None`` where it was given back and will be repeated.
        """
        ...
