"""SDPO: the policy is its own teacher. The teacher also reads how an answer turned out, and the policy learns from it.

Paper: Hübotter et al. 2026, "Reinforcement Learning via Self-Distillation" (arXiv 2601.20802). One step:

    1. collect: run every task `group_size` times with the live weights pi
    2. write lessons: put what the trace says about a rollout into the prompts of its calls (`feedback`, `lessons`):
       errors of tools, the text feedback of rewards, and the answers of a sibling that succeeded
    3. update: minimise sum_t w_t D(pi(. | prompt, y_<t) || q(. | prompt, lesson, y_<t)) over the very tokens y that
       were sampled, where the teacher q is the same policy without gradient; plus `grpo_coef` times GRPO's loss
    4. publish the new weights

GRPO learns from one number per rollout, SDPO from a distribution per token. SDPO also learns from a group in which
every rollout failed, if a tool or a reward said why. Limit: a model that ignores feedback in its prompt gives the same
distribution as teacher and as policy, and learns nothing.

Deviations from the paper, and why:
- The lesson is a user message of its own before the answer begins, and not a new first message: a call may be the tenth
  of a conversation with tools, and its recorded tokens stay as they were sampled.
- The lesson about a sibling is made of the answers of the same agent in the other rollout.
- In a rollout that succeeded without feedback, the teacher counts only at tokens that it finds at least as likely as
  the policy does; with `teach_successes = "all"` it counts at every token, as in the paper. The teacher is mostly the
  policy at the start with a lesson. It makes mistakes of its own and would undo what the policy has learned since: with
  `"all"` the calculator example went from a reward of 1.00 to 0.75 in ten steps; with the default it stays at 0.98.
- Quotes of hidden fields of the task are masked in the feedback of rewards and in the messages of tools.
- The teacher is the geometric mean of two policies, that of the step's start and that of this algorithm's start, which
  is the paper's trust region; `teacher.start` is the share of the second. The paper's other form, a moving average of
  weights, would be a second set of weights to save and to resume.
- A step has one update, so its rollouts are the current policy's own and need no importance weights.

Policy and teacher are both taken at the temperature of sampling. M is the number of tokens, V that of the vocabulary.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import torch

from agl.errors import ConfigError
from agl_algo_torch.data.credited_rows import ESTIMATOR, estimator_of_samples, needed_by, prepare
from agl_algo_torch.data.lessons import SelfTeacher, TaughtRow, Teaching
from agl_algo_torch.learner.objective import PolicyObjective, Tally
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.scoring import scaled
from agl_algo_torch.learner.token_numbers import TokenNumbers
from agl_algo_torch.learner.tuned_policy import OnPolicy, TunedPolicy
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.aggregation import MeanAggregation, loss_weights
from agl_objectives.groups import GroupSampler, Silence
from agl_objectives.reports import UnusedEstimator
from agl_objectives.settings import Compute, Count, Lora, NotNegative, Objective, Optim, Sampling, Saving, Whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agl.contracts import StepReport
    from agl.schemas import Episode
    from agl_algo_torch.learner.batch import MicroBatch, RowSample

NOTHING_TO_LEARN = (
    "silent, dropped: nothing could be said about its group, or all of it succeeded, and the step took further tasks "
    "in its place (refill)"
)
"""Note that `agl why` shows for the calls of a group that was replaced."""

Divergence = Literal["jsd", "reverse", "forward"]
"""The divergence of the policy p from the teacher q, both given as log-probabilities in nats, per token:

    reverse  KL(p || q)                        the policy writes only what the teacher finds likely
    forward  KL(q || p)                        the policy covers everything that the teacher finds likely
    jsd      KL(p || m) / 2 + KL(q || m) / 2   with m = (p + q) / 2; never above log 2
"""

_LEAST = 1e-9
"""Lower bound on the total probability of all but the K likeliest tokens, so that its logarithm is finite."""


def scaled_logprobs(logits_M_V: Tensor, *, temperature_M: Tensor) -> Tensor:
    """Return the logarithm of `softmax(logits / temperature)`, [M, V], at least float32."""
    # softmax(z / tau) is the distribution that was sampled from, so policy and teacher are compared at that
    # temperature.
    return scaled(logits_M_V, temperature_M=temperature_M).log_softmax(dim=1)


def likeliest(logp_M_V: Tensor, *, count: int) -> Tensor | None:
    """Return the ids of the `count` likeliest tokens, [M, K]; None, for all tokens, if `count` is 0 or at least V."""
    if not 0 < count < logp_M_V.shape[1]:
        return None
    return logp_M_V.detach().topk(count, dim=1).indices


def among(logp_M_V: Tensor, chosen_M_K: Tensor | None) -> Tensor:
    """Return the log-probabilities of the K chosen tokens, and that of all others together, [M, K + 1].

    With `chosen_M_K` None every token is chosen, and the result is `logp_M_V` itself.
    """
    if chosen_M_K is None:
        return logp_M_V
    # The tail as one more outcome: the divergence of these K + 1 outcomes is at most that of all V (data processing),
    # and 0 where the K likeliest agree. It takes M x K numbers in place of M x V.
    logp_M_K = logp_M_V.gather(1, chosen_M_K)
    others_M = (1.0 - logp_M_K.exp().sum(dim=1)).clamp_min(_LEAST)
    return torch.cat([logp_M_K, others_M.log()[:, None]], dim=1)


def divergence(policy_M_K: Tensor, teacher_M_K: Tensor, *, kind: Divergence) -> Tensor:
    """Return the divergence of policy and teacher at each token in nats, [M], differentiable in both arguments."""
    # D(p || q), p the policy with its gradient and q the teacher without.
    if kind == "reverse":
        return _kl(policy_M_K, teacher_M_K)
    if kind == "forward":
        return _kl(teacher_M_K, policy_M_K)
    # m = (p + q) / 2: log m = log(exp(log p) + exp(log q)) - log 2. m has mass wherever p or q has, so neither KL is
    # infinite, and the gradient stays bounded where policy and teacher disagree completely.
    middle_M_K = torch.logaddexp(policy_M_K, teacher_M_K) - math.log(2.0)
    return 0.5 * (_kl(policy_M_K, middle_M_K) + _kl(teacher_M_K, middle_M_K))


def _kl(a_M_K: Tensor, b_M_K: Tensor) -> Tensor:
    # sum_k a_k (log a_k - log b_k)
    return (a_M_K.exp() * (a_M_K - b_M_K)).sum(dim=1)


class SDPO(OnPolicy):
    """Trains the weights of one policy towards its own answers after a lesson about how its first answers turned out.

    Args:
        steps: Number of steps; each collects once and publishes once.
        tasks_per_step: Groups per step. Without a `curriculum` every task is drawn once before any is drawn again.
        group_size: Rollouts per task. The teacher of a rollout reads the answers of another one that succeeded.
        sampling: The choice of tasks. `refill` replaces silent groups: those for which there is no lesson, and those in
            which every rollout succeeded without feedback.
        teacher: The weights of the teacher, and the lessons that it reads.
        divergence: `jsd`, `reverse` (policy to teacher) or `forward` (teacher to policy).
        top_k: Number of the policy's likeliest tokens that are compared one by one; all others are compared as one
            token. 0 compares the whole vocabulary.
        grpo_coef: Weight of GRPO's loss, which is added to the divergence.
        estimator: The estimator of the advantages in GRPO's loss; refused without `grpo_coef`.
        aggregation: `token` (every token counts the same) or `sequence` (every rollout counts the same).
        optim: AdamW.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        steps: Count = 100,
        tasks_per_step: Count = 16,
        group_size: Count = 8,  # the paper's
        sampling: Sampling = Sampling(),
        teacher: SelfTeacher = SelfTeacher(),
        divergence: Divergence = "jsd",  # the paper's, which found it steadier than either direction of KL
        top_k: Whole = 100,  # K of the paper
        grpo_coef: NotNegative = 0.0,
        estimator: str = ESTIMATOR,
        aggregation: MeanAggregation = "token",
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        # A rollout that is alone has no sibling to read, and A_i = 0 in GRPO's loss.
        if group_size == 1 and teacher.sources == ("siblings",):
            raise ConfigError(
                "sdpo learns from siblings alone, but group_size is 1. Give at least 2, or another source."
            )
        if group_size == 1 and grpo_coef:
            raise ConfigError(
                "sdpo with grpo_coef compares the rollouts of a group, but group_size is 1. Give at least 2, or "
                "grpo_coef = 0."
            )
        self._steps, self._teacher, self._grpo_coef = steps, teacher, grpo_coef
        self._divergence: Divergence = divergence
        self._top_k = top_k
        self._aggregation: MeanAggregation = aggregation
        self._estimator = estimator_of_samples("sdpo", estimator)
        needed_by("sdpo", "grpo_coef", grpo_coef, estimator=estimator)
        self._unused = UnusedEstimator(estimator)
        # The paper's group: a rollout that failed reads a sibling that succeeded.
        self._groups = GroupSampler(
            "sdpo",
            count=tasks_per_step,
            n=group_size,
            refill=sampling.refill,
            curriculum=sampling.curriculum,
            silence=Silence(of=self._is_silent, note=NOTHING_TO_LEARN),
            compares_batch=self._estimator.entry.compares == "batch",
        )
        # L_GRPO: no KL penalty of its own, as the teacher is a trust region already.
        self._objective = PolicyObjective("sdpo", Objective(aggregation=aggregation))
        # pi_theta, and pi_start, the policy at this algorithm's start, which has the share `teacher.start` in the
        # teacher.
        self._tuned = TunedPolicy(
            "sdpo",
            settings=LearnerSettings(optim=optim, lora=lora, compute=compute, total=steps),  # one update per step
            saving=saving,
            has_reference=teacher.start > 0,
        )

    async def step(self) -> StepReport:
        """Collect one batch of groups, write the teacher's lessons about them, update, save and publish."""
        context, learner = self._context, await self._tuned.learner()
        moves = learner.moves
        # Raises for a chat template that has no place for a lesson, before the step spends anything on rollouts.
        self._teaching = Teaching(context.store, learner.loaded, self._teacher, pictures=self._tuned.pictures)

        # 1. Collect answers y of the policy as it is, pi.
        collected = await self._groups.collect(self._tuned.step + 1)
        groups = collected.groups

        # 2. Write lessons: the teacher's context is (x, f, y_<t), with the lesson f in the prompt x of a call.
        prepared = prepare(groups, credit=context.credit, estimator=self._estimator.call, pictures=self._tuned.pictures)
        if self._grpo_coef and (notice := self._unused.news(final=prepared.final, calls=prepared.calls)):
            context.say(notice)
        lessons = await self._teaching.lessons(groups)
        metrics = prepared.metrics | collected.metrics | lessons.metrics()

        # 3. Update: L(theta) = sum_t w_t D(pi_theta(. | x, y_<t) || q(. | x, f, y_<t)) + grpo_coef L_GRPO(theta).
        started = time.perf_counter()
        samples = prepared.samples if self._grpo_coef else []
        self._tuned.start_updates()
        tokens = TokenNumbers()
        metrics |= await asyncio.to_thread(self._update, learner, lessons.rows, samples, tokens=tokens)
        metrics["update_s"] = time.perf_counter() - started

        # 4. Publish the new weights, if there was an update. Save a state of training, unless saving is deferred.
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        # A rollout counts as trained once, whether a lesson, its reward or both have trained it.
        trained = [row.policy.rollout for row in lessons.rows] + [sample.rollout for sample in samples]
        uses = tokens.added(lessons.uses(groups, grpo=prepared if self._grpo_coef else None)) | collected.uses
        return self._report(metrics, trained=trained, published=published, uses=uses)

    async def _is_silent(self, group: Sequence[Episode]) -> bool:
        """Return true if nothing can be learned from a group: no lessons and, with `grpo_coef`, equal rewards."""
        return await self._teaching.is_silent(group) and (not self._grpo_coef or self._groups.is_equal(group))

    def _update(
        self, learner: PolicyLearner, rows: Sequence[TaughtRow], samples: Sequence[RowSample], *, tokens: TokenNumbers
    ) -> dict[str, float]:
        """Do one optimizer update and return its metrics; without a gradient in any row, do nothing."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        metrics = self._add_divergence(learner, rows, tokens) | self._add_grpo(learner, samples, tokens)
        if not metrics:
            return {"updates_skipped": 1.0}
        return learner.apply(metrics)

    def _add_divergence(
        self, learner: PolicyLearner, rows: Sequence[TaughtRow], tokens_seen: TokenNumbers
    ) -> dict[str, float]:
        """Add the gradient of the divergence from the teacher.

        Returns the mean divergence per token, the mean gap by which the teacher prefers the sampled token, and the
        share of tokens at which the teacher is ignored; `{}` if it is ignored at every token.
        """
        policies = [row.policy for row in rows]
        weight, total = loss_weights(policies, aggregation=self._aggregation)
        # w_t / total: 1 over all taught tokens with "token", 1 / (|y| rollouts) with "sequence".
        tokens = sum(policy.trained_tokens for policy in policies)
        sums: defaultdict[str, float] = defaultdict(float)
        model = learner.loaded.model
        for batch in learner.batches(policies, weight, total=total):
            logp_M_V = scaled_logprobs(batch.logits(model), temperature_M=batch.temperature_M)
            # D(pi(. | x, y_<t) || q(. | x, lesson, y_<t)) at every token y_t, pi with its gradient and q without.
            chosen_M_K = likeliest(logp_M_V, count=self._top_k)
            calls = [call for index in batch.rows for call in rows[index].teacher]
            teacher_M_K, teacher_M = self._taught(learner, calls, chosen_M_K)
            apart_M = divergence(among(logp_M_V, chosen_M_K), teacher_M_K, kind=self._divergence)
            # log q(y_t) - log pi(y_t): by how much the teacher prefers the token that was sampled. The paper reads its
            # gradient as a policy gradient with this gap as the advantage.
            gap_M = teacher_M - logp_M_V.detach().gather(1, batch.targets_M[:, None])[:, 0]
            # In rollouts that succeeded the teacher counts only where it does not contradict the sampled token.
            unheard_M = (gap_M < 0) & self._needs_agreement(batch, rows)
            backward(batch.mean(apart_M.masked_fill(unheard_M, 0.0)))  # gradients of micro-batches add up
            sums["divergence"] += float(apart_M.detach().sum())
            sums["teacher_gap"] += float(gap_M.sum())
            sums["unheard_share"] += float(unheard_M.sum())
            tokens_seen.note_gaps(batch, gap_M)
        return {name: value / tokens for name, value in sums.items()} if sums["unheard_share"] < tokens else {}

    def _needs_agreement(self, batch: MicroBatch, rows: Sequence[TaughtRow]) -> Tensor:
        """Return for every trained token whether the teacher counts only if it agrees with the token, [M] bool."""
        solved = torch.tensor(
            [rows[index].is_solved and self._teacher.teach_successes == "agreed" for index in batch.rows]
        )
        # One value per row -> [M]
        counts = torch.tensor([rows[index].policy.trained_tokens for index in batch.rows])
        return solved.repeat_interleave(counts).to(batch.targets_M.device)

    @torch.no_grad()
    def _taught(
        self, learner: PolicyLearner, calls: Sequence[RowSample], chosen_M_K: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the teacher's log-probabilities of the chosen tokens, [M, K + 1], and of the sampled tokens, [M].

        `calls` are in the order of their tokens in the policy's rows.
        """
        # One row of the policy may hold several calls. Each call has its own context here, so the M tokens are spread
        # over other rows.
        sizes = torch.tensor([0, *(call.trained_tokens for call in calls)])
        starts = sizes.cumsum(0)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        device = learner.loaded.device
        # Weights are 0 because nothing is summed here.
        for batch in learner.batches(calls, [0.0] * len(calls)):
            # Micro-batches come longest first; `place_m` says where their tokens are among the M.
            places = [torch.arange(int(starts[i]), int(starts[i + 1])) for i in batch.rows]
            place_m = torch.cat(places).to(device)
            logp_m_V = self._teacher_logprobs(learner, batch)
            among_m_K = among(logp_m_V, None if chosen_M_K is None else chosen_M_K[place_m])
            parts.append((place_m, among_m_K, logp_m_V.gather(1, batch.targets_M[:, None])[:, 0]))
        # Sorted into the order of the policy's tokens, so that index m means the same y_t for policy and teacher.
        order_M = torch.cat([place for place, _, _ in parts]).argsort()
        return torch.cat([part for _, part, _ in parts])[order_M], torch.cat([y for _, _, y in parts])[order_M]

    def _teacher_logprobs(self, learner: PolicyLearner, batch: MicroBatch) -> Tensor:
        """Return log q for every trained token of a micro-batch in the teacher's contexts, [m, V]."""
        logp_m_V = scaled_logprobs(batch.logits(learner.loaded.model), temperature_M=batch.temperature_M)
        # If the policy at the start has a share in the teacher, it takes another forward pass.
        if not self._teacher.start:
            return logp_m_V
        with self._tuned.reference.active() as model_start:
            start_m_V = scaled_logprobs(batch.logits(model_start), temperature_M=batch.temperature_M)
        # q = pi^(1 - s) pi_start^s / Z with s = `teacher.start`, the paper's teacher with a trust region: it minimises
        # (1 - s) KL(q || pi) + s KL(q || pi_start). In logarithms it is a mean, and log Z what log_softmax takes off.
        return torch.lerp(logp_m_V, start_m_V, self._teacher.start).log_softmax(dim=1)

    def _add_grpo(self, learner: PolicyLearner, samples: Sequence[RowSample], tokens: TokenNumbers) -> dict[str, float]:
        """Add `grpo_coef` times the gradient of GRPO's loss; returns the loss as a metric, `{}` without a gradient."""
        # -A r per token as in `grpo`, with r = 1 in value: a step has one update. Weights are computed before silent
        # rows are left out.
        weight, total = self._objective.weights(samples)
        kept = [index for index, sample in enumerate(samples) if self._objective.has_gradient(sample)]
        tally = Tally(tokens=tokens)
        for batch in learner.batches([samples[i] for i in kept], [weight[i] for i in kept], total=total):
            loss = self._objective.loss(batch, model=learner.loaded.model, tuned=self._tuned, tally=tally)
            backward(self._grpo_coef * loss)
        return {"grpo_loss": tally.sums["loss"]} if kept else {}
