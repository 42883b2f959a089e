"""The relay in a separate process: the same answers, and what happens to calls when a process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from agl import owned_process
from agl.errors import PolicyError
from agl_algo_verl.serving import policy as policy_module
from agl_algo_verl.serving.relay_process import RelayProcess
from agl_testing.waiting import eventually, wait_until

from .test_policy import call, replicas, serving

if TYPE_CHECKING:
    from pathlib import Path

    from agl_algo_verl.serving.relay import Backend

PROGRAM = "agl_algo_verl.serving.relay_program"


def relays(of: int = 0) -> list[psutil.Process]:
    """Return the relay processes that a process, by default this one, has started."""
    return [p for p in psutil.Process(of or None).children(recursive=True) if PROGRAM in command_of(p)]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_calls_are_passed_on_by_another_process_and_none_is_left_behind() -> None:
    async def body() -> None:
        async with replicas(2) as (found, runners), serving(model="m") as (policy, llm):
            (process,) = relays()
            await policy.attach([r.address for r in found], version="global_step_3")
            answers = [await call(llm, f"task {number}") for number in range(8)]
            assert {"global_step_3"} == {answer["model_version"] for answer in answers}
            assert all(replica.seen for replica in found)
            await runners[0].cleanup()
            answers = [await call(llm, f"later {number}") for number in range(4)]
            assert {found[1].address} == {answer["address"] for answer in answers}
            counts = await policy.counts()
            assert (12, 0) == (counts["replica_calls"], counts["relay_restarts"])
            assert 0 < counts["replica_failures"]
        assert not process.is_running()

    asyncio.run(body())


def test_calls_are_held_and_drained_across_the_processes() -> None:
    async def body() -> None:
        async with replicas(1) as (found, _):
            async with serving(model="m") as (policy, llm):
                await policy.attach([found[0].address], version="global_step_0")
                found[0].goes_on.clear()
                first = asyncio.create_task(call(llm, "one"))
                await eventually(lambda: found[0].seen)
                holding = asyncio.create_task(policy.hold())
                await asyncio.sleep(0.1)
                assert not holding.done()
                found[0].goes_on.set()
                await holding
                assert "global_step_0" == (await first)["model_version"]
                second = asyncio.create_task(call(llm, "two"))
                await asyncio.sleep(0.1)
                assert 1 == len(found[0].seen)
                await policy.attach([found[0].address], version="global_step_1")
                assert "global_step_1" == (await second)["model_version"]
                found[0].goes_on.clear()
                third = asyncio.create_task(call(llm, "three"))
                await eventually(lambda: 3 == len(found[0].seen))
                asyncio.get_running_loop().call_later(0.3, found[0].goes_on.set)
            assert "global_step_1" == (await third)["model_version"]

    asyncio.run(body())


def test_calls_wait_for_other_replicas_and_old_news_of_a_loss_is_forgotten() -> None:
    async def body() -> None:
        async with replicas(2) as (found, runners), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address])
            await runners[0].cleanup()
            waiting = asyncio.create_task(call(llm, "task"))
            await asyncio.wait_for(policy.lost(), 60)
            await policy.detach()
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await policy.attach([found[1].address])
            assert found[1].address == (await waiting)["address"]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(policy.lost(), 0.3)

    asyncio.run(body())


def test_without_replicas_the_trainer_is_asked_for_the_server_at_home(model_dir: Path) -> None:
    pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves at home")

    async def body() -> None:
        async with serving(model=str(model_dir), threads=1) as (_, llm):
            assert "choices" in await call(llm, "hi", max_tokens=1)
        async with serving(model=str(model_dir), home="absent") as (_, llm):
            assert "absent" in (await call(llm, "hi"))["error"]["message"]

    asyncio.run(body())


def test_a_relay_that_is_killed_is_started_again_at_the_same_address() -> None:
    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address], version="global_step_0")
            await call(llm, "one")
            await policy.counts()
            await policy.hold()
            (killed,) = relays()
            killed.kill()
            await eventually(lambda: not killed.is_running())
            waiting = [asyncio.create_task(call(llm, f"two {number}")) for number in range(4)]
            await policy.hold()
            await asyncio.sleep(0.1)
            assert not any(each.done() for each in waiting)
            await policy.attach([found[0].address], version="global_step_1")
            assert ["global_step_1"] * 4 == [(await each)["model_version"] for each in waiting]
            counts = await policy.counts()
            assert (5, 1) == (counts["replica_calls"], counts["relay_restarts"])

    asyncio.run(body())


def test_a_relay_ends_with_its_trainer(tmp_path: Path) -> None:
    script = tmp_path / "trainer_that_is_killed.py"
    script.write_text(
        "import asyncio\n"
        "from agl_algo_verl.serving.policy import VerlPolicy\n"
        "async def main():\n"
        "    await VerlPolicy(name='llm', model='m').start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert "up\n" == trainer.stdout.readline()
        (relay,) = relays(trainer.pid)
        assert os.getsid(relay.pid) != os.getsid(trainer.pid)
        trainer.send_signal(signal.SIGKILL)
    wait_until(lambda: not relay.is_running() or relay.status() == psutil.STATUS_ZOMBIE, within_s=60)


def test_a_relay_that_does_not_start_is_an_error_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def home() -> Backend:
        raise PolicyError("nobody")

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            relay = RelayProcess(home, key="k", program=(sys.executable, "-c", "raise SystemExit('no such thing')"))
            with pytest.raises(PolicyError, match=r"ended with 1: no such thing"):
                await relay.start(listener.dup())
            await relay.stop()

            monkeypatch.setattr(owned_process, "FIRST_PAUSE_S", 0.001)
            relay = RelayProcess(home, key="k")
            await relay.start(listener.dup())
            relay._process.program = (sys.executable, "-c", "raise SystemExit('no such thing')")
            psutil.Process(relay.pid).kill()
            await asyncio.wait_for(relay.lost.wait(), 60)
            assert "no such thing" in str(relay.failure)
            assert owned_process.QUICK_ENDS - 1 == relay.restarts
            await relay.hold()
            await relay.stop()

    asyncio.run(body())


def test_a_process_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "RelayProcess", partial(RelayProcess, health_s=0.5))

    async def body() -> None:
        async with replicas(1) as (found, _), serving(model="m") as (policy, llm):
            await policy.attach([found[0].address], version="global_step_2")
            (process,) = relays()
            process.suspend()
            answer = await asyncio.wait_for(call(llm, "task"), 60)
            assert "global_step_2" == answer["model_version"]
            assert 1 <= (await policy.counts())["relay_restarts"]
            assert not process.is_running()

    asyncio.run(body())
