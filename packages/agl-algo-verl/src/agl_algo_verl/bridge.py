"""Between VERL's trainer, which decides when a step begins, and agl, which runs the agents: a Ray actor and its words.

VERL's agent loop manager asks for the rollouts of a step and waits; agl takes the question, runs the agents against
the addresses in it, and answers with the rows to train.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "agl_bridge"
"""The actor's Ray name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """VERL is ready for a step.

    Attributes:
        step: VERL's count, from 1.
        addresses: Where the current weights serve, `host:port` each.
    """

    step: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step.

    Attributes:
        rows: What to train.
        temperature: At which all of them were drawn.
        rollouts: What a loss that is a mean over sequences divides by; 0 for a loss that is a mean over tokens.
    """

    rows: tuple[BridgeRow, ...]
    temperature: float
    rollouts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeRow:
    """One row; `ids` int64 [T]; `mask` int64, `scores` and `logprobs` float32 [R], the last R of its tokens.

    `scores` are advantages, or rewards where VERL's critic makes advantages of them. `group` is the row's place among
    the step's tasks, `rollout` that of its rollout within the group and `part` its own within the rollout.
    """

    group: int
    rollout: int
    part: int
    ids: Tensor
    mask: Tensor
    scores: Tensor
    logprobs: Tensor


class Bridge:
    """One question at a time; run it as a Ray actor."""

    def __init__(self) -> None:
        self._questions: asyncio.Queue[StepRequest] = asyncio.Queue()
        self._answers: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def ask(self, question: StepRequest) -> list[Any]:
        """VERL's side: wait for the answer, a list of one reference to it."""
        await self._questions.put(question)
        return await self._answers.get()

    async def question(self) -> StepRequest:
        """agl's side: wait for a question."""
        return await self._questions.get()

    async def answer(self, reference: list[Any]) -> None:
        """agl's side: give a reference to the rows, in a list, so that this process never reads them."""
        await self._answers.put(reference)
