"""Imports files: reads all of them first, and writes to the store only if all of them could be read.

Memory holds a few runs at a time. Imported rollouts keep the times and outcomes of their runs. A run that the store
already has stays as it is and only gets the rewards it lacks, so repeating a killed import completes it.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from agl.contracts import MAX_BLOB_BYTES, Recording, RolloutQuery
from agl.errors import ConfigError, ConflictError, DatasetError
from agl.schemas import Blob, Json, Record, Reward, Rollout, Span
from agl.semconv import AGENT_NAME
from agl.stores import TableStore, all_spans
from agl_data.importing.readers import FORMATS, Format, atif, format_of
from agl_data.importing.runs import Run, Target
from agl_data.importing.values import as_dict, digest, field_of, number_of, text_of

_RUNS, _BYTES = 200, 16 << 20
"""Runs are written together until a batch has this many runs, or this many bytes."""

_SUFFIXES = tuple(f".{kind}{packed}" for kind in ("jsonl", "json", "pb") for packed in ("", ".gz", ".zst"))
_NO_REWARD = "runs whose field for the reward is missing or null: without a reward"
_NO_PROMPT = "runs without a message of a user: they share one empty task"
_TOO_LARGE = (
    f"payloads of more than {MAX_BLOB_BYTES // 10**6} MB, which no store takes: only their digests are recorded"
)
_SKIPPED = "files of a folder that are in no known format: left out"
_LINKS = "files of a folder that are links out of it: left out"
_OTHER_REWARDS = "rewards that the store has with another value: they stay as they are"


class Imported(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The result of an import.

    Attributes:
        experiment: The experiment that the runs were imported into.
        files: Number of files, by format.
        rollouts: Number of new rollouts; in a dry run, the number that would be new.
        known: Number of runs that the store already had.
        changed: Number of runs in ``known`` that differ from the store's, for example because a session went on.
        calls: Number of model calls in all runs.
        calls_with_ids: Number of model calls with token ids in all runs.
        rewards: Number of rewards that were added; in a dry run, that would be added.
        tasks: Number of different tasks in all runs.
        agents: Number of runs in which an agent made a call, by agent name.
        lost: Number of items that were not imported, or not completely, by description.
        is_dry: True for a dry run, which writes nothing.
    """

    experiment: str
    files: dict[str, int]
    rollouts: int = 0
    known: int = 0
    changed: int = 0
    calls: int = 0
    calls_with_ids: int = 0
    rewards: int = 0
    tasks: int = 0
    agents: dict[str, int] = {}
    lost: dict[str, int] = {}
    is_dry: bool = False


class File(NamedTuple):
    """A file to import, with the format, and the size in bytes and modification time (ns) when it was found."""

    path: Path
    format: Format
    stamp: tuple[int, int]


def find_files(paths: Sequence[Path], name: str) -> tuple[list[File], Counter[str]]:
    """Find the files under paths and their formats, and count the files that are left out.

    Args:
        paths: Files and folders. In a folder, only files with a known suffix count, without the files of sub-agents:
            these are imported with the run that names them.
        name: The name of the format, or ``auto`` to recognise the format of each file.

    Raises:
        DatasetError: A file named in ``paths`` cannot be read, or its format is unknown.
        ConfigError: There is no file to import.
    """
    lost: Counter[str] = Counter()
    found: dict[Path, File] = {}
    below: set[Path] = set()
    for path in paths:
        for file in [path] if not path.is_dir() else _files_in(path, lost):
            try:
                form = FORMATS[name] if name in FORMATS else format_of(file)
            except DatasetError:
                if file is path:
                    raise
                lost[_SKIPPED] += 1
                continue
            found.setdefault(file.resolve(), File(file, form, _stamp(file)))
            if form.name == "atif" and file is not path:
                below.update(atif.named_in(file))
    below.difference_update(path.resolve() for path in paths)
    found = {own: file for own, file in found.items() if own not in below}
    if not found:
        raise ConfigError(
            f"no file to import in {', '.join(map(str, paths))}; name files of {', '.join(FORMATS)}, or a folder that "
            f"holds some (their names end in {', '.join(_SUFFIXES)})"
        )
    return list(found.values()), lost


def _files_in(folder: Path, lost: Counter[str]) -> Iterator[Path]:
    """Yield the files under a folder with a known suffix, except Claude Code's logs of sub-agents.

    Logs of sub-agents are imported with their session.
    """
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if not path.name.endswith(_SUFFIXES) or not path.is_file() or path.parent.name == "subagents":
            continue
        if path.resolve().is_relative_to(inside):
            yield path
        else:
            lost[_LINKS] += 1


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror or error}; correct the path") from error
    return found.st_size, found.st_mtime_ns


async def import_files(
    store: TableStore | None, files: Sequence[File], target: Target, *, lost: Counter[str], is_dry: bool
) -> Imported:
    """Read the files twice: first to check all of them, then to write their runs.

    Args:
        store: The store; ``None`` for a dry run without a store.
        files: The files.
        target: The experiment, mode, task field and reward field of the imported runs.
        lost: Losses counted so far, which the result includes; the counter itself is not changed.
        is_dry: Only read; write nothing.

    Raises:
        DatasetError: A file is damaged, lacks the field of the task, or changed during the import. Nothing was written,
            unless a file changed after the check.
    """
    there = {} if store is None else await _imported(store, target.experiment)
    survey = _Survey(target, lost, there)
    for batch in _batches(files, target):
        await survey.add(store, batch)
    if store is not None and not is_dry:
        with click.progressbar(length=survey.runs, label="importing runs", file=sys.stderr) as bar:
            for batch in _batches(files, target):
                recordings = [item.recording for item in batch if item.recording]
                for item in batch:
                    await store.save_blobs(item.blobs)
                await _write(store, recordings, there, survey.first)
                bar.update(len(recordings))
    return survey.result(files, is_dry=is_dry)


class _Item(NamedTuple):
    """The result of reading one run: the recording, or ``None`` if the run has no model call, losses and payloads."""

    recording: Recording | None
    lost: Counter[str]
    blobs: Sequence[Blob] = ()


def _batches(files: Sequence[File], target: Target) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    size = 0
    for file in files:
        for item in _items(file, target):
            batch.append(item)
            size += len(msgspec.msgpack.encode(item.recording)) + sum(len(blob.data) for blob in item.blobs)
            if len(batch) >= _RUNS or size >= _BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _items(file: File, target: Target) -> Iterator[_Item]:
    if _stamp(file.path) != file.stamp:
        raise DatasetError(f"{file.path} changed while it was read; import it again once it is complete")
    now = time.time()
    copies: Counter[int] = Counter()
    for run in file.format.read(file.path):
        if run.calls == 0:
            yield _Item(None, +run.lost)
            continue
        task = _task(run, target)
        _add_reward(run, target)
        for name in set(run.unread) - {target.task_from.partition(".")[0], target.reward_from.partition(".")[0]}:
            run.lost[f"records with the field {name[:60]!r}, which --reward or --task-from would read"] += 1
        blobs = [blob for blob in run.blobs.values() if len(blob.data) <= MAX_BLOB_BYTES]
        run.lost[_TOO_LARGE] += len(run.blobs) - len(blobs)
        own = int(run.identity()[:14], 16)
        recording = run.recording(target, format=file.format.name, task=task, copy=copies[own], now=now)
        copies[own] += 1
        yield _Item(recording, +run.lost, blobs)
    if _stamp(file.path) != file.stamp:
        raise DatasetError(f"{file.path} changed while it was read; import it again once it is complete")


def _task(run: Run, target: Target) -> Json:
    """Return a run's task: the field that the target names, or by default the first user message as ``prompt``."""
    if not target.task_from:
        run.lost[_NO_PROMPT] += int(run.prompt is None)
        return {"prompt": text_of(run.prompt) or run.referenced(run.prompt)}
    task = field_of(run.fields, target.task_from)
    if task is None:
        fields = ", ".join(sorted(as_dict(run.fields))[:12])
        raise DatasetError(
            f"{run.place} has no field {target.task_from!r} for the task (it has {fields or 'none'}), and nothing was "
            "imported; name another with --task-from, or leave it out to take the first message of a user"
        )
    return as_dict(task) or {"prompt": task}


def _add_reward(run: Run, target: Target) -> None:
    if not target.reward_from:
        return
    given = field_of(run.fields, target.reward_from)
    if given is None:
        run.lost[_NO_REWARD] += 1
        return
    value = number_of(given)
    if value is None:
        raise DatasetError(
            f"{run.place}: the field {target.reward_from!r} for the reward is {str(given)[:80]!r}, and nothing was "
            "imported; a reward is a number, true or false"
        )
    run.add_reward(f"field {target.reward_from}", Reward(value=value, source="evaluator"))


class _Survey:
    """Counts the runs, calls and rewards in the files, separating those that the store already has.

    Attributes:
        first: For each rollout id that the store lacks, the fingerprint of the first run with that id in the files.
    """

    def __init__(self, target: Target, lost: Counter[str], there: dict[str, int]) -> None:
        self._target, self._there = target, there
        self.first: dict[str, int] = {}
        self._lost: Counter[str] = Counter(lost)
        self._counts: Counter[str] = Counter()
        self._agents: Counter[str] = Counter()
        self._tasks: set[int] = set()
        self._rewards: set[int] = set()

    async def add(self, store: TableStore | None, batch: Sequence[_Item]) -> None:
        """Count the runs of a batch."""
        for item in batch:
            self._lost.update(item.lost)
            if item.recording is not None:
                self._add(item.recording)
                self._rewards.update([int(span.span_id, 16) for span in await self._new_rewards(store, item.recording)])

    def _add(self, recording: Recording) -> None:
        rollout = recording.rollout
        calls = [span.call for span in recording.spans if span.call is not None]
        here = _number_of(recording, self._there, self.first)
        if here is None:
            self.first[rollout.rollout_id] = _fingerprint(rollout)
        self._counts["rollouts" if here is None else "known"] += 1
        self._counts["changed"] += int(here not in (None, _fingerprint(rollout)))
        self._counts["calls"] += len(calls)
        self._counts["calls_with_ids"] += sum(not call.ids_missing for call in calls)
        self._agents.update({str(name) for span in recording.spans if (name := span.attributes.get(AGENT_NAME))})
        self._tasks.add(int(rollout.group_id.removeprefix("task-")[:14], 16))

    async def _new_rewards(self, store: TableStore | None, recording: Recording) -> list[Span]:
        """Return the rewards of a run that the store lacks; empty if the store has another version of the run."""
        rollout, rewards = recording.rollout, _rewards_of(recording)
        if not rewards or _fingerprint(rollout) != _number_of(recording, self._there, self.first):
            return []
        if store is None or rollout.rollout_id in self.first:
            return rewards
        known = {span.span_id: span.reward for span in await all_spans(store, rollout.rollout_id)}
        self._lost[_OTHER_REWARDS] += sum(known.get(span.span_id, span.reward) != span.reward for span in rewards)
        return [span for span in rewards if span.span_id not in known]

    @property
    def runs(self) -> int:
        """The number of runs in the files, new and known."""
        return self._counts["rollouts"] + self._counts["known"]

    def result(self, files: Sequence[File], *, is_dry: bool) -> Imported:
        """Return the counts as the result of the import."""
        counts: dict[str, Any] = dict(self._counts)
        return Imported(
            experiment=self._target.experiment,
            files=dict(Counter(file.format.name for file in files)),
            tasks=len(self._tasks),
            rewards=len(self._rewards),
            agents=dict(self._agents.most_common()),
            lost=dict((+self._lost).most_common()),
            is_dry=is_dry,
            **counts,
        )


async def _imported(store: TableStore, experiment: str) -> dict[str, int]:
    """Return the fingerprints of the runs that were imported into an experiment before, by rollout id."""
    found: dict[str, int] = {}
    query = RolloutQuery(experiment=experiment, limit=1000)
    while page := await store.rollouts(query):
        found.update((each.rollout_id, _fingerprint(each)) for each in page if "imported" in each.metadata)
        query = query.next(page[-1])
    return found


def _rewards_of(recording: Recording) -> list[Span]:
    return [span for span in recording.spans if span.reward is not None]


def _fingerprint(rollout: Rollout) -> int:
    return int(digest([rollout.metadata, rollout.task, rollout.mode], size=7), 16)


async def _write(
    store: TableStore, recordings: Sequence[Recording], there: Mapping[str, int], first: Mapping[str, int]
) -> None:
    """Add the runs that the store lacks, and the missing rewards of the runs that it has.

    ``there`` has the fingerprints of the runs in the store, and ``first`` those of the runs that are new. If several
    different runs have the same id, only the first in the files is added.
    """
    same = [each for each in recordings if _fingerprint(each.rollout) == _number_of(each, there, first)]
    new: dict[str, Recording] = {}
    for each in same:
        if each.rollout.rollout_id not in there:
            new.setdefault(each.rollout.rollout_id, each)
    try:
        added = {rollout_id: new[rollout_id] for rollout_id in await store.restore(list(new.values()))}
    except ConflictError as error:
        raise ConflictError(
            f"{error}; another import runs at the same time: repeat this one when it has ended"
        ) from error
    late = [span for each in same if each is not added.get(each.rollout.rollout_id) for span in _rewards_of(each)]
    if late:
        await store.append_spans(late)


def _number_of(recording: Recording, there: Mapping[str, int], first: Mapping[str, int]) -> int | None:
    rollout_id = recording.rollout.rollout_id
    return there.get(rollout_id, first.get(rollout_id))
