"""A Ray actor between VERL's trainer, which decides when a step begins, and agl, which runs the agents.

VERL's agent loop manager (`ray/loops.py`) asks for the rollouts of a step and waits. agl (`ray/trainer.py`) takes the
request, runs the agents against the addresses in it, and answers with the rows to train on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from agl_algo_verl.ray.completion import Completion

NAME = "agl_bridge"
"""Name of the Ray actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """VERL's request for the rollouts of a step.

    Attributes:
        step: VERL's step count, from 1.
        addresses: The addresses that serve the current weights, each as `host:port`.
    """

    step: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """agl's answer to a `StepRequest`: the rows of a step.

    Attributes:
        rows: The rows to train on.
        temperature: The temperature at which all of their tokens were sampled.
        rollouts: The divisor of a mean over sequences if all rows share one update. It is 0 for a mean over tokens,
            which counts the tokens, and for a loss of agl-objectives, whose rows carry their weights.
        updates: The number of rollouts of each update, if the step has several.
        saves: Whether VERL saves a checkpoint at the end of the step; it always does after its last step.
        completion: The computation on the rows once VERL has recomputed log-probabilities; None to change nothing.
    """

    rows: tuple[BridgeRow, ...]
    temperature: float
    rollouts: int = 0
    updates: tuple[int, ...] = ()
    saves: bool = True
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeRow:
    """One row of T tokens; the last R are the response.

    Attributes:
        group: Index of the row's task in the step.
        rollout: Index of the row's rollout in the group.
        part: Index of the row in its rollout.
        ids: Prompt and response; int64, [T].
        mask: 1 on trained tokens; int64, [R].
        scores: Advantages, or rewards if VERL's critic computes advantages from them; float32, [R].
        logprobs: Log-probabilities that the server recorded; float32, [R].
        weight: w_t of the row's trained tokens, for a loss of agl-objectives.
        total: W of the row's update, the divisor of that loss's weighted sum.
        update: Index of the row's update in the step.
        is_replayed: True if an earlier step has already trained on the row.
        held: 1 / U if the row is a call that is held and not trained on, where U is the number of such tokens in its
            update; 0 for other rows.
    """

    group: int
    rollout: int
    part: int
    ids: Tensor
    mask: Tensor
    scores: Tensor
    logprobs: Tensor
    weight: float = 1.0
    total: float = 1.0
    update: int = 0
    is_replayed: bool = False
    held: float = 0.0


class Bridge:
    """Passes a request from VERL to agl, then the answer back, one at a time; run it as a Ray actor."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[StepRequest] = asyncio.Queue()
        self._answers: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._saves: asyncio.Queue[None] = asyncio.Queue()

    async def ask(self, request: StepRequest) -> list[Any]:
        """Send a request and wait for its answer; called by VERL's side.

        Returns a list with one reference to the rows. An empty list means: save a checkpoint now, then call `saved`.
        """
        await self._requests.put(request)
        return await self._answers.get()

    async def saved(self) -> list[Any]:
        """Report that a checkpoint is saved, then wait for the answer as `ask` does; called by VERL's side."""
        await self._saves.put(None)
        return await self._answers.get()

    async def save(self) -> None:
        """Make VERL save a checkpoint of the last completed step; returns once it is saved; called by agl's side."""
        await self._answers.put([])
        await self._saves.get()

    async def request(self) -> StepRequest:
        """Wait for a request and return it; called by agl's side."""
        return await self._requests.get()

    async def answer(self, reference: list[Any]) -> None:
        """Answer with a reference to the rows; called by agl's side.

        The reference is in a list, because Ray would resolve a bare one, and this process need not read the rows.
        """
        await self._answers.put(reference)
