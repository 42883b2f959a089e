"""Settings of the runner and of the tables ``resources`` in an experiment file; Ray is not started."""

from pathlib import Path

import pytest

from agl.errors import AglError, ConfigError
from agl_run import Trainer, load_config
from agl_run.fleet import Fleet
from agl_testing.commands import run_agl
from agl_testing.experiments import write_experiment

BASE = "http://127.0.0.1:9/v1"
RESOURCE = '[resource.style]\ntemplate = "?"\n\n'
ALGORITHM = '[[algorithm]]\nuse = "pacing"\ntunes = "style"\n\n[algorithm.resources]\nnum_gpus = 1\n\n'


def _plan(folder: Path, more: str) -> object:
    file = write_experiment(folder, base_url=BASE, more=RESOURCE + more)
    return Trainer.from_config(load_config(file), folder=folder).plan()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("concurrency = 257", "runner.concurrency is 257, the rollouts at once of each worker; one event loop holds"),
        ("concurrency = 0", "runner.concurrency is 0, the rollouts at once of each worker"),
        ("params = { max_workers = 0 }", "min_workers is 0 and max_workers 0; choose 0 <= min_workers"),
        ("params = { min_workers = 5 }", "min_workers is 5 and max_workers 4"),
        ("params = { idle_s = 0 }", "runner.params.idle_s is 0; write seconds above 0"),
        ("params = { adress = 'auto' }", "adress"),
        ("params = { address = 'head' }", "'head'; write auto, local or HOST:PORT"),
        ("params = { address = 'ray://head:10001' }", "one of Ray's client, which cannot place workers"),
        ("params = { runner = 'ray' }", "which places workers itself"),
        ("params = { concurrency = 3 }", "runner.params has 'concurrency', which the runner 'ray' is given anyway"),
        ("params = { runner = 'proces' }", "process"),
        ("resources = { num_cpu = 1 }", "unknown key 'runner.resources.num_cpu'.*num_cpus"),
        ("resources = { strategy = 'STRICT_PACK' }", "workers come and go, so write PACK or SPREAD"),
        ("resources = { strategy = 'spread' }", "write one of PACK, SPREAD"),
        ("resources = { num_cpus = -1 }", "each worker asks for -1 CPU"),
    ],
)
def test_wrong_setting_is_named(more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AglError, match=message):
        _plan(tmp_path, f'[runner]\nuse = "ray"\n{more}\n')


@pytest.mark.parametrize("more", [ALGORITHM, "[runner]\nresources = { num_cpus = 1 }\n"])
def test_resources_without_a_cluster_are_refused(more: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has resources, and the runner 'async' runs everything .*use = \"ray\""):
        _plan(tmp_path, more)


def test_fleet_keeps_the_contract() -> None:
    from agl_ray.fleet import RayFleet

    assert isinstance(RayFleet, Fleet)
    assert ("process", {"a": 1}) == RayFleet(runner="process", runner_params={"a": 1}).attempts()
    assert 12 == RayFleet(concurrency=4, max_workers=3).most_attempts


def test_check_shows_the_layout_of_a_cluster_that_would_be_started_here(tmp_path: Path) -> None:
    runner = "[runner.params]\ncluster = { num_cpus = 3, num_gpus = 1, memory = 4294967296 }\n"
    file = write_experiment(tmp_path, base_url=BASE, more=f'{RESOURCE}{ALGORITHM}[runner]\nuse = "ray"\n\n{runner}')
    text = run_agl("check", str(file), folder=tmp_path)
    assert "Ray: a new cluster on this machine, with 3 CPU, 1 GPU, 4 GB memory\n" in text
    assert "algorithm 'pacing': 1 CPU, 1 GPU, PACK\n" in text
    assert "0 to 4 workers with 8 rollouts each: 0.5 CPU each\n" in text


def test_check_names_what_has_no_room(tmp_path: Path) -> None:
    runner = "[runner.params]\ncluster = { num_cpus = 3, num_gpus = 0 }\n"
    file = write_experiment(tmp_path, base_url=BASE, more=f'{RESOURCE}{ALGORITHM}[runner]\nuse = "ray"\n\n{runner}')
    with pytest.raises(
        AssertionError, match=r"algorithm 'pacing' asks for 1 CPU, 1 GPU, and the most that one machine"
    ):
        run_agl("check", str(file), folder=tmp_path)


def test_option_puts_the_runner_of_a_file_into_workers(tmp_path: Path) -> None:
    more = '[runner]\nuse = "process"\nconcurrency = 4\n'
    file = write_experiment(tmp_path, base_url=BASE, more=more)
    text = run_agl("check", str(file), "--ray", "auto", folder=tmp_path)
    assert "0 to 4 workers with 4 rollouts each: 0.5 CPU each\n" in text
    assert "runner process\n" in text
    assert "start with: agl run " in text
    assert " --ray auto" in text
