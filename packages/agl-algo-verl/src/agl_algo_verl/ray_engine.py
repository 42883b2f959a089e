"""The algorithm `verl` with `engine = "ray"`: VERL's own V1 trainer on a Ray cluster, and agl's agents outside it.

VERL's trainer owns the loop; it runs in an actor of the cluster. One step:

    1. VERL asks for rollouts, with the addresses of its replicas, which serve the current weights (`ray_loops.py`)
    2. agl sends the policy's calls there (`policy.py`), runs the agents, and makes rows with advantages from credit
    3. VERL recomputes log-probabilities, updates, saves a checkpoint, and hands the new weights to its replicas
    4. VERL asks for the next step: this one is finished, and its weights are published

Groups that were asked for ahead (`supply.py`) go on meanwhile. Replicas that share the trainer's GPUs cannot serve
while it trains: calls are held then, and the agents go on with everything else. The replicas on the CPU have memory of
their own and serve the old weights until they have the new.

Deviations from VERL as it is usually run: advantages come with the rows, all rows of a step share one update (VERL
would cut after a number of rows, through the middle of a rollout), and a checkpoint is saved in every step, because a
step that agl counts as done is never repeated. VERL's trainer runs in its mode `sync` with groups collected ahead, too:
in VERL's own asynchronous modes replicas break off calls in the middle, and only VERL's own client would take them up.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agl.contracts import StepReport
from agl.errors import AglError, ConfigError
from agl.schemas import Weights
from agl_algo_verl.bridge import StepRequest
from agl_algo_verl.critic import check_model
from agl_algo_verl.inproc import advice
from agl_algo_verl.policy import VerlPolicy
from agl_algo_verl.probe import probe_files
from agl_algo_verl.ray_config import CHECKPOINTS, METRICS, compose, environment
from agl_algo_verl.ray_keys import check_machine, read_ray_settings
from agl_algo_verl.ray_weights import merge_saved, say_precision
from agl_algo_verl.runtime import check_version
from agl_algo_verl.supply import VerlSupply
from agl_algo_verl.tuned_policy import own_weights, tuned_policy

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json
    from agl_algo_verl.bridge import StepRows
    from agl_algo_verl.ray_cluster import Cluster
    from agl_algo_verl.rows import PreparedStep

T = TypeVar("T")

REPORTED = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/entropy": "entropy",
    "actor/lr": "lr",
    "actor/pg_clipfrac": "pg_clipfrac",
    "actor/ppo_kl": "ppo_kl",
    "actor/kl_loss": "kl_loss",
    "agl/logprob_gap": "logprob_gap",
    "agl/logprob_gap_mean": "logprob_gap_mean",
    "training/rollout_probs_diff_max": "probability_gap",
    "training/rollout_probs_diff_mean": "probability_gap_mean",
    "timing_s/old_log_prob": "old_log_prob_s",
    "critic/vf_loss": "vf_loss",
    "critic/vf_clipfrac": "vf_clipfrac",
    "critic/grad_norm": "critic_grad_norm",
    "critic/lr": "critic_lr",
    "critic/values/mean": "value",
    "critic/vf_explained_var": "explained_variance",
    "timing_s/update_actor": "update_s",
    "timing_s/update_critic": "update_critic_s",
    "timing_s/save_checkpoint": "save_s",
    "timing_s/update_weights": "weight_sync_s",
}
"""Numbers of VERL's that are logged, and their names here."""


class RayVERL:
    """Trains the weights of one policy with VERL's trainer on Ray.

    Args:
        threads: Torch's threads in each process on the CPU; 0 for one.
        keep: Checkpoints that stay on disk.
        probe: Whether to put a probe beside the weights of each step, for policies such as `vllm` that check what
            they serve. The weights are read once more for it, on the CPU of this machine.
        config: VERL's configuration, by its groups.
    """

    def __init__(self, *, threads: int = 0, keep: int = 2, probe: bool = True, **config: Any) -> None:
        if keep < 1 or threads < 0:
            raise ConfigError(f"verl got keep = {keep} and threads = {threads}; give at least 1 and 0.")
        check_version()
        self.read = read_ray_settings(config)
        self.settings, self.notes = self.read.settings, self.read.notes
        self._threads, self._keep, self._probes = threads, keep, probe
        self._cluster: Cluster | None = None
        self._question: StepRequest | None = None
        self._step = self._base = 0  # `_base` steps were done before VERL's count began
        self._opened: str = ""
        self._origin: str = ""
        self._checkpoint: str = ""

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy, the tasks and the machine; say what others decide. Ray starts with the first step."""
        import torch

        self._tuned, weights = tuned_policy(context)
        self._context = context
        check_machine(self.read, has_gpu=torch.cuda.is_available())
        if self.settings.has_critic:
            await asyncio.to_thread(check_model, weights.uri)
        policy = context.policy(self._tuned)
        if not isinstance(policy, VerlPolicy):
            raise ConfigError(
                f'engine = "ray" serves the policy {self._tuned!r} with VERL\'s replicas, and it is a '
                f'{type(policy).__name__}. Write [policy.{self._tuned}] use = "verl".'
            )
        self._policy = policy
        self._steps = self.settings.steps(len(context.train))
        self._tasks = min(self.settings.data.train_batch_size, len(context.train))
        self._supply = VerlSupply(context, self.settings, steps=self._steps)
        for note in (*self.notes, *advice(self.settings)):
            context.say(note)

    async def step(self) -> StepReport:
        """Answer VERL's question with a step's rows and wait until it has trained them."""
        context, step = self._context, self._step + 1
        cluster = await self._open()
        question = self._question
        if question is None or question.step != step - self._base:
            raise AglError(
                f"VERL asked for its step {question.step if question else 'none'} where agl is at step {step}; "
                "continue with agl run --resume"
            )
        started = time.perf_counter()
        supplied = await self._while_served(cluster, self._supply.take(step))
        metrics = supplied.metrics | {"collect_s": time.perf_counter() - started, **self._policy.counts()}
        prepared = await asyncio.to_thread(self._prepare, supplied.groups)
        answer = self._answer(prepared, step=step)

        started = time.perf_counter()
        self._question = await self._train(cluster, answer, after=question)  # the one of the next step: this is done
        metrics |= prepared.metrics | self._trained(question.step) | {"train_s": time.perf_counter() - started}
        folder = self._folder / CHECKPOINTS.format(question.step)
        weights = await asyncio.to_thread(self._published, folder)
        if self._probes:
            await asyncio.to_thread(probe_files, weights)
        version = await context.publish(self._tuned, weights, step=step)
        await asyncio.to_thread(prune, self._folder, step=question.step, keep=max(2, self._keep))
        self._step, self._checkpoint = step, str(folder)
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=tuple(dict.fromkeys(sample.rollout for sample in prepared.samples)),
            published=(f"{self._tuned}@{version.version}",),
            stop_reason=f"{self._steps} steps done" if is_finished else "",
        )

    def state(self) -> Mapping[str, Json]:
        """The step count, VERL's newest checkpoint, and the version and weights that training started from."""
        names = {"checkpoint": self._checkpoint, "opened": self._opened, "origin": self._origin}
        return {"step": self._step, "base": self._base, "supply": self._supply.state(), **names}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from VERL's checkpoint when the next step begins."""
        self._step, self._base = int(state["step"]), int(state["base"])
        self._opened, self._origin = str(state["opened"]), str(state["origin"])
        self._checkpoint = str(state["checkpoint"])
        self._supply.restore(state["supply"])
        if self._checkpoint and not Path(self._checkpoint).is_dir():
            raise ConfigError(
                f"VERL's checkpoint {self._checkpoint} is not here. Resume where the run's files are, or start the "
                "run with --fresh."
            )

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Whether VERL's configuration asks for more steps than were done."""
        del sources_go_on
        return int(state["step"]) < self.settings.steps(tasks)

    async def close(self) -> None:
        """Stop the cluster and stop waiting for rollouts; the policy serves at home again."""
        if hasattr(self, "_supply"):
            await self._supply.close()
        await self._stop()

    async def _stop(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await self._policy.detach()
            await cluster.stop()

    @property
    def _folder(self) -> Path:
        """Where VERL writes: one directory for every start from weights that were not VERL's own."""
        return self._context.workdir.absolute() / f"verl-{self._base:06d}"

    async def _open(self) -> Cluster:
        """The running cluster, started anew when another algorithm has published weights since."""
        version = self._context.current(self._tuned)
        is_foreign = version.algorithm != self._context.name and version.version != self._opened
        if self._cluster is not None and not is_foreign:
            return self._cluster
        await self._stop()
        if is_foreign or not self._origin:
            self._origin = own_weights(version.resource, name=self._tuned).uri
            self._opened, self._base, self._checkpoint = version.version, self._step, ""
        self._cluster = await self._start()
        return self._cluster

    async def _start(self) -> Cluster:
        from agl_algo_verl.ray_cluster import Cluster

        self._context.say("starts VERL's trainer on Ray")
        done = self._step - self._base
        await asyncio.to_thread(forget_after, self._folder, step=done)
        cluster = Cluster(self.read, environment=environment(self.read, folder=self._folder, threads=self._threads))
        self._cluster = cluster
        await cluster.start(self._config)
        self._question = await cluster.question()
        if self._question is None:
            raise AglError(f"VERL's trainer ended before step {self._step + 1}; continue with agl run --resume")
        await self._attach(self._question)
        return cluster

    async def _train(self, cluster: Cluster, answer: StepRows, *, after: StepRequest) -> StepRequest | None:
        """Give a step's rows and wait until VERL has trained them; returns its next question, None after the last."""
        if not self.read.is_cpu:
            await self._policy.hold()
        await cluster.answer(answer)
        question = await cluster.question()
        await self._attach(question or StepRequest(step=after.step + 1, addresses=after.addresses))
        return question

    async def _while_served(self, cluster: Cluster, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; raises AglError, and leaves its rollouts to be repeated, when VERL is gone meanwhile."""
        task = asyncio.ensure_future(work)
        gone = {asyncio.ensure_future(self._policy.lost()), asyncio.ensure_future(cluster.ended())}
        try:
            await asyncio.wait({task, *gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for each in (task, *gone):
                each.cancel()
            await asyncio.gather(task, *gone, return_exceptions=True)
        raise cluster.failure() or AglError(
            "none of VERL's replicas answers any more. Every finished step is kept, and rollouts that were under way "
            "are repeated: continue with agl run --resume"
        )

    async def _attach(self, question: StepRequest) -> None:
        await self._policy.attach(question.addresses, version=f"global_step_{question.step - 1}")

    def _config(self) -> Any:
        return compose(
            self.read,
            model=self._origin,
            folder=self._folder,
            steps=self._steps - self._base,
            tasks=self._tasks,
            before=self._base,
            checkpoint=Path(self._checkpoint) if self._checkpoint else None,
            threads=self._threads,
        )

    def _prepare(self, groups: Any) -> PreparedStep:
        from agl_algo_verl.rows import prepare

        return prepare(groups, credit=self._context.credit, settings=self.settings)

    def _answer(self, prepared: PreparedStep, *, step: int) -> StepRows:
        from agl_algo_verl.ray_rows import rows_for_verl

        settings = self.settings
        return rows_for_verl(prepared, mode=settings.actor.loss_agg_mode, step=step, has_critic=settings.has_critic)

    def _published(self, folder: Path) -> Weights:
        weights = folder / "actor" / "huggingface"
        if not any(weights.glob("*.safetensors")):
            raise AglError(
                f"VERL saved no weights in {weights}. On several machines this directory must be one that all of "
                "them see: set `workdir` to a shared one."
            )
        if self.settings.is_lora:
            model = self.settings.actor_rollout_ref.model
            merge_saved(weights, scaling=model.lora_alpha / model.lora_rank)
        say_precision(weights)
        return Weights(uri=str(weights), format="hf")

    def _trained(self, step: int) -> dict[str, float]:
        """VERL's numbers of its step."""
        lines = (self._folder / METRICS).read_text(encoding="utf-8").splitlines()
        for line in reversed(lines):
            record = json.loads(line)
            if record["step"] == step:
                return {name: float(record["data"][key]) for key, name in REPORTED.items() if key in record["data"]}
        return {}


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def forget_after(folder: Path, *, step: int) -> None:
    """Remove what VERL saved after `step`: agl never heard that those steps were done, and they are repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(CHECKPOINTS.format("*")):
        if _number(path) > step:
            shutil.rmtree(path)


def prune(folder: Path, *, step: int, keep: int) -> None:
    """Remove the checkpoints of steps before the last `keep`."""
    for path in folder.glob(CHECKPOINTS.format("*")):
        if _number(path) <= step - keep:
            shutil.rmtree(path, ignore_errors=True)
