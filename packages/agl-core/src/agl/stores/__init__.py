"""The store kit: the store contract over tables or over an ordered map, and the memory store."""

from agl.stores._batches import Batches, perform
from agl.stores._memory import MemoryStore
from agl.stores._memory_tables import MemoryTables
from agl.stores._older import older_documents
from agl.stores._operations import closed, expire, label_key, ledger_documents, unknown_attempt
from agl.stores._packing import Packer, Unpacker
from agl.stores._reading import all_spans, read_recordings
from agl.stores._rows import (
    ATTEMPT_BITS,
    MAX_SEQUENCE,
    NUMBER_MASK,
    ROLLOUT,
    SEQUENCE_BITS,
    Place,
    Row,
    number_of,
    place_spans,
    progress_row,
    read_change,
    read_rollout,
)
from agl.stores._rules import deadline, is_wanted, select
from agl.stores._store import TableStore
from agl.stores._tables import Backend, Reads, Tables, Work
from agl.stores._urls import shown_url, without_credentials
from agl.stores._wake_up import WakeUp

__all__ = [
    "ATTEMPT_BITS",
    "Backend",
    "Batches",
    "MAX_SEQUENCE",
    "MemoryStore",
    "MemoryTables",
    "NUMBER_MASK",
    "Packer",
    "Place",
    "ROLLOUT",
    "Reads",
    "Row",
    "SEQUENCE_BITS",
    "TableStore",
    "Tables",
    "Unpacker",
    "WakeUp",
    "Work",
    "all_spans",
    "closed",
    "deadline",
    "expire",
    "is_wanted",
    "label_key",
    "ledger_documents",
    "number_of",
    "older_documents",
    "perform",
    "place_spans",
    "progress_row",
    "read_change",
    "read_recordings",
    "read_rollout",
    "select",
    "shown_url",
    "unknown_attempt",
    "without_credentials",
]
