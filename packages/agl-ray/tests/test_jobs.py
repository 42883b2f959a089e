"""An experiment that is submitted to Ray's own job server, which needs ``ray[default]``: ``nox -s ray-jobs``."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import pytest

from agl.contracts import RolloutQuery
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

pytest.importorskip("aiohttp_cors", reason="needs ray[default], which has the job server")

RAY = Path(sys.executable).parent / "ray"

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def job_server(_place: None) -> Iterator[str]:
    """Start Ray with its job server in another process, and yield the address."""
    dashboard, agent, gcs = _free_port(), _free_port(), _free_port()
    words = ["start", "--head", "--block", "--num-cpus", "4", "--object-store-memory", str(128 << 20), "--port", gcs]
    words += ["--include-dashboard", "true", "--dashboard-port", dashboard, "--dashboard-agent-listen-port", agent]
    with TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True) as folder:  # short, for sockets
        process = subprocess.Popen([str(word) for word in (RAY, *words, "--temp-dir", folder)], start_new_session=True)
        try:
            for url in (f"{agent}/api/local_raylet_healthz", f"{dashboard}/api/version"):
                wait_until(lambda url=url: _answers(f"http://127.0.0.1:{url}"), within_s=300, every_s=0.5)
            yield f"http://127.0.0.1:{dashboard}"
        finally:
            process.terminate()
            process.wait(timeout=120)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


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
    words = [RAY, "job", "submit", "--address", job_server, "--working-dir", ".", "--"]
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
