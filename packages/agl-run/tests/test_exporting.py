"""Exporters of plugins receive all finished rollouts, and cannot change the experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agl
from agl.contracts import ExporterEntry, Recording
from agl.errors import ExportError, PluginError
from agl.stores import MemoryStore
from agl_run import Quiet

TASKS = [{"n": number} for number in range(40)]


class Kept:
    """An exporter that collects rollouts, after raising the given errors."""

    destination = "memory"

    def __init__(self, *raises: Exception) -> None:
        self.raises = list(raises)
        self.batches: list[list[Recording]] = []
        self.is_closed = False

    async def export(self, recordings: Sequence[Recording]) -> None:
        if self.raises:
            raise self.raises.pop(0)
        self.batches.append([*recordings])

    async def close(self) -> None:
        self.is_closed = True

    @property
    def ids(self) -> list[str]:
        return [recording.rollout.rollout_id for batch in self.batches for recording in batch]


def trainer(exporter: Kept, folder: Path, **settings: Any) -> agl.Trainer:
    class Plugin:
        @agl.hookimpl
        def agl_exporters(self):
            yield ExporterEntry(name="kept", factory=lambda: exporter)

    manager = agl.PluginManager.from_environment()
    manager.register(Plugin(), name="kept")
    options = {"exporters": "kept", "store": "memory://", "folder": folder, **settings}
    return agl.Trainer(plugins=manager, progress=Quiet(), **options)


def solve(task: dict[str, int]) -> float:
    return 1.0


def test_an_exporter_gets_every_finished_rollout_once_with_its_spans(tmp_path: Path) -> None:
    exporter = Kept()

    trainer(exporter, tmp_path).fit(solve, val_dataset=TASKS)

    assert 40 == len(exporter.ids) == len(set(exporter.ids))
    first = exporter.batches[0][0]
    assert ("succeeded", True) == (first.rollout.status, first.is_whole)
    assert [1.0] == [span.reward.value for span in first.spans if span.reward is not None]
    assert exporter.is_closed


def test_a_dry_run_is_exported_too(tmp_path: Path) -> None:
    exporter = Kept()

    trainer(exporter, tmp_path, name="tried").dev(solve, TASKS, tasks=2)

    assert ["tried-dev"] * 2 == [each.rollout.experiment for batch in exporter.batches for each in batch]


class Fragile(Kept):
    """An exporter that raises on the rollouts of two tasks."""

    async def export(self, recordings: Sequence[Recording]) -> None:
        if any(recording.rollout.task["n"] in (3, 20) for recording in recordings):
            raise ZeroDivisionError("its own mistake")
        await super().export(recordings)


def test_rollouts_on_which_an_exporter_breaks_are_left_out_and_all_others_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Fragile()

    result = trainer(exporter, tmp_path).fit(solve, val_dataset=TASKS)

    assert 1.0 == result.after
    assert exporter.is_closed
    assert 38 == len(exporter.ids) == len(set(exporter.ids))
    (record,) = [record for record in caplog.records if "the exporter kept broke on rollout" in record.getMessage()]
    assert record.exc_info is not None
    assert "kept: 2 rollouts not sent, because the exporter broke on them" in caplog.messages


def test_a_batch_comes_again_after_a_passing_error(tmp_path: Path) -> None:
    exporter = Kept(ExportError("busy", is_passing=True))

    trainer(exporter, tmp_path).fit(solve, val_dataset=TASKS[:3])

    assert 3 == len(exporter.ids)


@pytest.mark.long
def test_an_experiment_continues_where_its_exporter_stopped(tmp_path: Path) -> None:
    store = MemoryStore()
    trainer(Kept(*[ExportError("away", is_passing=True)] * 100), tmp_path, store=store).fit(
        solve, val_dataset=TASKS[:3]
    )
    later = Kept()
    trainer(later, tmp_path, store=store).fit(solve, val_dataset=TASKS[:3], fresh=True)

    assert 6 == len(later.ids) == len(set(later.ids))


def test_an_unknown_exporter_is_named_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no exporter is named 'otlpp'"):
        trainer(Kept(), tmp_path, exporters="otlpp").plan(solve, val_dataset=TASKS)
