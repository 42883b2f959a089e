"""Brings archived rollouts back into a store, byte for byte.

A part is compared with the store before any of its rollouts is written. A rollout that the store already has, equal to
its archived copy, is left as it is. A rollout with other contents stops the restore, so that no part is restored
incompletely.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from agl.contracts import Recording
from agl.errors import ConfigError, ConflictError, NotFoundError
from agl.hints import count_of, did_you_mean
from agl.schemas import Record
from agl.stores import TableStore
from agl_data.archive.blobs import restore_blobs
from agl_data.archive.context import restore_context
from agl_data.archive.layout import DamagedArchiveError, Folder, Manifest, folders, open_archive
from agl_data.archive.parts import PartReader, content_of
from agl_data.archive.places import Place
from agl_data.archive.stored import chunks, read_known, rollouts_there
from agl_data.copying import digests_of

_LISTED = 8
_GREATEST = "\U0010ffff"


class Restored(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of a restore.

    Attributes:
        experiments: Names of the restored experiments.
        rollouts: Number of restored rollouts.
        known: Number of rollouts that the store already had.
    """

    experiments: list[str]
    rollouts: int = 0
    known: int = 0


class ArchivedPart(NamedTuple):
    """A part of an archive to restore from.

    Attributes:
        folder: The folder of the part's experiment.
        manifest: The part's manifest.
        rollout_ids: Ids of the rollouts to restore; ``None`` for all rollouts of the part.
    """

    folder: Folder
    manifest: Manifest
    rollout_ids: frozenset[str] | None = None

    @property
    def wanted(self) -> int:
        """The number of rollouts to restore."""
        return self.manifest.rollouts if self.rollout_ids is None else len(self.rollout_ids)


def find_parts(place: Place, *, experiments: Sequence[str] = (), names: Sequence[str] = ()) -> list[ArchivedPart]:
    """Find the parts to restore.

    Args:
        place: The archive.
        experiments: Only these experiments; empty for all.
        names: Rollouts to restore, as ids or unique prefixes of ids; empty for all rollouts.

    Raises:
        ConfigError: The place is not an archive, or a name is the prefix of several ids.
        DamagedArchiveError: A manifest is damaged; nothing is restored.
        NotFoundError: The archive lacks an experiment or a rollout.
    """
    open_archive(place)
    parts = [
        ArchivedPart(folder, manifest)
        for folder in folders(place)
        for manifest in folder.manifests()
        if manifest.is_whole
    ]
    known = sorted({part.manifest.experiment for part in parts})
    for name in experiments:
        if name not in known:
            there = f"the archive has {', '.join(map(repr, known))}" if known else "the archive is empty"
            raise NotFoundError("experiment", name, did_you_mean(name, known, otherwise=there))
    parts = [part for part in parts if not experiments or part.manifest.experiment in experiments]
    return _naming(parts, names) if names else parts


async def restore_parts(
    store: TableStore, parts: Sequence[ArchivedPart], *, tell: Callable[[int], None], is_dry_run: bool = False
) -> Restored:
    """Restore parts, with the versions, labels, scores and metrics of their experiments.

    Args:
        store: The store to restore into.
        parts: The parts.
        tell: Called after each part with its number of wanted rollouts, new and known.
        is_dry_run: Compare with the store, and write nothing.

    Raises:
        ConflictError: The store has a rollout, version or label with other contents.
        DamagedArchiveError: Files of parts are damaged; these parts are left out, and the others restored. Or an
            experiment's versions, labels, scores or metrics are damaged; then no rollout is restored.
    """
    found: list[str] = []
    done = Restored(experiments=sorted({part.manifest.experiment for part in parts}))
    for experiment, folder in {part.manifest.experiment: part.folder for part in parts}.items():
        if not is_dry_run:
            await restore_context(folder, store, experiment=experiment)
    for part in parts:
        try:
            with await asyncio.to_thread(PartReader, part.folder, part.manifest) as reader:
                known = await _known(store, part, reader)
                if not is_dry_run:
                    await _restore(store, part, reader, known)
        except DamagedArchiveError as error:
            found.append(str(error))
        except ConflictError as error:
            raise ConflictError("; ".join([str(error), *found])) from error
        else:
            done = replace(done, rollouts=done.rollouts + part.wanted - len(known), known=done.known + len(known))
        tell(part.wanted)
    if found:
        others = f"{'would restore' if is_dry_run else 'restored'} {count_of(done.rollouts, 'rollout')} of whole parts"
        raise DamagedArchiveError("; ".join([*found, others]))
    return done


async def _known(store: TableStore, part: ArchivedPart, reader: PartReader) -> set[str]:
    """Return ids of wanted rollouts that the store already has; raises :class:`ConflictError` if one differs."""
    wanted = part.rollout_ids
    known = {
        rollout.rollout_id
        async for rollout in rollouts_there(store, part.manifest)
        if wanted is None or rollout.rollout_id in wanted
    }
    known &= set(reader.ids())
    for archived in chunks(each for each in reader.recordings() if each.rollout.rollout_id in known):
        contents = {each.rollout.rollout_id: content_of(each) for each in archived}
        async for recording in read_known(store, list(contents)):
            rollout_id = recording.rollout.rollout_id
            if contents[rollout_id] != content_of(recording):
                raise ConflictError(
                    f"the rollout {rollout_id!r} is in the store with other contents than in the archive, such as a "
                    "reward that came later; nothing of its part was restored: restore into another store "
                    "(--store restored.db), or remove it first with agl runs rm"
                )
    return known


async def _restore(store: TableStore, part: ArchivedPart, reader: PartReader, known: set[str]) -> None:
    def is_lacking(recording: Recording) -> bool:
        rollout_id = recording.rollout.rollout_id
        return rollout_id not in known and (part.rollout_ids is None or rollout_id in part.rollout_ids)

    for chunk in chunks(filter(is_lacking, reader.recordings())):
        await restore_blobs(part.folder, store, digests_of(chunk))
        await store.restore(chunk)


def _naming(parts: Sequence[ArchivedPart], names: Sequence[str]) -> list[ArchivedPart]:
    """Return the parts that hold the named rollouts, each limited to these rollouts; reads one part's ids at a time."""
    found: dict[str, set[str]] = {name: set() for name in names}
    fitting: list[tuple[ArchivedPart, set[str]]] = []
    for part in parts:
        first, last = part.manifest.first, part.manifest.last
        near = [name for name in names if name <= last and f"{name}{_GREATEST}" >= first]
        if near:
            with PartReader(part.folder, part.manifest, tables=("rollouts",)) as reader:
                ids = reader.ids()
            for name in near:
                found[name].update(each for each in ids if each.startswith(name))
            fitting.append((part, set(ids)))
    wanted = {_only(name, ids) for name, ids in found.items()}
    return [part._replace(rollout_ids=frozenset(ids & wanted)) for part, ids in fitting if ids & wanted]


def _only(name: str, ids: set[str]) -> str:
    if name in ids or len(ids) == 1:
        return name if name in ids else next(iter(ids))
    if not ids:
        raise NotFoundError("rollout", name, "no id in the archive begins so; its tables rollouts/*.parquet list them")
    listed = ", ".join(sorted(ids)[:_LISTED]) + (" and more" if len(ids) > _LISTED else "")
    raise ConfigError(f"several rollouts of the archive begin with {name!r}: {listed}; write more of the id")
