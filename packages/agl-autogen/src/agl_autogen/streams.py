"""Asynchronous generators within a span, whose reader is not within it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from agl.tracing import OpenSpan


async def stepped(open_: Callable[[], OpenSpan], items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Pass ``items`` on. Each is made within the span; a generator shares its reader's context, so nothing else is."""
    async with aclosing(items):
        with open_() as span:
            while True:
                with span.entered():
                    try:
                        item = await anext(items)
                    except StopAsyncIteration:
                        return
                yield item
