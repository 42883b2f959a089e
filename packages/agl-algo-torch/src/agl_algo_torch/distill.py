"""On-policy distillation: the policy samples, and a teacher gives the log-probability of every sampled token.

Sources: Thinking Machines 2025, "On-Policy Distillation"; Agarwal et al. 2024, arXiv 2306.13649 (GKD), trained only on
texts that the student samples. One step:

    1. collect: run every task `group_size` times with the live weights pi
    2. ask the teacher for log q(y_t | y_<t) of the very tokens y that were sampled, at temperature 1
    3. advantages: A_t = log q(y_t) - log pi(y_t) + reward_coef * GRPO's advantage, where pi is the policy at sampling
    4. update: the policy gradient with A_t by the loss `loss` (`objective.py`), then publish the new weights

Without `reward_coef` the mean of -A_t over the policy's own tokens estimates the reverse KL(pi || q) per token. The
policy learns to write tokens that the teacher finds likely, in the states that the policy itself reaches. It needs
neither rewards nor groups.

Deviations, and why:
- The advantage of a token holds only the gap log q(y_t) - log pi(y_t) of that token (a discount of 0), as in the first
  source: the gaps of later tokens would add noise.
- Rollouts have several calls and agents. The gaps of all calls that train count, each in the context of its call.
- The gap is taken at the sampled token, not between the distributions, because a server returns it in a few bytes.
- The teacher reads what the policy read. In OPSD (arXiv 2601.18734) it also reads the solution. `sdpo` has a teacher
  that reads more, but only from the trace and never a hidden solution.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from agl.errors import ConfigError
from agl_algo_torch.data.credited_rows import ESTIMATOR, estimator_of_samples, live_rows, needed_by, prepare
from agl_algo_torch.data.teachers import LocalTeacher, ServedTeacher, Teacher, load_tokenizer
from agl_algo_torch.learner.objective import PolicyObjective, Tally
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, mean, tuned_weights
from agl_algo_torch.learner.token_numbers import TokenNumbers, mean_advantages
from agl_algo_torch.learner.tuned_policy import OnPolicy, TunedPolicy
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.aggregation import split_updates
from agl_objectives.groups import GroupSampler
from agl_objectives.reports import UnusedEstimator, averaged
from agl_objectives.settings import (
    Compute,
    Correction,
    Count,
    Lora,
    Losses,
    NotNegative,
    Objective,
    Optim,
    Sampling,
    Saving,
)
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext, CallUse, StepReport
    from agl.schemas import Episode
    from agl_algo_torch.learner.batch import RowSample


class Distill(OnPolicy):
    """Trains the weights of one policy towards a teacher, on the tokens that the policy samples.

    Args:
        teacher: A model folder or a hub name, either with a slash (`./big`, `Qwen/Qwen2.5-7B-Instruct`); or the name of
            a policy of the experiment whose server returns `prompt_logprobs`, such as vLLM's.
        steps: Number of steps; each collects once and publishes once.
        tasks_per_step: Tasks per step. Without a `curriculum` every task is drawn once before any is drawn again.
        group_size: Rollouts per task. More than 1 only makes a batch larger, unless `reward_coef` compares rewards.
        sampling: The choice of tasks. `refill` replaces groups whose rewards do not differ; it is refused without
            `reward_coef`, because nothing then compares rewards.
        reward_coef: Weight of the rewards' advantages, which are added to the teacher's; 0 needs no reward.
        estimator: The estimator of the rewards' advantages; refused without `reward_coef`.
        updates_per_step: Parts into which a step's rollouts are divided, one optimizer update for each part.
        epochs: Passes over a step's rollouts.
        objective: The loss and the weights of tokens.
        correction: Importance weights for the difference between sampler and trainer.
        optim: AdamW.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory, also of a teacher that is opened from a folder or the hub.
        saving: When states of training are saved, and how many are kept.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        teacher: Annotated[str, msgspec.Meta(min_length=1)],
        steps: Count = 100,
        tasks_per_step: Count = 16,
        group_size: Count = 4,
        reward_coef: NotNegative = 0.0,
        estimator: str = ESTIMATOR,
        updates_per_step: Count = 1,
        epochs: Count = 1,
        sampling: Sampling = Sampling(),
        objective: Losses = Losses(),
        correction: Correction = Correction(),
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        # A_i = (R_i - mean(R)) / std(R) is 0 for a rollout that is alone in its group.
        if reward_coef and group_size == 1:
            raise ConfigError(
                "distill with reward_coef compares the rewards of a task's rollouts, but group_size is 1. Give at "
                "least 2, or reward_coef = 0."
            )
        if sampling.refill and not reward_coef:
            raise ConfigError(
                f"distill got refill = {sampling.refill} without reward_coef: every group learns from the teacher, so "
                "there is none to replace. Remove refill, or give reward_coef."
            )
        self._teacher_name, self._reward_coef = teacher, reward_coef
        self._steps, self._updates_per_step, self._epochs = steps, updates_per_step, epochs
        # With several updates r_t leaves 1, and log pi_old of all tokens is fixed before the first of them.
        updates = updates_per_step * epochs
        # The policy gradient with r_t clipped as in PPO, or another loss; A_t is the teacher's, plus the rewards'.
        self._objective = PolicyObjective(
            "distill", Objective(**msgspec.structs.asdict(objective)), correction=correction, updates=updates
        )
        # A_i of the rewards as in GRPO, scaled by `reward_coef`; without it nothing is compared and no reward needed.
        self._estimator = estimator_of_samples("distill", estimator)
        needed_by("distill", "reward_coef", reward_coef, estimator=estimator)
        self._unused = UnusedEstimator(estimator)
        # Groups matter to A_i alone: without `reward_coef` every rollout is handed over, failed ones included.
        self._groups = GroupSampler(
            "distill",
            count=tasks_per_step,
            n=group_size,
            refill=sampling.refill,
            curriculum=sampling.curriculum,
            keeps_all=not reward_coef,
            compares_batch=self._estimator.entry.compares == "batch",
        )
        settings = LearnerSettings(optim=optim, lora=lora, compute=compute, total=steps * updates, per_step=updates)
        # pi_theta. There is no reference: the teacher q is what the policy is held to.
        self._tuned = TunedPolicy("distill", settings=settings, saving=saving)

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy and the tasks, and check that the teacher answers and uses the policy's tokenizer."""
        await super().setup(context)
        self._teacher = self._find_teacher(context)
        # q is asked about token ids, so both must split a text alike.
        weights = tuned_weights(context.current(self._tuned.name).resource, name=self._tuned.name)
        path = weights.uri if weights.format == "hf" else weights.base_model
        await self._teacher.start(await asyncio.to_thread(load_tokenizer, path))

    async def step(self) -> StepReport:
        """Collect rollouts, ask the teacher about them, update, save and publish."""
        learner = await self._tuned.learner()
        moves = learner.moves

        # 1. Collect answers y of the policy as it is, pi. Training on its own states, and not on the teacher's texts,
        # is what distinguishes on-policy distillation from fine-tuning on a teacher's answers (GKD with lambda = 1).
        collected = await self._groups.collect(self._tuned.step + 1)

        # 2. and 3. Rows with the rewards' part of the advantages, then the teacher's: log q(y_t | y_<t), by one forward
        # pass of the teacher over the very tokens of the row.
        # q is asked at temperature 1, whatever the policy was sampled with.
        groups = collected.groups
        samples, metrics = self._rows(groups)
        started = time.perf_counter()
        scores = await self._teacher.score(samples)
        metrics["teacher_s"] = time.perf_counter() - started
        rows = [taught(row, scores_T) for row, scores_T in zip(samples, scores, strict=True)]
        metrics |= collected.metrics | _gap(samples, scores)

        # 4. Update with A_t = log q(y_t) - log pi(y_t) + reward_coef A_i, make the new weights live, and save them
        # unless that may wait.
        started = time.perf_counter()
        self._tuned.start_updates()
        tokens = TokenNumbers()
        tokens.note_advantages(rows)
        metrics |= await self._train(learner, rows, tokens=tokens)
        metrics["update_s"] = time.perf_counter() - started
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        # Every call of a rollout trains unless it was rejected, whatever the rollout's outcome.
        uses = tokens.added(_uses(groups, rows)) | collected.uses
        return self._report(metrics, trained=[row.rollout for row in rows], published=published, uses=uses)

    async def close(self) -> None:
        """Release the model and the teacher."""
        await super().close()
        if hasattr(self, "_teacher"):
            await self._teacher.close()

    def _find_teacher(self, context: AlgorithmContext) -> Teacher:
        name = self._teacher_name
        # A model here is asked by its folder or hub name, both of which have a slash; a policy's name has none.
        if "/" in name:
            path = str(context.folder / name) if name.startswith(".") else name
            return LocalTeacher(path, self._tuned.settings.compute, say=context.say)
        if name == self._tuned.name:
            raise ConfigError(f"distill got teacher = {name!r}, which is the policy that it tunes; give another model.")
        if Path(context.folder, name).is_dir():
            raise ConfigError(f"distill got teacher = {name!r}; write a folder with a slash: teacher = './{name}'.")
        context.endpoint(name)  # names the policies that there are
        return ServedTeacher(lambda: context.endpoint(name), name=name, say=context.say)

    def _rows(self, groups: Sequence[Sequence[Episode]]) -> tuple[list[RowSample], dict[str, float]]:
        """Return the rows to train, whose advantages so far come from rewards only, and the metrics of the batch."""
        # The rewards' part: reward_coef A_i at every token of call i, by credit and estimator.
        if self._reward_coef:
            batch = prepare(
                groups,
                credit=self._context.credit,
                estimator=self._estimator.call,
                pictures=self._tuned.pictures,
            )
            if notice := self._unused.news(final=batch.final, calls=batch.calls):
                self._context.say(notice)
            # No group statistic sees the teacher: its part is added after A_i was compared and scaled.
            scaled = [replace(row, advantages=self._reward_coef * row.advantages) for row in batch.samples]
            return scaled, batch.metrics
        episodes = [episode for group in groups for episode in group]
        # Without `reward_coef` the calls of failed rollouts train too: the teacher judges tokens, not outcomes.
        pictures = self._tuned.pictures
        rows = [row for episode in episodes for row in live_rows(episode, advantage=0.0, pictures=pictures)]
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        # A reward is logged where there is one, and trains nothing.
        metrics = {"groups": float(len(groups)), "rollouts": float(len(episodes)), "rows": float(len(rows))}
        return rows, metrics | ({"reward": mean(rewards)} if rewards else {})

    async def _train(
        self, learner: PolicyLearner, samples: list[RowSample], *, tokens: TokenNumbers
    ) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates that report them."""
        # Every row gets log pi_old, because the updates train every row, and one row without it takes it from its whole
        # micro-batch.
        samples = await asyncio.to_thread(self._objective.prepared, samples, learner=learner, skips_silent=False)
        # q is asked once per step: its log-probabilities stay as they are while pi moves, and r_t accounts for that.
        parts = split_updates(samples, updates=self._updates_per_step)
        reports = [
            await asyncio.to_thread(self._update, learner, part, tokens=tokens)
            for _ in range(self._epochs)
            for part in parts
        ]
        return averaged(reports) or {"updates_skipped": 1.0}

    def _update(
        self, learner: PolicyLearner, samples: Sequence[RowSample], *, tokens: TokenNumbers | None = None
    ) -> dict[str, float]:
        """Do one optimizer update on whole rollouts and return its metrics."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        # w_t and the total of this update: 1 over its tokens with "token", 1 / (|y| rollouts) with "sequence".
        tally = Tally(tokens=tokens)
        weight, total = self._objective.weights(samples)
        rows = self._objective.surveyed(samples, learner=learner)
        for batch in learner.batches(rows, weight, total=total):
            # sum_t w_t c_t max(-A_t r_t, -A_t clip(r_t)) / total, r_t = pi_theta(y_t) / pi(y_t). At r = 1 its gradient
            # is
            #     -sum_t w_t A_t grad log pi(y_t),    A_t = log q(y_t) - log pi(y_t),
            # whose mean over y_t ~ pi is the gradient of the reverse KL at this token,
            #     grad KL(pi || q) = E_pi[(log pi(y) - log q(y)) grad log pi(y)],
            # because E_pi[grad log pi] = 0. The states y_<t are taken as given: a discount of 0.
            backward(self._objective.loss(batch, model=learner.loaded.model, tuned=self._tuned, tally=tally))
        return learner.apply(tally.report())


def taught(sample: RowSample, scores_T: Tensor) -> RowSample:
    """Return the sample with log q - log pi added to each token's advantage; `scores_T` is the teacher's log q."""
    # A_t = log q(y_t) - log pi(y_t), pi being the sampler's record: -A_t is the k1 estimate of KL(pi || q) at token t.
    gap_T = (scores_T - sample.behaviour) * sample.mask
    return replace(sample, advantages=sample.advantages + gap_T)


def _gap(samples: Sequence[RowSample], scores: Sequence[Tensor]) -> dict[str, float]:
    """Return two metrics: the estimated reverse KL per token, in nats, and the share of tokens that the teacher
    scored.
    """
    # KL(pi || q) per token, estimated by the mean of log pi(y_t) - log q(y_t) over all tokens of the step.
    tokens = sum(sample.trained_tokens for sample in samples)
    gaps = [float((s.behaviour - q_T)[s.trained].sum()) for s, q_T in zip(samples, scores, strict=True)]
    # A share below 1 means that a server could not score some tokens, for which the update is then skipped.
    scored = sum(int(q_T[s.trained].isfinite().sum()) for s, q_T in zip(samples, scores, strict=True))
    return {"reverse_kl": sum(gaps) / max(1, tokens), "teacher_share": scored / max(1, tokens)}


def _uses(groups: Sequence[Sequence[Episode]], rows: Sequence[RowSample]) -> dict[str, tuple[CallUse, ...]]:
    """Return the use of every call, by rollout id, with the mean advantage of the call's tokens."""
    # A_t differs from token to token, and `agl why` shows one number per call: its mean.
    means = mean_advantages(rows)
    return {
        episode.rollout.rollout_id: call_uses(
            episode,
            trained={call.span_id for call in episode.transitions if not call.reject},
            advantages=means[episode.rollout.rollout_id],
        )
        for group in groups
        for episode in group
    }
