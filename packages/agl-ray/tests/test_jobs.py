"""An experiment that is submitted to Ray's own job server, which needs ``ray[default]``: ``nox -s ray-jobs``."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from agl.contracts import RolloutQuery
from agl_run import SQLiteStore

pytest.importorskip("aiohttp_cors", reason="needs ray[default], which has the job server")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SERVER = """
import sys, ray
found = ray.init(address="local", num_cpus=4, include_dashboard=True, dashboard_port=0, object_store_memory=128 << 20)
print("dashboard", found.dashboard_url, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job_server(_place: None) -> Iterator[str]:
    """Ray with its job server, in a process of its own; gives the address."""
    with TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True) as folder:  # short, for sockets
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_TMPDIR": folder},
            text=True,
        )
        assert process.stdout is not None
        found = next((line for line in process.stdout if line.startswith("dashboard")), "")
        assert found, "Ray did not start"
        yield f"http://{found.split()[1]}"
        process.communicate(timeout=120)


async def _statuses(url: str) -> list[str]:
    store = SQLiteStore(url=url)
    try:
        return [rollout.status for rollout in await store.rollouts(RolloutQuery())]
    finally:
        await store.close()


def test_job_that_is_submitted_runs_on_its_cluster(job_server: str, experiment: Any, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'kept' / 'runs.db'}"
    given = experiment(tmp_path / "job")
    given.file.write_text(given.file.read_text().replace("sqlite:///runs.db", store))
    (tmp_path / "kept").mkdir()
    ray = Path(sys.executable).parent / "ray"
    words = [ray, "job", "submit", "--address", job_server, "--working-dir", ".", "--"]
    done = subprocess.run(
        [*words, sys.executable, "-m", "agl", "run", "experiment.toml", "--ray", "auto"],
        cwd=given.file.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "recorded 6 rollouts, 0 failed, mean reward 1.000" in done.stdout
    assert {"succeeded"} == set(asyncio.run(_statuses(store)))
    assert given.processes
