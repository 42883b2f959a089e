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

from agl_gateway.wire.problems import Problem

_MAGIC = b"agl-v1"
MARK = base64.b64encode(_MAGIC)
"""The first bytes of every sealed value; a body without them holds none."""

_MAX = 8 * 1024 * 1024
"""Bytes of plain JSON, more than the thoughts in any model's context."""

_URL_SAFE = str.maketrans("-_", "+/")


def seal(value: Any) -> str:
    """Return a JSON value as base64, which :class:`Unsealer` reads."""
    return base64.b64encode(_MAGIC + zlib.compress(msgspec.json.encode(value))).decode()


class Unsealer:
    """Reads the sealed values of one request, which inflate to 8 MiB together at most."""

    def __init__(self) -> None:
        self._left = _MAX

    def read(self, text: object) -> Any:
        """Return the value in a text of :func:`seal`, in base64 of either alphabet; ``None`` for any other value.

        Raises:
            Problem: 413 when the request's values inflate to more.
        """
        if not isinstance(text, str) or not text.startswith(MARK.decode()):
            return None
        try:
            packed = base64.b64decode(text.translate(_URL_SAFE) + "=" * (-len(text) % 4), validate=True)
            plain = self._inflated(packed.removeprefix(_MAGIC))
            return None if plain is None else msgspec.json.decode(plain)
        except (binascii.Error, zlib.error, ValueError, msgspec.DecodeError, RecursionError):
            return None

    def _inflated(self, packed: bytes) -> bytes | None:
        """Return the plain bytes of a stream; ``None`` for one without an end."""
        inflater = zlib.decompressobj()
        plain = inflater.decompress(packed, self._left + 1)
        self._left -= len(plain)
        if self._left < 0:
            raise Problem(
                413,
                f"the request's sealed thoughts are longer than {_MAX >> 20} MiB; start a new conversation",
                code="request_too_large",
            )
        return plain if inflater.eof else None
