"""The files of an archive and the records that describe them.

    agl-data.json                     marks the folder, with the format's version
    EXPERIMENT/manifests/PART.json       a part: its rollouts and the checksums of its three files
    EXPERIMENT/rollouts/PART.parquet     the part's rollouts, in order of id
    EXPERIMENT/attempts/PART.parquet     the attempts of these rollouts
    EXPERIMENT/spans/PART.parquet        the spans of these rollouts
    EXPERIMENT/versions.parquet          versions of the resources that the rollouts name
    EXPERIMENT/labels.parquet            every move of the resources' labels
    EXPERIMENT/scores.parquet            scores of the versions
    EXPERIMENT/metrics.parquet           the experiment's metrics
    EXPERIMENT/blobs/SHA256              a picture that calls saw, as a blob in msgpack

A part's manifest is written twice: before the part's files, marked as unfinished, and after them, marked as whole.
Readers ignore unfinished parts. A part therefore appears as a whole or not at all, even in an object store that cannot
rename files.
"""

import hashlib
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from agl.errors import ConfigError, SchemaVersionError, StoreError
from agl.schemas import Record, from_json, to_json
from agl_data.archive.places import Place

R = TypeVar("R", bound=Record)

FORMAT = 1
"""The version of the format that this release writes; it reads this version and older ones."""

MARK = "agl-data.json"
TABLES = ("spans", "attempts", "rollouts")
"""The tables of a part, in the order in which they are written."""

_LONGEST = 100


class Mark(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The contents of ``agl-data.json``, the file that marks a folder as an archive."""

    format: str = "agl-data"
    version: int = FORMAT


class Sum(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The size of a file in bytes, the SHA-256 in hex digits and the number of rows."""

    size: int
    sha256: str
    rows: int


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The description of one part of an archive.

    Attributes:
        part: The name of the part's files, without suffix.
        experiment: The experiment that all rollouts of the part belong to.
        first: The smallest id among the part's rollouts.
        last: The greatest id among the part's rollouts.
        files: Size, checksum and rows of each file, by table.
        is_whole: True once all files are written.
        writer: The name of the store that the part came from. When that store is archived again, its unfinished parts,
            which a killed process left, are discarded.
    """

    part: str
    experiment: str
    first: str
    last: str
    files: dict[str, Sum]
    is_whole: bool = False
    writer: str = ""
    version: int = FORMAT

    @property
    def rollouts(self) -> int:
        """The number of rollouts in the part."""
        return self.files["rollouts"].rows


class Folder:
    """The folder of one experiment in an archive."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.name = name

    def file(self, table: str, part: str = "") -> str:
        """Return the path of a table's file within ``part``, or without ``part`` if the table is a single file."""
        return f"{self.name}/{table}/{part}.parquet" if part else f"{self.name}/{table}.parquet"

    def manifests(self) -> list[Manifest]:
        """Read the manifests of all parts, including unfinished ones, sorted by first id."""
        found: list[Manifest] = []
        for name in self.place.names(f"{self.name}/manifests"):
            path = f"{self.name}/manifests/{name}"
            manifest = _decoded(self.place, path, Manifest) if name.endswith(".json") else None
            if manifest is None:
                continue
            # What a manifest names is read and removed, so it may name only files of its own part.
            if (f"{manifest.part}.json", folder_of(manifest.experiment)) != (name, self.name):
                raise damaged(self.place, path, f"it describes {manifest.part!r} of {manifest.experiment!r}")
            if not manifest.files.keys() >= set(TABLES):
                raise damaged(self.place, path, f"it lacks one of the tables {', '.join(TABLES)}")
            found.append(manifest)
        return sorted(found, key=lambda each: (each.first, each.part))

    def save(self, manifest: Manifest) -> None:
        """Write the manifest of a part."""
        self.place.write(f"{self.name}/manifests/{manifest.part}.json", to_json(manifest))

    def discard(self, manifest: Manifest) -> None:
        """Remove the files of a part, and its manifest last."""
        for table in TABLES:
            self.place.remove(self.file(table, manifest.part))
        self.place.remove(f"{self.name}/manifests/{manifest.part}.json")

    def fetch(self, manifest: Manifest, table: str, folder: Path) -> Path:
        """Copy a part's file to a local folder and check it; raises :class:`StoreError` if it is missing or damaged."""
        target, name, expected = folder / f"{table}.parquet", self.file(table, manifest.part), manifest.files[table]
        if not self.place.fetch(name, target):
            raise damaged(self.place, name, "it is missing")
        size = target.stat().st_size
        if size != expected.size:
            raise damaged(self.place, name, f"it has {size:,} bytes and should have {expected.size:,}")
        if sha256(target) != expected.sha256:
            raise damaged(self.place, name, "its checksum differs from the one in the manifest")
        return target


def folder_of(experiment: str) -> str:
    """Return an experiment's folder name: the URL-quoted name, shortened if it is long; ``%`` for an empty name."""
    name = quote(experiment, safe="")
    if name.startswith(".") or name == MARK:
        name = name.replace(".", "%2E")
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{hashlib.sha256(experiment.encode()).hexdigest()[:16]}"
    return name or "%"


def open_archive(place: Place) -> None:
    """Check that a place is an archive that this release can read.

    Raises:
        ConfigError: The place is not an archive.
        SchemaVersionError: A newer release wrote the archive.
    """
    mark = _decoded(place, MARK, Mark)
    if mark is None:
        raise ConfigError(
            f"{place.shown} is not an archive: it has no file {MARK}; name the folder that agl data archive wrote to"
        )
    if mark.format != Mark().format:
        raise damaged(place, MARK, f"it names the format {mark.format!r}")


def make_archive(place: Place) -> None:
    """Open an archive, or mark a new or empty folder as one.

    Raises:
        ConfigError: The folder holds other files.
        SchemaVersionError: A newer release wrote the archive.
    """
    if place.read(MARK) is not None:
        open_archive(place)
        return
    others = place.names()
    if others:
        raise ConfigError(
            f"{place.shown} is neither an archive nor empty: it has {others[0]!r}; name a folder that is new or empty, "
            "or the folder of an archive"
        )
    place.write(MARK, to_json(Mark()))


def folders(place: Place) -> list[Folder]:
    """Return the folders of all experiments."""
    return [Folder(place, name) for name in place.names() if not name.startswith(".") and name != MARK]


class DamagedArchiveError(StoreError):
    """A file of an archive is missing or damaged."""


def damaged(place: Place, name: str, what: str) -> DamagedArchiveError:
    """Make the error for a damaged file; ``what`` says how it is damaged."""
    return DamagedArchiveError(
        f"{name!r} in the archive {place.shown} is damaged: {what}; bring the file back from a copy of the archive, "
        "and repeat the command"
    )


def newer(place: Place, name: str, version: int) -> SchemaVersionError:
    """Make the error for a file that a newer release wrote."""
    return SchemaVersionError(
        f"{name!r} in the archive {place.shown} has version {version} of the format, and this release reads up to "
        f"{FORMAT}; install a newer agl-data"
    )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a local file, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Versioned(Record, frozen=True, kw_only=True):
    version: int = 0


def _decoded(place: Place, name: str, type: type[R]) -> R | None:
    """Read a JSON file; ``None`` if it does not exist."""
    data = place.read(name)
    if data is None:
        return None
    try:
        version = from_json(data, _Versioned).version
        if version > FORMAT:
            raise newer(place, name, version)
        return from_json(data, type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(place, name, str(error)) from error
