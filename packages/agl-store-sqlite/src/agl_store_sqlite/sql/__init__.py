"""Shared parts of stores on databases: rows, packed spans and batches.

A store on a server loads what its operations need (:func:`needs_of`), runs them over :class:`LoadedTables`, and writes
their :class:`Changes`. A store of another kind needs only :mod:`agl.stores`.
"""

from agl_store_sqlite.sql._batches import Batches, Look, OverdueError, answer_to, perform
from agl_store_sqlite.sql._changes import Changes, LoadedRows
from agl_store_sqlite.sql._compaction import Compactable, Compaction, Measured
from agl_store_sqlite.sql._loaded_tables import LoadedTables
from agl_store_sqlite.sql._needs import Needs, needs_of
from agl_store_sqlite.sql._packing import AttemptSpans, Packer, Unpacker, place_spans
from agl_store_sqlite.sql._rows import (
    ATTEMPT_BITS,
    MODES,
    NUMBER_MASK,
    ROLLOUT,
    SEQUENCE_BITS,
    STATUSES,
    Row,
    by_status,
    conditions,
    containing,
    number_of,
    order_of,
    progress_row,
    read_change,
    read_rollout,
)
from agl_store_sqlite.sql._servers import (
    RESTART_WAIT_S,
    START_WAIT_S,
    BatchReader,
    ChangeListener,
    Channel,
    Message,
    ServerAccess,
    ServerBackend,
    ThreadConnection,
    UncheckedRead,
    read_message,
)
from agl_store_sqlite.sql._statistics import STATISTICS, additions, merging, read_statistics, statistics_row

__all__ = [
    "ATTEMPT_BITS",
    "MODES",
    "NUMBER_MASK",
    "RESTART_WAIT_S",
    "ROLLOUT",
    "SEQUENCE_BITS",
    "START_WAIT_S",
    "STATISTICS",
    "STATUSES",
    "AttemptSpans",
    "BatchReader",
    "Batches",
    "ChangeListener",
    "Changes",
    "Channel",
    "Compactable",
    "Compaction",
    "LoadedRows",
    "LoadedTables",
    "Look",
    "Measured",
    "Message",
    "Needs",
    "OverdueError",
    "Packer",
    "Row",
    "ServerAccess",
    "ServerBackend",
    "ThreadConnection",
    "UncheckedRead",
    "Unpacker",
    "additions",
    "answer_to",
    "by_status",
    "conditions",
    "containing",
    "merging",
    "needs_of",
    "number_of",
    "order_of",
    "perform",
    "place_spans",
    "progress_row",
    "read_change",
    "read_message",
    "read_rollout",
    "read_statistics",
    "statistics_row",
]
