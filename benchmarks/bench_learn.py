"""A learner among simulated customers: harm, drift, poison, an obedient model and forgetting; and the same without it.

The store, the decisions and the served split are those of `agl learn`; customers, training and replays are simulated,
so that the truth is known. Nothing is measured by rewards that were drawn: an answer counts with the probability with
which it is liked. Rewards that are *lost* or a *regret* are sums of differences of these probabilities, in
conversations. The baseline promotes every proposal at once.

- *Harm*: a candidate that is worse by 0.3 gets a share of 0.1, without a replay. It ends by 60 of its calls.
- *Drop*: 500 conversations after its promotion a version becomes worse than the one before by 0.3.
- *Drift*: the wish of 2,000 users changes twice; a replay and a round of training take 10 conversations. The service is
  back when the next 50 answers are liked with 0.79 on average: the hold-back alone costs 0.055. The regret is against
  an oracle that follows at once.
- *Poison*: 30 of 100 users report the opposite of what they think, about everything or about one kind of question, or
  three users who give 30 % of the feedback do.
- *Obedient*: the optimiser follows a rule that its training conversations like, and no other.
- *Forgetting*: five kinds of questions become frequent one after another, with an optimiser that forgets.

Each run has a seed of its own, and the runs are divided between two processes.
"""

import asyncio
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from agl_inspect.records.labels import move
from agl_learn.users import contradicting
from benchmarks._harness import Figure
from benchmarks._wishes import GOOD, LETTERS, NEVER, Shop, expected, promote_everything
from worlds.customers import PROMPT, Customers, settings

Result = TypeVar("Result")

RUNS, SEEDS = 200, 20
"""Runs of harm and drop, and of the others."""

HARMED = ((0.8, 0.5), (0.6, 0.3), (0.9, 0.6))
CHANGES = (700, 1400)
BACK = 0.79
LIARS = [f"u{number}" for number in range(30)]


def harm(old: float, bad: float, *, seed: int) -> tuple[int, float]:
    """Return the calls that a harmful candidate got in its canary, and the reward that they lost."""
    customers = Customers(
        liked=lambda version, kind, number: {"old": old, "bad": bad}[version],
        propose=lambda train: "bad",
        seed=seed,
        settings=settings(tasks=0, share=(0.1,), units=NEVER),
    )

    def is_over() -> bool:
        return customers.learner.state.candidates == 1 and not customers.learner.state.current

    async def work() -> None:
        await customers.open("old")
        await customers.serve(3000, until=is_over)

    asyncio.run(work())
    calls = sum(each.versions[PROMPT] == "bad" for each in customers.past)
    return calls, calls * (old - bad)


def drop(*, seed: int) -> tuple[bool, float]:
    """Return whether a version that became worse was rolled back, and the reward that it lost until then."""
    began: list[int] = []

    def liked(version: str, kind: str, number: int) -> float:
        return {"old": 0.6, "new": 0.3 if began and number >= began[0] else 0.8}[version]

    customers = Customers(liked=liked, propose=lambda train: None, seed=seed, settings=settings(every=NEVER, tasks=0))

    async def work() -> None:
        learner = await customers.open("old")
        await customers.serve(20)
        await move(customers.store, PROMPT, "candidate", await customers.publish("new"))
        await customers.serve(3000, until=lambda: bool(learner.state.watched))
        began.append(len(customers.past) + 500)
        await customers.serve(2500, until=lambda: not learner.state.watched)

    asyncio.run(work())
    lost = sum(0.6 - 0.3 for each in customers.past[began[0] :] if each.versions[PROMPT] == "new")
    return not customers.learner.state.watched and len(customers.past) > began[0], lost


def drift(*, seed: int) -> list[tuple[int, float]]:
    """Return for each change of the wish the conversations until the service was back, and the regret."""
    shop = Shop(wish=lambda kind, n: LETTERS[sum(n >= change for change in CHANGES)], settings=settings(), seed=seed)
    shop.customers.lag, shop.customers.users = 10, 2000

    async def work() -> None:
        await shop.customers.open(LETTERS[0])
        await shop.customers.serve(2100)

    asyncio.run(work())
    found: list[tuple[int, float]] = []
    for change in CHANGES:
        after = expected(shop.customers)[change : change + 700]
        back = (n for n in range(650) if statistics.fmean(after[n : n + 50]) >= BACK)
        found.append((next(back, 700), sum(GOOD - liked for liked in after)))
    return found


def serve_liars(liars: Mapping[str, Collection[str]], *, seed: int, heavy: int, kinds: str) -> Customers:
    """Serve 2,000 conversations of 100 users whose wish changes once."""
    asked = settings(tasks=400)
    shop = Shop(wish=lambda kind, n: "b" if n >= 500 else "a", settings=asked, seed=seed, kinds=kinds, liars=liars)
    shop.customers.users, shop.customers.heavy, shop.customers.contradicting = 100, heavy, contradicting

    async def work() -> None:
        await shop.customers.open("a" * len(kinds))
        await shop.customers.serve(2000)

    asyncio.run(work())
    return shop.customers


def poison(count: int, *, seed: int, heavy: int, kinds: str) -> tuple[float, int, int, int]:
    """Return the regret against honest users, how many users and liars are named, and how many of honest users."""
    liars = {user: kinds[-1] for user in LIARS[:count]}
    clean, poisoned = (serve_liars(each, seed=seed, heavy=heavy, kinds=kinds) for each in ({}, liars))
    named = poisoned.learner.state.excluded.keys()
    regret, accused = sum(expected(clean)) - sum(expected(poisoned)), clean.learner.state.excluded
    return regret, len(named), len(named & liars.keys()), len(accused)


def obedient(*, seed: int, is_gated: bool) -> float:
    """Return how well the last 500 of 2,000 answers were liked, if every proposal pleases only where it was trained."""
    customers = Customers(
        liked=lambda version, kind, number: 0.8 if version == "old" else 0.05,
        propose=lambda train: f"rule {len(train)} {train[0].rollout_id}",
        seed=seed,
        settings=settings(every=40 if is_gated else NEVER),
    )

    async def work() -> None:
        await customers.open("old")
        await (customers.serve(2000) if is_gated else promote_everything(customers, 2000))

    asyncio.run(work())
    return statistics.fmean(expected(customers)[-500:])


def forgetting(*, seed: int, is_gated: bool) -> tuple[float, float]:
    """Return by how many points the first kind fell from its best, and the least share of its best that a kind kept."""
    kinds, each = "01234", 600
    asked = settings(tasks=400) if is_gated else replace(settings(every=NEVER), memory=60)
    shop = Shop(wish=lambda kind, n: LETTERS[int(kind)], settings=asked, seed=seed, kinds=kinds)
    served: list[list[float]] = []

    def note() -> None:
        version = shop.customers.learner.split.versions["production"][PROMPT]
        served.append([shop.liked(version, kind, len(shop.customers.past)) for kind in kinds])

    async def work() -> None:
        await shop.customers.open("?????")
        for now in range(len(kinds)):  # 9 of 10 questions are about the frequent kind, the others about earlier ones
            shop.customers.kinds = [kinds[now]] * 9 * max(now, 1) + list(kinds[:now])
            for _ in range(each // 40):
                await (shop.customers.serve(40) if is_gated else promote_everything(shop.customers, 40))
                note()

    asyncio.run(work())
    best = [max(column) for column in zip(*served, strict=True)]
    return 100 * (best[0] - served[-1][0]), min(end / top for end, top in zip(served[-1], best, strict=True))


def each_seed(run: Callable[..., Result], count: int) -> list[Result]:
    """Run with the seeds from 0 to before ``count``, in two processes."""
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(partial(_seeded, run), range(count)))


def _seeded(run: Callable[..., Result], seed: int) -> Result:
    return run(seed=seed)


def harm_figures(runs: int) -> list[Figure]:
    """The calls and the reward that harmful candidates and versions that became worse cost."""
    figures: list[Figure] = []
    for old, bad in HARMED:
        found = each_seed(partial(harm, old, bad), runs)
        lost = [reward for _, reward in found]
        ended = 100 * sum(calls <= 60 for calls, _ in found) / runs
        name = f"harm from {old} to {bad}"
        figures += [
            Figure(name=f"{name}: canaries that ended by 60 calls", value=ended, unit="%", bar=95),
            mean_figure(f"{name}: reward lost", lost, bar=14, baseline=300.0, name="1,000 answers without a gate"),
            Figure(name=f"{name}: reward lost, worst", value=max(lost), unit="", bar=30, better="lower"),
        ]
    drops = each_seed(drop, runs)
    lost = sorted(reward for _, reward in drops)
    figures += [
        Figure(name="drop: rolled back", value=100 * sum(is_over for is_over, _ in drops) / runs, unit="%", bar=95),
        mean_figure("drop: reward lost", lost, bar=30, baseline=300.0, name="1,000 answers without a gate"),
        Figure(
            name="drop: reward lost, 95th percentile", value=lost[int(0.95 * runs)], unit="", bar=30, better="lower"
        ),
        Figure(name="drop: reward lost, worst", value=lost[-1], unit=""),
    ]
    return figures


def mean_figure(
    what: str, values: Sequence[float], *, bar: float, baseline: float | None = None, name: str = ""
) -> Figure:
    """A mean with its 95 % interval."""
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    title = f"{what}, mean (+- {half:.1f})"
    return Figure(
        name=title,
        value=statistics.fmean(values),
        unit="",
        bar=bar,
        better="lower",
        baseline=baseline,
        baseline_name=name,
    )


def drift_figures(seeds: int) -> list[Figure]:
    """Measure how soon the service follows its users."""
    found = each_seed(drift, seeds)
    in_time = 100 * sum(all(back <= 300 for back, _ in run) for run in found) / seeds
    regrets = [regret for run in found for _, regret in run]
    return [
        Figure(name="drift: seeds back in 300 conversations", value=in_time, unit="%", bar=90),
        mean_figure("drift: regret of a change", regrets, bar=120, baseline=385.0, name="without learning"),
        Figure(name="drift: regret of a change, worst", value=max(regrets), unit=""),
    ]


def poison_figures(seeds: int) -> list[Figure]:
    """Measure how much reward liars cost, and how many of them are named."""
    figures: list[Figure] = []
    for name, count, heavy, kinds in (
        ("everything", 30, 0, "0"),
        ("one of two kinds", 30, 0, "01"),
        ("heavy", 3, 3, "0"),
    ):
        found = each_seed(partial(poison, count, heavy=heavy, kinds=kinds), seeds)
        regrets, named, right, accused = zip(*found, strict=True)
        precision, recall = sum(right) / max(1, sum(named)), sum(right) / (count * seeds)
        figures += [
            mean_figure(f"poison about {name}: regret", regrets, bar=40),
            Figure(name=f"poison about {name}: precision", value=precision, unit="", bar=0.9),
            Figure(name=f"poison about {name}: recall", value=recall, unit="", bar=0.9),
            Figure(
                name=f"poison about {name}: named without liars", value=sum(accused), unit="", bar=1, better="lower"
            ),
        ]
    return figures


def keeping_figures(seeds: int) -> list[Figure]:
    """Measure the reward with an obedient model, and on earlier kinds of questions, with and without the gate."""
    gated = each_seed(partial(obedient, is_gated=True), seeds)
    free = each_seed(partial(obedient, is_gated=False), seeds)
    kept = each_seed(partial(forgetting, is_gated=True), seeds)
    forgot = each_seed(partial(forgetting, is_gated=False), seeds)
    ungated = "every proposal promoted at once"
    return [
        Figure(
            name="obedient: worst reward of the seeds",
            value=min(gated),
            unit="",
            bar=0.79,
            baseline=max(free),
            baseline_name=f"{ungated}, best seed",
        ),
        mean_figure(
            "forgetting: points lost on the first kind",
            [lost for lost, _ in kept],
            bar=3,
            baseline=statistics.fmean(lost for lost, _ in forgot),
            name=ungated,
        ),
        Figure(
            name="forgetting: least share of its best that a kind kept",
            value=min(share for _, share in kept),
            unit="",
            bar=0.95,
            baseline=min(share for _, share in forgot),
            baseline_name=ungated,
        ),
    ]


def run(*, quick: bool = False) -> list[Figure]:
    """All figures; ``quick`` for a tenth of the runs."""
    runs, seeds = (20, 2) if quick else (RUNS, SEEDS)
    return [*harm_figures(runs), *drift_figures(seeds), *poison_figures(seeds), *keeping_figures(seeds)]
