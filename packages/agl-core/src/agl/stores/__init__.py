"""The store kit: the store contract over the tables of a backend, and the memory store."""

from agl.stores._blobs import documents_needed
from agl.stores._leases import deadline
from agl.stores._memory import MemoryStore, MemoryTables
from agl.stores._operations import closed, documents_of, expire, unknown_attempt
from agl.stores._queries import all_spans, is_readable, is_wanted, read_recordings, select, sort_key, start_of
from agl.stores._store import Backend, TableStore, Work
from agl.stores._tables import Reads, Tables
from agl.stores._tallies import counted, place_of, reward_of, share_of
from agl.stores._values import DAMAGE, MAX_SEQUENCE, check_recording, note_damage, placed, readable
from agl.stores._wake_up import WakeUp

__all__ = [
    "DAMAGE",
    "MAX_SEQUENCE",
    "Backend",
    "MemoryStore",
    "MemoryTables",
    "Reads",
    "TableStore",
    "Tables",
    "WakeUp",
    "Work",
    "all_spans",
    "check_recording",
    "closed",
    "counted",
    "deadline",
    "documents_needed",
    "documents_of",
    "expire",
    "is_readable",
    "is_wanted",
    "note_damage",
    "place_of",
    "placed",
    "read_recordings",
    "readable",
    "reward_of",
    "select",
    "share_of",
    "sort_key",
    "start_of",
    "unknown_attempt",
]
