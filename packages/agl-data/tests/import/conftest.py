"""Imports files in this process, and reads the imported rollouts."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import Recording, RolloutQuery
from agl.episodes import build_episode
from agl.schemas import Episode
from agl.stores import read_recordings
from agl_data.importing.importer import Imported, find_files, import_files
from agl_data.importing.runs import Target
from agl_store_sqlite._store import SQLiteStore


class Imports:
    """A new store into which a test imports files."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/runs/imports.db"

    def __call__(self, *paths: Path, form: str = "auto", is_dry: bool = False, **target: Any) -> Imported:
        async def work() -> Imported:
            files, lost = find_files(paths, form)
            store = SQLiteStore(self.url)
            try:
                own = Target(**{"experiment": "old", **target})
                return await import_files(store, files, own, lost=Counter(lost), is_dry=is_dry)
            finally:
                await store.close()

        return asyncio.run(work())

    def recordings(self) -> list[Recording]:
        """All rollouts with their spans, oldest first."""

        async def work() -> list[Recording]:
            store = SQLiteStore(self.url)
            try:
                query = RolloutQuery(sort="created_at")
                return [each async for each in read_recordings(store, query, spans="all")]
            finally:
                await store.close()

        return asyncio.run(work())

    def count(self) -> int:
        """The number of rollouts."""

        async def work() -> int:
            store = SQLiteStore(self.url)
            try:
                return await store.count_rollouts(RolloutQuery())
            finally:
                await store.close()

        return asyncio.run(work())

    def episodes(self) -> list[Episode]:
        """All rollouts as episodes."""
        return [build_episode(each.rollout, each.attempts[-1], each.spans) for each in self.recordings()]


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    return Imports(tmp_path)
