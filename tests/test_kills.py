"""``kill -9`` of everything in turn, late returns and returns as another machine: nothing acknowledged is lost."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from agl_run import SQLiteStore

from .conftest import AGENT
from .kills import Campaign, Installation, StartAgl, serve
from .test_crash import check_end
from .test_lost import pass_time
from .test_workers import free_port, store_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")

SLOW = f"import random\nimport time\n{AGENT}".replace(
    "        for _", "        time.sleep(0.5 * random.random())\n        for _"
)
"""An agent that is killed at work more often than not."""


def soon(draw: random.Random) -> float:
    return draw.choice((0.0, 0.0, 0.5, 1.5))


def anytime(draw: random.Random) -> float:
    return draw.uniform(20, 120) if draw.random() < 0.03 else min(20, draw.expovariate(0.4))


@pytest.fixture
def installation(agl: StartAgl, experiment: Callable[..., Path]) -> Callable[..., Installation]:
    """Makes an installation around a SQLite store, with an experiment of that many steps."""

    def make(steps: int) -> Installation:
        file, port = experiment(steps=steps, pause_s=0.1, agent=SLOW), free_port()
        store_of(file).parent.mkdir()
        serve(file, f"http://127.0.0.1:{port}")
        url = f"sqlite:///{store_of(file)}"
        return Installation(agl, file, port, served=url, open_store=lambda: SQLiteStore(url))

    return make


def check(campaign: Campaign, *, steps: int) -> None:
    print(campaign.report())
    for name, words in campaign.last_words.items():
        print(f"--- the last {name} that ended by itself:\n{words}")
    assert campaign.installation.losses() > 0
    assert [] == campaign.orphans
    assert [] == campaign.installation.lost()
    check_end(campaign.installation.file, steps=steps)


def test_killed_installation_loses_nothing_and_trains_nothing_twice(installation: Callable[..., Installation]) -> None:
    parts = installation(steps=20)
    campaign = Campaign(parts, 30, random.Random(1), soon, lapse=lambda: pass_time(parts.file, seconds=120))

    campaign.run()

    check(campaign, steps=20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_installation_that_is_killed_a_hundred_times(installation: Callable[..., Installation], seed: int) -> None:
    campaign = Campaign(installation(steps=60), 100, random.Random(seed), anytime)

    campaign.run()

    check(campaign, steps=60)
