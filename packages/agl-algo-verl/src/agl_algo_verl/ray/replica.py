"""A rollout replica for VERL's trainer on machines without a GPU: `rollout.name = "agl_hf"`.

`HFReplica`, in the trainer's process, starts a server (`ray/server.py`) for every training worker and holds its
address. `HFRollout`, in the training worker, sends the new weights to that server after every step. Limits: one worker
per replica (tensor parallelism is for GPUs), and the server holds a copy of the weights.
"""

# ruff: noqa: D102 - VERL's RolloutReplica and BaseRollout describe the methods

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from agl_algo_verl.ray.server import HFServer

if TYPE_CHECKING:
    from collections.abc import Generator

NAME = "agl_hf"
"""Value of `actor_rollout_ref.rollout.name` for this replica."""


def server_name(replica: int) -> str:
    """Return the Ray name of a replica's server."""
    return f"agl_hf_server_{replica}"


class HFReplica(RolloutReplica):
    """Starts one server for one training worker."""

    async def launch_servers(self) -> None:
        settings: dict[str, Any] = cast("Any", self.config).engine_kwargs.get(NAME) or {}
        actor = cast("Any", ray).remote(HFServer).options(name=server_name(self.replica_rank), num_cpus=1)
        server = actor.remote(model=cast("Any", self.model_config).path, threads=int(settings.get("threads", 1)))
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.launch.remote()


class HFRollout(BaseRollout):
    """Sends a training worker's new weights to the server of its own replica."""

    async def resume(self, tags: list[str]) -> None:
        del tags

    async def release(self) -> None:
        return

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"the replica {NAME} takes whole tensors, and VERL sent {wire_format!r}")
        # Every rank takes part in gathering each tensor, so all of them read the generator to its end.
        state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
        server = cast("Any", ray).get_actor(server_name(cast("Any", torch).distributed.get_rank()))
        await server.load.remote(state, int(kwargs.get("global_steps") or 0), adapter=kwargs.get("peft_config"))
