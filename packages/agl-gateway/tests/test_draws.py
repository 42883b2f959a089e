"""Calls to a policy in training carry a seed that follows from the rollout and the call's position in it."""

import asyncio
import time

import httpx

from agl.contracts import POLICY_KEY_ENV, Upstream
from agl.schemas import Outcome, RetryPolicy, Rollout, new_rollout_id

HEADER = "x-agl-seed"


async def seeds_of(it, server, words, *, seed=7, model="main", at_once=False, attempts=1):
    """Make a call for each word in the last attempt of a rollout; returns the seed that the server got each time."""
    metadata = {} if seed is None else {"seed": seed}
    rollout = Rollout(rollout_id=new_rollout_id(), task={}, metadata=metadata, retry=RetryPolicy(max_attempts=3))
    await it.store.enqueue([rollout])
    for number in range(attempts):
        (claim,) = await it.store.claim(worker="test")
        if number + 1 < attempts:
            await it.store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="failed")])
    key = it.tokens.issue(rollout.rollout_id, claim.attempt.attempt_id, expires_at=time.time() + 600)
    before = len(server.calls)
    headers = {"authorization": f"Bearer {key}", HEADER: "1"}
    async with httpx.AsyncClient(headers=headers) as client:

        async def ask(word):
            body = {"model": model, "messages": [{"role": "user", "content": word}]}
            assert 200 == (await client.post(f"{it.url}/v1/chat/completions", json=body)).status_code

        if at_once:
            await asyncio.gather(*map(ask, words))
        else:
            for word in words:
                await ask(word)
    return [(call.json["messages"][0]["content"], call.headers.get(HEADER)) for call in server.calls[before:]]


def trained(server, **fields):
    return Upstream(name="main", base_url=server.base_url, model="m", is_trained=True, **fields)


async def test_seed_depends_on_the_rollouts_seed_and_the_position_alone(stage, server):
    async with stage(upstreams=[trained(server)]) as it:
        first = await seeds_of(it, server, ["a", "a", "b"])
        assert 3 == len({seed for _, seed in first})
        assert first == await seeds_of(it, server, ["a", "a", "b"])
        assert sorted(first) == sorted(await seeds_of(it, server, ["b", "a", "a"], at_once=True))
        other = await seeds_of(it, server, ["a", "a", "b"], seed=8)
        assert not {seed for _, seed in first} & {seed for _, seed in other}
        assert all(int(seed) < 2**62 for _, seed in [*first, *other])


async def test_next_attempt_draws_anew(stage, server):
    async with stage(upstreams=[trained(server)]) as it:
        assert await seeds_of(it, server, ["a"]) != await seeds_of(it, server, ["a"], attempts=2)


async def test_calls_without_a_seed_and_to_other_models_carry_none(stage, server):
    frozen = Upstream(name="judge", base_url=server.base_url, model="m")
    async with stage(upstreams=[trained(server), frozen]) as it:
        assert [("a", None)] == await seeds_of(it, server, ["a"], seed=None)
        assert [("a", None)] == await seeds_of(it, server, ["a"], model="judge")


async def test_attempt_is_named_to_servers_of_this_project_alone(stage, server, monkeypatch):
    monkeypatch.setenv(POLICY_KEY_ENV, "key")
    ours = Upstream(name="ours", base_url=server.base_url, model="m", api_key_env=POLICY_KEY_ENV)
    async with stage(upstreams=[trained(server), ours]) as it:
        await seeds_of(it, server, ["a"], model="main")
        await seeds_of(it, server, ["a"], model="ours")
        assert [False, True] == ["x-agl-attempt-id" in call.headers for call in server.calls]
