"""A recorded conversation with two pictures, in a store."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from agl import PluginManager
from agl.contracts import Recording, RolloutQuery, Store
from agl.schemas import Blob, MediaSpan, ModelCall, digest_of, pack_floats, pack_ids
from agl.stores import MemoryStore
from agl_data.export.formats import export_with_plugin
from agl_data.export.preferences import recorded
from agl_inspect.exports import Exported

from .worlds import START_NS, call_span, recording_of

PROCESSOR = "TinyProcessor 1.0 1a2b3c4d"


def png(seed: int) -> Blob:
    """Return bytes that begin as a PNG file does; they are no picture."""
    data = b"\x89PNG\r\n\x1a\n" + bytes([seed]) * 9
    return Blob(digest=digest_of(data), media_type="image/png", data=data)


def shown(blob: Blob, text: str) -> dict[str, Any]:
    """Return a user's message as the gateway records it: the picture's digest in place of its bytes."""
    picture = {"type": "image_url", "image_url": {"url": blob.digest}}
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}


def answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call_of(
    messages: Sequence[dict[str, Any]],
    prompt: Sequence[int],
    answer: Sequence[int],
    media: Sequence[MediaSpan],
    **own: Any,
) -> ModelCall:
    """Return a call whose last message is the answer."""
    return ModelCall(
        request_id=f"r{len(messages)}",
        dialect="chat",
        model="seer",
        policy="seer",
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(answer),
        logprobs=pack_floats([-0.5] * len(answer)),
        request={"messages": list(messages[:-1])},
        response={"choices": [{"index": 0, "message": messages[-1]}]},
        media=tuple(media),
        **{"inputs": tuple(span.digest for span in media), "processor": PROCESSOR, **own},
    )


def recording_of_calls(calls: Sequence[ModelCall]) -> Recording:
    """Return a rollout with these calls, one after the other."""
    spans = [
        call_span(f"{number:016x}", call, parent="", at_ns=START_NS + number * 10**7)
        for number, call in enumerate(calls, start=1)
    ]
    return recording_of(spans)


def two_turns() -> tuple[Recording, list[Blob]]:
    """Return a conversation of two turns, with a picture each, and the pictures; 9 stands for pictures."""
    blobs = [png(1), png(2)]
    spans = [
        MediaSpan(offset=offset, length=2, modality="image", digest=blob.digest, grid=(1, 2, 4))
        for offset, blob in zip((1, 6), blobs, strict=True)
    ]
    talk = [shown(blobs[0], "What is it?"), answered("A cat."), shown(blobs[1], "And this?"), answered("A dog.")]
    first, second = [1, 9, 9, 2], [1, 9, 9, 2, 5, 3, 9, 9, 2]
    calls = [call_of(talk[:2], first, [5], spans[:1]), call_of(talk, second, [6, 7], spans)]
    return recording_of_calls(calls), blobs


S = TypeVar("S", bound=Store)


async def store_of(recording: Recording, blobs: Sequence[Blob], store: S) -> S:
    """Put the rollout and its pictures into an empty store; returns the store."""
    await store.save_blobs(blobs)
    await store.restore([recording])
    return store


async def item_of(recording: Recording, blobs: Sequence[Blob]) -> Exported:
    """Return the rollout as an export reads it from a store."""
    found = [item async for item in recorded(await store_of(recording, blobs, MemoryStore()), RolloutQuery(), None)]
    return found[0]


async def written(form: str, path: Path, recording: Recording, blobs: Sequence[Blob]) -> int:
    """Write the rollout to a file as ``agl data export`` does; returns the number of records."""
    return await write_from(await store_of(recording, blobs, MemoryStore()), form, path)


async def write_from(store: Store, form: str, path: Path) -> int:
    """Write all rollouts of a store to a file as ``agl data export`` does; returns the number of records."""
    manager = PluginManager.from_environment()
    return await export_with_plugin(
        manager, store, RolloutQuery(), form=form, output=path, agents=None, min_reward=None
    )
