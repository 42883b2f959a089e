"""Writes values into fields that clients hand back unread, and reads them there: no gateway has to remember them.

Model APIs without a memory have such a field for a model's thoughts: ``encrypted_content`` in OpenAI's responses,
``signature`` in Anthropic's messages, ``thoughtSignature`` in Google's API. Clients drop the thoughts themselves, or
the exact text of a tool's arguments, and keep these fields. What is written here is compressed and not encrypted.
"""

import base64
import binascii
import zlib
from typing import Any

import msgspec

_MAGIC = b"agl-v1"
MARK = base64.b64encode(_MAGIC)
"""The first bytes of every sealed value; a body without them holds none."""

_MAX = 8 * 1024 * 1024
_URL_SAFE = str.maketrans("-_", "+/")


def seal(value: Any) -> str:
    """Return a JSON value as base64, which :func:`unseal` reads."""
    return base64.b64encode(_MAGIC + zlib.compress(msgspec.json.encode(value))).decode()


def unseal(text: object) -> Any:
    """Return the value in a text of :func:`seal`, in base64 of either alphabet; ``None`` for any other value.

    At most 8 MiB are inflated.
    """
    if not isinstance(text, str) or not text.startswith(MARK.decode()):
        return None
    try:
        packed = base64.b64decode(text.translate(_URL_SAFE) + "=" * (-len(text) % 4), validate=True)
        inflater = zlib.decompressobj()
        plain = inflater.decompress(packed.removeprefix(_MAGIC), _MAX)
        return msgspec.json.decode(plain) if inflater.eof else None
    except (binascii.Error, zlib.error, ValueError, msgspec.DecodeError, RecursionError):
        return None
