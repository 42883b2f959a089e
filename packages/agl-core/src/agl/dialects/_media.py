"""Inputs that are not tokens: images, audio, files. They are recorded by reference, never by content.

A payload inside the request is replaced by the SHA-256 digest of its bytes, so that two calls with one image have
equal records and a store does not keep it a hundred times.
"""

import base64
import binascii
import hashlib
from typing import Any

from agl.dialects._foreign import as_dict, as_list, as_text, is_list
from agl.schemas import Json

_KINDS = frozenset(
    {"image_url", "input_image", "image", "input_audio", "video_url", "video", "document", "file", "input_file"}
)
_PAYLOADS = frozenset({"data", "file_data", "url", "image_url", "file_url", "video_url", "file_id"})
_MARKERS = (b"image", b"audio", b"video", b"file", b"document")


def may_hold_media(body: bytes) -> bool:
    """True if the request may hold media; quick, and never False for one that does."""
    return b'"type"' in body and any(marker in body for marker in _MARKERS)


def reference_media(request: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The request with payloads replaced by references, and the references in order.

    A reference is the URL, the provider's file id, or ``sha256:<hex>`` of the payload.
    """
    found: list[str] = []
    kept = dict(request)
    for key in ("messages", "input", "system"):
        if key in kept:
            kept[key] = _walk(kept[key], found)
    return kept, tuple(found)


def _walk(value: Json, found: list[str]) -> Json:
    if is_list(value):
        return [_walk(item, found) for item in as_list(value)]
    entry = as_dict(value)
    if not entry:
        return value
    is_text = as_dict(entry.get("source")).get("type") in ("text", "content")
    if as_text(entry.get("type")) in _KINDS and not is_text:
        return _replace(entry, found)
    return {key: _walk(item, found) if isinstance(item, list | dict) else item for key, item in entry.items()}


def _replace(entry: dict[str, Json], found: list[str]) -> dict[str, Json]:
    replaced: dict[str, Json] = {}
    for key, item in entry.items():
        if inner := as_dict(item):
            replaced[key] = _replace(inner, found)
        elif isinstance(item, str) and key in _PAYLOADS:
            replaced[key] = _reference(key, item)
            found.append(replaced[key])
        else:
            replaced[key] = item
    return replaced


def _reference(key: str, text: str) -> str:
    if text.startswith("sha256:"):
        return text
    if text.startswith("data:"):
        return _digest(text.partition(",")[2])
    return _digest(text) if key in ("data", "file_data") else text


def _digest(payload: str) -> str:
    try:
        content = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        content = payload.encode()
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
