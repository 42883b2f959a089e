"""Reads the pictures of chat messages: data URLs become blobs, and the message says where each of them stands."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, cast

from agl.schemas import Blob, digest_of
from agl_algo_torch.serving.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Blob]:
    """Return the pictures of a conversation in order; raises WireError for one that is not in the request itself."""
    return [_blob(part["image_url"]) for message in messages for part in _parts(message) if part["type"] == "image_url"]


def with_placeholders(message: Mapping[str, Any]) -> Any:
    """Return the content of a message as templates expect it, or None if it has no pictures: text is enough then."""
    parts = _parts(message)
    if all(part["type"] == "text" for part in parts):
        return None
    return [{"type": "text", "text": part["text"]} if part["type"] == "text" else {"type": "image"} for part in parts]


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return cast("list[dict[str, Any]]", content) if isinstance(content, list) else []


def _blob(source: str | Mapping[str, Any]) -> Blob:
    url = source if isinstance(source, str) else str(source["url"])
    head, _, payload = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise WireError(
            f"A picture is given as {url[:40]!r}, and this policy fetches nothing. "
            "Send it as a data URL: data:image/png;base64,...",
            code="unsupported_content",
            param="messages",
        )
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"The data URL of a picture is not base64: {error}.", param="messages") from error
    return Blob(digest=digest_of(data), media_type=head.removeprefix("data:").partition(";")[0], data=data)
