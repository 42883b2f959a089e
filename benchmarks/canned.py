"""A model server for benchmarks: it sends pre-encoded replies over minimal HTTP/1.1, so that its own cost is small.

It answers every POST with the next of its replies, searches the body only for ``"stream":true``, and records only the
number of calls. A call takes about 30 microseconds. It is not a general HTTP server: bodies need a ``Content-Length``,
and pipelined requests are not supported. ``python -m benchmarks.canned [VARIANTS]`` prints its URL and serves.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import islice

import msgspec

from agl_testing.model_server.answer import ScriptedExchange, answer_of
from agl_testing.model_server.codec import OFFSET
from agl_testing.model_server.dialects import chat
from agl_testing.model_server.script import Reply
from agl_testing.model_server.thread import HOST, ThreadedServer

_LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class CannedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A complete HTTP response in two forms: plain, and streamed as a sequence of writes."""

    plain: bytes
    stream: tuple[bytes, ...]

    @classmethod
    def chat(
        cls, *, prompt_tokens: int = 1000, response_tokens: int = 200, events: int = 50, seed: int = 0
    ) -> "CannedReply":
        """Return a chat completion of the given size, with token ids and log-probabilities.

        The streamed form has ``events`` pieces of text, with one write for each. Each seed gives different tokens.
        """
        draw = random.Random(seed)
        text = "".join(draw.choice(_LETTERS) for _ in range(response_tokens - 1))
        exchange = ScriptedExchange(
            number=seed + 1,
            dialect="chat",
            flavour="vllm",
            model="canned",
            body={"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}},
            prompts=[[draw.randrange(OFFSET, OFFSET + 256) for _ in range(prompt_tokens)]],
            answers=(answer_of(Reply(text=text, chunks=events), number=seed + 1, choice=0),),
            created=int(time.time()),
        )
        body = msgspec.json.encode(chat.body_of(exchange))
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return cls(plain=head.encode() + body, stream=_framed(list(chat.events_of(exchange))))


class CannedModelServer(ThreadedServer):
    """Serves ``replies`` in turn from its own thread; used as a context manager, like the scripted server."""

    def __init__(self, replies: Sequence[CannedReply] | None = None, *, port: int = 0) -> None:
        super().__init__(port)
        self.replies = tuple(replies) if replies else (CannedReply.chat(),)
        self.call_count = 0

    def next_reply(self) -> CannedReply:
        """Count a call and return the reply for it; replies are used in turn."""
        self.call_count += 1
        return self.replies[(self.call_count - 1) % len(self.replies)]

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[int]:
        """Listen with a minimal protocol that does only what a benchmark needs."""
        connections: set[_Connection] = set()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self, connections), HOST, self._port)
        yield int(server.sockets[0].getsockname()[1])
        server.close()
        for connection in list(connections):
            connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self, server: CannedModelServer, connections: "set[_Connection]") -> None:
        self._server = server
        self._connections = connections
        self._received = bytearray()
        self._expected = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

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
        reply = self._server.next_reply()
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


def main() -> None:
    """Print the base URL and serve until killed; the number of different replies is the only argument."""
    variants = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with CannedModelServer([CannedReply.chat(seed=seed) for seed in range(variants)]) as server:
        print(server.base_url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
