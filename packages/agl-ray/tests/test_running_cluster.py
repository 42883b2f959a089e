"""Checks and runs with an existing cluster, started as a user would."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_ray.cluster import Cluster
from agl_ray.layout import Share
from agl_ray.reservation import Patience, Reservation
from agl_testing.commands import run_agl

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own sockets

ALGORITHM = '[[algorithm]]\nuse = "pacing"\ntunes = "style"\nresources = { num_gpus = 1, strategy = "SPREAD" }\n\n'


def _address(ray: Any) -> str:
    return ray.get_runtime_context().gcs_address


def test_check_adds_up_what_a_running_cluster_has(ray: Any, experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path, more=ALGORITHM + '[runner]\nuse = "ray"\nconcurrency = 64\n')
    text = run_agl("check", str(given.file), "--ray", _address(ray), folder=tmp_path)
    assert "Ray: a cluster of 1 machine, with 8 CPU, 2 GPU, " in text
    assert "algorithm 'pacing': 1 CPU, 1 GPU, SPREAD\n" in text
    assert "0 to 4 workers with 64 rollouts each: 0.5 CPU each\n" in text
    assert f"--ray {_address(ray)}" in text


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("num_gpus = 3", "algorithm 'pacing' asks for 1 CPU, 3 GPU, and the most that one machine of the cluster has"),
        ("num_cpus = 8", r"each worker asks for 0\.5 CPU besides the rest of the experiment, and the whole cluster"),
        ("custom = { lathe = 1 }", "asks for 1 CPU, 1 lathe, and the most that one .* has is 8 CPU, 0 lathe; lower"),
    ],
)
def test_check_names_what_a_running_cluster_has_no_room_for(
    resources: str, message: str, ray: Any, experiment: Any, tmp_path: Path
) -> None:
    algorithm = ALGORITHM.replace("num_gpus = 1", resources)
    given = experiment(tmp_path, more=algorithm + '[runner]\nuse = "ray"\n')
    with pytest.raises(AssertionError, match=message):
        run_agl("check", str(given.file), "--ray", _address(ray), folder=tmp_path)


def test_auto_runs_on_the_cluster_of_the_environment(
    ray: Any, experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", _address(ray))
    before = {node["NodeID"] for node in ray.nodes()}
    given = experiment(tmp_path, more='[runner]\nuse = "process"\nconcurrency = 2\n')
    done = subprocess.run(
        [sys.executable, "-m", "agl", "run", str(given.file), "--ray", "auto"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert 0 == done.returncode, done.stderr
    assert "recorded 6 rollouts, 0 failed, mean reward 1.000" in done.stdout
    assert 2 <= len(set(given.processes))
    assert before == {node["NodeID"] for node in ray.nodes()}


def test_waits_for_room_add_up_to_one_time(ray: Any) -> None:
    began = time.monotonic()
    asyncio.run(_ask_three_times(Patience(4.0)))
    assert 4.0 <= time.monotonic() - began < 8.0  # and not 12


async def _ask_three_times(patience: Patience) -> None:
    """Take all GPUs, and then wait for one more three times; the time limit ends during the first wait."""
    cluster = Cluster("auto", started={})
    await cluster.connect()
    held = Reservation(cluster, patience)
    try:
        await held.make([Share(name="algorithm 'a'", amounts={"GPU": 2}, strategy="PACK")])
        for _ in range(3):
            room = Reservation(cluster, patience)
            with pytest.raises(ConfigError, match=r"no room within 4 s: algorithm 'b' asks for 1 GPU \(SPREAD\)"):
                await room.make([Share(name="algorithm 'b'", amounts={"GPU": 1}, strategy="SPREAD")])
            await room.release()
    finally:
        await held.release()
        await cluster.disconnect()
