"""Experiments that name one folder do not write over each other's weights."""

from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl_run.config.records import ExperimentSection
from agl_run.config.work_folder import own, work_folder


def folder_of(base: Path, name: str, workdir: str = "out/run") -> Path:
    return work_folder(base, ExperimentSection(name=name, agent="agent:solve", workdir=workdir))


def begin(base: Path, name: str) -> Path:
    folder = folder_of(base, name)
    folder.mkdir(parents=True, exist_ok=True)
    own(folder, name)
    return folder


def test_each_experiment_has_a_folder_of_its_own_in_every_start(tmp_path: Path) -> None:
    folders = [begin(tmp_path, name) for name in ("calc", "rloo", "calc", "gspo", "rloo")]
    shared = tmp_path / "out/run"
    others = [shared / "experiment-rloo", shared / "experiment-gspo"]
    assert [shared, others[0], shared, others[1], others[0]] == folders


def test_without_a_workdir_the_folder_follows_from_the_name(tmp_path: Path) -> None:
    assert tmp_path / "runs/calc" == folder_of(tmp_path, "calc", workdir="")


def test_folder_that_another_experiment_took_meanwhile_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "calc")
    begin(tmp_path, "rloo")
    with pytest.raises(ConfigError, match=r"'rloo' has just begun in .*; start 'calc' once more"):
        own(folder, "calc")
