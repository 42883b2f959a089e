"""The server of the replica `agl_hf`: a Ray actor that serves one copy of the model and loads new weights.

It serves through the policy `torch`, obtained from agl's plugin manager, so nothing here samples tokens. It imports
nothing of VERL, so that its process starts fast.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from safetensors import torch as safetensors

from agl import PluginManager
from agl.schemas import ResourceVersion, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from agl.contracts import Policy

MODEL = "verl"
"""The model name under which the server serves."""


class HFServer:
    """Serves one model by OpenAI's protocol, with token ids and log-probabilities.

    Args:
        model: Directory in Hugging Face's format.
        threads: Torch's threads.
    """

    def __init__(self, *, model: str, threads: int) -> None:
        self._model = model
        manager = PluginManager.from_environment()
        host: str = cast("Any", ray).util.get_node_ip_address()
        self._policy: Policy = manager.build(
            manager.policy("torch"), name=MODEL, model=model, host=host, threads=threads
        )

    async def launch(self) -> str:
        """Start to serve; returns `host:port`."""
        served = await self._policy.start()
        return served.base_urls[0].removeprefix("http://").removesuffix("/v1")

    async def load(self, state: dict[str, Tensor], step: int, *, adapter: dict[str, Any] | None = None) -> None:
        """Serve the tensors in `state` from now on; returns once they are live.

        `state` holds the full weights, or those of a LoRA adapter with the peft configuration `adapter`.
        """
        with tempfile.TemporaryDirectory(prefix="agl-weights-") as folder:
            weights = Weights(uri=folder)
            if adapter is None:
                cast("Any", safetensors).save_file(state, Path(folder) / "model.safetensors")
            else:
                cast("Any", safetensors).save_file(state, Path(folder) / "adapter_model.safetensors")
                peft: Any = importlib.import_module("peft")
                peft.LoraConfig.from_peft_type(**adapter).save_pretrained(folder)
                weights = Weights(uri=folder, base_model=self._model, format="lora")
            await self._policy.load(ResourceVersion(name=MODEL, version=f"global_step_{step}", resource=weights))

    async def wake_up(self) -> None:
        """Do nothing: the server never releases memory, and no request waits while weights change."""

    async def sleep(self) -> None:
        """Do nothing: the server never releases memory."""
