"""``agl exec``: a program's attempt is held as long as the program runs, even if the store fails meanwhile."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import agl
from agl.contracts import StoreEntry
from agl.errors import StoreError
from agl.stores import MemoryStore
from agl_run.runners import recording as command_recording
from agl_run.runners.recording import record_command

PROGRAM = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


@pytest.mark.long
def test_lease_is_renewed_after_a_store_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command_recording, "LEASE_S", 3.0)
    renewed = tmp_path / "renewed"
    answers = [StoreError("the disk is full"), None]

    class FailingStore(MemoryStore):
        async def renew(self, attempt_ids: Sequence[str], *, lease_s: float = 60.0) -> list[str]:
            if error := answers.pop(0) if answers else None:
                raise error
            renewed.touch()
            return await super().renew(attempt_ids, lease_s=lease_s)

    class Plugin:
        @agl.hookimpl
        def agl_stores(self) -> list[StoreEntry]:
            return [StoreEntry(name="failing", factory=lambda url: FailingStore())]

    manager = agl.PluginManager()
    manager.register(Plugin(), name="failing")
    command = [sys.executable, "-c", PROGRAM, str(renewed)]

    run = asyncio.run(record_command(command, manager=manager, store_url="failing://", timeout_s=20.0))

    assert 0 == run.exit_code
    assert [(logging.WARNING, "the store could not record that the program still runs: the disk is full")] == [
        (record.levelno, record.getMessage()) for record in caplog.records if record.name == "agl_run.run"
    ]
