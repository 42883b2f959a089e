"""The view of learning: one run's metrics as figures, each with all algorithms, and as tables of steps."""

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from agl.contracts import ExperimentRecord, Metric, Store, VersionScore
from agl.schemas import Record
from agl_console.figures import REWARD, Figure, Mark, Stretch, derived, figure_of, line_of, stretches_of
from agl_console.reading import run_of
from agl_console.runs import best_version, has_failures, is_made_by, rewards_of, status_of
from agl_inspect.advice.suggestions import Suggestion, read_alerts, suggestions_in
from agl_inspect.records.metrics import experiment_step
from agl_inspect.records.state import load_settings
from agl_inspect.rollouts.step_tallies import StepTally, read_tallies

STEPS = 50
"""The most steps in a table."""

METRICS = {
    "reward": "mean reward of the step's rollouts, with its 95 % interval over tasks",
    "score": "",
    "best_val_score": "",
    "kl": "distance to the first policy, nats per token",
    "entropy": "spread of the policy's next token, nats",
    "entropy_by_turn": "entropy of a rollout's first answer, second answer and so on, the mean in nats",
    "clipped": "",
    "clipped_low": "share of tokens clipped below",
    "clipped_high": "share of tokens clipped above",
    "tokens_per_rollout": "sampled tokens of a rollout, the mean",
    "truncated_share": "rollouts with an answer cut at a limit of tokens",
    "tokens": "trained tokens of an update",
    "staleness": "",
    "replay_staleness": "versions that replayed rollouts are behind, the mean",
    "groups_silent": "groups whose rollouts all got the same reward",
    "groups_dropped": "silent groups that were replaced",
    "rollouts_extra": "rollouts in place of silent ones",
    "silent_share": "rollouts that train nothing",
    "dropped_share": "rollouts that failed or had no reward",
    "evaluator_failed_share": "rollouts that failed because a reward broke",
    "unusable_answers": "answers of the optimiser's model without a usable text",
    "texts_unsent": "tuned texts that no model call contains",
    "logprob_gap": "how far the trainer's log-probabilities are from the server's, nats",
    "loss": "",
    "grad_norm": "length of the gradient before clipping",
    "collect_s": "seconds for rollouts",
    "update_s": "seconds for updates",
    "tokens_per_s": "sampled tokens per second of collecting",
    "tokens_used": "share of sampled tokens on which the step trained",
    "slots_idle_share": "share of the runner's slots without a rollout while a step collects",
    "slots": "agents that may run at once",
}
"""Metrics whose figures come first, in this order, with their meanings; they show if, and why not, the run learns."""

HEALTH = (
    "entropy",
    "entropy_by_turn",
    "kl",
    "logprob_gap",
    "groups_silent",
    "silent_share",
    "truncated_share",
    "tokens_per_rollout",
    "dropped_share",
)
"""Metrics that tell a healthy run from a sick one; a small chart of each stands below the rewards."""

LABELS = {
    "logprob_gap": "gap to the server",
    "groups_silent": "silent groups",
    "silent_share": "silent rollouts",
    "truncated_share": "truncated answers",
    "tokens_per_rollout": "answer length",
    "dropped_share": "dropped rollouts",
    "kl": "distance to the first policy",
    "grad_norm": "gradient length",
    "collect_s": "seconds for rollouts",
    "update_s": "seconds for updates",
    "tokens_per_s": "tokens per second",
    "tokens_used": "tokens that train",
    "slots_idle_share": "idle slots",
}
"""Labels of metrics."""

FIRST = list(METRICS)
MEANINGS = {name: meaning for name, meaning in METRICS.items() if meaning}


class LearningFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page.

    Attributes:
        before: The tables show steps below this one; ``None`` for the newest.
    """

    before: int | None = None


class StepTable(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The metrics of an algorithm: a row per step, the newest first, with a value or ``None`` for each name.

    ``linked`` are the steps that have rollouts.
    """

    algorithm: str
    names: list[str]
    linked: list[int]
    rows: list["StepRow"]


class StepRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The numbers of one step."""

    step: int
    values: list[float | None]


class LearningView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One run: its state, suggestions, figures, tables and settings.

    Attributes:
        suggestions: The output of ``agl metrics --suggest`` for the run.
        rewards: The figure of rewards, with published versions, roll-backs and alerts as marks; ``None`` without one.
        health: Figures that show whether the run is healthy.
        figures: Figures of all other numbers that change.
        stretches: The algorithms of the run in the order of their steps.
        events: The number of marks on that figure by their kind.
        rejected: The number of candidates that a search has refused.
        constants: The values that all steps of all algorithms share, by metric.
        meanings: Explanations of metrics, by name.
        next: The query of the page with older steps; empty if there are none.
    """

    name: str
    status: str
    agent: str
    turn: int
    live: dict[str, str]
    best: VersionScore | None
    has_failures: bool
    suggestions: list[Suggestion]
    rewards: Figure | None
    health: list[Figure]
    figures: list[Figure]
    stretches: list[Stretch]
    events: dict[str, int]
    rejected: int
    constants: dict[str, float]
    meanings: dict[str, str]
    tables: list[StepTable]
    settings: dict[str, str]
    next: dict[str, str]


async def learning_view(store: Store, name: str, chosen: LearningFilter, *, rows: int = STEPS) -> LearningView:
    """Read a run's metrics, with tables of up to ``rows`` steps; raises :class:`NotFoundError` for an unknown run."""
    record = await run_of(store, name)
    logged = await store.metrics(name, run=record.run)
    counted = {metric.algorithm for metric in logged if metric.name == "groups_silent"}
    other = [metric for metric in logged if metric.name != "silent_share" or metric.algorithm not in counted]
    tallies = await read_tallies(store, record)
    metrics = [*other, *derived(logged, tallies)]
    shown = [metric for metric in metrics if chosen.before is None or metric.step < chosen.before]
    newest = sorted({metric.step for metric in shown}, reverse=True)
    steps = newest[:rows]
    stretches = stretches_of(logged)
    drawn = [*_figures(name, metrics), *_entropy_by_turn(name, tallies, logged)]
    figures = {figure.name: replace(figure, stretches=stretches) for figure in drawn}
    rewards = figures.pop(REWARD, None)
    constants = {
        key: figure.series[0].values[0]
        for key, figure in figures.items()
        if figure.is_constant and len({line.values[0] for line in figure.series}) == 1
    }
    best = await best_version(store, record)
    marks = await marks_of(store, record, logged, best) if rewards else []
    kinds = [mark.kind for mark in marks]
    return LearningView(
        name=name,
        status=await status_of(store, record),
        agent=record.agent,
        turn=record.turn,
        live=record.live,
        best=best,
        has_failures=await has_failures(store, name),
        suggestions=await suggestions_in(store, logged),
        rewards=rewards and replace(rewards, marks=marks),
        health=[figures[key] for key in HEALTH if key in figures and key not in constants],
        figures=[figure for key, figure in figures.items() if key not in constants and key not in HEALTH],
        stretches=stretches,
        events={kind: kinds.count(kind) for kind in ("published", "best", "back", "alert")},
        rejected=int(max((metric.value for metric in logged if metric.name == "rejected"), default=0)),
        constants=constants,
        meanings=MEANINGS,
        tables=_tables([metric for metric in shown if steps and metric.step >= steps[-1]], tallies),
        settings=await load_settings(store, record),
        next={"before": str(steps[-1])} if len(newest) > rows else {},
    )


async def reward_figure(store: Store, record: ExperimentRecord, version: str) -> Figure | None:
    """Return the figure of a run's rewards with one of its versions marked; ``None`` if no reward is logged."""
    rewards = await rewards_of(store, record)
    figure = figure_of(REWARD, {record.name: rewards})
    marks = await marks_of(store, record, rewards, None)
    own = [replace(mark, kind="shown") if mark.version == version else mark for mark in marks]
    return replace(figure, marks=own) if figure.series else None


async def marks_of(
    store: Store, record: ExperimentRecord, logged: Sequence[Metric], best: VersionScore | None
) -> list[Mark]:
    """Return what happened to a run's versions, in order of the steps: published, rolled back, or an alert."""
    places = {(metric.algorithm, metric.step): experiment_step(metric) for metric in logged}
    times = sorted((metric.time, experiment_step(metric)) for metric in logged if metric.time)
    found: list[Mark] = []

    def at(time: float) -> int:
        return max((place for moment, place in times if moment <= time), default=0)

    for name in sorted(record.live):
        for each in await store.resources(name):
            is_best = best is not None and (best.name, best.version) == (name, each.version)
            place = places.get((each.algorithm, each.step or 0))
            if place is not None and not each.metadata.get("candidate") and is_made_by(record, each.version):
                words = f"highest score, {best.mean:.4g} ({best.how}): " if best and is_best else "published "
                kind, text = "best" if is_best else "published", f"{words}{name}@{each.version}"
                address, query = ["versions", name], {"version": each.version}
                found.append(
                    Mark(place=place, kind=kind, text=text, version=each.version, address=address, query=query)
                )
        moves = [move for label in await store.labels(name) for move in await store.label_moves(name, label.label)]
        for move in moves:
            if move.is_back and is_made_by(record, move.version):
                text = f"rolled {move.label} back to {name}@{move.version}"
                found.append(Mark(place=at(move.moved_at), kind="back", text=text, address=["versions", name]))
    alerts = await read_alerts(store, record.name, record.run)
    found += [
        Mark(
            place=places.get((alert.found.algorithm, alert.found.step), at(alert.time)),
            kind="alert",
            text=". To change that: ".join(filter(None, (alert.found.evidence, alert.found.change))),
            address=["rollouts"],
            query={"experiment": record.name, "algorithm": alert.found.algorithm, "step": alert.found.step}
            | ({"taught": "nothing"} if alert.found.rule == "silent-groups" else {}),
        )
        for alert in alerts
    ]
    return sorted(found, key=lambda mark: mark.place)


def _entropy_by_turn(run: str, tallies: Sequence[StepTally], logged: Sequence[Metric]) -> list[Figure]:
    """Return the figure of the entropies of first calls, second calls and so on; none for rollouts of one call."""
    places = {(metric.algorithm, metric.step): experiment_step(metric) for metric in logged}
    steps = [each for each in tallies if each.entropies and (each.algorithm, each.step) in places]
    lines = [
        line_of(
            run,
            f"turn {turn + 1}",
            [
                (each.step, places[each.algorithm, each.step], each.entropies[turn].mean)
                for each in steps
                if len(each.entropies) > turn
            ],
        )
        for turn in range(max((len(each.entropies) for each in steps), default=0))
    ]
    return [Figure(name="entropy_by_turn", series=lines)] if len(lines) > 1 else []


def _figures(run: str, metrics: Sequence[Metric]) -> list[Figure]:
    """Return a figure per metric, the known metrics first; the ends of an interval are in the figure of its metric."""
    by_name: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    drawn = [name for name in in_order(by_name) if not _is_end(name, by_name)]
    parts = {name: [m for part in (name, *_ends(name)) for m in by_name.get(part, ())] for name in drawn}
    found = [figure_of(name, {run: parts[name]}) for name in drawn]
    return [figure for figure in found if figure.series]


def _is_end(name: str, names: Collection[str]) -> bool:
    """Return true for ``NAME_low`` and ``NAME_high``, the ends of an interval, if ``NAME`` is in ``names``."""
    middle, _, end = name.rpartition("_")
    return end in ("low", "high") and middle in names


def _ends(name: str) -> tuple[str, str]:
    return f"{name}_low", f"{name}_high"


def in_order(names: Collection[str]) -> list[str]:
    """Sort metric names: known metrics first, and the ends of an interval after its metric."""

    def place(name: str) -> tuple[int, str]:
        middle = name.rpartition("_")[0] if _is_end(name, names) else name
        return FIRST.index(middle) if middle in FIRST else len(FIRST), name

    return sorted(names, key=place)


def _tables(metrics: Sequence[Metric], tallies: Sequence[StepTally]) -> list[StepTable]:
    by_algorithm: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_algorithm.setdefault(metric.algorithm, []).append(metric)
    collected = {(tally.algorithm, tally.step) for tally in tallies if tally.rollouts}
    return [_table(algorithm, found, collected) for algorithm, found in by_algorithm.items()]


def _table(algorithm: str, metrics: Sequence[Metric], collected: Collection[tuple[str, int]]) -> StepTable:
    names = in_order({metric.name for metric in metrics})
    values = {(metric.step, metric.name): metric.value for metric in metrics}
    rows = [
        StepRow(step=step, values=[values.get((step, name)) for name in names])
        for step in sorted({metric.step for metric in metrics}, reverse=True)
    ]
    linked = [row.step for row in rows if (algorithm, row.step) in collected]
    return StepTable(algorithm=algorithm, names=names, linked=linked, rows=rows)
