"""On-policy distillation: the policy samples, and a teacher says of every token how likely it would have been.

Sources: Thinking Machines 2025, "On-Policy Distillation"; Agarwal et al. 2024, arXiv 2306.13649 (GKD), with student's
data alone. One step:

    1. collect: run every task `group_size` times with the live weights pi
    2. ask the teacher for log q(y_t | y_<t) of the very tokens y that were sampled, at temperature 1
    3. advantages: A_t = log q(y_t) - log pi(y_t) + reward_coef * GRPO's advantage, pi as it was at sampling
    4. update: the policy gradient with A_t by the loss `loss` (`objective.py`), then publish the new weights

The mean of -A_t over the policy's own tokens estimates the reverse KL(pi || q) per token: the policy keeps to what the
teacher finds likely, in the states that it gets into itself. No reward is needed, and no group.

Deviations, and why:
- Each token's advantage holds its own gap alone (a discount of 0), as in the source: later gaps would be credited with
  noise.
- Rollouts have several calls and agents. The gaps of all calls that train count, each in its own context.
- The gap is that of the sampled token, not of the distributions: a server returns the former for a few bytes.
- The teacher reads what the policy read. One that reads more, as the solution in OPSD (arXiv 2601.18734), is `sdpo`'s:
  it reads what the trace holds, and no hidden solution.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.preparation import ESTIMATOR, estimator_of_samples, prepare
from agl_algo_torch.data.teachers import LocalTeacher, ServedTeacher, Teacher, load_tokenizer
from agl_algo_torch.learner.batch import RowSample, from_row, micro_batches, split_updates
from agl_algo_torch.learner.model import LoraSettings
from agl_algo_torch.learner.objective import Objective, Tally
from agl_algo_torch.learner.optim import Decay, OptimSettings
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, mean, tuned_weights
from agl_algo_torch.learner.token_numbers import TokenNumbers, mean_advantages
from agl_algo_torch.learner.tuned_policy import (
    TunedPolicy,
    at_least_one,
    check_tasks,
    needed_by,
    not_negative,
    one_of,
)
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.aggregation import MEANS, MeanAggregation
from agl_objectives.groups import GroupSampler
from agl_objectives.importance import Importance
from agl_objectives.reports import UnusedEstimator, averaged
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import Curriculum  # noqa: TC001 - the parameter check resolves it
from agl_objectives.uses import call_uses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Episode, Json


class Distill:
    """Trains the weights of one policy towards a teacher, on the tokens that the policy samples.

    Args:
        teacher: A model folder or hub name, which has a slash (`./big`, `Qwen/Qwen2.5-7B-Instruct`); or the name of a
            policy of the experiment whose server returns `prompt_logprobs`, such as vLLM's.
        steps: Steps in all; one step collects once and publishes once.
        tasks_per_step: Tasks per step, drawn without repetition until the training tasks are used up.
        group_size: Rollouts per task; more than 1 only makes a batch larger, unless `reward_coef` compares them.
        refill: With `reward_coef`, rounds in which groups whose rewards do not differ are replaced by those of further
            tasks; 0 keeps every group. Without it every group learns from the teacher, and `refill` is refused.
        curriculum: `frontier` prefers tasks of which about half of the rollouts succeeded when they were last drawn,
            `unsolved` those with the worst rewards; at least the share `curriculum_uniform` of a step's tasks is drawn
            without preference.
        reward_coef: Weight of the rewards' advantages, by `estimator`, beside the teacher's; 0 needs no reward.
        teacher_wait_s: Seconds for which a teacher's server that is away is asked again before the run ends.
        updates_per_step: Optimizer updates that share a step's rollouts; `epochs` passes over them.
        loss: `ppo-clip`, another loss's name, or `module:name`; `loss_params` are its parameters.
        aggregation: `token` or `sequence`; by default what the loss asks for.
        tis_cap: Largest weight `pi_old / pi_behaviour` of importance sampling; 0 turns it off.
        lr: Peak learning rate; `warmup` and `decay` shape it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
        max_nonfinite: Updates in a row that are skipped for a gradient that is not finite; one more ends the run.
        token_budget: Tokens that one forward pass may compute, padding included where rows are padded.
        lora_rank: 0 trains all weights; else the rank of LoRA adapters on `lora_targets` with `lora_alpha`.
        device: `auto`, `cpu`, `cuda` ...; `dtype` that of passes and exports; `threads` 0 leaves torch's. A teacher
            from a folder has the same.
        gradient_checkpointing: Whether layers are computed again in the backward pass, which takes less memory and
            a third more time.
        keep: Saved states and exported weights that stay on disk.
        save_every: Steps between two saves of weights and moments, a time such as `"60s"`, or the largest share of the
            time that may go into saving. A run that is killed repeats the steps since the last save.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        teacher: str,
        steps: int = 100,
        tasks_per_step: int = 16,
        group_size: int = 4,
        refill: int = 0,
        curriculum: Curriculum = "",
        curriculum_uniform: float = 0.5,
        reward_coef: float = 0.0,
        estimator: str = ESTIMATOR,
        teacher_wait_s: float = 600.0,
        updates_per_step: int = 1,
        epochs: int = 1,
        loss: str = "ppo-clip",
        loss_params: dict[str, Any] | None = None,
        aggregation: MeanAggregation | None = None,
        tis_cap: float = 2.0,
        lr: float = 1e-6,
        warmup: int = 0,
        decay: Decay = "constant",
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
        if not teacher:
            raise ConfigError(
                'distill got teacher = ""; give a model folder such as "./big", or the name of a policy of the '
                "experiment."
            )
        not_negative("distill", reward_coef=reward_coef, teacher_wait_s=teacher_wait_s, tis_cap=tis_cap)
        counts = {"tasks_per_step": tasks_per_step, "group_size": group_size, "token_budget": token_budget}
        at_least_one("distill", steps=steps, updates_per_step=updates_per_step, epochs=epochs, **counts, keep=keep)
        if aggregation is not None:
            one_of("distill", aggregation=(aggregation, MEANS))
        if reward_coef and group_size == 1:
            raise ConfigError(
                "distill with reward_coef compares the rewards of a task's rollouts, but group_size is 1. Give at "
                "least 2, or reward_coef = 0."
            )
        if refill and not reward_coef:
            raise ConfigError(
                f"distill got refill = {refill} without reward_coef: every group learns from the teacher, so there is "
                "none to replace. Remove refill, or give reward_coef."
            )
        self._objective = Objective(
            "distill",
            loss=loss,
            loss_params=loss_params,
            aggregation=aggregation,
            importance=Importance(cap=tis_cap),
            kl="k3",
            kl_coef=0.0,
            entropy_coef=0.0,
            token_budget=token_budget,
        )
        self._objective.check_effect("distill", updates=updates_per_step * epochs)
        self._estimator = estimator_of_samples("distill", estimator)
        self._unused = UnusedEstimator(estimator)
        needed_by("distill", "reward_coef", reward_coef, estimator=(estimator, ESTIMATOR))
        self._name, self._wait_s = teacher, teacher_wait_s
        self._steps = steps
        self._reward_coef = reward_coef
        # Without rewards in the loss, a rollout without a reward is as good as any.
        self._groups = GroupSampler(
            "distill",
            count=tasks_per_step,
            n=group_size,
            refill=refill,
            curriculum=curriculum,
            uniform=curriculum_uniform,
            keeps_all=not reward_coef,
            compares_batch=self._estimator.entry.compares == "batch",
        )
        self._updates_per_step, self._epochs = updates_per_step, epochs
        self._token_budget = token_budget
        self._settings = LearnerSettings(
            optim=OptimSettings(
                lr=lr,
                betas=(betas[0], betas[1]),
                weight_decay=weight_decay,
                warmup=warmup,
                decay=decay,
                total=steps * updates_per_step * epochs,
                max_grad_norm=max_grad_norm,
                max_nonfinite=max_nonfinite,
            ),
            lora=LoraSettings.of(lora_rank, lora_alpha, lora_targets),
            device=device,
            dtype=dtype,
            threads=threads,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._tuned = TunedPolicy(settings=self._settings, algorithm="distill", keep=keep, save_every=save_every)
        self._step = 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy, the tasks and the teacher, which must answer and have the policy's tokenizer."""
        self._context = context
        self._tuned.begin(context)
        check_tasks(context, algorithm="distill")
        self._groups.begin(context)
        self._teacher = self._find_teacher(context)
        weights = tuned_weights(context.current(self._tuned.name).resource, name=self._tuned.name)
        path = weights.uri if weights.format == "hf" else weights.base_model
        await self._teacher.start(await asyncio.to_thread(load_tokenizer, path))

    async def step(self) -> StepReport:
        """Collect rollouts, ask the teacher about them, update, save and publish."""
        step = self._step + 1
        learner = await self._tuned.learner(updates=self._step * self._updates_per_step * self._epochs)
        moves = learner.moves

        # 1. Collect.
        started = time.perf_counter()
        collected = await self._groups.collect(step)
        collect_s = time.perf_counter() - started

        # 2. and 3. Rows with the rewards' part of the advantages, then the teacher's.
        groups = collected.groups
        samples, metrics = self._rows(groups)
        started = time.perf_counter()
        scores = await self._teacher.score(samples)
        metrics["teacher_s"] = time.perf_counter() - started
        rows = [taught(row, scores_T) for row, scores_T in zip(samples, scores, strict=True)]
        metrics |= collected.metrics | _gap(samples, scores) | {"collect_s": collect_s}
        metrics |= {f"dropped_{reason}": float(count) for reason, count in collected.dropped.items()}

        # 4. Update, make the new weights live, and save them unless that may wait.
        started = time.perf_counter()
        self._tuned.start_updates()
        tokens = TokenNumbers()
        tokens.note_advantages(rows)
        metrics |= await self._train(learner, rows, tokens=tokens)
        metrics["update_s"] = time.perf_counter() - started
        published = await self._tuned.finish(step=step, has_moved=learner.moves > moves)
        self._step = step
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=tuple(dict.fromkeys(row.rollout for row in rows)),
            published=published,
            stop_reason=f"{self._steps} steps done" if is_finished else "",
            uses=tokens.added(_uses(groups, rows)) | collected.uses,
        )

    def state(self) -> Mapping[str, Json]:
        """The step count, what the curriculum knows, the newest checkpoint and the version it was opened from."""
        return {"step": self._step, "groups": self._groups.state(), **self._tuned.state(step=self._step)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments included."""
        self._step = int(state["step"])
        self._groups.restore(state.get("groups", {}))
        await self._tuned.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        await self._tuned.go_back(state, rate=rate, updates=self._step * self._updates_per_step * self._epochs)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done; a decaying rate then follows the new length."""
        del tasks, sources_go_on
        return int(state["step"]) < self._steps

    async def close(self) -> None:
        """Drop the model and the teacher."""
        self._tuned.close()
        if hasattr(self, "_teacher"):
            await self._teacher.close()

    def _find_teacher(self, context: AlgorithmContext) -> Teacher:
        name = self._name
        if "/" in name:
            path = str(context.folder / name) if name.startswith(".") else name
            settings, budget = self._settings, self._token_budget
            return LocalTeacher(
                path, device=settings.device, dtype=settings.dtype, token_budget=budget, say=context.say
            )
        if name == self._tuned.name:
            raise ConfigError(f"distill got teacher = {name!r}, which is the policy that it tunes; give another model.")
        if Path(context.folder, name).is_dir():
            raise ConfigError(f"distill got teacher = {name!r}; write a folder with a slash: teacher = './{name}'.")
        context.endpoint(name)  # names the policies that there are
        return ServedTeacher(lambda: context.endpoint(name), name=name, wait_s=self._wait_s, say=context.say)

    def _rows(self, groups: Sequence[Sequence[Episode]]) -> tuple[list[RowSample], dict[str, float]]:
        """Return the rows that train, with the rewards' part of the advantages, and metrics of the batch."""
        if self._reward_coef:
            batch = prepare(groups, credit=self._context.credit, estimator=self._estimator.call)
            if notice := self._unused.news(final=batch.final, calls=batch.calls):
                self._context.say(f"{self._context.name}: {notice}")
            scaled = [replace(row, advantages=self._reward_coef * row.advantages) for row in batch.samples]
            return scaled, batch.metrics
        episodes = [episode for group in groups for episode in group]
        rows = [row for episode in episodes for row in _live_rows(episode)]
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        metrics = {"groups": float(len(groups)), "rollouts": float(len(episodes)), "rows": float(len(rows))}
        return rows, metrics | ({"reward": mean(rewards)} if rewards else {})

    async def _train(
        self, learner: PolicyLearner, samples: list[RowSample], *, tokens: TokenNumbers
    ) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates that report them."""
        if self._updates_per_step * self._epochs > 1:
            samples = await asyncio.to_thread(self._with_old_logprobs, learner, samples)
        parts = split_updates(samples, updates=self._updates_per_step)
        reports = [
            await asyncio.to_thread(self._update, learner, part, tokens=tokens)
            for _ in range(self._epochs)
            for part in parts
        ]
        return averaged(reports) or {"updates_skipped": 1.0}

    def _with_old_logprobs(self, learner: PolicyLearner, samples: list[RowSample]) -> list[RowSample]:
        """Return `samples` with log pi_old, the log-probabilities before the step's first update.

        Every row has it, because the updates leave none out: one without would cost its whole micro-batch theirs.
        """
        learner.use_threads()
        return self._objective.with_old_logprobs(
            samples, model=learner.loaded.model, device=learner.loaded.device, skips_silent=False
        )

    def _update(
        self, learner: PolicyLearner, samples: Sequence[RowSample], *, tokens: TokenNumbers | None = None
    ) -> dict[str, float]:
        """Do one optimizer update on whole rollouts and return its metrics."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        loaded, tally = learner.loaded, Tally(tokens=tokens)
        weight, total = self._objective.weights(samples)
        rows = self._objective.surveyed(samples, model=loaded.model, device=loaded.device)
        for batch in micro_batches(
            rows,
            weight,
            total=total,
            token_budget=self._token_budget,
            device=loaded.device,
            is_packed=packs_rows(loaded.model),
        ):
            backward(self._objective.loss(batch, model=loaded.model, tuned=self._tuned, tally=tally))
        return learner.apply(tally.report())


def taught(sample: RowSample, scores_T: Tensor) -> RowSample:
    """Return a sample with the teacher's part in its advantages; `scores_T` are log q of its tokens."""
    gap_T = (scores_T - sample.behaviour) * sample.mask
    return replace(sample, advantages=sample.advantages + gap_T)


def _gap(samples: Sequence[RowSample], scores: Sequence[Tensor]) -> dict[str, float]:
    """Return the estimate of the reverse KL per token in nats, and the share of tokens that the teacher has scored."""
    tokens = sum(sample.trained_tokens for sample in samples)
    gaps = [float((s.behaviour - q_T)[s.trained].sum()) for s, q_T in zip(samples, scores, strict=True)]
    scored = sum(int(q_T[s.trained].isfinite().sum()) for s, q_T in zip(samples, scores, strict=True))
    return {"reverse_kl": sum(gaps) / max(1, tokens), "teacher_share": scored / max(1, tokens)}


def _live_rows(episode: Episode) -> list[RowSample]:
    """Return the rows of an episode that have trained tokens, without a reward's part in their advantages."""
    live = {call.span_id: 0.0 for call in episode.transitions if not call.reject}
    temperatures = {call.span_id: call.temperature for call in episode.transitions}
    rows = [from_row(row, advantages=live, temperatures=temperatures) for row in episode.rows]
    return [row for row in rows if row.trained_tokens]


def _uses(groups: Sequence[Sequence[Episode]], rows: Sequence[RowSample]) -> dict[str, tuple[CallUse, ...]]:
    """Return what became of every call, by rollout id, with the mean advantage of its tokens."""
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
