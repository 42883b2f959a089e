"""Shared parts of stores on SQL databases: rows, packed spans, batches, and the layouts of older releases.

A store on another kind of database needs only :mod:`agl.stores`.
"""

from agl_run.sql._batches import Batches, perform
from agl_run.sql._new_spans import AttemptSpans, place_spans
from agl_run.sql._old_layouts import older_documents
from agl_run.sql._packing import Packer, Unpacker
from agl_run.sql._rows import (
    ATTEMPT_BITS,
    NUMBER_MASK,
    ROLLOUT,
    SEQUENCE_BITS,
    Row,
    number_of,
    progress_row,
    read_change,
    read_rollout,
)

__all__ = [
    "ATTEMPT_BITS",
    "NUMBER_MASK",
    "ROLLOUT",
    "SEQUENCE_BITS",
    "AttemptSpans",
    "Batches",
    "Packer",
    "Row",
    "Unpacker",
    "number_of",
    "older_documents",
    "perform",
    "place_spans",
    "progress_row",
    "read_change",
    "read_rollout",
]
