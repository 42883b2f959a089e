"""Records of settings that several algorithms share: sub-tables of `params` in an experiment file.

    [algorithm.params.optim]
    lr = 1e-5

or `agl.GRPO(optim={"lr": 1e-5})` in Python. A table sets the keys that it names; all other keys keep the algorithm's
own defaults. Each record is documented only here. Values are checked against the annotations when the algorithm is
built. Importing this module does not import torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from agl_objectives.aggregation import Aggregation  # noqa: TC001 - the parameter check resolves it
from agl_objectives.replay import BOUND
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import Curriculum  # noqa: TC001 - the parameter check resolves it

__all__ = [
    "Adam",
    "Compute",
    "Correction",
    "Count",
    "GroupSampling",
    "Lora",
    "Losses",
    "NotNegative",
    "Objective",
    "Optim",
    "Positive",
    "Replay",
    "Sampling",
    "Saving",
    "Settings",
    "Share",
    "Whole",
]

Count = Annotated[int, msgspec.Meta(ge=1)]
"""A whole number of at least 1."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
"""A number above 0."""

NotNegative = Annotated[float, msgspec.Meta(ge=0)]
"""A number of at least 0."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""A number from 0 to 1."""

Whole = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number of at least 0."""

Moment = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""Decay rate of a moment: the share of it that an update keeps."""

Decay = Literal["constant", "linear", "cosine"]
"""The curves of the learning rate after the warm-up."""

KLPenalty = Literal["k2", "k3"]
"""The estimates of a KL divergence that can be a term of the loss, because their gradient is not 0 in expectation."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of settings."""


class Adam(Settings, frozen=True, kw_only=True):
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101, algorithm 2).

    Attributes:
        lr: Learning rate.
        betas: Decay rates of the two moments. The second is below torch's 0.999, because updates are few and gradients
            change.
        weight_decay: Decay of matrices towards 0; vectors (norms, biases) do not decay.
        max_grad_norm: Bound on the 2-norm of the whole gradient.
    """

    lr: Positive = 1e-6
    betas: tuple[Moment, Moment] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0


class Optim(Adam, frozen=True, kw_only=True):
    """AdamW with a curve for its learning rate; `lr` is the peak.

    Attributes:
        warmup: Number of updates over which the rate rises linearly to the peak.
        decay: Curve after the warm-up: `constant`; or `linear` or `cosine`, which fall to 0 at the last update of the
            run.
        moments: `float32`, or `8bit` for a quarter of the memory of both moments.
        max_nonfinite: Largest number of updates in a row that are skipped because their gradient is not finite; one
            more ends the run.
        trains_vision: Whether the vision tower of a model that reads pictures trains too; otherwise it is frozen.
    """

    warmup: Whole = 0
    decay: Decay = "constant"
    moments: Literal["float32", "8bit"] = "float32"
    max_nonfinite: Whole = 3
    trains_vision: bool = False


class Lora(Settings, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685, section 4.1): `delta W = B A * alpha / rank`.

    Attributes:
        rank: Rank of the adapters; 0 trains all weights.
        alpha: Scale of the adapters, relative to the rank.
        targets: Names of the modules that get an adapter; `["all-linear"]` means every linear layer except the head.
        is_quantized: Whether the frozen weights are stored in 4 bits while adapters train (QLoRA).
    """

    rank: Whole = 0
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ("all-linear",)
    is_quantized: bool = False

    def __post_init__(self) -> None:
        if not self.rank and (self.alpha, self.targets, self.is_quantized) != (32.0, ("all-linear",), False):
            raise ValueError("lora.rank is 0, which trains all weights, so the other settings of lora do nothing")


class Compute(Settings, frozen=True, kw_only=True):
    """The device, and the precision and size of forward passes.

    Attributes:
        device: `auto` (the first GPU, else the CPU), `cpu`, `cuda` ...
        dtype: Number type of forward passes and of exported weights. Weights in training are always float32.
        threads: Number of CPU threads; 0 leaves it to torch.
        token_budget: Largest number of tokens that one forward pass computes; padding counts if rows are padded.
        gradient_checkpointing: Whether layers are computed again in the backward pass, which takes less memory and
            about a third more time. With `auto` they are if a pass of `token_budget` tokens would otherwise keep more
            than half of the memory that weights, gradients, moments and the policy server leave, or if attention is
            eager.
    """

    device: str = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: Whole = 0
    token_budget: Count = 16_384
    gradient_checkpointing: bool | Literal["auto"] = "auto"


class Saving(Settings, frozen=True, kw_only=True):
    """When states of training are saved, and how many are kept. A killed run continues from the last saved state.

    Attributes:
        keep: Number of saved states, and of exported weights, that stay on disk.
        save_every: Steps between two saves of weights and moments, a time such as `"60s"`, or the largest share of the
            time that may go into saving, such as `"5%"`. A killed run repeats the steps since the last save.
    """

    keep: Count = 2
    save_every: int | str = SAVE_EVERY


class Sampling(Settings, frozen=True, kw_only=True):
    """The choice of tasks and groups.

    Attributes:
        refill: Largest number of rounds per step in which groups that teach nothing are replaced by groups of further
            tasks (DAPO's dynamic sampling); 0 keeps every group.
        curriculum: `frontier` prefers tasks of which about half of the rollouts succeeded when they were last drawn;
            `unsolved` prefers tasks with low rewards. Half of a step's tasks are drawn without preference. Empty for no
            preference at all.
    """

    refill: Whole = 0
    curriculum: Curriculum = ""


class GroupSampling(Sampling, frozen=True, kw_only=True):
    """The choice of tasks and groups, and the treatment of answers that are too long.

    Attributes:
        mask_truncated: Whether calls that were cut at a limit of tokens are left out of the loss.
        overlong_limit: Number of tokens from which on an answer loses a reward of 1; 0 turns this off.
        overlong_buffer: Number of tokens before `overlong_limit` over which the loss of reward grows from 0 to 1, as in
            DAPO.
    """

    mask_truncated: bool = False
    overlong_limit: Whole = 0
    overlong_buffer: Whole = 0

    def __post_init__(self) -> None:
        if (self.overlong_limit or self.overlong_buffer) and not 0 < self.overlong_buffer <= self.overlong_limit:
            raise ValueError(
                f"overlong_limit is {self.overlong_limit} and overlong_buffer {self.overlong_buffer}; give the most "
                "tokens of an answer and the part of them, at least 1, in which it is punished, or neither"
            )


class Replay(Settings, frozen=True, kw_only=True):
    """Rollouts of earlier steps that are trained once more, each at most once.

    Attributes:
        share: Share of replayed rollouts among the rollouts that a step trains on; 0 turns replay off.
        bound: Upper bound on the importance weights of replayed tokens.
        max_staleness: Largest number of versions of the policy between sampling and replaying a rollout.
    """

    share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    bound: Positive = BOUND
    max_staleness: Count = 4


class Losses(Settings, frozen=True, kw_only=True):
    """The loss of a token and the weights of tokens.

    Attributes:
        loss: `ppo-clip`, the name of another loss, or `module:name`.
        loss_params: Parameters of the loss, such as `{clip_low = 0.2, clip_high = 0.28}`.
        aggregation: `token`, `sequence`, or `constant` (divide by `constant_tokens`, as Dr. GRPO does). Each loss has
            its own default, which is `token` for `ppo-clip`.
        constant_tokens: The divisor of the aggregation `constant`.
    """

    loss: str = "ppo-clip"
    loss_params: dict[str, Any] | None = None
    aggregation: Aggregation | None = None
    constant_tokens: Count = 1024


class Objective(Losses, frozen=True, kw_only=True):
    """The loss of a token, the weights of tokens, and penalties and an entropy bonus that are added to the loss.

    Attributes:
        kl: Estimate of the KL divergence from the policy at this algorithm's start, `k2` or `k3`.
        kl_coef: Weight of a penalty on this divergence, beta in GRPO's paper.
        anchor_coef: Weight of a KL penalty on the calls of agents that share the weights but are not trained. Without
            it these agents lose their skills when the trained agents have learned theirs. 0 turns it off.
        entropy_coef: Weight of an entropy bonus.
    """

    kl: KLPenalty = "k3"
    kl_coef: NotNegative = 0.0
    anchor_coef: NotNegative = 0.1
    entropy_coef: NotNegative = 0.0


class Correction(Settings, frozen=True, kw_only=True):
    """Importance weights `pi_old / pi_behaviour` for the difference between sampler and trainer.

    Attributes:
        cap: Largest weight; 0 turns the weights off.
        level: `token` for one weight per token; `sequence` or `geometric` for one weight per rollout, the product or
            the geometric mean of its tokens' weights.
        mode: `truncate` lowers weights above the cap to the cap. `mask` drops tokens with a weight above the cap or
            below 0.5, as IcePop does.
        is_normalised: Whether weights are divided by their mean over rollouts.
    """

    cap: NotNegative = 2.0
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    is_normalised: bool = False
