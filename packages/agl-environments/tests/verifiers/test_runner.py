"""The runner, with an environment that only records with which model settings it is called."""

import asyncio
from typing import Any

import pytest

from agl.schemas import LLM, Attempt, Claim, Rollout
from agl.stores import MemoryStore
from agl_environments.verifiers.environment import Model
from agl_environments.verifiers.runner import VerifiersRunner
from agl_run import AgentSpec, RunContext


class Noting:
    """An environment that ends its first rollout when another one has begun."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.has_second_begun = asyncio.Event()

    async def start(self) -> None:
        pass

    async def play(self, task: Any, model: Model) -> None:
        self.urls.append(model.routed_url)
        if len(self.urls) > 1:
            self.has_second_begun.set()
        await self.has_second_begun.wait()

    async def stop(self) -> None:
        pass


def claim(number: int) -> Claim:
    """Return the claim of an attempt at one rollout."""
    attempt = Attempt(rollout_id="ro-1", attempt_id=f"ro-1.{number}", number=number, worker="one")
    return Claim(rollout=Rollout(rollout_id="ro-1", task={}), attempt=attempt)


def test_two_attempts_at_a_rollout_call_the_policy_each_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens after a lost lease, if the worker that stops the old attempt claims the new one."""
    environment = Noting()
    monkeypatch.setattr("agl_environments.verifiers.runner.load", lambda *_, **__: environment)

    async def resources(_: Rollout) -> dict[str, Any]:
        return {"main": LLM(endpoint="http://gateway/v1", model="scripted")}

    async def play() -> list[str]:
        spec = AgentSpec(source="verifiers", name="noting")
        runner = VerifiersRunner(RunContext(agent=spec, store=MemoryStore(), secret=b"0" * 32, resources=resources))
        await runner.start()
        outcomes = await asyncio.gather(runner.execute(claim(1)), runner.execute(claim(2)))
        await runner.stop()
        return [outcome.status for outcome in outcomes]

    assert ["succeeded", "succeeded"] == asyncio.run(play())
    assert [True, True] == [f"/rollout/ro-1/attempt/ro-1.{n}/" in url for n, url in enumerate(environment.urls, 1)]
