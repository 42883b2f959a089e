"""KTO: learns from single rollouts that are good or bad, with no pairs; fits feedback such as a thumb up or down.

Paper: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306), equation 8.
With r = log pi(rollout) - log ref(rollout), summed over the policy's tokens,

    good rollout   loss = weight_good (1 - sigmoid(beta (r - z)))
    bad rollout    loss = weight_bad  (1 - sigmoid(beta (z - r)))

and the mean over an update. z, the point of reference, estimates the distance KL(pi || ref), is at least 0 and has no
gradient.

A rollout is good if its reward is at least `good_from`, else bad. Without `good_from`, it is compared with the mean of
its group, and has no label if it equals it; a group of one then teaches nothing.

Deviations from the paper, and why:
- z is the mean of r over the update's rollouts, good and bad. The paper pairs prompts with answers of other prompts,
  because its answers were not sampled from the policy; ours were, so their mean is the estimate itself. With a source
  of old rollouts it is that of the policy that acted, and more rough.
- The paper sets the two weights by hand so that both kinds count about the same; `is_balanced` does it by their numbers
  in each step. A step with one kind only is not balanced.
`preference` has the steps and the deviations that `dpo` shares.

With `data` the answers are those of a file, with labels of its own. Their distance to the policy is then no estimate of
KL(pi || ref), since the policy did not write them; z stays their mean, at least 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agl.errors import ConfigError
from agl_algo_torch.dpo import sigmoid
from agl_algo_torch.learner import LearnerSettings, mean
from agl_algo_torch.model import LoraSettings
from agl_algo_torch.optim import OptimSettings
from agl_algo_torch.preference import (
    Gathered,
    Judgement,
    PreferenceAlgorithm,
    PreferenceSettings,
    Ratio,
    ReferenceKind,
    can_teach,
)
from agl_algo_torch.supply import RolloutSupply
from agl_algo_torch.tuned_policy import at_least_one
from agl_algo_torch.written_pairs import WrittenAnswer, check_ignored, check_source, read_answers, told
from agl_objectives.saving import SAVE_EVERY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode
    from agl_algo_torch.learner import PolicyLearner


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A rollout by id, whether it is good, and how much it counts."""

    rollout: str
    is_good: bool
    weight: float

    @property
    def rollouts(self) -> tuple[str, ...]:
        """The one."""
        return (self.rollout,)


_EQUAL = 1e-6
"""Rewards that are no further apart are equal; above the rounding of their sums."""


class KTO(PreferenceAlgorithm[Label]):
    """Trains the weights of one policy on rollouts that are good or bad by themselves.

    Args:
        data: File of `{"prompt": [...], "completion": [...], "label": true}` lines, relative to the experiment's file,
            or of pairs as for `dpo`, each a good and a bad answer; each step learns from all of it. Empty for rollouts.
        steps: Steps in all, by default 1; with a source at most so many, by default until it has nothing more.
        tasks_per_step: Groups per step, by default 16; refused with a source, which pays for its own.
        group_size: Rollouts per task, by default 4; refused with a source.
        max_age: With a source, versions of the tuned policy that a rollout may be behind; -1 for any number.
        good_from: Least reward of a good rollout; by default the mean of its group, which it must differ from.
        beta: Strength of the reference: the inverse of how far the policy may go from it.
        weight_good: How much a good rollout counts, and `weight_bad` a bad one.
        is_balanced: Whether the rarer kind of a step counts for more, so that both kinds weigh the same.
        reference: `start` (the policy when this algorithm began) or `behaviour` (the recorded log-probabilities).
        epochs: Passes over a step's rollouts; `rollouts_per_update` make one optimizer update.
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
        good_from: float | None = None,
        beta: float = 0.1,  # the paper's default
        weight_good: float = 1.0,
        weight_bad: float = 1.0,
        is_balanced: bool = True,
        reference: ReferenceKind = "start",
        epochs: int = 1,
        rollouts_per_update: int = 32,
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
        at_least_one("kto", rollouts_per_update=rollouts_per_update)
        if min(beta, weight_good, weight_bad) <= 0:
            raise ConfigError(f"kto got {beta=}, {weight_good=} and {weight_bad=}; each must be above 0.")
        if group_size == 1 and good_from is None:
            raise ConfigError(
                "kto got group_size = 1 without good_from; a rollout that is alone in its group has nothing to be "
                "compared with. Set good_from to the least reward of a good rollout, or use a larger group."
            )
        check_ignored(
            data,
            {
                "tasks_per_step": tasks_per_step is not None,
                "group_size": group_size is not None,
                "max_age": max_age >= 0,
                "good_from": good_from is not None,
                'reference = "behaviour"': reference == "behaviour",
            },
            algorithm="kto",
        )
        self._data, self._steps = data, steps or 1
        self._written: list[WrittenAnswer] = []
        self._good_from, self._beta = good_from, beta
        self._weights = {True: weight_good, False: weight_bad}
        self._is_balanced = is_balanced
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
            "kto",
            supply=RolloutSupply(
                algorithm="kto", steps=steps, tasks_per_step=tasks_per_step, group_size=group_size, max_age=max_age
            ),
            settings=PreferenceSettings(
                learner=learner,
                reference=reference,
                epochs=epochs,
                per_update=rollouts_per_update,
                token_budget=token_budget,
                keep=keep,
                save_every=save_every,
            ),
            left_out="its rollout is neither good nor bad",
        )

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy, and where the answers come from; reads those of `data`."""
        if not self._data:
            await super().setup(context)
            return
        self.begin(context)
        check_source(self._data, context.sources, algorithm="kto")
        self._written = read_answers(context.folder / self._data)
        context.say(f"{context.name}: {told(len(self._written), 'answers', self._data)}")

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of so many tasks a step draws, and how many times it runs each; none with `data`."""
        return (0, 0) if self._data else super().step_size(tasks)

    async def gather(self, step: int, learner: PolicyLearner) -> Gathered[Label]:
        """Return the labels of `data` if there is one, else those of a step's groups."""
        if not self._data:
            return await super().gather(step, learner)
        loaded = learner.loaded
        rows = [
            row
            for answer in self._written
            for row in answer.rows(tokenizer=loaded.tokenizer, max_tokens=loaded.context_length)
        ]
        labels = self._weighed([(answer.dialogue.where, answer.is_good) for answer in self._written])
        is_last = step >= self._steps
        return Gathered(examples=labels, rows=rows, metrics={}, stop_reason=f"{step} steps done" if is_last else "")

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Label]:
        """Return the labels of all rollouts that are good or bad."""
        return self._weighed([label for group in groups for label in self._labels(group)])

    def _weighed(self, found: Sequence[tuple[str, bool]]) -> list[Label]:
        """Return labels with their weights."""
        counts = Counter(is_good for _, is_good in found)
        # Of n rollouts, g good: the good ones count n / 2g each and the bad ones n / 2(n - g).
        is_balanced = self._is_balanced and len(counts) == len(self._weights)
        share = {kind: len(found) / (2 * count) if is_balanced else 1.0 for kind, count in counts.items()}
        return [
            Label(rollout=rollout, is_good=is_good, weight=share[is_good] * self._weights[is_good])
            for rollout, is_good in found
        ]

    def counts(self, examples: Sequence[Label]) -> dict[str, float]:
        """Count the good and the bad rollouts."""
        good = sum(label.is_good for label in examples)
        return {"good": float(good), "bad": float(len(examples) - good)}

    def sides(self, examples: Sequence[Label]) -> dict[str, str]:
        """Return whether each rollout is good or bad, and how much it counts."""
        return {label.rollout: f"{'good' if label.is_good else 'bad'}, counts {label.weight:.3g}" for label in examples}

    def judge(self, examples: Sequence[Label], ratios: Mapping[str, Ratio]) -> Judgement:
        """Equation 8 and its slopes: weight beta s (1 - s), where s is the sigmoid, up for good and down for bad."""
        point = max(0.0, mean([ratio.total for ratio in ratios.values()]))
        losses: list[float] = []
        factors: dict[str, float] = {}
        for label in examples:
            sign = 1.0 if label.is_good else -1.0
            value = sigmoid(self._beta * sign * (ratios[label.rollout].total - point))
            losses.append(label.weight * (1.0 - value))
            factors[label.rollout] = sign * label.weight * self._beta * value * (1.0 - value) / len(examples)
        good = [ratios[label.rollout].total for label in examples if label.is_good]
        bad = [ratios[label.rollout].total for label in examples if not label.is_good]
        margin = mean(good) - mean(bad) if good and bad else 0.0
        return Judgement(factors=factors, metrics={"loss": mean(losses), "margin": margin, "reference_kl": point})

    def _labels(self, group: Sequence[Episode]) -> list[tuple[str, bool]]:
        """Return the ids of a group's rollouts that have a label, and whether they are good."""
        rewards = {e.rollout.rollout_id: e.reward for e in group if can_teach(e) and e.reward is not None}
        if self._good_from is not None:
            return [(name, reward >= self._good_from) for name, reward in rewards.items()]
        middle = mean(list(rewards.values()))
        return [(name, reward > middle) for name, reward in rewards.items() if abs(reward - middle) > _EQUAL]
