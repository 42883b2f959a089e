"""The memory store, and the parts that every store is made of."""

from agl.stores.bell import Bell
from agl.stores.jobs import Job, answer, new_job
from agl.stores.keys import (
    ATTEMPT_BITS,
    MAX_SEQUENCE,
    NUMBER_MASK,
    ROLLOUT,
    SEQUENCE_BITS,
    Row,
    number_of,
    read_rollout,
)
from agl.stores.memory import MemoryStore
from agl.stores.packing import Packer, Unpacker, mark_late
from agl.stores.paging import all_spans
from agl.stores.urls import shown_url, without_credentials

__all__ = [
    "ATTEMPT_BITS",
    "MAX_SEQUENCE",
    "NUMBER_MASK",
    "ROLLOUT",
    "SEQUENCE_BITS",
    "Bell",
    "Job",
    "MemoryStore",
    "Packer",
    "Row",
    "Unpacker",
    "all_spans",
    "answer",
    "mark_late",
    "new_job",
    "number_of",
    "read_rollout",
    "shown_url",
    "without_credentials",
]
