"""Runs one checked request in the engine and writes its answer to HTTP, whole or as a stream.

Tokens pass from the engine's thread to the server's event loop through a queue. All tokens in the queue are sent
together.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
from aiohttp import web

from agl_algo_torch.serving.sampling import Draw
from agl_algo_torch.serving.sequence import (
    EngineError,
    EngineStoppedError,
    Event,
    Flight,
    Generation,
    GenerationRequest,
    PromptError,
    QueueFullError,
)
from agl_algo_torch.serving.wire import ChatBody, CompletionBody, WireError
from agl_algo_torch.serving.writers import AnswerHead, usage, version_fields

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from agl_algo_torch.serving.engine import Engine
    from agl_algo_torch.serving.writers import AnswerWriter

VERSION_HEADER = "x-agl-model-version"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A checked request that is ready to run; `requests` has one generation request per choice, in order."""

    body: ChatBody | CompletionBody
    head: AnswerHead
    writer: AnswerWriter
    requests: list[GenerationRequest]
    prompt_tokens: int


async def serve(request: web.Request, call: CheckedRequest, engine: Engine) -> web.StreamResponse:
    """Run a request and send its answer, whole or as a stream; an early end cancels its sequences."""
    run = _RunningRequest(engine, call.requests)
    try:
        return await (_stream(request, call, run) if call.body.stream else _whole(call, run))
    finally:
        run.cancel()


class _RunningRequest:
    """The sequences of one HTTP request in the engine, and the queue of their events."""

    def __init__(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._flights: list[Flight] = engine.submit(
            requests, listeners=[self._listener(index) for index in range(len(requests))]
        )

    def _listener(self, index: int) -> Callable[[Event], None]:
        return lambda event: cast("None", self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event)))

    async def events(self) -> AsyncIterator[list[tuple[int, Draw | Generation]]]:
        """Yield events with the index of their sequence, in batches as they arrive, until all sequences have finished.

        Raises:
            EngineError: A sequence failed.
        """
        left = len(self._flights)
        while left:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            checked: list[tuple[int, Draw | Generation]] = []
            for index, event in batch:
                if isinstance(event, EngineError):
                    raise event
                checked.append((index, event))
            left -= sum(isinstance(event, Generation) for _, event in checked)
            yield checked

    def cancel(self) -> None:
        """Cancel the sequences that have not finished."""
        self._engine.cancel(self._flights)

    @property
    def first_version(self) -> str:
        """Version of the weights that generated the first token; defined after the first event."""
        return next(flight.spans[0][0] for flight in self._flights if flight.spans)


async def _whole(call: CheckedRequest, run: _RunningRequest) -> web.Response:
    done: dict[int, Generation] = {}
    async for batch in run.events():
        done.update((index, event) for index, event in batch if isinstance(event, Generation))
    done = dict(sorted(done.items()))
    choices = [call.writer.choice(index, generation) for index, generation in done.items()]
    fields = version_fields(done, call.requests[0].params)
    counts = usage(call.prompt_tokens, list(done.values()))
    body = call.head.fields(is_chunk=False) | {"choices": choices, "usage": counts} | call.writer.top() | fields
    return json_response(body, headers={VERSION_HEADER: fields["model_version"]})


async def _stream(request: web.Request, call: CheckedRequest, run: _RunningRequest) -> web.StreamResponse:
    """Send chunks as tokens arrive.

    An error before the first token becomes an ordinary HTTP error, a later one an event of the stream.
    """
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
    done: dict[int, Generation] = {}
    try:
        async for batch in run.events():
            data = b""
            if not response.prepared:
                response.headers[VERSION_HEADER] = run.first_version
                await response.prepare(request)
                data = _openings(call)
            done.update((index, event) for index, event in batch if isinstance(event, Generation))
            data += b"".join(_chunk(call, index, event) for index, event in batch)
            if data:
                await response.write(data)
    except EngineError as error:
        if not response.prepared:
            raise
        await response.write(b"data: " + wire_error(error).body() + b"\n\n")
        return response
    await response.write(_ending(call, list(done.values())))
    return response


def _openings(call: CheckedRequest) -> bytes:
    chunks: list[dict[str, Any]] = []
    for index in range(len(call.requests)):
        opening = call.writer.opening(index)
        if opening is not None:
            extra = call.writer.top() if not chunks else {}
            chunks.append({"choices": [opening]} | extra)
    return b"".join(_event(call, chunk) for chunk in chunks)


def _chunk(call: CheckedRequest, index: int, event: Draw | Generation) -> bytes:
    if isinstance(event, Draw):
        choice = call.writer.token(index, event)
        return _event(call, {"choices": [choice]}) if choice is not None else b""
    fields = version_fields({index: event}, call.requests[0].params)
    return _event(call, {"choices": [call.writer.closing(index, event)]} | fields)


def _ending(call: CheckedRequest, generations: list[Generation]) -> bytes:
    data = b""
    if call.body.stream_options.include_usage:
        data = _event(call, {"choices": [], "usage": usage(call.prompt_tokens, generations)})
    return data + b"data: [DONE]\n\n"


def _event(call: CheckedRequest, fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(call.head.fields(is_chunk=True) | fields) + b"\n\n"


def json_response(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return an HTTP answer with a JSON body."""
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


def wire_error(error: EngineError) -> WireError:
    """Return the HTTP error that reports an error of the engine to the client."""
    if isinstance(error, PromptError):
        return WireError(str(error))
    if isinstance(error, QueueFullError):
        return WireError(str(error), status=429, code="queue_full")
    if isinstance(error, EngineStoppedError):
        return WireError(str(error), status=503, code="stopped")
    return WireError(str(error), status=500, code="generation_failed")
