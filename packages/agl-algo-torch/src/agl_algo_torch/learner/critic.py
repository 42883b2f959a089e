"""PPO's critic: a copy of the policy's network with a value head in place of the vocabulary, and its own optimizer.

V(s_t) is the expected return before token t is drawn. The state s_t is all tokens before t, so the value is read at the
position that also predicts token t.

The critic is a separate network and not a second head on the policy. The value's gradient then cannot disturb the
policy, and the served model stays a plain language model. The price is the memory of a second model. Where the policy
has LoRA adapters, the critic has adapters of its own on the same frozen weights, and costs little.
`ppo` computes targets and advantages (`gae`).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from agl_algo_torch.learner.batch import micro_batches
from agl_algo_torch.learner.checkpoint import load_training, save_training
from agl_algo_torch.learner.model import checkpoint_gradients, computing, has_lora
from agl_algo_torch.learner.optim import apply_gradients, build_optimizer
from agl_algo_torch.learner.packing import pack, packs_rows
from agl_algo_torch.learner.scoring import bare, last_hidden_states
from agl_algo_torch.learner.typed_torch import backward, seed_everything
from agl_objectives.directories import prune, step_directory
from agl_objectives.reports import Skipped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from agl_algo_torch.learner.batch import MicroBatch, RowSample
    from agl_algo_torch.learner.policy_learner import PolicyLearner
    from agl_objectives.settings import Optim


class ValueModel(nn.Module):
    """Maps every position of a row to the expected return from there on; before training all values are 0."""

    def __init__(self, language_model: nn.Module) -> None:
        """Build a value model from the network below the head of a Hugging Face causal LM."""
        super().__init__()
        whole = cast("Any", language_model)
        self.trunk: nn.Module = whole.base_model
        self.head = nn.Linear(whole.config.get_text_config().hidden_size, 1)
        # With V = 0 the first advantages are the returns themselves and not the noise of a random head.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return V(s_t) for each trained token t of the batch, [M], float32."""
        with computing(self.trunk):
            hidden_M_H = batch.run(last_hidden_states(self.trunk))
        # [M, H] -> [M]: the position before a token depends on the earlier tokens only.
        return self.head(hidden_M_H.float())[:, 0]


class CriticLearner:
    """A value model, its AdamW optimizer and the number of updates done."""

    def __init__(self, learner: PolicyLearner, settings: Optim, *, clip: float) -> None:
        """Copy the learner's network; `clip` bounds how far a value moves in one step, and 0 sets no bound.

        Under LoRA the copy starts from the present adapters, and shares the frozen weights below them.
        The critic uses gradient checkpointing if the learner does.
        """
        seed_everything(0)  # the new head draws from the global generator; a resumed run must draw the same
        network = _network(learner.loaded.model)
        self._device = learner.loaded.device
        pack(network)  # if it cannot, the policy's own notice has said so
        self._is_packed = packs_rows(network)
        self.model = ValueModel(bare(network)).to(self._device)
        if learner.checkpoints:
            checkpoint_gradients(self.model.trunk)
        self._optimizer = build_optimizer(self.model, settings)
        self._settings, self._clip = settings, clip
        self._budget = learner.settings.compute.token_budget
        self.updates = 0
        self._skipped = Skipped(settings.max_nonfinite)

    @torch.no_grad()  # values are data for GAE; only `update` differentiates them
    def values(self, samples: Sequence[RowSample]) -> list[Tensor]:
        """Return V(s_t) for each trained token t, [T] per sample on the CPU, 0 at other tokens."""
        found: dict[int, Tensor] = {}
        # Weights are 0 because nothing is summed here.
        for batch in self._batches(samples, [0.0] * len(samples), total=1.0):
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
        left: float,
    ) -> dict[str, float]:
        """Do one optimizer update towards the returns in `targets`; returns its metrics.

        `old` has the values before the step's first update; `targets` and `old` are [T] per sample. `left` is the share
        of the run that is left, for a decay of the learning rate.
        """
        carried = [  # the batch's advantages hold the targets here, and its log-probabilities the old values
            replace(sample, advantages=target.float(), behaviour=value.float())
            for sample, target, value in zip(samples, targets, old, strict=True)
        ]
        summed = 0.0  # the losses of micro-batches add up, as their gradients do
        for batch in self._batches(carried, weight, total=total):
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
        # The critic's gradient norm is clipped separately, so a large one does not shorten the policy's step.
        norm = apply_gradients(self._optimizer, self._settings, update=self.updates, left=left)
        is_skipped = self._skipped.note(norm, update=self.updates)
        self.updates += 1
        if is_skipped:
            return {"value_updates_nonfinite": 1.0}
        return {"value_loss": summed, "value_grad_norm": norm}

    def _batches(self, samples: Sequence[RowSample], weight: Sequence[float], *, total: float) -> Iterator[MicroBatch]:
        return micro_batches(
            samples, weight, total=total, token_budget=self._budget, device=self._device, is_packed=self._is_packed
        )

    def save(self, workdir: Path, learner: PolicyLearner, *, step: int, keep: int, kept: Collection[int] = ()) -> None:
        """Write a checkpoint next to the learner's and remove old ones, except the newest `keep` and the steps in
        `kept`.

        At least two stay, because the run's stored state names the previous checkpoint until the new state is stored.
        """
        target = step_directory(workdir / "critic", step)
        save_training(target, model=self.model, optimizer=self._optimizer, updates=self.updates, origin=learner.origin)
        prune(workdir / "critic", step=step, keep=max(2, keep), kept=kept)

    def load(self, workdir: Path, *, step: int) -> None:
        """Continue from the critic's checkpoint of a step."""
        source = step_directory(workdir / "critic", step)
        # If the directory exists, it was looked at for damage together with the policy's checkpoint.
        self.updates = load_training(source, model=self.model, optimizer=self._optimizer, is_checked=source.is_dir())


def _network(policy: nn.Module) -> nn.Module:
    """Return a copy of the policy to read values from, below its head."""
    if not has_lora(policy):
        # float32 even with a bfloat16 policy: returns are compared, and 8 bits of precision blur them.
        return copy.deepcopy(policy).float().requires_grad_(requires_grad=True)
    # Tensors that are listed as copied already are shared.
    shared = {id(tensor): tensor for tensor in (*policy.parameters(), *policy.buffers()) if not tensor.requires_grad}
    return copy.deepcopy(policy, dict(shared))


def value_loss(
    values_M: Tensor, *, targets_M: Tensor, old_M: Tensor, weight_M: Tensor, clip: float, total: float = 1.0
) -> Tensor:
    """Return `sum w max((V - R)^2, (clip(V, old - c, old + c) - R)^2) / (2 total)`; c = 0 omits the second term.

    The clipped form comes from the PPO implementation of the paper's authors and is not in the paper (Huang et al.
    2022, "The 37 Implementation Details of Proximal Policy Optimization", detail 9).
    """
    error_M = (values_M - targets_M) ** 2  # [M], (V - R)^2
    if clip:
        # clip(V, old - c, old + c), in the order of VERL's minimum and maximum.
        clipped_M = torch.maximum(torch.minimum(values_M, old_M + clip), old_M - clip)
        # The maximum is pessimistic, as in the policy's loss: once V has moved by c towards R, the clipped term is the
        # larger one and has no gradient. A value that moved away from R is still pulled back.
        error_M = torch.maximum(error_M, (clipped_M - targets_M) ** 2)
    # Weighted like the policy's loss; the half makes the gradient of one term w (V - R).
    return 0.5 * ((weight_M * error_M).sum() / total)
