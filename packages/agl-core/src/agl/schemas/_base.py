"""The base of all records: frozen, keyword-only, and able to read newer records by ignoring unknown fields."""

from typing import Annotated, Any, TypeAlias

import msgspec

SCHEMA_VERSION = 1
"""Version of the record layout; a store refuses data of a newer version and migrates older data."""

Json: TypeAlias = Any
"""A value that JSON can carry: ``None``, bool, int, float, str, list or dict with str keys."""

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A signed integer of 64 bits, the largest that every store can hold; checked when a record is decoded."""


# omit_defaults keeps records small, and lets a field be added without touching what is stored.
class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The base of all records: immutable, compared by content, encoded by :func:`agl.schemas.encode`."""
