"""Leases follow the server's clock, whatever the clocks of other machines show."""

import time

import pytest

from agl.schemas import Rollout
from agl_store_postgres.store import PostgresStore


async def test_lease_lapses_in_time_though_a_machine_sets_its_clock_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, back_s = time.time, [-86400.0]
    monkeypatch.setattr("time.time", lambda: system() - back_s[0])

    store = PostgresStore(url)
    await store.enqueue([Rollout(rollout_id="ro", task=1)])
    (claim,) = await store.claim(worker="dies", lease_s=0.5)
    assert abs(claim.attempt.started_at - system()) < 600
    back_s[0] = 86400.0
    (claim,) = await store.claim(worker="w", wait_s=10)
    assert 2 == claim.attempt.number
    await store.close()
