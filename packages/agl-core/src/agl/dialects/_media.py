"""Media in requests (images, audio, files): recorded by reference, with the payloads as blobs of their own.

A reference is the URL, the provider's file id, or the digest of the payload, so that calls with the same image have
equal records and a store keeps no copies.
"""

import base64
import binascii
from typing import Any

from agl.dialects._foreign import as_dict, as_list, as_text, is_list
from agl.schemas import Blob, Json, digest_of

_KINDS = frozenset(
    {
        *("image_url", "input_image", "image", "computer_screenshot", "video_url", "video"),
        *("input_audio", "document", "file", "input_file"),
    }
)
_PAYLOADS = frozenset({"data", "file_data", "url", "image_url", "file_url", "video_url", "file_id"})
_MARKERS = (b"image", b"audio", b"video", b"file", b"document")

_BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"ID3", "audio/mpeg"),
    (b"\xff\xfb", "audio/mpeg"),
    (b"OggS", "audio/ogg"),
    (b"fLaC", "audio/flac"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav"}


def media_type_of(data: bytes | bytearray) -> str:
    """The MIME type of a payload by its first bytes; ``application/octet-stream`` for other content, such as SVG.

    What a client says of its payload is not trusted, because browsers may come to show it.
    """
    if data[:4] == b"RIFF":
        return _RIFF.get(bytes(data[8:12]), "application/octet-stream")
    return next((kind for start, kind in _BEGINNINGS if data[: len(start)] == start), "application/octet-stream")


def may_hold_media(body: bytes) -> bool:
    """Test quickly whether a body may hold media; true for every request with media, and for some without."""
    # Walking a long conversation costs more than a search for five words, and most have no media.
    return b'"type"' in body and any(marker in body for marker in _MARKERS)


class Media:
    """Takes the payloads out of the parts of one request.

    Attributes:
        inputs: The references, in order.
        blobs: The payloads by their digests.
    """

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self.blobs: dict[str, Blob] = {}

    def referenced(self, value: Json) -> Json:
        """A copy of ``value`` with references in place of payloads."""
        if is_list(value):
            return [self.referenced(item) for item in as_list(value)]
        entry = as_dict(value)
        if not entry:
            return value
        # Anthropic's documents may hold their text in the request, which is tokens as any other.
        is_text = as_dict(entry.get("source")).get("type") in ("text", "content")
        if as_text(entry.get("type")) in _KINDS and not is_text:
            return self._replaced(entry)
        return {key: self.referenced(item) if isinstance(item, list | dict) else item for key, item in entry.items()}

    def _replaced(self, entry: dict[str, Any]) -> dict[str, Json]:
        replaced: dict[str, Json] = {}
        for key, item in entry.items():
            if inner := as_dict(item):
                replaced[key] = self._replaced(inner)
            elif isinstance(item, str) and key in _PAYLOADS:
                replaced[key] = self._reference(key, item)
                self.inputs.append(replaced[key])
            else:
                replaced[key] = item
        return replaced

    def _reference(self, key: str, text: str) -> str:
        if text.startswith("sha256:"):
            return text
        if text.startswith("data:"):
            return self._digest(text.partition(",")[2])
        return self._digest(text) if key in ("data", "file_data") else text

    def _digest(self, payload: str) -> str:
        data = _decoded(payload)
        if not data:  # for the model's server to refuse
            return digest_of(payload.encode("utf-8", "surrogatepass"))
        blob = Blob(digest=digest_of(data), media_type=media_type_of(data), data=data)
        return self.blobs.setdefault(blob.digest, blob).digest


def _decoded(payload: str) -> bytes | None:
    """The bytes of base64, which may have line breaks; ``None`` for other text."""
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
