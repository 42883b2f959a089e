"""The keys of documents, which hold everything that is not a rollout, an attempt, a span, a version or a number."""

from agl.errors import StoreError
from agl.schemas import _codec as codec


def document(*kind: str, last: str = "") -> bytes:
    """The key of a document: its kind, then ``last``, by which documents of the same kind are sorted."""
    try:
        return b"x" + codec.encode(kind) + last.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"{last!r} cannot be a key: {error}; it holds half of a character") from error
