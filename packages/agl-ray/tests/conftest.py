"""One Ray cluster of this machine for the tests of a process, and a model server beside it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from agl_testing.model_server import Reply, ScriptedModelServer

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

LOGICAL_CPUS = 8
LOGICAL_GPUS = 2


@pytest.fixture(scope="session", autouse=True)
def _secret() -> Iterator[None]:
    """Give the tests a key of their own, and no cluster of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGL_SECRET", "a-secret-of-the-tests-with-enough-characters")
        patch.setenv("OPENAI_API_KEY", "none")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="session")
def ray(_secret: None) -> Iterator[Any]:
    """Ray, connected to a cluster with logical CPUs and GPUs."""
    import ray

    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        num_gpus=LOGICAL_GPUS,
        resources={"desk": 2},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        _system_config={"prestart_worker_first_driver": False, "memory_monitor_refresh_ms": 0},
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def model() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=lambda _: Reply(text="4")) as server:
        yield server
