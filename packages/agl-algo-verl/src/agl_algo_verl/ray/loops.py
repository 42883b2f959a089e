"""VERL's end of the bridge, in the process of VERL's trainer: asks agl for rollouts and passes their rows to VERL.

It fills three of VERL's plug-in points, named in its configuration:

    AgentLoops   rollout.agent.agent_loop_manager_class: asks agl for a step's rollouts and puts the rows into VERL's
                 queue, from which the trainer samples next
    EmptyTasks   data.custom_cls: as many empty tasks as a step has; agl decides which tasks they are
    as_given     algorithm.adv_estimator = "agl": advantages come with the rows, from agl's credit; with a critic the
                 rows carry rewards instead, and the estimator is VERL's own `gae`

VERL counts rows where agl counts rollouts. So before a step is sampled, `ppo_mini_batch_size` is set to hold all its
rows, which then share one update unless they name several (`loss_worker.py`), and `rollout.temperature` is set to that
of its rows. A loss that is a mean over sequences then divides by the rows of that mini-batch, N, padding included. It
should be a mean over the rollouts, n:

    sum(A_row * l_row) * (N / n) / N = sum(A_row * l_row) / n

So advantages are scaled by N / n. VERL's `vanilla` and `gspo` are proportional to a positive factor of the advantages,
so this is exact. Rows for a loss of agl-objectives carry the weights of their tokens instead (`losses/loss_worker.py`).

All work that needs the log-probabilities recomputed by VERL is done before its advantages (`ray/completion.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch.utils.data import Dataset
from verl.trainer.ppo.core_algos import register_adv_est

from agl_algo_verl.privates import (
    balancer_of,
    before_advantages,
    introduce_trainer,
    report_tokens,
    save_checkpoint,
)
from agl_algo_verl.ray.bridge import NAME, BridgeRow, StepRequest
from agl_algo_verl.ray.completion import HELD, REPLAYED, UPDATE
from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from torch import Tensor

    from agl_algo_verl.ray.bridge import StepRows
    from agl_algo_verl.ray.completion import Completion

ESTIMATOR = "agl"
"""The value of `algorithm.adv_estimator` for advantages that come with the rows."""


@register_adv_est(ESTIMATOR)
def as_given(token_level_rewards: Tensor, response_mask: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the values at the rows' tokens as both advantages and returns, [B, R] each."""
    advantages_BR = token_level_rewards * response_mask  # [B, R]; VERL calls `rm_scores` rewards from here on
    return advantages_BR, advantages_BR  # returns are a critic's, and this estimator has none


class EmptyTasks(Dataset[dict[str, Any]]):
    """A data set of `data.train_batch_size` tasks without content."""

    def __init__(self, *, config: Any, **_: Any) -> None:
        self._size = int(config.train_batch_size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": "", "index": index, "dummy_tensor": torch.zeros(1, dtype=torch.uint8)}


class AgentLoops:
    """Asks agl for the rollouts of a step, in place of VERL's own agent loops.

    Args:
        config: VERL's whole configuration, which its trainer reads again in every step.
        balancer: The VERL actor that knows the addresses of all replicas.
    """

    def __init__(self, *, config: Any, balancer: Any) -> None:
        self._config, self._balancer = config, balancer
        self._bridge = cast("Any", ray).get_actor(NAME)
        self.trainer: Any = None
        """VERL's trainer; set when training begins (`privates.introduce_trainer`)."""
        self._completion: Completion | None = None

    @classmethod
    def create(cls, *, config: Any, llm_client: Any, **_: Any) -> AgentLoops:
        """Create the manager; VERL calls this in its trainer's process."""
        report_tokens()
        introduce_trainer()
        return cls(config=config, balancer=balancer_of(llm_client))

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Put the rows of this step into VERL's queue; blocks until agl has collected them."""
        get: Any = cast("Any", ray).get
        step = int(cast("Any", prompts["global_steps"]))
        addresses = get(self._balancer.get_all_servers.remote())
        given = get(self._bridge.ask.remote(StepRequest(step=step, addresses=tuple(addresses))))
        while not given:
            save_checkpoint(self.trainer, step=step - 1)
            given = get(self._bridge.saved.remote())
        answer: StepRows = get(given[0])
        trainer = self._config.trainer
        trainer.save_freq = 1 if answer.saves else trainer.total_training_steps  # which VERL saves after its last step
        self._complete_by(answer.completion)
        uids = [str(uid) for uid in cast("Any", prompts["uid"])]
        counted = self._widen_mini_batch(answer)  # N, which VERL will divide a mean over sequences by
        scale = counted / answer.rollouts if answer.rollouts else 1.0  # N / n; a mean over tokens needs none
        numbers: dict[tuple[int, int], int] = {}
        rows = [
            _row_fields(row, uids[row.group], step=step, scale=scale)
            | {
                "agl_weight": torch.tensor([row.weight]),
                "agl_total": torch.tensor([row.total]),
                "agl_rollout": torch.tensor([numbers.setdefault((row.group, row.rollout), len(numbers))]),
                "agl_row": torch.tensor([place]),
                UPDATE: torch.tensor([row.update]),
                "agl_updates": torch.tensor([max(1, len(answer.updates))]),
                "agl_rollouts": torch.tensor([answer.updates[row.update] if answer.updates else 0]),
                HELD: torch.tensor([row.held]),
                REPLAYED: torch.tensor([float(row.is_replayed)]),
            }
            for place, row in enumerate(answer.rows)
        ]
        put: Any = cast("Any", tq).kv_batch_put
        put(
            keys=[f"{uids[row.group]}_{row.rollout}_{row.part}" for row in answer.rows],
            partition_id="train",
            fields=verl_part("verl.utils.tensordict_utils:list_of_dict_to_tensordict")(rows),
            tags=[_row_tags(row, step=step) for row in answer.rows],
        )
        # VERL samples a step once all its own prompts are finished too.
        put(keys=uids, partition_id="train", tags=[{"status": "finished"} for _ in uids])

    def _complete_by(self, completion: Completion | None) -> None:
        """Complete the rows with `completion` in this step and later ones, in place of VERL's own correction."""
        if completion is not None and self._completion is None:
            self._config.algorithm.rollout_correction = None  # whose statistics fail where every token is rejected
            before_advantages(self.trainer, self._complete)
        self._completion = completion

    def _complete(self, batch: Any, metrics: dict[str, Any]) -> dict[str, Any]:
        """Complete a batch in VERL's queue before VERL computes advantages; returns options for the workers."""
        completion = self._completion
        if completion is None:
            return {}
        get: Any = cast("Any", tq).kv_batch_get
        data = get(keys=batch.keys, partition_id=batch.partition_id, select_fields=completion.reads)
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        found = completion.completed(data, padding=padding)
        metrics.update(found.metrics)
        if found.fields:
            fields = TensorDict(cast("Any", found.fields), batch_size=len(batch.keys))
            put: Any = cast("Any", tq).kv_batch_put
            put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        return found.options

    def _widen_mini_batch(self, answer: StepRows) -> int:
        """Set the step's mini-batch size and temperature; returns the rows of a mini-batch, padding included."""
        policy, trainer = self._config.actor_rollout_ref, self._config.trainer
        ranks = trainer.nnodes * trainer.n_gpus_per_node
        # VERL multiplies this by rollout.n to get rows, and needs a multiple of the ranks: the smallest that holds all
        # rows.
        policy.actor.ppo_mini_batch_size = ranks * math.ceil(len(answer.rows) / (ranks * policy.rollout.n))
        policy.rollout.temperature = answer.temperature
        self._config.critic.ppo_mini_batch_size = policy.actor.ppo_mini_batch_size
        return int(policy.actor.ppo_mini_batch_size * policy.rollout.n)


def _row_fields(row: BridgeRow, uid: str, *, step: int, scale: float) -> dict[str, Any]:
    """Return a row as tensors under the names that VERL uses."""
    prompt = len(row.ids) - len(row.mask)  # P = T - R
    return {
        "uid": uid,
        "session_id": row.rollout,
        "global_steps": step,
        "num_turns": 1,
        "prompts": row.ids[:prompt],  # [P]
        "responses": row.ids[prompt:],  # [R]
        "input_ids": row.ids,  # [T]
        "position_ids": torch.arange(len(row.ids)),
        "response_mask": row.mask,
        "loss_mask": row.mask,
        "rollout_log_probs": row.logprobs,  # [R]: of the server, to which VERL compares its own
        "rm_scores": row.scores * scale,  # [R]: advantages, which `as_given` passes on
    }


def _row_tags(row: BridgeRow, *, step: int) -> dict[str, Any]:
    """Return a row's tags, which VERL's queue reads instead of the row's tensors."""
    return {
        "status": "success",
        "prompt_len": len(row.ids) - len(row.mask),
        "response_len": len(row.mask),
        "seq_len": len(row.ids),
        "global_steps": step,
        # Versions of the policy that wrote the row; agl has already checked its real staleness (`rows/supply.py`).
        "min_global_steps": step - 1,
        "max_global_steps": step - 1,
    }
