"""IPO: DPO with a squared loss, which asks for a margin of a certain size instead of an ever larger one.

Paper: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences"
(arXiv 2310.12036), equation 17, whose tau is `beta` here. For a pair of a chosen rollout w and a rejected rollout l

    loss = (m - 1 / (2 beta))^2,   m = r(w) - r(l),   r = log pi - log ref

Where preferences hardly contradict each other, DPO's loss pulls the policy away from the reference without an end; this
one stops at the margin 1 / (2 beta).

Deviation from the paper: r is a rollout's mean per token of the policy, as its authors advise and TRL computes it. With
sums, a long rollout's margin is hundreds of nats off its target from the start. `is_per_token = false` is the paper's.
`preference` has the steps and the other deviations. With `data` the pairs are those of a file, as for `dpo`.
"""

from __future__ import annotations

from agl.errors import ConfigError
from agl_algo_torch.learner import LearnerSettings
from agl_algo_torch.model import LoraSettings
from agl_algo_torch.optim import OptimSettings
from agl_algo_torch.pairs import PairAlgorithm, Pairing
from agl_algo_torch.preference import PreferenceSettings, ReferenceKind
from agl_algo_torch.supply import RolloutSupply
from agl_algo_torch.written_pairs import check_ignored
from agl_objectives.saving import SAVE_EVERY


class IPO(PairAlgorithm):
    """Trains the weights of one policy on pairs of rollouts of one task, towards a margin of a certain size.

    Args:
        data: File of pairs of texts, as for `dpo`; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        beta: Strength of the reference: the margin that a pair is brought to is 1 / (2 `beta`).
        is_per_token: Whether a margin compares means per token of the two rollouts; else sums, as in the paper.
        min_gap: Least difference of two rewards that is a preference.
        pairs: `extremes` (one pair per group) or `all`.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's pairs; `pairs_per_update` make one optimizer update.
        lr: Peak learning rate; `warmup` shapes it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
        max_nonfinite: Updates in a row that are skipped for a gradient that is not finite; one more ends the run.
        token_budget: Tokens that one forward pass may compute, padding included where rows are padded.
        lora_rank: 0 trains all weights; else the rank of LoRA adapters on `lora_targets` with `lora_alpha`.
        device: `auto`, `cpu`, `cuda` ...; `dtype` that of passes and exports; `threads` 0 leaves torch's.
        gradient_checkpointing: Whether layers are computed again in the backward pass, which takes less memory and
            a third more time.
        keep: Saved states and exported weights that stay on disk.
        save_every: Steps between two saves of weights and moments, a time such as `"60s"`, or the largest share of the
            time that may go into saving. A run that is killed repeats the steps since the last save.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        data: str = "",
        steps: int | None = None,
        tasks_per_step: int | None = None,
        group_size: int | None = None,
        max_age: int = -1,
        beta: float = 0.1,
        is_per_token: bool = True,
        min_gap: float = 1e-6,  # in the unit of the reward; above the rounding of sums of rewards
        pairs: Pairing = "extremes",
        reference: ReferenceKind = "start",
        epochs: int = 1,
        pairs_per_update: int = 16,
        lr: float = 1e-6,
        warmup: int = 0,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_nonfinite: int = 3,
        token_budget: int = 16_384,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_targets: tuple[str, ...] = ("all-linear",),
        device: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        gradient_checkpointing: bool = False,
        keep: int = 2,
        save_every: int | str = SAVE_EVERY,
    ) -> None:
        if group_size == 1 or beta <= 0:
            raise ConfigError(
                f"ipo got {group_size=} and {beta=}; a pair needs a group of 2 at least, and beta must be above 0."
            )
        check_ignored(
            data,
            {
                "tasks_per_step": tasks_per_step is not None,
                "group_size": group_size is not None,
                "max_age": max_age >= 0,
                "min_gap": min_gap != 1e-6,
                "pairs": pairs != "extremes",
                'reference = "behaviour"': reference == "behaviour",
            },
            algorithm="ipo",
        )
        self._beta = beta
        learner = LearnerSettings(
            optim=OptimSettings(
                lr=lr,
                betas=(betas[0], betas[1]),
                weight_decay=weight_decay,
                warmup=warmup,
                max_grad_norm=max_grad_norm,
                max_nonfinite=max_nonfinite,
            ),
            lora=LoraSettings.of(lora_rank, lora_alpha, lora_targets),
            device=device,
            dtype=dtype,
            threads=threads,
            gradient_checkpointing=gradient_checkpointing,
        )
        super().__init__(
            "ipo",
            supply=RolloutSupply(
                algorithm="ipo", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            settings=PreferenceSettings(
                learner=learner,
                reference=reference,
                epochs=epochs,
                per_update=pairs_per_update,
                token_budget=token_budget,
                keep=keep,
                save_every=save_every,
            ),
            pairing=pairs,
            min_gap=min_gap,
            is_per_token=is_per_token,
            data=data,
            steps=steps,
        )

    def pair_loss(self, margin: float) -> tuple[float, float]:
        """Equation 17 and its slope."""
        distance = margin - 1 / (2 * self._beta)
        return distance**2, -2 * distance
