"""Exports recordings with the writers that plugins register, and imports the files again."""

import asyncio
import io
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agl import PluginManager
from agl.contracts import CommandEntry, Recording, RolloutQuery
from agl.episodes import EpisodeOptions, build_episode
from agl.schemas import Episode
from agl.stores import MemoryStore, read_recordings
from agl_data.importing.importer import find_files, import_files
from agl_data.importing.runs import Target
from agl_inspect.exports import Exported, ExportSetup, Losses


class Export(NamedTuple):
    """An exported file in memory, the number of its records, and the losses."""

    data: bytes
    records: int
    lost: dict[str, int]


@cache
def plugins() -> PluginManager:
    return PluginManager.from_environment()


def episode_of(recording: Recording, agents: str | None = None) -> Episode:
    options = EpisodeOptions(processor=None)
    return build_episode(
        recording.rollout, recording.attempts[-1], recording.spans, agent_match=agents, options=options
    )


def export(form: str, recordings: Sequence[Recording], *, suffix: str = ".jsonl", agents: str | None = None) -> Export:
    manager = plugins()
    entry = manager.command(f"export {form}")
    assert isinstance(entry, CommandEntry)
    file, losses = io.BytesIO(), Losses()
    writer = manager.resolve(entry)(setup=ExportSetup(file, Path(f"out{suffix}"), losses))
    count = sum(writer.write(Exported(each, episode_of(each, agents))) for each in recordings)
    writer.close()
    return Export(file.getvalue(), count, {what: number for what, number, _ in losses.listed()})


def imported(path: Path, **target: Any) -> list[Episode]:
    """Import a file as ``agl data import`` does, and return its rollouts as episodes."""

    async def work() -> list[Recording]:
        files, lost = find_files([path], "auto")
        store = MemoryStore()
        await import_files(store, files, Target(experiment="again", **target), lost=Counter(lost), is_dry=False)
        return [each async for each in read_recordings(store, RolloutQuery(sort="created_at"), spans="all")]

    return [episode_of(each) for each in asyncio.run(work())]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")
