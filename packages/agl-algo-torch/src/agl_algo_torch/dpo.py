"""DPO: learns which of two rollouts of a task was better, with no reward model and no sampling while it trains.

Paper: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290), equation 7. For a pair of a chosen
rollout w and a rejected rollout l of one task (the paper's y_w and y_l)

    loss = -log sigmoid(beta m),   m = r(w) - r(l),   r = log pi - log ref

where log pi sums over the policy's tokens of a rollout. beta r is the paper's implicit reward, so beta m is the
difference of two rewards. A group gives the best against the worst, or every pair, whose rewards differ by `min_gap`
at least; a group without a difference gives no pair. `preference` has the steps, and what differs from the paper.
With `data` the pairs are those of a file, and their token ids come from the policy's tokenizer.
"""

from __future__ import annotations

import math

from agl.errors import ConfigError
from agl_algo_torch.learner import LearnerSettings
from agl_algo_torch.model import LoraSettings
from agl_algo_torch.optim import OptimSettings
from agl_algo_torch.pairs import PairAlgorithm, Pairing
from agl_algo_torch.preference import PreferenceSettings, ReferenceKind
from agl_algo_torch.supply import RolloutSupply
from agl_algo_torch.written_pairs import check_ignored
from agl_objectives.saving import SAVE_EVERY


class DPO(PairAlgorithm):
    """Trains the weights of one policy on pairs of rollouts of one task, the better against the worse.

    Args:
        data: File of `{"prompt": [...], "chosen": [...], "rejected": [...]}` lines, relative to the experiment's file,
            as `agl export --format dpo` writes them; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        beta: Strength of the reference: the inverse of how far the policy may go from it.
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
        beta: float = 0.1,  # the paper's default
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
                f"dpo got {group_size=} and {beta=}; a pair needs a group of 2 at least, and beta must be above 0."
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
            algorithm="dpo",
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
            "dpo",
            supply=RolloutSupply(
                algorithm="dpo", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
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
            is_per_token=False,
            data=data,
            steps=steps,
        )

    def pair_loss(self, margin: float) -> tuple[float, float]:
        """Equation 7 and its slope beta sigmoid(-beta m).

        The slope is near beta where the policy has the pair the wrong way round, and near 0 where it already prefers
        the chosen rollout clearly.
        """
        return -_log_sigmoid(self._beta * margin), self._beta * sigmoid(-self._beta * margin)


def sigmoid(x: float) -> float:
    """Return the logistic function."""
    # Two forms of one function, each with an exponent that is never positive, so nothing overflows.
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def _log_sigmoid(x: float) -> float:
    # log sigmoid(x) = -log(1 + exp(-x)) = min(x, 0) - log(1 + exp(-|x|)), which loses no digits for large |x|.
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))
