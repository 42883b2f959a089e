"""Writes recordings, in order of id, as parts of an archive, and reads the same recordings back."""

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from agl.contracts import Recording
from agl.errors import StoreError
from agl.schemas import encode
from agl.stores import check_recording
from agl_data.archive.arrow import Kind, Row, TableWriter, read_rows
from agl_data.archive.layout import TABLES, Folder, Manifest, Sum, damaged, sha256
from agl_data.archive.tables import COLUMNS, STORED, attempt_of, rollout_of, rows_of, span_of

R = TypeVar("R")

PART_ROLLOUTS, PART_BYTES = 10_000, 256 << 20
"""A part is full at this many rollouts, or at this many uncompressed bytes of values."""


class PartWriter:
    """Collects recordings of an experiment in local files, in order of id, and uploads them as one part.

    Use it in a ``with`` block: the local files are removed at its end.

    Args:
        folder: The experiment's folder.
        experiment: The experiment's name.
        writer: The store's name in the :class:`~agl_data.archive.layout.Manifest`.
    """

    def __init__(self, folder: Folder, experiment: str, *, writer: str) -> None:
        self._folder, self._experiment, self._writer = folder, experiment, writer
        self._local = tempfile.TemporaryDirectory(prefix="agl-archive-")
        self._tables = {table: TableWriter(self._path(table), COLUMNS[table]) for table in TABLES}
        self._ids: list[str] = []
        self._bytes = 0

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for table in self._tables.values():
            table.close()
        self._local.cleanup()

    @property
    def is_full(self) -> bool:
        """True once the part has the largest number of rollouts or of bytes."""
        return len(self._ids) >= PART_ROLLOUTS or self._bytes >= PART_BYTES

    @property
    def count(self) -> int:
        """The number of rollouts added so far."""
        return len(self._ids)

    def add(self, recording: Recording) -> None:
        """Add a rollout with all its attempts and spans; rollouts must come in ascending order of id."""
        self._ids.append(recording.rollout.rollout_id)
        rows = rows_of(recording)
        for table in TABLES:
            self._bytes += sum(map(self._tables[table].add, getattr(rows, table)))

    def upload(self) -> Manifest:
        """Upload the part: the manifest, marked as unfinished, then the files, then the manifest, marked as whole."""
        for table in self._tables.values():
            table.close()
        files = {table: self._sum(table) for table in TABLES}
        ids = "\n".join(self._ids).encode()
        manifest = Manifest(
            part=f"part-{hashlib.sha256(ids).hexdigest()[:16]}",
            experiment=self._experiment,
            first=self._ids[0],
            last=self._ids[-1],
            files=files,
            writer=self._writer,
        )
        self._folder.save(manifest)
        for table in TABLES:
            self._folder.place.put(self._folder.file(table, manifest.part), self._path(table))
        whole = replace(manifest, is_whole=True)
        self._folder.save(whole)
        return whole

    def _path(self, table: str) -> Path:
        return Path(self._local.name) / f"{table}.parquet"

    def _sum(self, table: str) -> Sum:
        path = self._path(table)
        return Sum(size=path.stat().st_size, sha256=sha256(path), rows=self._tables[table].count)


class PartReader:
    """Copies a part's files to this machine, checks them, and reads them; use it in a ``with`` block.

    Args:
        folder: The experiment's folder.
        manifest: The manifest of the part.
        tables: The tables to copy; ``rollouts`` alone suffices for :meth:`ids` and :meth:`ends`.

    Raises:
        StoreError: A file is missing or damaged.
        SchemaVersionError: A newer release wrote the part.
    """

    def __init__(self, folder: Folder, manifest: Manifest, *, tables: Sequence[str] = TABLES) -> None:
        self._folder, self._manifest = folder, manifest
        self._local = tempfile.TemporaryDirectory(prefix="agl-archive-")
        try:
            self._paths = {table: folder.fetch(manifest, table, Path(self._local.name)) for table in tables}
        except BaseException:
            self._local.cleanup()
            raise

    def __enter__(self) -> "PartReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._local.cleanup()

    def ids(self) -> list[str]:
        """Return the ids of the rollouts, in order."""
        return [row["rollout_id"] for row in self._ordered({"rollout_id": "text"})]

    def ends(self) -> dict[str, int | None]:
        """Return the time at which each rollout finished, in Unix microseconds, by rollout id in ascending order."""
        rows = self._ordered({"rollout_id": "text", "finished_at": "time"})
        return {row["rollout_id"]: row["finished_at"] for row in rows}

    def recordings(self) -> Iterator[Recording]:
        """Read the recordings, in order of id.

        Raises:
            StoreError: A record cannot be read, or belongs to another rollout or experiment than its row.
        """
        by_id = itemgetter("rollout_id")
        groups = {table: itertools.groupby(self._rows(table, STORED[table]), by_id) for table in ("attempts", "spans")}
        ahead = {table: next(rows, None) for table, rows in groups.items()}
        for row in self._ordered(STORED["rollouts"]):
            own = {table: group[1] for table, group in ahead.items() if group and group[0] == row["rollout_id"]}
            (rollout,) = self._read("rollouts", [row], rollout_of, "rollout_id")
            attempts = self._read("attempts", own.get("attempts", ()), attempt_of, "number")
            spans = self._read("spans", own.get("spans", ()), span_of, "attempt_id", "span_id")
            ahead |= {table: next(groups[table], None) for table in own}
            recording = Recording(rollout=rollout, attempts=attempts, spans=spans)
            try:
                check_recording(recording)
            except StoreError as error:
                raise self._damaged("rollouts", f"the records of {row['rollout_id']!r} do not fit: {error}") from error
            if (rollout.rollout_id, rollout.experiment) != (row["rollout_id"], self._manifest.experiment):
                raise self._damaged("rollouts", f"the row {row['rollout_id']!r} holds {rollout.rollout_id!r}")
            yield recording
        for table, group in ahead.items():
            if group is not None:
                raise self._damaged(table, f"it has rows of {group[0]!r}, which is not among the rollouts")

    def _read(self, table: str, rows: Iterable[Row], read: Callable[[Row], R], *key: str) -> list[R]:
        """Decode the records of a rollout in a table, in which each key may come once."""
        found: dict[tuple[object, ...], R] = {}
        for row in rows:
            try:
                record = read(row)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                what = f"a record of the rollout {row['rollout_id']!r} cannot be read: {error}"
                raise self._damaged(table, what) from error
            own = tuple(getattr(record, name) for name in key)
            if own in found:
                raise self._damaged(table, f"it has {own} of the rollout {row['rollout_id']!r} twice")
            found[own] = record
        return list(found.values())

    def _ordered(self, columns: dict[str, Kind]) -> Iterator[Row]:
        """Read the rows of the rollouts, which must be in ascending order of id, each id once."""
        last = ""
        for row in self._rows("rollouts", columns):
            if not isinstance(row["rollout_id"], str) or row["rollout_id"] <= last:
                raise self._damaged("rollouts", f"its ids do not ascend: {row['rollout_id']!r} follows {last!r}")
            last = row["rollout_id"]
            yield row

    def _damaged(self, table: str, what: str) -> StoreError:
        return damaged(self._folder.place, self._folder.file(table, self._manifest.part), what)

    def _rows(self, table: str, columns: dict[str, Kind]) -> Iterator[Row]:
        name = self._folder.file(table, self._manifest.part)
        count = self._manifest.files[table].rows
        return read_rows(self._paths[table], columns, place=self._folder.place, name=name, count=count)


def content_of(recording: Recording) -> bytes:
    """Encode a recording as bytes; equal recordings give equal bytes."""
    return encode((recording.rollout, recording.attempts, recording.spans))
