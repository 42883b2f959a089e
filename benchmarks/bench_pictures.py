"""Growth of a SQLite store by pictures: rollouts over 100 pictures, compared with the same rollouts without them.

A rollout is one call with one picture, or a conversation with one more picture in each turn, recorded as the gateway
records it. The pictures are random bytes, which compress as little as real ones.
"""

import asyncio
import base64
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from agl.dialects import Request
from agl.schemas import Blob, Json, MediaSpan, ModelCall, Span, pack_ids
from agl_store_sqlite import SQLiteStore
from benchmarks._harness import Figure, table
from benchmarks.bench_store import start, text_call

PICTURES, BATCH, CONVERSATIONS = 100, 500, 10
PLACEHOLDER, PROCESSOR = pack_ids([151_655]), "Qwen2VLProcessor 5.23.0 1a2b3c4d"


class Shown(NamedTuple):
    """A picture: the part of a message that shows it, as recorded, and its bytes."""

    part: Json
    blob: Blob


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Pictures of sizes from ``smallest`` to ``largest`` bytes; ``tokens`` placeholders stand for each."""

    name: str
    smallest: int
    largest: int
    tokens: int
    bar: float | None = None

    def recorded(self) -> list[Shown]:
        source, step = random.Random(0), (self.largest - self.smallest) / (PICTURES - 1)
        sizes = (int(self.smallest + at * step) for at in range(PICTURES))
        return [as_recorded(b"\x89PNG\r\n\x1a\n" + source.randbytes(size)) for size in sizes]


KINDS = (
    Kind(name="screenshots of 0.2 to 1 MB", smallest=200_000, largest=1_000_000, tokens=1200, bar=1.01),
    Kind(name="pictures of 20 kB", smallest=20_000, largest=20_000, tokens=256),
)


def as_recorded(picture: bytes) -> Shown:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    body = {"messages": [{"type": "image_url", "image_url": {"url": url}}]}
    request, _, (blob,) = Request("chat", json.dumps(body).encode()).stored()
    return Shown(request["messages"][0], blob)


def call_of(number: int, picture: Shown | None, *, tokens: int) -> ModelCall:
    """A call with 50 to 850 tokens of question, 100 of answer, and perhaps a picture before the question."""
    call = text_call(50 + number * 7 % 801, 100, number)  # rows of all sizes, for SQLite stores whole pages
    text = {"type": "text", "text": call.request["messages"][0]["content"]}
    if picture is None:
        return replace(call, request={"model": "main", "messages": [{"role": "user", "content": [text]}]})
    digest = picture.blob.digest
    media = MediaSpan(offset=0, length=tokens, modality="image", digest=digest, grid=(1, 2 * tokens, 2))
    return replace(
        call,
        request={"model": "main", "messages": [{"role": "user", "content": [picture.part, text]}]},
        prompt_ids=PLACEHOLDER * tokens + call.prompt_ids,
        inputs=(digest,),
        media=(media,),
        processor=PROCESSOR,
    )


async def disk_bytes(path: Path, pictures: Sequence[Shown | None], *, rollouts: int, tokens: int) -> int:
    """The size of the file with these rollouts, which show the pictures in turn."""
    store = SQLiteStore(f"sqlite:///{path}")
    await store.save_blobs([picture.blob for picture in pictures if picture])
    for first in range(0, rollouts, BATCH):
        spans: list[Span] = []
        for at, each in enumerate(await start(store, BATCH), first):
            call = call_of(at, pictures[at % len(pictures)], tokens=tokens)
            spans.append(Span(rollout_id=each, attempt_id=f"{each}.1", span_id="1" * 16, name="chat", call=call))
        await store.append_spans(spans)
    await store.close()
    return path.stat().st_size


def conversation(pictures: Sequence[Shown | None], *, tokens: int) -> list[ModelCall]:
    """The calls of a conversation that shows one picture more in each turn."""
    calls: list[ModelCall] = []
    messages, ids, inputs, media = list[Json](), b"", tuple[str, ...](), tuple[MediaSpan, ...]()
    for at, picture in enumerate(pictures):
        own = call_of(at, picture, tokens=tokens)
        media += tuple(replace(each, offset=len(ids) // 4) for each in own.media)
        messages, ids, inputs = [*messages, *own.request["messages"]], ids + own.prompt_ids, inputs + own.inputs
        request = {"model": "main", "messages": messages}
        calls.append(replace(own, request=request, prompt_ids=ids, inputs=inputs, media=media))
        messages, ids = [*messages, own.response["choices"][0]["message"]], ids + own.response_ids
    return calls


async def conversation_bytes(path: Path, pictures: Sequence[Shown | None], *, tokens: int) -> int:
    """The size of the file with ten conversations over all pictures, without the pictures' own bytes."""
    store = SQLiteStore(f"sqlite:///{path}")
    for each in await start(store, CONVERSATIONS):
        for at, call in enumerate(conversation(pictures, tokens=tokens)):
            span = Span(rollout_id=each, attempt_id=f"{each}.1", span_id=f"{at:016x}", name="chat", call=call)
            await store.append_spans([span])
    await store.close()
    return path.stat().st_size


def turns(folder: Path, kind: Kind) -> Figure:
    """By how much a turn's own picture makes the store grow in a conversation."""
    with_pictures, without = (
        asyncio.run(conversation_bytes(folder / f"talk-{at}.db", shown, tokens=kind.tokens))
        for at, shown in enumerate((kind.recorded(), [None] * PICTURES))
    )
    each = (with_pictures - without) / PICTURES / CONVERSATIONS
    return Figure(name=f"a turn with a picture, of {PICTURES} such turns", value=each, unit="bytes", better="lower")


def growth(folder: Path, kind: Kind, *, rollouts: int) -> list[Figure]:
    """By how much the store grows: for each byte of the pictures, and for each rollout beyond these bytes."""
    pictures = kind.recorded()
    own = sum(len(picture.blob.data) for picture in pictures)
    with_pictures, without = (
        asyncio.run(disk_bytes(folder / f"{kind.tokens}-{at}.db", shown, rollouts=rollouts, tokens=kind.tokens))
        for at, shown in enumerate((pictures, [None]))
    )
    grown, title = with_pictures - without, f"{rollouts:,} rollouts over {PICTURES} {kind.name}"
    return [
        Figure(name=title, value=grown / own, unit="x their bytes", bar=kind.bar, better="lower"),
        Figure(name=f"{title}, each", value=(grown - own) / rollouts, unit="bytes", better="lower"),
    ]


def run(*, quick: bool) -> list[Figure]:
    """Two figures for each kind of pictures, and one for conversations."""
    rollouts = 1000 if quick else 10_000
    with tempfile.TemporaryDirectory() as folder:
        figures = [figure for kind in KINDS for figure in growth(Path(folder), kind, rollouts=rollouts)]
        return [*figures, turns(Path(folder), KINDS[-1])]


if __name__ == "__main__":
    print(table(run(quick=False)))
