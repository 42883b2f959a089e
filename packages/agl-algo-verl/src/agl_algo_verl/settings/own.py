"""Parameters next to VERL's keys, with the names and the meaning that they have in `grpo` of agl-algo-torch."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agl_objectives.replay import MAX_STALENESS
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import Curriculum  # noqa: TC001 - msgspec resolves it


class Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of a configuration; a key that it does not have is an error."""


class Sampling(Keys, frozen=True, kw_only=True):
    """The choice of tasks, groups and calls.

    Attributes:
        refill: Most rounds in which a step replaces silent groups by those of further tasks; 0 for none.
        curriculum: `frontier` or `unsolved`: the tasks to prefer in half of the draws.
        mask_truncated: Whether calls that were cut at a limit of tokens are left out of the loss.
    """

    refill: int = 0
    curriculum: Curriculum = ""
    mask_truncated: bool = False


class Replay(Keys, frozen=True, kw_only=True):
    """Rollouts of earlier steps that are trained once more.

    Attributes:
        share: Their share of a step's trained rollouts; 0 for none.
        max_staleness: Most versions of the policy that such a rollout may be behind.
    """

    share: float = 0.0
    max_staleness: int = MAX_STALENESS


class Saving(Keys, frozen=True, kw_only=True):
    """Saved states of training, from which a run continues after it was killed.

    Attributes:
        keep: Saved states and published weights that stay on disk.
        save_every: Steps between two saves of weights and moments, a time such as `"60s"`, or the largest share of the
            time that may go into saving. A run that is killed repeats the steps since the last save.
    """

    keep: Annotated[int, Meta(ge=1)] = 2
    save_every: int | str = SAVE_EVERY


SAMPLING, REPLAY, SAVING = Sampling(), Replay(), Saving()
