"""Sandboxes on a Ray cluster on this machine, which is started once for all tests."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_harness import SandboxError
from agl_harness.conformance import SandboxConformance, sh
from agl_harness.sandboxes.isolation import find_isolation
from agl_harness.sandboxes.ray_cluster import RaySandboxes
from agl_testing.model_server import ScriptedModelServer

from .conftest import asks, dev
from .test_harbor import CONFIG, DOCKERFILE, FILE, TEST, only, write

ray: Any = pytest.importorskip("ray", reason="ray is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own sockets
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster on this machine with two CPUs and a custom resource."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, resources={"desk": 4})
    yield
    ray.shutdown()


@pytest.fixture
def boxes(tmp_path: Path) -> RaySandboxes:
    """A backend whose sandboxes reserve few resources, so that several fit."""
    return RaySandboxes(base=tmp_path, num_cpus=0.1, resources={"desk": 1}, folder=str(tmp_path / "boxes"))


class TestRay(SandboxConformance):
    @pytest.fixture
    def sandboxes(self, boxes: RaySandboxes) -> Any:
        return boxes


def test_actor_that_dies_is_a_dead_sandbox(boxes: RaySandboxes) -> None:
    async def main() -> None:
        await boxes.start()
        sandbox = await boxes.create("one")
        endless = asyncio.create_task(sh(sandbox, "echo $PPID > keeper; sleep 600"))
        (actor,) = [found for found in _actors() if sandbox.address.startswith(f"ray:{found['name']}/")]
        os.kill(actor["pid"], signal.SIGKILL)
        with pytest.raises(SandboxError, match="actor is gone"):
            await endless
        with pytest.raises(SandboxError):
            await boxes.attach(sandbox.address)
        other = await boxes.create("two")
        assert "again\n" == (await sh(other, "echo again")).output
        await other.close()

    asyncio.run(main())


def _actors() -> list[dict[str, Any]]:
    from ray._private.state import actors  # the state API needs ray[default]

    return [{"name": found["Name"], "pid": found["Pid"]} for found in actors().values() if found["State"] == "ALIVE"]


def test_sandbox_takes_up_what_it_asks_for_and_waits_for_room(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"num_cpus": 0, "resources": {"desk": 3}, "folder": str(tmp_path / "boxes")}

    async def main() -> None:
        first = await RaySandboxes(base=tmp_path, **wanted).create("one")
        with pytest.raises(SandboxError, match="had room for a sandbox within 1 s"):
            await RaySandboxes(base=tmp_path, **wanted, wait_s=1).create("two")
        await first.close()

    asyncio.run(main())


@pytest.mark.parametrize("wanted", [{"num_cpus": 64}, {"memory": "900TB"}, {"resources": {"moon": 1}}])
def test_what_no_node_has_is_refused_at_once(tmp_path: Path, wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"no node of the Ray cluster has what a sandbox asks for \("):
        asyncio.run(RaySandboxes(base=tmp_path, **wanted).start())


@pytest.mark.skipif(not find_isolation("auto").program, reason="bubblewrap does not work here")
def test_harbor_task_is_run_and_graded_on_the_cluster(project: Path, model: ScriptedModelServer) -> None:
    files = {"instruction.md": "Make calc.py print 3.", "task.toml": CONFIG, "environment/Dockerfile": DOCKERFILE}
    files |= {"environment/calc.py": "", "environment/seed.txt": "", "tests/test.sh": TEST, "tests/expected": ""}
    write(project / "tasks" / "add", files)
    model.enqueue(*asks("echo 'print(3)' > calc.py"))
    params = '{ sandbox = "ray", sandbox_params = { num_cpus = 0.5 } }'
    episode = only(dev(project, model, file=FILE, params=params))
    assert 1.0 == episode.reward, episode.attempt.error
