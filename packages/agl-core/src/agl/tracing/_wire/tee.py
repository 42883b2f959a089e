"""Passes a response's bytes on as they arrive and shows each to the record of the call."""

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol


class Sink(Protocol):
    """What a tee tells; neither method raises."""

    def take(self, chunk: bytes) -> None:
        """``chunk`` is about to be passed on."""
        ...

    def finish(self, *, is_complete: bool, error: str = "") -> None:
        """Nothing follows; only the first call counts."""
        ...


class _Tee:
    def __init__(self, inner: Any, sink: Sink) -> None:
        self._inner = inner
        self._sink = sink

    def __del__(self) -> None:
        self._closed()

    def _failed(self, error: BaseException) -> None:
        self._sink.finish(is_complete=False, error=describe(error))

    def _closed(self) -> None:
        self._sink.finish(is_complete=False)


class SyncTee(_Tee):
    """For ``httpx.Client``; mixed with the client module's own ``SyncByteStream``."""

    def __iter__(self) -> Iterator[bytes]:
        """The inner stream's chunks, unchanged."""
        try:
            for chunk in self._inner:
                self._sink.take(chunk)
                yield chunk
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failed(error)
            raise
        self._sink.finish(is_complete=True)

    def close(self) -> None:
        """Close the inner stream; what was not read by then counts as cut."""
        try:
            self._inner.close()
        finally:
            self._closed()


class AsyncTee(_Tee):
    """For ``httpx.AsyncClient``; mixed with the client module's own ``AsyncByteStream``."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The inner stream's chunks, unchanged."""
        try:
            async for chunk in self._inner:
                self._sink.take(chunk)
                yield chunk
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failed(error)
            raise
        self._sink.finish(is_complete=True)

    async def aclose(self) -> None:
        """Close the inner stream; what was not read by then counts as cut."""
        try:
            await self._inner.aclose()
        finally:
            self._closed()


def describe(error: BaseException) -> str:
    """An exception as one line: its type and what it says."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
