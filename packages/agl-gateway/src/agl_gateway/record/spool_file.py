"""A SQLite file of calls that are not in the store yet; it survives ``kill -9`` and the loss of power.

Every write is one transaction and is on disk (``synchronous = FULL``) when it returns. The process that opens a file
holds it exclusively until the process ends, however it ends. A file belongs to one store, by an identity that the store
itself holds, so calls are never written to another store, even if its address stays the same.
"""

import asyncio
import socket
import sqlite3
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from agl.contracts import Presence, Store
from agl.errors import ConfigError, FencedError, StoreError
from agl.schemas import Blob, Span, blob_digests, decode, encode, new_trace_id
from agl.stores import MemoryStore
from agl_gateway.record.storable import storable
from agl_inspect.keys import state_dir
from agl_store_sqlite import SQLiteStore

_FORMAT = "1"
_SUFFIX = ".spool"
_MAX_FILES = 64
_LARGE_BYTES = 32 << 20
"""Size in bytes from which a file without calls is rewritten, to free disk space."""

_TABLES = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS calls (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, attempt TEXT NOT NULL, at REAL NOT NULL, spans INTEGER NOT NULL,
  size INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS blobs (digest TEXT PRIMARY KEY, type TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS refused (
  seq INTEGER PRIMARY KEY, attempt TEXT NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL, data BLOB NOT NULL);
"""
_ADD = "INSERT INTO calls (attempt, at, spans, size, data) VALUES (?, ?, ?, ?, ?)"
_ADD_BLOB = "INSERT OR IGNORE INTO blobs VALUES (?, ?, ?)"
_REFUSE = "INSERT OR REPLACE INTO refused SELECT seq, attempt, at, ?, data FROM calls WHERE seq = ?"
_HELD = "SELECT attempt, count(*), coalesce(sum(size), 0), min(at) FROM calls GROUP BY attempt"

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(list[bytes]).decode


class SpoolBusyError(StoreError):
    """Raised if another process has the spool open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpooledCall:
    """The spans of one call and its media, and the row of the spool file that holds them.

    Attributes:
        blobs: The payloads of media that may not be in the store yet; a file holds each once, however many calls
            refer to it.
        seq: Number of the row; 0 before it is written.
        at: Unix seconds at which the row was written.
        size: Bytes of the spans in the file, and of the payloads that it brought.
    """

    attempt_id: str
    spans: Sequence[Span]
    blobs: Sequence[Blob] = ()
    seq: int = 0
    at: float = 0.0
    size: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SpoolContent:
    """A summary of the calls in a spool file.

    It holds the number of calls per attempt, their bytes, and the Unix time in seconds of the oldest call.
    """

    attempts: dict[str, int]
    size: int = 0
    oldest_at: float = 0.0

    @property
    def calls(self) -> int:
        """Total number of calls in the file."""
        return sum(self.attempts.values())


class SpoolFile:
    """An open spool; its methods block, and are called by one thread at a time.

    Args:
        path: The file; created if it is missing.
        store_id: Identity of the store that the calls belong to.
        store_url: Address of the store, without credentials, for people who find the file.

    Raises:
        SpoolBusyError: Another process has the file open.
        ConfigError: The file belongs to another store or a newer release, or cannot be written.
    """

    def __init__(self, path: Path, *, store_id: str, store_url: str) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from error
        try:
            self._prepare(store_id, store_url)
        except BaseException as error:
            self._db.close()
            if isinstance(error, sqlite3.Error):
                if "locked" not in str(error):
                    raise _unusable(path, error) from error
                raise SpoolBusyError(f"another gateway uses the spool {path}; it lets go when it ends") from error
            raise

    @property
    def gateway_id(self) -> str:
        """Id of the gateway that owns the file, the same at every start."""
        return self._about["gateway"]

    @property
    def store_id(self) -> str:
        """Id of the store that the calls belong to."""
        return self._about["store"]

    def add(self, calls: Sequence[SpooledCall]) -> list[SpooledCall]:
        """Write calls durably; returns them with their row numbers. Adding a call twice stores it twice.

        Raises:
            StoreError: The disk is full, or the file cannot be written; no call was written.
        """
        now, added = time.time(), list[SpooledCall]()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for call in calls:
                data = _pack([encode(storable(span)) for span in call.spans])
                size = len(data) + sum(map(self._add_blob, call.blobs))
                cursor = self._db.execute(_ADD, (call.attempt_id, now, len(call.spans), size, data))
                added.append(replace(call, seq=cursor.lastrowid or 0, at=now, size=size))
            self._db.execute("COMMIT")
        except BaseException as error:
            self._roll_back()
            if isinstance(error, sqlite3.Error):
                raise StoreError(_failure(self.path, error)) from error
            raise
        return added

    def oldest(self, *, limit: int, max_bytes: int, without: Collection[str] = ()) -> list[SpooledCall]:
        """Read the oldest calls, except those of the attempts in ``without``.

        Returns at most ``limit`` calls with at most ``max_bytes`` bytes, but at least one call if there is any. Calls
        that refer to the same payload share it.
        """
        places = ", ".join("?" * len(without))
        where = f"WHERE attempt NOT IN ({places})" if without else ""
        query = f"SELECT seq, attempt, at, size, data FROM calls {where} ORDER BY seq LIMIT ?"
        found, total, payloads = list[SpooledCall](), 0, dict[str, Blob]()
        with closing(self._db.execute(query, (*without, limit))) as rows:
            for seq, attempt_id, at, size, data in rows:
                spans = [decode(one, Span) for one in _unpack(data)]
                digests = dict.fromkeys(digest for span in spans for digest in blob_digests(span))
                new = self._blobs(digests.keys() - payloads.keys())
                payloads |= {blob.digest: blob for blob in new}
                blobs = [payloads[digest] for digest in digests if digest in payloads]
                total += len(data) + sum(len(blob.data) for blob in new)
                if found and total > max_bytes:
                    break
                call = SpooledCall(attempt_id=attempt_id, spans=spans, blobs=blobs, seq=seq, at=at, size=size)
                found.append(call)
        return found

    def remove(self, calls: Sequence[SpooledCall]) -> None:
        """Remove calls and their payloads from the file once they are in the store."""
        self._change("DELETE FROM blobs WHERE digest = ?", [(blob.digest,) for call in calls for blob in call.blobs])
        self._change("DELETE FROM calls WHERE seq = ?", [(call.seq,) for call in calls])

    def refuse(self, calls: Sequence[SpooledCall], reason: str) -> None:
        """Set aside calls that the store refused for good, with the store's reason."""
        self._change(_REFUSE, [(reason, call.seq) for call in calls])
        self.remove(calls)

    def content(self) -> SpoolContent:
        """Summarise the calls in the file."""
        rows = self._db.execute(_HELD).fetchall()
        return SpoolContent(
            attempts={attempt_id: count for attempt_id, count, _, _ in rows},
            size=sum(size for _, _, size, _ in rows),
            oldest_at=min((at for *_, at in rows), default=0.0),
        )

    def shrink(self) -> None:
        """Free disk space if the file is large; call this only while it holds no calls."""
        (pages,), (page,) = (self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
        if pages * page > _LARGE_BYTES:
            with suppress(sqlite3.Error):  # a full disk; the space is used again
                self._db.execute("VACUUM")
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the file so that another process can open it; a file without calls is deleted."""
        is_unused = not self._db.execute("SELECT 1 FROM calls UNION ALL SELECT 1 FROM refused LIMIT 1").fetchone()
        self._db.close()
        if is_unused:
            self.path.unlink(missing_ok=True)

    def _prepare(self, store_id: str, store_url: str) -> None:
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("BEGIN EXCLUSIVE")
        for statement in _TABLES.split(";"):
            self._db.execute(statement)
        first = {
            "format": _FORMAT,
            "store": store_id,
            "url": store_url,
            "gateway": new_trace_id(),
            "machine": socket.gethostname(),
        }
        self._db.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", first.items())
        self._about: dict[str, str] = dict(self._db.execute("SELECT key, value FROM about"))
        self._db.execute("COMMIT")
        if self._about["format"] != _FORMAT:
            raise ConfigError(
                f"the spool {self.path} has the format {self._about['format']!r} of a newer release; start that "
                "release once to have it drained, or choose another folder with --spool"
            )
        if self._about["store"] != store_id:
            raise ConfigError(
                f"the spool {self.path} belongs to the store {self._about['url']}, which is another one than "
                f"{store_url}; start a gateway of that store to have it drained, or choose another folder with --spool"
            )

    def _add_blob(self, blob: Blob) -> int:
        """Write a payload unless the file has it; returns the number of bytes written."""
        is_new = self._db.execute(_ADD_BLOB, (blob.digest, blob.media_type, blob.data)).rowcount
        return len(blob.data) if is_new else 0

    def _blobs(self, digests: Collection[str]) -> list[Blob]:
        """Read the payloads that the file holds."""
        rows = [self._db.execute("SELECT * FROM blobs WHERE digest = ?", (digest,)).fetchone() for digest in digests]
        return [Blob(digest=digest, media_type=kind, data=data) for digest, kind, data in filter(None, rows)]

    def _change(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, rows)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise StoreError(_failure(self.path, error)) from error

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")


def open_spools(folder: Path, *, store_id: str, store_url: str, without: Collection[Path] = ()) -> list[SpoolFile]:
    """Open the spool files of a store that no other process holds: the gateway's own first, then those to drain.

    If there are none, a new file is created.

    Args:
        without: Files that belong to other processes of the same gateway, even while those processes do not run.

    Raises:
        ConfigError: The folder cannot be used, or all 64 spools in it are busy.
    """
    found = list[SpoolFile]()
    free = list[Path]()
    for number in range(_MAX_FILES):
        path = folder / f"{store_id}-{number}{_SUFFIX}"
        if path in without:
            continue
        if not path.exists():
            free.append(path)
            continue
        with suppress(SpoolBusyError):
            found.append(SpoolFile(path, store_id=store_id, store_url=store_url))
    for path in free:
        if found:
            break
        with suppress(SpoolBusyError):  # a gateway that started at the same moment took it
            found.append(SpoolFile(path, store_id=store_id, store_url=store_url))
    if not found:
        raise ConfigError(f"{_MAX_FILES} gateways of one store use the folder {folder}; choose another with --spool")
    return found


@dataclass(frozen=True, kw_only=True)
class SpoolReport:
    """A spool file found in a folder.

    Attributes:
        store_url: The store that the file's calls belong to.
        is_busy: A gateway has the file open; then only ``path`` is known.
        refused: The number of calls that the store refused; they stay in the file for people to look at.
    """

    path: Path
    is_busy: bool = False
    store_url: str = ""
    calls: int = 0
    size: int = 0
    oldest_at: float = 0.0
    refused: int = 0


def spools_in(folder: Path) -> list[SpoolReport]:
    """Describe every spool in a folder, whichever store it belongs to; changes nothing."""
    return [_report(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))] if folder.is_dir() else []


def _report(path: Path) -> SpoolReport:
    try:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0.0)) as db:
            about = dict(db.execute("SELECT key, value FROM about"))
            ((calls, size, oldest),) = db.execute("SELECT count(*), coalesce(sum(size), 0), min(at) FROM calls")
            ((refused,),) = db.execute("SELECT count(*) FROM refused")
    except sqlite3.Error:
        return SpoolReport(path=path, is_busy=True)
    return SpoolReport(
        path=path, store_url=about["url"], calls=calls, size=size, oldest_at=oldest or 0.0, refused=refused
    )


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the spool {path} cannot be used ({error}); it keeps calls while the store does not answer. Choose a folder "
        "on a local disk that this user can write to with --spool, or --spool off to go without"
    )


def _failure(path: Path, error: Exception) -> str:
    is_full = "full" in str(error)
    return (
        f"the spool {path} cannot be written ({error}); "
        + ("make room on its disk" if is_full else "check its disk and rights")
        + ", or start the gateway with --spool FOLDER on another one"
    )


_STORE_ID = ".agl-store"
"""The place of a store's id among the leases; no experiment's name starts with a full stop."""

OFF = "off"


def default_folder() -> Path:
    """Return the folder for spools in this user's state folder."""
    return state_dir() / "spool"


def folder_of(choice: str, store: Store) -> Path | None:
    """Return the folder for a gateway's spool; ``None`` to run without one.

    Args:
        choice: A folder, ``off``, or ``""`` for the default: the user's state folder if the store is in another
            process, else no spool, because a SQLite file or the memory takes a call as fast as a spool does, and cannot
            become unreachable while this process runs.
    """
    if choice == OFF or (not choice and isinstance(store, MemoryStore | SQLiteStore)):
        return None
    return Path(choice).expanduser() if choice else default_folder()


async def store_identity(store: Store) -> str:
    """Return the id that a store holds, created on the first call; all users of the store get the same id."""
    while True:
        # A lease that nobody renews or withdraws: the first gateway takes it, and its session is the identity.
        for known in await store.presences(_STORE_ID):
            return known.session
        with suppress(FencedError):  # another gateway was first
            await store.announce(Presence(experiment=_STORE_ID, session=new_trace_id()[:16]), replaces="")


async def spools_for(store: Store, choice: str, *, shown: str, without: Collection[Path] = ()) -> list[SpoolFile]:
    """Open the spools of a store that no other process uses, the gateway's own first; empty to run without a spool.

    Args:
        choice: See :func:`folder_of`.
        shown: The store's address without credentials.
        without: See :func:`open_spools`.

    Raises:
        ConfigError: The folder cannot be used.
        StoreError: The store does not answer, so its identity is unknown.
    """
    folder = folder_of(choice, store)
    if folder is None:
        return []
    store_id = await store_identity(store)
    return await asyncio.to_thread(open_spools, folder, store_id=store_id, store_url=shown, without=without)


def left_text(calls: int, path: Path | None) -> str:
    """Return the message of a gateway that stops while calls are left in its spool."""
    return (
        f"the store does not answer, and calls stay in the spool {path}: {calls}; the next gateway that starts on this "
        "machine with the same store and spool brings them there"
    )
