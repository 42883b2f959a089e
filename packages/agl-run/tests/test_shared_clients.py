"""Clients that outlive an experiment and are shared by its rollouts, in threads and on several event loops."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from agl.schemas import LLM
from agl.stores import MemoryStore
from agl_run import Quiet, Trainer
from agl_testing.model_server import Reply, ScriptedModelServer
from tests.adapters import MODEL
from tests.repeats import check_repeats

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # connections of loops that ended


@pytest.fixture
def server() -> Iterator[ScriptedModelServer]:
    with ScriptedModelServer(respond=lambda _: Reply(text="yes", chunk_delay=0.005)) as running:
        yield running


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect the connections of ended loops here, where their warnings are expected."""
    yield
    gc.collect()


async def ask(client: AsyncOpenAI, text: str) -> None:
    messages: Any = [{"role": "user", "content": text}]
    for _ in range(2):
        await client.chat.completions.create(model="scripted", messages=messages)


@pytest.mark.long
def test_shared_async_client_works_in_blocking_agents(server: ScriptedModelServer, tmp_path: Path) -> None:
    client = AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)

    def agent(task: Any) -> float:
        asyncio.run(ask(client, task["marker"]))
        return 1.0

    check_repeats(agent, server, tracers=(), gateway="none", folder=tmp_path, calls=2)


@pytest.mark.long
def test_client_that_is_closed_in_a_rollout_leaves_no_connection_open(
    server: ScriptedModelServer, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    async def agent(task: Any) -> float:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            await ask(client, task["marker"])
        return 1.0

    gc.collect()
    recwarn.clear()
    check_repeats(agent, server, tracers=(), gateway="none", folder=tmp_path, calls=2)
    gc.collect()

    assert [] == [str(warning.message) for warning in recwarn if warning.category is ResourceWarning]


def test_client_that_a_rollout_drops_closes_its_connections_in_their_loop(
    server: ScriptedModelServer, recwarn: pytest.WarningsRecorder
) -> None:
    """Otherwise sockets close while transports still listen to their descriptors, which new connections then get."""

    async def agent(task: Any) -> float:
        client = AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        await asyncio.gather(*(ask(client, task["marker"]) for _ in range(3)))
        del client
        gc.collect()
        return 1.0

    gc.collect()
    recwarn.clear()
    policy = LLM(endpoint=server.base_url, model=MODEL)
    trainer = Trainer(name="one", store=MemoryStore(), initial_resources={"main": policy}, progress=Quiet())
    trainer.dev(agent, [{"marker": f"#{number}#"} for number in range(4)], tasks=4)
    gc.collect()

    assert 24 == len(server.calls)
    assert [] == [str(warning.message) for warning in recwarn if warning.category is ResourceWarning]


def test_agents_of_every_run_in_a_process_are_on_one_loop(tmp_path: Path) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def agent(task: Any) -> float:
        del task
        loops.append(asyncio.get_running_loop())
        return 1.0

    def trainer(name: str) -> Trainer:
        return Trainer(name=name, store=MemoryStore(), progress=Quiet(), folder=tmp_path)

    trainer("one").dev(agent, ["a"])
    trainer("two").fit(agent, val_dataset=["a"])
    asyncio.run(trainer("three").fit_async(agent, val_dataset=["a"]))

    assert (3, 1) == (len(loops), len(set(loops)))
    assert not loops[0].is_closed()


def test_interrupt_of_an_agent_ends_its_rollout_and_no_later_run(tmp_path: Path) -> None:
    async def agent(task: Any) -> float:
        if task == "stop":
            raise KeyboardInterrupt
        return 1.0

    trainer = Trainer(name="one", store=MemoryStore(), progress=Quiet(), folder=tmp_path)
    episodes = trainer.dev(agent, ["stop", "go"]).episodes

    assert ["failed", "succeeded"] == [episode.attempt.status for episode in episodes]
    assert 1.0 == Trainer(name="two", store=MemoryStore(), progress=Quiet()).fit(agent, val_dataset=["go"]).before
