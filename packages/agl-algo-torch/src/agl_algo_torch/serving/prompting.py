"""Renders and tokenises prompts in a separate thread with a time limit, so that no prompt delays other answers.

The thread has its own tokenizer, because the lock of a tokenizer is held for the whole of a long text. A thread cannot
be ended: work past the limit goes on, and the prompts that wait for it also reach their limit and are refused.
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
    """Builds prompts in a separate thread. Call the methods from one event loop.

    Args:
        builder: The builder, which only the thread may use from now on, like the builder's codec.
        limit_s: Seconds that a request waits for its prompt, including the time of earlier prompts.
    """

    def __init__(self, builder: PromptBuilder, *, limit_s: float) -> None:
        self._builder = builder
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agl-prompts")

    async def build(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> Prompt:
        """Render and tokenise a conversation; raises the template's own errors, and WireError after the time limit."""
        return await self._run(lambda: self._builder.build(messages, tools=tools, options=options))

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text with its special tokens; raises WireError after the time limit."""
        return await self._run(lambda: self._builder.encode(text))

    def remember(self, prompt: Prompt, ids: Sequence[int], *, message: Mapping[str, Any]) -> None:
        """Store a response to `prompt`, as token ids and as the message sent to the client, for later prompts."""
        self._thread.submit(self._builder.remember, prompt, ids, message=message)

    def close(self) -> None:
        """End the thread after its current prompt; waiting prompts are dropped."""
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
