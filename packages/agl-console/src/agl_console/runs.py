"""The view of runs: every experiment with its state, last reward and best version; or a comparison of some of them."""

import re
import time
from collections.abc import Sequence

from agl.contracts import ExperimentRecord, Metric, Moments, RolloutQuery, Store, VersionScore
from agl.errors import ConfigError
from agl.schemas import Record
from agl_console.figures import REWARD, Figure, Line, derived, figure_of
from agl_inspect.advice.ranking import DatedFit, read_fits
from agl_inspect.advice.run_differences import RunDifference, compare_runs
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.presence import is_gone
from agl_inspect.records.state import load_settings, states_of_run
from agl_inspect.records.validations import Validation, read_validations
from agl_inspect.rollouts.step_tallies import read_tallies
from agl_inspect.statistics import interval

PAGE = 50
"""The most runs on a page."""

COMPARED = 8
"""The most runs in a comparison, so that their curves stay distinguishable."""


class RunsFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page.

    Attributes:
        compare: Names of the runs to compare; all runs are listed unless these are two or more.
        after: The last name on the previous page.
    """

    compare: tuple[str, ...] = ()
    after: str = ""


class RunRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A run, which is an experiment with all of its steps.

    Attributes:
        status: ``running``, ``stopped`` (it may be resumed) or ``finished``.
        turn: The number of steps that all algorithms took together.
        steps: The number of steps of each algorithm.
        rewards: The last reward of each algorithm.
        rollouts: Finished rollouts of all the experiment's runs.
        tokens: Tokens that models sampled in these rollouts.
        wall_s: Seconds from the first logged reward to the last one.
        curve: The validation reward with its intervals, else that of an algorithm; ``None`` if none is logged.
        highest: The highest reward of the curve, which has a selection of the points of a long run.
        now: The newest reward; of a run with validations, the newest of the live versions, ``None`` without one.
        best: The version of a live resource with the highest score.
        has_failures: True if a rollout failed.
    """

    name: str
    status: str
    agent: str
    turn: int
    steps: dict[str, int]
    rewards: list["LastReward"]
    rollouts: int
    tokens: int
    wall_s: float
    curve: Line | None
    highest: float | None
    now: "Now | None"
    best: VersionScore | None
    has_failures: bool


class Now(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The newest reward with its interval; ``tasks`` is 0 if it was no validation. ``parts`` are the reward's."""

    value: float
    low: float | None
    high: float | None
    tasks: int
    parts: dict[str, Moments] = {}


class LastReward(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The newest reward that an algorithm logged."""

    algorithm: str
    step: int
    value: float


class Difference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A setting that differs between runs: the name, and the value in each run, ``""`` where a run does not set one."""

    name: str
    values: list[str]


class RunsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The runs of a page, or a comparison of runs.

    Attributes:
        figures: The rewards of the compared runs, in one figure.
        against_first: The newest validation of each run but the first, compared with the first run's.
        differences: The settings in which the runs differ.
        fits: Models of how these runs' parameters affect the result, from ``agl metrics --rank``, newest first.
        next: The query of the next page; empty on the last.
    """

    runs: list[RunRow]
    compared: list[str]
    figures: list[Figure]
    against_first: list[RunDifference]
    differences: list[Difference]
    fits: list[DatedFit]
    next: dict[str, str]


async def runs_view(store: Store, chosen: RunsFilter) -> RunsView:
    """Read a page of runs, or the runs to compare; raises :class:`ConfigError` for unknown or too many names."""
    records = sorted(await store.experiments(), key=lambda record: record.name)
    wanted = list(dict.fromkeys(chosen.compare))
    unknown = [name for name in wanted if name not in {record.name for record in records}]
    if unknown:
        there = ", ".join(record.name for record in records) or "none yet"
        raise ConfigError(f"no run is named {unknown[0]!r}; choose from: {there}")
    if len(wanted) > 1:
        return await _compared(store, records, wanted)
    page = [record for record in records if record.name > chosen.after][: PAGE + 1]
    rows = [await _row(store, record, await rewards_of(store, record)) for record in page[:PAGE]]
    following = {"after": page[PAGE - 1].name} if len(page) > PAGE else {}
    fits = await read_fits(store, page[:PAGE])
    return RunsView(runs=rows, compared=wanted, figures=[], against_first=[], differences=[], fits=fits, next=following)


async def status_of(store: Store, record: ExperimentRecord) -> str:
    """Return ``finished``, ``running``, or ``stopped`` for a run that stopped before its end."""
    if record.status == "finished":
        return "finished"
    signs = await store.presences(record.name, member="")
    return "running" if any(not is_gone(sign, now=time.time()) for sign in signs) else "stopped"


async def best_version(store: Store, record: ExperimentRecord) -> VersionScore | None:
    """Return the version of a run's resources with the highest score; ``None`` if no version was measured."""
    own = [
        score
        for name in sorted(record.live)
        for score in await store.scores(name)
        if score.version == record.live[name] or is_made_by(record, score.version)
    ]
    return max(own, key=lambda score: score.mean, default=None)


def is_made_by(record: ExperimentRecord, version: str) -> bool:
    """Return true if the experiment made the version, by the version's name."""
    # the second part excludes an experiment NAME-1
    return bool(re.match(rf"{re.escape(record.name)}-[0-9]+-(?![0-9]+-)", version))


async def has_failures(store: Store, experiment: str) -> bool:
    """Return true if a rollout of the experiment failed."""
    return bool(await store.rollouts(RolloutQuery(experiment=experiment, status=("failed",), limit=1)))


async def _compared(store: Store, records: Sequence[ExperimentRecord], wanted: Sequence[str]) -> RunsView:
    known = {record.name: record for record in records}
    if len(wanted) > COMPARED:
        raise ConfigError(f"{len(wanted)} runs are too many to tell their curves apart; choose {COMPARED} at most")
    rewards = {name: await rewards_of(store, known[name]) for name in wanted}
    figure = figure_of(REWARD, rewards)
    settings = {name: await load_settings(store, known[name]) for name in wanted}
    return RunsView(
        runs=[await _row(store, known[name], rewards[name]) for name in wanted],
        compared=list(wanted),
        figures=[figure] if figure.series else [],
        against_first=await compare_runs(store, [known[name] for name in wanted]),
        differences=_differences([settings[name] for name in wanted]),
        fits=await read_fits(store, [known[name] for name in wanted]),
        next={},
    )


async def rewards_of(store: Store, record: ExperimentRecord) -> list[Metric]:
    """Return the rewards of an experiment's newest run, with the ends of their intervals."""
    parts = (REWARD, f"{REWARD}_low", f"{REWARD}_high")
    logged = [metric for name in parts for metric in await store.metrics(record.name, name=name, run=record.run)]
    return [*logged, *derived(logged, await read_tallies(store, record))]


async def _row(store: Store, record: ExperimentRecord, rewards: Sequence[Metric]) -> RunRow:
    values = sorted((metric for metric in rewards if metric.name == REWARD), key=lambda metric: metric.step)
    last = {metric.algorithm: metric for metric in values}
    times = [metric.time for metric in values if metric.time]
    lines = sorted(figure_of(REWARD, {record.name: rewards}).series, key=lambda line: line.algorithm != VALIDATE)
    sums = await store.statistics(record.name)
    return RunRow(
        name=record.name,
        status=await status_of(store, record),
        agent=record.agent,
        turn=record.turn,
        steps={name: state.step for name, state in (await states_of_run(record.name, record.run).read(store)).items()},
        rewards=[LastReward(algorithm=key, step=metric.step, value=metric.value) for key, metric in last.items()],
        rollouts=sum(each.rollouts for each in sums),
        tokens=sum(each.response_tokens for each in sums),
        wall_s=max(times, default=0) - min(times, default=0),
        curve=lines[0] if lines else None,
        highest=max((one.value for one in values if lines and one.algorithm == lines[0].algorithm), default=None),
        now=_now(lines[0] if lines else None, record, await read_validations(store, record.name, record.run)),
        best=await best_version(store, record),
        has_failures=any(each.failed for each in sums),
    )


def _now(curve: Line | None, record: ExperimentRecord, measured: Sequence[Validation]) -> Now | None:
    if not measured and curve:
        return Now(value=curve.values[-1], low=curve.low[-1], high=curve.high[-1], tasks=0)
    newest = next((one for one in reversed(measured) if one.versions == record.live), None)
    if newest is None:
        return None
    low, high = interval(newest.rewards) if len(newest.rewards) > 1 else (None, None)
    return Now(value=newest.mean, low=low, high=high, tasks=len(newest.rewards), parts=newest.parts)


def _differences(settings: Sequence[dict[str, str]]) -> list[Difference]:
    names = sorted({name for each in settings for name in each})
    rows = [Difference(name=name, values=[each.get(name, "") for each in settings]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]
