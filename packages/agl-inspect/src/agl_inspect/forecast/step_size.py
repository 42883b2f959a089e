"""Records of the size of a training step, and of the settings that its memory and time depend on."""

from agl.schemas import Record


class StepShape(Record, frozen=True, kw_only=True):
    """The size of a step.

    Attributes:
        tasks: Tasks per step.
        samples: Rollouts per task.
        steps: Steps in all; 0 if the algorithm sets no limit.
        token_budget: Tokens that one pass may compute; 0 where there is no such limit.
    """

    tasks: int
    samples: int
    steps: int = 0
    token_budget: int = 0

    @property
    def rollouts(self) -> int:
        """Rollouts per step."""
        return self.tasks * self.samples


class Training(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The settings of an algorithm that memory and time depend on.

    Attributes:
        dtype: The type that passes compute in.
        lora_rank: Rank of the adapters; 0 if all weights train.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        token_budget: Tokens of a pass at most; 0 where there is no such limit.
        passes: Forward passes with a gradient over a step's rows.
        other_passes: Forward passes without one: old log-probabilities and those of a reference.
        updates: Updates of a step.
        has_reference: Whether a frozen copy of the weights is held.
        has_critic: Whether a second model of the same size trains.
    """

    dtype: str = "bfloat16"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    token_budget: int = 0
    passes: int = 1
    other_passes: int = 0
    updates: int = 1
    has_reference: bool = False
    has_critic: bool = False

    @property
    def models(self) -> int:
        """Models that train."""
        return 2 if self.has_critic else 1
