"""The common parts of training in one process and on Ray: groups to rows, replay, saving and reports."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_verl.losses.choice import unused_estimator
from agl_algo_verl.rows.replay import VerlReplay
from agl_algo_verl.rows.supply import VerlSupply
from agl_algo_verl.runtime import check_version
from agl_objectives.saving import SaveInterval, begin_saving

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Json
    from agl_algo_verl.rows.rows import PreparedStep
    from agl_algo_verl.rows.supply import StepGroups
    from agl_algo_verl.settings.settings import VerlSettings


def own_checkpoint(state: Mapping[str, Json], *, workdir: Path) -> str:
    """Return the checkpoint that a saved state names, `""` for none.

    Raises ConfigError if it is outside of the run's folder: the state may come from a copied store, and VERL reads its
    checkpoints with pickle, which runs code. A link in the run's folder may lead to another disk.
    """
    checkpoint = str(state.get("checkpoint", ""))
    parents = Path(os.path.abspath(checkpoint)).parents
    if checkpoint and workdir.resolve() not in (parent.resolve() for parent in parents):
        raise ConfigError(
            f"The saved state names VERL's checkpoint {checkpoint}, which is outside of the run's folder {workdir} and "
            "is not read. Resume where the run's files are, or start the run with --fresh."
        )
    return checkpoint


class VerlTraining:
    """Base of the algorithm's two engines, in one process and on Ray."""

    def __init__(self, settings: VerlSettings, notes: Iterable[str]) -> None:
        check_version()
        self.settings, self.notes = settings, notes
        self._interval = SaveInterval("verl", settings.saving.save_every)
        self._is_moving = False  # while the weights belong to no step
        self._step = 0  # steps done

    def _begin(self, context: AlgorithmContext, *, extra: Iterable[str], serves: str = "") -> None:
        """Create the objects that steps need, once the settings are final; logs `extra` and notes on overruled keys."""
        self._steps = self.settings.steps(len(context.train))
        self._supply = VerlSupply(context, self.settings, steps=self._steps)
        self._unused = unused_estimator(self.settings)
        self._replay = VerlReplay(self.settings, workdir=context.workdir)
        every = self.settings.saving.save_every
        begin_saving(context, self.save, algorithm="verl", save_every=every, serves=serves)
        for note in (*self.notes, *extra, *advice(self.settings)):
            context.say(note)

    def _restore_rollouts(self, state: Mapping[str, Json], context: AlgorithmContext) -> None:
        """Restore the groups that were being collected, and the rollouts to replay; logs why the latter are lost."""
        # Groups that were being collected are requested again by their numbers, and found in the store.
        self._supply.restore(state["supply"])
        if found := self._replay.load(step=self._step):
            context.say(f"{found}; training goes on without the rollouts of earlier steps that were to be replayed")

    async def save(self, must: bool) -> bool:
        """Save the state from which training continues; see `defer` of the context."""
        raise NotImplementedError

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if VERL's configuration requests more steps than are done."""
        del sources_go_on
        return int(state["step"]) < self.settings.steps(tasks)

    async def _prepare(self, supplied: StepGroups, context: AlgorithmContext) -> PreparedStep:
        """Return the step's rows with advantages, from credit and the estimator."""
        from agl_algo_verl.rows.rows import prepare

        # In a thread: if groups are collected ahead, agents run in this event loop meanwhile.
        prepared = await asyncio.to_thread(
            prepare,
            supplied.groups,
            credit=context.credit,
            settings=self.settings,
            dropped=supplied.dropped,
            baselines=supplied.baselines,
        )
        if notice := self._unused.news(**prepared.finished):
            context.say(notice)
        return prepared

    def _report(
        self,
        prepared: PreparedStep,
        *,
        metrics: dict[str, float],
        published: tuple[str, ...],
        uses: dict[str, tuple[CallUse, ...]],
    ) -> StepReport:
        is_finished = self._step >= self._steps
        return StepReport(
            step=self._step,
            is_finished=is_finished,
            metrics=metrics,
            trained=tuple(dict.fromkeys(sample.rollout for sample in prepared.samples)),  # each once, in order
            published=published,
            stop_reason=f"reached steps = {self._steps}" if is_finished else "",
            uses=uses,
        )


def advice(settings: VerlSettings) -> list[str]:
    """Return advice on settings that work but have a better alternative."""
    notes: list[str] = []
    # Without a correction, old rollouts bias the gradient towards what older weights did.
    is_corrected = settings.correction.is_on or settings.algorithm.rollout_correction.bypass_mode
    if settings.trainer.v1.is_async and not is_corrected:
        notes.append(
            "old rollouts are trained as if they were new; correct them with "
            'algorithm.rollout_correction.rollout_is = "token"'
        )
    if settings.actor.fsdp_config.model_dtype == "bf16" and not settings.is_lora:
        notes.append(
            "the optimizer updates weights in bfloat16, whose rounding swallows small steps; leave "
            'actor_rollout_ref.actor.fsdp_config.model_dtype at "fp32", and passes still compute in bfloat16 on a GPU'
        )
    return notes
