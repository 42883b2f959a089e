"""Renders and tokenises prompts in a few threads, where each attempt takes its turn, so that no prompt delays others.

Requests are bounded before they come here (`wire`, `server`), and longer texts than the context can hold are refused
before they are tokenised (`templates`), so a prompt takes a second or two at most. An attempt has one prompt in work at
a time: however many it sends, the other threads are free for others. A thread cannot be ended: work goes on past the
time limit, and after its client has hung up, and the attempt's next prompt waits for it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from agl_algo_torch.serving.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agl_algo_torch.serving.templates import Prompt, PromptBuilder

T = TypeVar("T")

_THREADS = 4


class PromptThreads:
    """Builds prompts in threads. Call the methods from one event loop.

    Args:
        builder: The builder of the prompts.
        limit_s: Seconds that a request waits for its prompt, including the time of the attempt's earlier prompts.
    """

    def __init__(self, builder: PromptBuilder, *, limit_s: float) -> None:
        self.builder = builder
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="agl-prompts")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        attempt: str,
    ) -> Prompt:
        """Render and tokenise a conversation; raises the template's own errors, and WireError after the time limit.

        Prompts of an `attempt` are built one after another; those without an attempt (`""`) are not.
        """
        return await self._run(lambda: self.builder.build(messages, tools=tools, options=options), attempt)

    async def encode(self, text: str, *, attempt: str) -> list[int]:
        """Return the token ids of a text with its special tokens; raises WireError after the time limit."""
        return await self._run(lambda: self.builder.encode(text), attempt)

    def close(self) -> None:
        """End the threads after their current prompts; waiting prompts are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T], attempt: str) -> T:
        try:
            async with asyncio.timeout(self._limit_s):
                turn = self._turns.setdefault(attempt, asyncio.Lock()) if attempt else asyncio.Lock()
                await turn.acquire()
                job = self._threads.submit(work)
                ended = asyncio.wrap_future(job)
                ended.add_done_callback(lambda _: turn.release())
                try:
                    return await asyncio.shield(ended)
                finally:
                    job.cancel()  # an abandoned job that no thread has begun
        except TimeoutError:
            raise WireError(
                f"Rendering and tokenising this prompt took longer than {self._limit_s:g} s. Shorten it, send fewer at "
                "once, or raise the policy's prompt_s.",
                status=503,
                code="prompt_timeout",
            ) from None
