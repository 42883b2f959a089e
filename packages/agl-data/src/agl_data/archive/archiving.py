"""Archives a store's finished rollouts, and on request removes those whose archived copies equal them when read back.

Only one process at a time archives a store. Rollouts that the archive already has are skipped, so repeating an
interrupted archiving completes it.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from agl.contracts import Recording, RolloutQuery, Store
from agl.errors import ConflictError
from agl.schemas import Record, Rollout, RolloutStatus
from agl.stores import is_readable
from agl_data.archive.arrow import micros
from agl_data.archive.blobs import archive_blobs
from agl_data.archive.context import archive_context
from agl_data.archive.layout import Folder, Manifest, folder_of, make_archive, open_archive
from agl_data.archive.parts import PartReader, PartWriter, content_of
from agl_data.archive.places import Place
from agl_data.archive.stored import CHUNK, chunks, read_known, rollouts_there
from agl_data.copying import digests_of
from agl_inspect.retention import FINISHED, delete_finished, needed_experiments, taking_turns
from agl_inspect.terminal.query import check_experiment, pages
from agl_store_sqlite.sql.compaction import Compaction

_PAGE = 500
"""The number of rollouts in one page of a listing."""

_TURN = ".archive"
_WRITER = f"experiment/{_TURN}/writer"


class Choice(Record, frozen=True, kw_only=True):
    """Selects the finished rollouts to archive.

    Attributes:
        experiments: Experiments to archive; empty for all.
        status: Statuses to archive.
        older_than_s: Archive only rollouts that finished at least this many seconds ago.
    """

    experiments: tuple[str, ...] = ()
    status: tuple[RolloutStatus, ...] = FINISHED
    older_than_s: float = 0.0


class Archived(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of an archiving.

    Attributes:
        rollouts: Number of archived rollouts; in a dry run, the number that would be archived.
        known: Number of rollouts that the archive already had.
        others: Ids under which the archive holds a different rollout, one that finished at another time, for example
            from another store with the same experiment. The store's rollouts with these ids are not archived, and stay.
        damaged: Ids of rollouts with an attempt or a span that cannot be read. They are not archived, and stay.
        removed: Number of rollouts removed from the store.
        changed: Ids of rollouts that changed in the store after they were archived; they stay in the store.
        needed: Number of rollouts that stay in the store because their experiments run or can be resumed.
        bytes: Total size of the files that were written.
        compaction: The store's size before and after; ``None`` if nothing was removed, or the store cannot be
            compacted.
    """

    experiments: list[str]
    rollouts: int = 0
    known: int = 0
    others: list[str] = []
    damaged: list[str] = []
    removed: int = 0
    changed: list[str] = []
    needed: int = 0
    bytes: int = 0
    compaction: Compaction | None = None
    is_dry_run: bool = False


class Archiving:
    """Archives rollouts of a store: call :meth:`survey` first, and then :meth:`run` once.

    Args:
        store: The store.
        place: The archive; created if it does not exist.
        choice: The rollouts to archive.
    """

    def __init__(self, store: Store, place: Place, *, choice: Choice) -> None:
        self._store, self._place, self._choice = store, place, choice
        self._writer = ""
        self._before = time.time() - choice.older_than_s
        self._names: dict[str, set[str]] = {}
        self._parts: dict[str, dict[str, int | None]] = {}
        self._done = Archived(experiments=[])
        self._tell: Callable[[int], None] = lambda _: None

    async def survey(self) -> int:
        """Find the experiments with chosen rollouts, and the resources that those rollouts use.

        Returns the number of finished rollouts that :meth:`run` will look at.

        Raises:
            ConfigError: No rollout of a named experiment is recorded.
        """
        total = 0
        for experiment in self._choice.experiments:
            await check_experiment(self._store, experiment)
        for experiment in self._choice.experiments or (None,):
            async for rollouts in pages(self._store, self._query(experiment)):
                total += len(rollouts)
                for rollout in filter(self._is_chosen, rollouts):
                    self._names.setdefault(rollout.experiment, set()).update(rollout.resources)
        for record in await self._store.experiments():
            if record.name in self._names:
                self._names[record.name].update(record.live)
        self._done = replace(self._done, experiments=sorted(self._names))
        return total

    async def run(
        self, *, tell: Callable[[int], None], is_removing: bool = False, is_dry_run: bool = False
    ) -> Archived:
        """Archive the rollouts, and with ``is_removing`` remove them from the store.

        Args:
            tell: Called with the number of rollouts handled since the previous call.
            is_removing: Remove each rollout whose archived copy equals the store's.
            is_dry_run: Only count; write and remove nothing.

        Raises:
            ConfigError: The place is a folder with other files.
            ConflictError: Another process is archiving the store.
            StoreError: The archive cannot be written or read, or one of its files is damaged.
        """
        self._tell = tell
        if is_dry_run:
            return await self._would()
        async with taking_turns(self._store, _TURN, title="the archiving of this store") as own:
            if own is None:
                raise ConflictError("another process archives this store; wait until it has ended")
            self._store = own
            self._writer = await _writer_of(own)
            if self._names:
                await asyncio.to_thread(make_archive, self._place)
            for experiment, names in sorted(self._names.items()):
                await self._archive(experiment, names)
            for experiment in sorted(self._names) if is_removing else ():
                await self._remove(experiment)
        return self._done

    async def _would(self) -> Archived:
        if await asyncio.to_thread(self._place.names):
            await asyncio.to_thread(open_archive, self._place)
        for experiment in self._names:
            folder = self._folder(experiment)
            manifests = [each for each in await asyncio.to_thread(folder.manifests) if each.is_whole]
            async for rollouts in pages(self._store, self._query(experiment)):
                self._count(rollouts=len(await self._new(folder, manifests, rollouts)))
        return replace(self._done, is_dry_run=True)

    async def _archive(self, experiment: str, names: set[str]) -> None:
        """Archive an experiment: first the resources and metrics that the rollouts refer to, then the rollouts."""
        folder = self._folder(experiment)
        manifests = await asyncio.to_thread(folder.manifests)
        for begun in [each for each in manifests if not each.is_whole and each.writer == self._writer]:
            await asyncio.to_thread(folder.discard, begun)
        await archive_context(self._store, folder, experiment=experiment, names=names)
        whole = [each for each in manifests if each.is_whole]
        async with aclosing(self._recordings(folder, whole, experiment)) as recordings:
            while await self._write_part(folder, experiment, recordings):
                pass

    async def _write_part(self, folder: Folder, experiment: str, recordings: AsyncIterator[Recording]) -> bool:
        """Write recordings as one part until it is full; returns false if the recordings ended before."""
        with PartWriter(folder, experiment, writer=self._writer) as part:
            digests: dict[str, None] = {}
            async for recording in recordings:
                part.add(recording)
                digests |= dict.fromkeys(digests_of([recording]))
                self._tell(1)
                if part.is_full:
                    break
            if part.count:
                await archive_blobs(self._store, folder, list(digests))  # before a manifest names the part
                manifest = await asyncio.to_thread(part.upload)
                self._count(rollouts=part.count, bytes=sum(each.size for each in manifest.files.values()))
            return part.is_full

    async def _recordings(
        self, folder: Folder, manifests: Sequence[Manifest], experiment: str
    ) -> AsyncGenerator[Recording]:
        """Read the chosen rollouts that the archive lacks, in order of id."""
        async for rollouts in pages(self._store, self._query(experiment)):
            new = await self._new(folder, manifests, rollouts)
            for start in range(0, len(new), CHUNK):
                async for recording in read_known(self._store, new[start : start + CHUNK]):
                    if is_readable(recording):
                        yield recording
                    else:
                        self._done = replace(self._done, damaged=[*self._done.damaged, recording.rollout.rollout_id])
                        self._tell(1)

    async def _new(self, folder: Folder, manifests: Sequence[Manifest], rollouts: Sequence[Rollout]) -> list[str]:
        """Return the ids of a page's chosen rollouts that the archive lacks, and count those that the archive has."""
        ends = {each.rollout_id: micros(each.finished_at) for each in rollouts if self._is_chosen(each)}
        ids = list(ends)
        near = [each for each in manifests if ids and each.first <= ids[-1] and each.last >= ids[0]]
        self._parts = {each.part: self._parts.get(each.part) or await self._ends(folder, each) for each in near}
        known = {own: end for part in self._parts.values() for own, end in part.items()}
        new = [each for each in ids if each not in known]
        others = [each for each in ids if known.get(each, ends[each]) != ends[each]]
        self._done = replace(self._done, others=[*self._done.others, *others])
        self._count(known=len(ids) - len(new) - len(others))
        self._tell(len(rollouts) - len(new))
        return new

    async def _remove(self, experiment: str) -> None:
        """Remove chosen rollouts whose archived copies equal the store's, unless their experiment still needs them."""
        folder = self._folder(experiment)
        if await needed_experiments(self._store, [experiment]):
            async for rollouts in pages(self._store, self._query(experiment)):
                self._count(needed=sum(map(self._is_chosen, rollouts)))
            return
        for manifest in await asyncio.to_thread(folder.manifests):
            if not manifest.is_whole:
                continue
            there = {each.rollout_id async for each in rollouts_there(self._store, manifest) if self._is_chosen(each)}
            if there:
                with await asyncio.to_thread(PartReader, folder, manifest) as part:
                    for chunk in chunks(each for each in part.recordings() if each.rollout.rollout_id in there):
                        await self._remove_same(chunk)

    async def _remove_same(self, archived: Sequence[Recording]) -> None:
        contents = {each.rollout.rollout_id: content_of(each) for each in archived}
        same: list[str] = []
        changed: list[str] = []
        async for recording in read_known(self._store, list(contents)):
            is_same = content_of(recording) == contents[recording.rollout.rollout_id]
            (same if is_same else changed).append(recording.rollout.rollout_id)
        removed = await delete_finished(self._store, same)
        others = set(self._done.others)
        changed = [each for each in changed if each not in others]
        self._done = replace(self._done, changed=[*self._done.changed, *changed])
        self._count(removed=len(removed))

    async def _ends(self, folder: Folder, manifest: Manifest) -> dict[str, int | None]:
        with await asyncio.to_thread(PartReader, folder, manifest, tables=("rollouts",)) as part:
            return part.ends()

    def _count(self, **more: int) -> None:
        self._done = replace(self._done, **{name: getattr(self._done, name) + each for name, each in more.items()})

    def _folder(self, experiment: str) -> Folder:
        return Folder(self._place, folder_of(experiment))

    def _query(self, experiment: str | None) -> RolloutQuery:
        return RolloutQuery(experiment=experiment, status=self._choice.status, limit=_PAGE)

    def _is_chosen(self, rollout: Rollout) -> bool:
        return rollout.finished_at <= self._before and rollout.status in self._choice.status


async def _writer_of(store: Store) -> str:
    """Return the name that marks this store's parts in archives, on any machine; created at the first use."""
    found = (await store.load_state(_WRITER)).get(_WRITER)
    if found is None:
        found = secrets.token_hex(8).encode()
        await store.save_state({_WRITER: found})
    return found.decode()
