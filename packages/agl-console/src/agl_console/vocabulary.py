"""The texts of tokens, from the file ``tokenizer.json`` of a Hugging Face model.

Only the vocabulary is read; no tokenizer is built. A token is shown as the vocabulary writes it, except that byte-level
and SentencePiece encodings of bytes are decoded.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from agl.errors import ConfigError
from agl.schemas import Record

FILE = "tokenizer.json"

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHOWN = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


class _Model(Record, frozen=True, kw_only=True):
    vocab: dict[str, int] | list[tuple[str, float]]


class _Added(Record, frozen=True, kw_only=True):
    id: int
    content: str


class _Tokenizer(Record, frozen=True, kw_only=True):
    """The fields of ``tokenizer.json`` that are read here."""

    model: _Model
    added_tokens: tuple[_Added, ...] = ()
    decoder: msgspec.Raw = msgspec.Raw(b"null")


class Vocabulary:
    """The text of every token of a model.

    Args:
        path: ``tokenizer.json``, or the folder of a model that has one.

    Raises:
        ConfigError: The file does not exist, or holds no vocabulary.
    """

    def __init__(self, path: Path) -> None:
        file = path / FILE if path.is_dir() else path
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
        except OSError as error:
            raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}; pass a model's {FILE}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{str(file)!r} is not a {FILE} with a vocabulary: {error}") from error
        vocab = found.model.vocab
        named = vocab.items() if isinstance(vocab, dict) else ((text, at) for at, (text, _) in enumerate(vocab))
        self._texts = {number: text for text, number in named}
        self._whole = {token.id: token.content for token in found.added_tokens}
        self._bytes = _bytes_by_character() if b'"ByteLevel"' in bytes(found.decoder) else {}

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Return the texts of tokens, with visible line ends and tabs; ``""`` for tokens that the vocabulary lacks."""
        return [self._text(number).translate(_SHOWN) for number in ids]

    def _text(self, number: int) -> str:
        if number in self._whole:
            return self._whole[number]
        text = self._texts.get(number, "")
        if self._bytes:
            return _decoded(bytes(self._bytes[character] for character in text if character in self._bytes))
        if match := _BYTE.fullmatch(text):
            return _decoded(bytes([int(match[1], 16)]))
        return text.replace("▁", " ")


class Vocabularies:
    """The vocabularies of a console: the given one for all tokens, or else that of each policy's own weights.

    Only the last one that was read is kept, because one takes tens of megabytes.
    """

    def __init__(self, given: Vocabulary | None = None) -> None:
        self._given = given
        self._last: tuple[str, Vocabulary | None] = ("", None)

    def of(self, folder: str) -> Vocabulary | None:
        """Return the vocabulary for tokens of the weights in ``folder``; ``None`` to show their ids."""
        if self._given is not None or not folder:
            return self._given
        if folder != self._last[0]:
            self._last = folder, _readable(Path(folder))
        return self._last[1]


def _readable(folder: Path) -> Vocabulary | None:
    try:
        return Vocabulary(folder)
    except ConfigError:
        return None


def _decoded(data: bytes) -> str:
    """Decode a token's bytes; an incomplete character is written as ``\\xe4``."""
    return data.decode("utf-8", "backslashreplace")


def _bytes_by_character() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary, by GPT-2's table."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
