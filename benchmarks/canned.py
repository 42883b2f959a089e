"""A model server for benchmarks: it sends pre-encoded replies over minimal HTTP/1.1, so that its own cost is small.

``python -m benchmarks.canned [VARIANTS]`` prints its URL and answers every POST with the next of its replies. It
searches the body only for ``"stream":true``. A call takes about 30 microseconds. It is not a general HTTP server:
bodies need a ``Content-Length``, and pipelined requests are not supported.
"""

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import httpx
import msgspec

from agl_testing.model_server import Reply, ScriptedModelServer

_LETTERS = "abcdefghijklmnopqrstuvwxyz     "
_MARKERS = 3
"""Tokens of a prompt that are no byte of its text: the start and the end of the message, the start of the answer."""


class CannedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A complete HTTP response in two forms: plain, and streamed as a sequence of writes."""

    plain: bytes
    stream: tuple[bytes, ...]


def canned_replies(
    count: int, *, prompt_tokens: int = 1000, response_tokens: int = 200, events: int = 50
) -> list[CannedReply]:
    """Chat completions of the given size, with token ids and log-probabilities; each has tokens of its own.

    The streamed form has ``events`` pieces of text, with one write for each.
    """
    return [_reply(random.Random(seed), prompt_tokens, response_tokens, events) for seed in range(count)]


def _reply(draw: random.Random, prompt_tokens: int, response_tokens: int, events: int) -> CannedReply:
    prompt, text = (
        "".join(draw.choice(_LETTERS) for _ in range(n)) for n in (prompt_tokens - _MARKERS, response_tokens - 1)
    )
    body = {"model": "canned", "messages": [{"role": "user", "content": prompt}], "logprobs": True}
    body["return_token_ids"] = True
    with ScriptedModelServer(default=Reply(text=text, chunks=events)) as server:
        url = f"{server.base_url}/chat/completions"
        plain = httpx.post(url, json=body).content
        streamed = httpx.post(url, json={**body, "stream": True, "stream_options": {"include_usage": True}}).content
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(plain)}\r\n\r\n"
    pieces = [piece + b"\n\n" for piece in streamed.split(b"\n\n") if piece]
    return CannedReply(plain=head.encode() + plain, stream=_framed(pieces))


class _Connection(asyncio.Protocol):
    def __init__(self, replies: Iterator[CannedReply]) -> None:
        self._replies = replies
        self._received = bytearray()
        self._expected = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._expected:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            self._expected = end + 4 + _content_length(bytes(self._received[:end]))
        if len(self._received) >= self._expected:
            is_streamed = b'"stream":true' in self._received or b'"stream": true' in self._received
            del self._received[: self._expected]
            self._expected = 0
            self._answer(is_streamed=is_streamed)

    def _answer(self, *, is_streamed: bool) -> None:
        assert self._transport is not None
        reply = next(self._replies)
        if is_streamed:
            self._write_from(reply.stream, 0)
        else:
            self._transport.write(reply.plain)

    def _write_from(self, writes: tuple[bytes, ...], index: int) -> None:
        if self._transport is None:
            return
        self._transport.write(writes[index])
        if index + 1 < len(writes):
            asyncio.get_running_loop().call_soon(self._write_from, writes, index + 1)


def _content_length(head: bytes) -> int:
    for line in islice(head.split(b"\r\n"), 1, None):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _framed(events: list[bytes]) -> tuple[bytes, ...]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    framed = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    return (head + framed[0], *framed[1:-1], framed[-1] + b"0\r\n\r\n")


async def serve(replies: Sequence[CannedReply]) -> None:
    """Print the base URL, and answer with the replies in turn until the process ends."""
    turns = cycle(replies)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(turns), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(canned_replies(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
