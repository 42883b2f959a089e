"""The tables that go with an experiment's rollouts: versions, labels and scores of resources, and metrics.

Each table is one file. Every archiving adds the store's new records, and rewrites the file if there are any. The file
needs no manifest, because its Parquet pages have checksums.
"""

import tempfile
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from agl.contracts import LabelMove, Metric, Store, VersionScore
from agl.errors import ConflictError
from agl.schemas import Record, ResourceVersion, decode, encode
from agl.stores import TableStore
from agl_data.archive.arrow import Kind, read_rows, row_of, write_table
from agl_data.archive.layout import Folder, damaged

R = TypeVar("R", bound=Record)

_BATCH = 1_000


class Table(NamedTuple, Generic[R]):
    """A table of an archive with one record per row.

    Attributes:
        name: The table's name in the archive.
        type: The type of the records.
        columns: The columns except ``record``.
        key: The fields that identify a record; a newer record replaces the archived one with the same key.
    """

    name: str
    type: type[R]
    columns: dict[str, Kind]
    key: tuple[str, ...]

    def key_of(self, record: R) -> Hashable:
        """Return the values of the fields that identify a record."""
        return tuple(getattr(record, name) for name in self.key)

    def read(self, folder: Folder) -> list[R]:
        """Read the archived records; empty if the file does not exist."""
        name = folder.file(self.name)
        with tempfile.TemporaryDirectory(prefix="agl-archive-") as local:
            path = Path(local) / "table.parquet"
            if not folder.place.fetch(name, path):
                return []
            try:
                rows = read_rows(path, {"record": "bytes"}, place=folder.place, name=name)
                return [decode(row["record"], self.type) for row in rows]
            except (msgspec.DecodeError, RecursionError) as error:
                raise damaged(folder.place, name, str(error)) from error

    def write(self, folder: Folder, records: Iterable[R]) -> None:
        """Replace the archived records."""
        with tempfile.TemporaryDirectory(prefix="agl-archive-") as local:
            path = Path(local) / "table.parquet"
            rows = ({**row_of(record, self.columns), "record": encode(record)} for record in records)
            write_table(path, {**self.columns, "record": "bytes"}, rows)
            folder.place.put(folder.file(self.name), path)

    def update(self, folder: Folder, records: Sequence[R]) -> None:
        """Merge records into the archived ones, new keys last, and write the file if that changes it."""
        archived = self.read(folder)
        merged = {self.key_of(record): record for record in archived}
        merged.update((self.key_of(record), record) for record in records)
        if list(merged.values()) != archived:
            self.write(folder, merged.values())


VERSIONS: Table[ResourceVersion] = Table(
    "versions",
    ResourceVersion,
    {
        "name": "text",
        "version": "text",
        "parent": "text",
        "algorithm": "text",
        "step": "int",
        "created_at": "time",
        "resource": "text",
        "metadata": "text",
    },
    ("name", "version"),
)
LABELS: Table[LabelMove] = Table(
    "labels",
    LabelMove,
    {"name": "text", "label": "text", "version": "text", "moved_at": "time", "is_back": "bool", "reason": "text"},
    ("name", "label", "moved_at"),
)
SCORES: Table[VersionScore] = Table(
    "scores",
    VersionScore,
    {"name": "text", "version": "text", "mean": "float", "low": "float", "high": "float", "n": "int", "how": "text"},
    ("name", "version"),
)
METRICS: Table[Metric] = Table(
    "metrics",
    Metric,
    {
        "experiment": "text",
        "run": "int",
        "algorithm": "text",
        "step": "int",
        "experiment_step": "int",
        "name": "text",
        "value": "float",
        "time": "time",
    },
    ("experiment", "run", "algorithm", "step", "name"),
)


async def archive_context(store: Store, folder: Folder, *, experiment: str, names: Iterable[str]) -> None:
    """Archive the versions, labels and scores of the named resources, and the metrics of the experiment.

    Raises:
        ConflictError: The archive has one of the versions with other contents.
    """
    archived = {VERSIONS.key_of(version): version for version in VERSIONS.read(folder)}
    versions: list[ResourceVersion] = []
    moves: list[LabelMove] = []
    scores: list[VersionScore] = []
    for name in sorted(names):
        versions += await store.resources(name)
        scores += await store.scores(name)
        for newest in await store.labels(name):
            moves += await store.label_moves(name, newest.label)
    for version in versions:
        if not _is_same(archived.get(VERSIONS.key_of(version), version), version):
            raise ConflictError(
                f"the archive {folder.place.shown} has {version.name}@{version.version} of another run of the "
                f"experiment {experiment!r}, with other contents; archive into another folder"
            )
    VERSIONS.update(folder, versions)
    SCORES.update(folder, scores)
    LABELS.update(folder, moves)
    METRICS.update(folder, await store.metrics(experiment) if experiment else [])


async def restore_context(folder: Folder, store: TableStore, *, experiment: str) -> None:
    """Restore the archived versions, labels, scores and metrics that the store lacks; existing records do not change.

    Raises:
        ConflictError: The store's versions of a resource, or the moves of a label, contradict the archive; nothing of
            the experiment is restored.
    """
    versions, moves = VERSIONS.read(folder), LABELS.read(folder)
    lacking = await _lacking_versions(store, versions)
    lacking_moves = await _lacking_moves(store, moves)
    for start in range(0, len(lacking), _BATCH):
        await store.publish(lacking[start : start + _BATCH])
    known = {SCORES.key_of(score) for name in {each.name for each in versions} for score in await store.scores(name)}
    await store.save_scores([score for score in SCORES.read(folder) if SCORES.key_of(score) not in known])
    await store.restore([], moves=lacking_moves)
    numbers = METRICS.read(folder)
    if any(metric.experiment != experiment for metric in numbers):
        raise damaged(
            folder.place, folder.file(METRICS.name), f"it has metrics of other experiments than {experiment!r}"
        )
    logged = {METRICS.key_of(metric) for metric in await store.metrics(experiment)} if numbers else set[Any]()
    numbers = [metric for metric in numbers if METRICS.key_of(metric) not in logged]
    for start in range(0, len(numbers), _BATCH):
        await store.log_metrics(numbers[start : start + _BATCH])


async def _lacking_versions(store: Store, versions: Sequence[ResourceVersion]) -> list[ResourceVersion]:
    """Return the versions that the store lacks; raises ConflictError if its versions of a resource contradict them."""
    lacking: list[ResourceVersion] = []
    for name in dict.fromkeys(version.name for version in versions):
        archived = [version for version in versions if version.name == name]
        there = {version.version: version for version in await store.resources(name)}
        missing = [version for version in archived if version.version not in there]
        same = [each for each in archived if each.version in there and _is_same(there[each.version], each)]
        if len(missing) + len(same) < len(archived) or (missing and len(there) > len(same)):
            raise ConflictError(
                f"the store has other versions of the resource {name!r} than the archive, and a restored one would "
                "become the newest, which agents get; restore into a store of its own: --store restored.db"
            )
        lacking += missing
    return lacking


def _is_same(one: ResourceVersion, other: ResourceVersion) -> bool:
    """Return true for versions with equal contents, where NaN counts as equal to NaN."""
    return one == other or encode(one) == encode(other)


async def _lacking_moves(store: Store, moves: Sequence[LabelMove]) -> list[LabelMove]:
    """Return the label moves that the store lacks; raises ConflictError if the store's moves contradict them."""
    lacking: list[LabelMove] = []
    for name, label in dict.fromkeys((move.name, move.label) for move in moves):
        archived = [move for move in moves if (move.name, move.label) == (name, label)]
        there = await store.label_moves(name, label)
        both = min(len(there), len(archived))
        if there[:both] != archived[:both]:
            raise ConflictError(
                f"the label {label!r} of {name!r} was moved otherwise in the store than in the archive; restore into a "
                "store of its own: --store restored.db"
            )
        lacking += archived[both:]
    return lacking
