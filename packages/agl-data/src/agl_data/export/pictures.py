"""Puts the pictures of calls back into exported messages: records name them by digest, and the store has their bytes.

A payload that the store no longer has is counted, and its digest stays in the message.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agl.contracts import Recording, Store
from agl.schemas import Blob
from agl_data.copying import BLOBS_AT_ONCE, digests_of
from agl_inspect.exports import Exported, Losses

GONE = "pictures and other inputs that the store no longer has: their digests stay in the messages"


async def blobs_of(store: Store, recording: Recording) -> dict[str, Blob]:
    """Return the blobs to which the calls of a recording refer, by digest; those that the store lacks are missing."""
    digests = digests_of([recording])
    found: list[Blob] = []
    for start in range(0, len(digests), BLOBS_AT_ONCE):
        found += await store.blobs(digests[start : start + BLOBS_AT_ONCE])
    return {blob.digest: blob for blob in found}


def data_url(blob: Blob) -> str:
    """Return a blob as a data URL."""
    return f"data:{blob.media_type};base64,{base64.b64encode(blob.data).decode()}"


def url_of(part: Mapping[str, Any]) -> str:
    """Return the URL or the digest of a picture in a message; ``""`` for any other part."""
    given = part.get("image_url")
    url = cast("Mapping[str, Any]", given).get("url") if isinstance(given, dict) else given
    return url if isinstance(url, str) else ""


def with_payloads(messages: Sequence[dict[str, Any]], item: Exported, losses: Losses) -> list[dict[str, Any]]:
    """Return chat messages with payloads in place of digests: base64 for ``data``, as of sounds, else data URLs."""

    def restored(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: restored(inner, name) for name, inner in cast("dict[str, Any]", value).items()}
        if not isinstance(value, str) or not value.startswith("sha256:"):
            return value
        blob = item.blobs.get(value)
        if blob is None:
            losses.add(GONE, item.recording.rollout.rollout_id)
            return value
        return base64.b64encode(blob.data).decode() if key == "data" else data_url(blob)

    def content_of(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        parts = cast("list[dict[str, Any]]", content)
        return [part if part.get("type") == "text" else restored(part) for part in parts]

    return [{**each, "content": content_of(each["content"])} if "content" in each else each for each in messages]
