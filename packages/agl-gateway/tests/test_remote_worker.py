"""A remote worker identifies itself to the gateway, waits until calls are written, and copes with a missing answer."""

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from agl.errors import CaptureError, ConfigError, GatewayLostError, NotFoundError, TokenError
from agl.schemas import Attempt, Claim, ErrorInfo, Outcome, Rollout, new_rollout_id
from agl.stores import MemoryStore
from agl_gateway.client import HttpStore
from agl_gateway.embedded import EmbeddedGateway
from agl_run import RunContext, Worker
from agl_run.access.tokens import AdminKey
from agl_run.worker.remote_gateway import GuardedRunner, RemoteGateway
from agl_testing.waiting import eventually

from .conftest import SECRET, StageFactory
from .test_remote_finish import BusyStore

OTHER = b"a secret of somebody else entirely"


class Runner:
    """A runner that runs no agent and returns prescribed outcomes."""

    def __init__(self, answer: Callable[[Claim], Outcome]) -> None:
        self._answer = answer

    async def start(self) -> None:
        """Do nothing."""

    async def execute(self, claim: Claim) -> Outcome:
        """Return the prescribed outcome."""
        return self._answer(claim)

    async def stop(self) -> None:
        """Do nothing."""


def failing(claim: Claim) -> Outcome:
    """Return the outcome of an agent that got no answer."""
    error = ErrorInfo(type="APIConnectionError", message="Connection error.")
    return Outcome(attempt_id=claim.attempt.attempt_id, status="failed", error=error)


def a_claim() -> Claim:
    """Return a claim for tests in which its content does not matter."""
    rollout = Rollout(rollout_id=new_rollout_id(), task={})
    attempt = Attempt(rollout_id=rollout.rollout_id, attempt_id=f"{rollout.rollout_id}.1", number=1, worker="test")
    return Claim(rollout=rollout, attempt=attempt)


async def test_settling_waits_for_the_calls_that_were_answered(stage: StageFactory) -> None:
    async with stage(store=BusyStore()) as it:
        remote = RemoteGateway(it.url, key=AdminKey(SECRET))
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            ask = {"model": "main_llm", "messages": [{"role": "user", "content": "hi"}]}
            await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(4)))
        await remote.settle(attempt_id)
        spans = await it.store.spans(attempt_id.rpartition(".")[0], attempt_id=attempt_id)
        assert 4 == len([span for span in spans if span.call is not None])


async def test_calls_that_the_store_refused_fail_the_attempt(stage: StageFactory) -> None:
    class Refusing(MemoryStore):
        async def append_spans(self, spans: object) -> None:
            raise NotFoundError("rollout", "somebody")

    async with stage(store=Refusing()) as it:
        attempt_id, token = await it.open_attempt()
        async with it.openai(token) as client:
            await client.chat.completions.create(model="main_llm", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(CaptureError, match="are not in the store: unknown rollout"):
            await RemoteGateway(it.url, key=AdminKey(SECRET)).settle(attempt_id)


async def test_an_attempt_settles_itself_and_no_other(stage: StageFactory) -> None:
    async with stage() as it:
        attempt_id, token = await it.open_attempt()
        headers = {"authorization": f"Bearer {token}"}
        async with aiohttp.ClientSession(headers=headers) as session:

            async def settle(body: object) -> int:
                async with session.post(f"{it.url}/settle", json=body) as reply:
                    return reply.status

            found = [await settle(body) for body in ({"attempt_id": attempt_id}, {"attempt_id": "x.1"}, {}, [])]
        assert [200, 403, 400, 400] == found


async def test_another_secret_is_named_and_a_closed_port_too(stage: StageFactory) -> None:
    async with stage() as it:
        assert "signs with another secret. Set AGL_SECRET" in await RemoteGateway(it.url, key=AdminKey(OTHER)).look()
        assert "" == await RemoteGateway(it.url, key=AdminKey(SECRET)).look()
    assert "ConnectionRefusedError" in await RemoteGateway("http://127.0.0.1:9", key=AdminKey(SECRET)).look()


async def test_gateway_that_was_started_again_gives_attempts_back(stage: StageFactory) -> None:
    async with stage() as it:
        remote = RemoteGateway(it.url, key=AdminKey(SECRET))
        await remote.look()
        port = int(it.url.rpartition(":")[2])
        await it.gateway.stop()
        again = EmbeddedGateway(port=port)
        await again.start(store=it.store, upstreams=[], secret=SECRET)
        with pytest.raises(GatewayLostError, match="was started again"):
            await remote.settle("x.1")
        await again.stop()


async def test_agent_that_failed_without_its_gateway_is_not_to_blame(stage: StageFactory) -> None:
    async with stage() as it:
        remote = RemoteGateway(it.url, key=AdminKey(SECRET), patience_s=0.1)
        guarded = GuardedRunner(Runner(failing), remote)
        assert "failed" == (await guarded.execute(a_claim())).status
    with pytest.raises(GatewayLostError, match="went away while"):
        await guarded.execute(a_claim())
    assert remote.lost.is_set()


async def test_agent_that_failed_while_the_network_was_gone_is_given_back(stage: StageFactory) -> None:
    class Outage(Runner):
        async def execute(self, claim: Claim) -> Outcome:
            remote.url = "http://127.0.0.1:9"
            await remote.look()
            remote.url = it.url
            return await super().execute(claim)

    async with stage() as it:
        remote = RemoteGateway(it.url, key=AdminKey(SECRET))
        with pytest.raises(GatewayLostError, match="did not answer while the attempt ran"):
            await GuardedRunner(Outage(failing), remote).execute(a_claim())
        assert not remote.lost.is_set()
        assert "failed" == (await GuardedRunner(Runner(failing), remote).execute(a_claim())).status


async def test_attempt_waits_for_a_gateway_that_is_gone_until_the_worker_stops() -> None:
    remote = RemoteGateway("http://127.0.0.1:9", key=AdminKey(SECRET), patience_s=0.1)
    attempt = asyncio.create_task(GuardedRunner(Runner(failing), remote).execute(a_claim()))
    await asyncio.wait_for(remote.lost.wait(), 30)
    done, _ = await asyncio.wait({attempt}, timeout=0.1)
    assert set() == done
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)


async def test_worker_gives_back_what_its_gateway_lost() -> None:
    class Gone:
        async def settle(self, attempt_id: str) -> None:
            raise GatewayLostError(f"{attempt_id} is cut off")

    store = MemoryStore()
    rollout = Rollout(rollout_id=new_rollout_id(), task={})
    await store.enqueue([rollout])
    runner = Runner(lambda claim: Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded"))

    async def five() -> list[Attempt]:
        attempts = await store.attempts(rollout.rollout_id)
        return attempts if len(attempts) >= 5 else []

    async with Worker(RunContext(store=store, concurrency=1, gateway=Gone()), runner):
        attempts = await eventually(five)
    assert {"lost"} == {attempt.status for attempt in attempts[:4]}
    assert {f"{attempt.attempt_id} is cut off" for attempt in attempts[:4]} == {
        attempt.error.message for attempt in attempts[:4] if attempt.error
    }
    await store.close()


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("AGL_TOKEN", "is not an agl token .*Set AGL_TOKEN to the token in `agl serve`'s token file"),
        ("AGL_SECRET", "the token signed with this machine's AGL_SECRET: .*Set AGL_SECRET to the secret that it runs"),
    ],
)
async def test_refused_token_of_a_store_is_answered_with_the_way_to_a_good_one(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch, variable: str, advice: str
) -> None:
    for name in ("AGL_TOKEN", "AGL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, OTHER.decode())
    async with stage() as it:
        store = HttpStore(it.url)
        with pytest.raises(TokenError, match=advice) as caught:
            await store.cursor()
        await store.close()
        assert "attempt" not in str(caught.value)


async def test_shared_secret_opens_the_store_of_a_running_experiment(
    stage: StageFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    monkeypatch.delenv("AGL_SECRET", raising=False)
    async with stage() as it:
        with pytest.raises(ConfigError, match="or AGL_SECRET to the secret"):
            HttpStore(it.url)
        monkeypatch.setenv("AGL_SECRET", SECRET.decode())
        store = HttpStore(it.url)
        assert await it.store.cursor() == await store.cursor()
        await store.close()
