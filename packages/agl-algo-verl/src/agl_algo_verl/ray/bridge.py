"""A Ray actor between VERL's trainer, which decides when a step begins, and agl, which runs the agents.

VERL's agent loop manager (`ray/loops.py`) asks for the rollouts of a step and waits. agl (`ray/trainer.py`) takes the
request, runs the agents against the addresses in it, and answers with the rows to train.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from agl_algo_verl.ray.completion import Completion

NAME = "agl_bridge"
"""The actor's Ray name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """VERL's request for the rollouts of a step.

    Attributes:
        step: VERL's count of steps, from 1.
        addresses: Where the current weights serve, `host:port` each.
    """

    step: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """agl's answer: the rows of a step.

    Attributes:
        rows: The rows to train.
        temperature: The temperature at which all of their tokens were drawn.
        rollouts: The number that a mean over sequences divides by where all rows share one update; 0 for a mean over
            tokens, which counts its tokens, and for a loss of agl-objectives, whose rows bring their weights.
        updates: The number of rollouts of each update, where the step has several.
        saves: Whether VERL saves a checkpoint at the end of the step; after its last one it does anyway.
        completion: What the rows need once VERL has their log-probabilities; None for nothing.
    """

    rows: tuple[BridgeRow, ...]
    temperature: float
    rollouts: int = 0
    updates: tuple[int, ...] = ()
    saves: bool = True
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeRow:
    """One row of T tokens, of which the last R are the response.

    Attributes:
        group: Place of the row's task in the step.
        rollout: Place of its rollout in the group.
        part: Place of the row in its rollout.
        ids: Prompt and response; int64, [T].
        mask: 1 on trained tokens; int64, [R].
        scores: Advantages, or rewards where VERL's critic makes advantages of them; float32, [R].
        logprobs: Log-probabilities that the server recorded; float32, [R].
        weight: w_t of the row's trained tokens, for a loss of agl-objectives.
        total: W of the row's update, which the weighted sum of that loss is divided by.
        update: Place of the row's update in the step.
        is_replayed: Whether an earlier step has trained the row already.
        held: 1 / U at the row of a call that is held and not trained, U being such tokens of its update; 0 elsewhere.
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
    """Passes one request at a time, and its answer; run it as a Ray actor."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[StepRequest] = asyncio.Queue()
        self._answers: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._saves: asyncio.Queue[None] = asyncio.Queue()

    async def ask(self, request: StepRequest) -> list[Any]:
        """Ask, and wait for the answer; called by VERL's side.

        Returns a list of one reference to the rows, or an empty one: save a checkpoint now, then call `saved`.
        """
        await self._requests.put(request)
        return await self._answers.get()

    async def saved(self) -> list[Any]:
        """Say that a checkpoint is saved, and wait for the answer as `ask` does; called by VERL's side."""
        await self._saves.put(None)
        return await self._answers.get()

    async def save(self) -> None:
        """Ask for a checkpoint of the step before the request, and return once it is saved; called by agl's side."""
        await self._answers.put([])
        await self._saves.get()

    async def request(self) -> StepRequest:
        """Wait for a request and return it; called by agl's side."""
        return await self._requests.get()

    async def answer(self, reference: list[Any]) -> None:
        """Answer with a reference to the rows; called by agl's side.

        The reference comes in a list: Ray would fetch a bare one, and this process need not read the rows.
        """
        await self._answers.put(reference)
