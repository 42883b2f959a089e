"""Renders and tokenises prompts in a thread of its own, for a limited time, so that no prompt holds up other answers.

The thread's builder has a tokenizer of its own, because a tokenizer's lock is held for as long as a text is long.
A thread cannot be ended: work past the limit goes on, and prompts behind it are refused until it is done.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from agl_algo_torch.serving.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agl_algo_torch.serving.templates import Prompt, PromptBuilder

T = TypeVar("T")


class PromptThread:
    """A prompt builder that works in a thread of its own. Its methods are called from one event loop.

    Args:
        builder: Used by the thread alone from now on, and so is its codec.
        limit_s: Seconds that a request waits for its prompt, those of prompts before it included.
    """

    def __init__(self, builder: PromptBuilder, *, limit_s: float) -> None:
        self._builder = builder
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-prompts")

    async def build(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Prompt:
        """Render and tokenise; raises the template's own errors, and WireError when the time is over."""
        return await self._run(lambda: self._builder.build(messages, tools=tools, options=options))

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text with its special tokens; raises WireError when the time is over."""
        return await self._run(lambda: self._builder.encode(text))

    def remember(self, prompt: Prompt, ids: Sequence[int], *, message: Mapping[str, Any]) -> None:
        """Keep a response to `prompt`, and the message that its client gets, for prompts that are built from now on."""
        self._thread.submit(self._builder.remember, prompt, ids, message=message)

    def close(self) -> None:
        """End the thread once it has done its current work; what waits is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        found = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            async with asyncio.timeout(self._limit_s):
                return await found
        except TimeoutError:
            raise WireError(
                f"Rendering and tokenising this prompt took longer than {self._limit_s:g} s. Shorten it, send fewer at "
                "once, or raise the policy's prompt_s.",
                status=503,
                code="prompt_timeout",
            ) from None
