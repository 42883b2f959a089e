"""The critic: a copy of the policy's network with a value head in place of the vocabulary, and its own optimizer.

It is a network of its own and not a second head on the policy, so that the value's gradient cannot disturb the policy
and what is served stays a plain language model; that costs the memory of a second model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from agl_algo_torch.batch import micro_batches
from agl_algo_torch.checkpoint import load_training, prune, save_training, step_directory
from agl_algo_torch.optim import OptimSettings, apply_gradients, build_optimizer
from agl_algo_torch.typed_torch import backward, seed_everything
from agl_algo_torch.weights import serving_copy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agl_algo_torch.batch import MicroBatch, RowSample
    from agl_algo_torch.learner import PolicyLearner


class ValueModel(nn.Module):
    """Maps every position to the return that is expected after it; starts at zero everywhere."""

    def __init__(self, language_model: nn.Module) -> None:
        """Take the network below the vocabulary of a Hugging Face causal LM."""
        super().__init__()
        whole = cast("Any", language_model)
        self.trunk: nn.Module = whole.base_model
        self.head = nn.Linear(whole.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the value before each trained token of the batch, [M], float32."""
        hidden = self.trunk(input_ids=batch.ids, attention_mask=batch.attention, use_cache=False).last_hidden_state
        return self.head(hidden[:, :-1][batch.predicts].float())[:, 0]


class CriticLearner:
    """A value model, its AdamW and the number of updates done."""

    def __init__(self, learner: PolicyLearner, settings: OptimSettings, *, clip: float, token_budget: int) -> None:
        """Copy the learner's network; `clip` bounds how far a value moves in one step, 0 turns that off."""
        seed_everything(0)
        loaded = serving_copy(learner.loaded)
        self._device = loaded.device
        self.model = ValueModel(loaded.model.float()).to(loaded.device).requires_grad_(requires_grad=True)
        self._optimizer = build_optimizer(self.model, settings)
        self._settings, self._clip, self._budget = settings, clip, token_budget
        self.updates = 0

    @torch.no_grad()
    def values(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return the value before each trained token, [T] per sample on the CPU, 0 elsewhere."""
        found: dict[int, Tensor] = {}
        for batch in micro_batches(samples, [0.0] * len(samples), token_budget=self._budget, device=self._device):
            found |= batch.scatter(self.model(batch))
        return [found[index] for index in range(len(samples))]

    def update(
        self,
        samples: Sequence[RowSample],
        weight: Sequence[float],
        *,
        total: float,
        targets: Sequence[Tensor],
        old: Sequence[Tensor],
    ) -> dict[str, float]:
        """One optimizer update towards `targets` from the values `old`, both [T] per sample."""
        carried = [  # a batch carries two numbers per token; here they are the target and the old value
            replace(sample, advantages=target.float(), behaviour=value.float())
            for sample, target, value in zip(samples, targets, old, strict=True)
        ]
        summed = 0.0
        for batch in micro_batches(carried, weight, total=total, token_budget=self._budget, device=self._device):
            loss = value_loss(
                self.model(batch),
                targets_M=batch.advantages_M,
                old_M=batch.behaviour_M,
                weight_M=batch.weight_M,
                total=batch.total,
                clip=self._clip,
            )
            backward(loss)
            summed += float(loss.detach())
        norm = apply_gradients(self._optimizer, self._settings, update=self.updates)
        self.updates += 1
        return {"value_loss": summed, "value_grad_norm": norm}

    def save(self, workdir: Path, learner: PolicyLearner, *, step: int, keep: int) -> None:
        """Write a checkpoint beside the learner's and remove old ones; the one before the last stays."""
        target = step_directory(workdir / "critic", step)
        save_training(target, model=self.model, optimizer=self._optimizer, updates=self.updates, origin=learner.origin)
        prune(workdir / "critic", step=step, keep=max(2, keep))

    def load(self, workdir: Path, *, step: int) -> None:
        """Continue from the checkpoint of a step."""
        source = step_directory(workdir / "critic", step)
        self.updates = load_training(source, model=self.model, optimizer=self._optimizer)


def value_loss(
    values_M: Tensor, *, targets_M: Tensor, old_M: Tensor, weight_M: Tensor, clip: float, total: float = 1.0
) -> Tensor:
    """Return `sum w max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / (2 total)`; without clip, of the first alone.

    The clipped form is that of the PPO implementation by its authors; it is not in the paper (Huang et al. 2022,
    "The 37 Implementation Details of Proximal Policy Optimization", detail 9).
    """
    error_M = (values_M - targets_M) ** 2
    if clip:
        clipped_M = torch.maximum(torch.minimum(values_M, old_M + clip), old_M - clip)
        error_M = torch.maximum(error_M, (clipped_M - targets_M) ** 2)
    return 0.5 * ((weight_M * error_M).sum() / total)
