"""Asynchronous generators that run within a span while their readers do not."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from agl.tracing import OpenSpan


async def stepped(open_: Callable[[], OpenSpan], items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield ``items``, each made within the span; it is left in between, as a generator shares its reader's context."""
    async with aclosing(items):
        with open_() as span:
            while True:
                with span.entered():
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item
