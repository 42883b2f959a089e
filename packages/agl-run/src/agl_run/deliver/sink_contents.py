"""Reads from the store the data that sinks show of a run: metrics, and tables of resources and rollouts.

It also prepares the configuration for display.
"""

from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from agl.contracts import Cell, RolloutQuery, SinkRow, SinkTable, SpanQuery, Store, shortened
from agl.episodes import episode_reward
from agl.schemas import TERMINAL_ROLLOUT, Json, JsonResource, PromptTemplate, Resource, ResourceVersion, to_json
from agl.stores import read_recordings
from agl.tracing import redact
from agl_inspect.advice.suggestions import Alert, read_alerts
from agl_inspect.searches import Candidate, searches_in
from agl_inspect.stores import command, without_password
from agl_run.config.sections import ExperimentConfig
from agl_run.config.training_settings import is_secret

NEWEST = 200
"""The most rows for rollouts in the rollouts' table, and for versions of one resource in the resources' table."""

LONGEST_TEXT = 8000
"""The most characters of one text in a table."""

_LONGEST_SETTING = 1000
_BY_USE = ("reward", "exporter")
_NAMED = ("policy", "resource", "algorithm", *_BY_USE)


async def read_rows(store: Store, experiment: str, run: int) -> list[SinkRow]:
    """Read a run's metrics, one row per algorithm and step, ordered by the experiment's step."""
    metrics: dict[tuple[str, int], dict[str, float]] = {}
    places: dict[tuple[str, int], tuple[int, float]] = {}
    for metric in await store.metrics(experiment, run=run):
        key = (metric.algorithm, metric.step)
        metrics.setdefault(key, {})[metric.name] = metric.value
        step = metric.step if metric.experiment_step is None else metric.experiment_step
        # The last metric of a step counts for its time.
        places[key] = (step, metric.time)
    rows = [
        SinkRow(algorithm=key[0], step=key[1], experiment_step=places[key][0], time=places[key][1], metrics=values)
        for key, values in metrics.items()
    ]
    return sorted(rows, key=lambda row: (row.place, row.algorithm, row.step))


async def read_tables(store: Store, experiment: str, run: int, *, store_url: str) -> list[SinkTable]:
    """Read the tables of versions, prompt candidates, newest rollouts, and alerts; empty tables are left out."""
    resources = [row async for row in _resources(store, experiment, run, store_url)]
    candidates = [row async for row in _candidates(store, experiment, run)]
    rollouts = [row async for row in _rollouts(store, experiment, run, store_url)]
    made = [
        SinkTable(
            name="resources",
            columns=(
                *("name", "version", "parent", "algorithm", "step", "candidate", "labels"),
                *("score", "low", "high", "tasks", "scored on", "content", "show"),
            ),
            rows=tuple(resources),
        ),
        SinkTable(
            name="candidates",
            columns=(
                *("algorithm", "candidate", "from", "how", "step", "decision", "why", "score", "low", "high"),
                *("tasks", "scored on", "rollouts", "tokens", "questions", "their tokens", "money", "text"),
            ),
            rows=tuple(candidates),
        ),
        SinkTable(
            name="rollouts",
            columns=("rollout", "mode", "algorithm", "step", "status", "reward", "show"),
            rows=tuple(rollouts),
        ),
        SinkTable(
            name="alerts",
            columns=("kind", "rule", "algorithm", "step", "time", "evidence", "change"),
            rows=tuple(_alert(alert) for alert in await read_alerts(store, experiment, run)),
        ),
    ]
    return [table for table in made if table.rows]


def shown_config(config: ExperimentConfig) -> dict[str, Json]:
    """Return an experiment's configuration without secrets and empty sections, and with algorithms keyed by name."""
    # Configurations may hold objects that only Python can pass; they are named by their type.
    plain = cast("dict[str, Any]", msgspec.to_builtins(config, enc_hook=_described, str_keys=True))
    by_name = {str(item["name"]): item for item in plain.get("algorithm", ())}
    sections = {**plain, "algorithm": by_name}
    sections |= {kind: {item["use"]: item.get("params", {}) for item in plain.get(kind, ())} for kind in _BY_USE}
    sections["exporter"] = {use: _without_paths(params) for use, params in sections["exporter"].items()}
    return {key: _section(key, value) for key, value in sections.items() if value not in ({}, [], ())}


def _without_paths(params: dict[str, Any]) -> dict[str, Any]:
    """Return an exporter's parameters, with ``url`` reduced to scheme and host because its path may be a secret."""
    url = params.get("url")
    if not isinstance(url, str):
        return params
    parts = urlsplit(url)
    return {**params, "url": f"{parts.scheme}://{parts.netloc}/***"}


def _section(key: str, value: Any) -> Json:
    """Return a section without secrets.

    In sections that are keyed by component names, a name such as ``token`` does not mark its entry as secret.
    """
    if key in _NAMED:
        return {_text(str(name)): _public(item, "") for name, item in value.items()}
    return _public(value, "")


def _described(value: object) -> str:
    return f"an object of {type(value).__name__}"


def _public(value: Any, name: str) -> Json:
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        return {_text(key): _public(item, f"{name}.{key}") for key, item in items.items()}
    if isinstance(value, list | tuple):
        return [_public(item, name) for item in cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    # By the key's name first: a secret has no form by which its value could be known.
    return "***" if value and is_secret(name) else _text(value)


def _text(value: str) -> str:
    shown = without_password(value) if "://" in value else value
    return shortened(redact(shown), _LONGEST_SETTING)


async def _resources(store: Store, experiment: str, run: int, store_url: str) -> AsyncIterator[tuple[Cell, ...]]:
    """Yield a table row for each version that the run made, and for each parent of such a version."""
    for newest in await store.resources():
        every = await store.resources(newest.name)
        own = {version.version for version in every if _is_of(version, f"{experiment}-{run}-")}
        if not own:
            continue
        # The parents stay in the table, so that its lineage has no loose ends.
        shown = own.union(version.parent for version in every if version.version in own)
        moves = await store.labels(newest.name)
        scores = {score.version: score for score in await store.scores(newest.name)}
        for version in [each for each in every if each.version in shown][-NEWEST:]:
            labels = ", ".join(sorted(move.label for move in moves if move.version == version.version))
            score = scores.get(version.version)
            measured = () if score is None else (score.mean, score.low, score.high, score.n, score.how)
            where = command("show", f"{version.name}@{version.version}", store_url=store_url)
            yield (
                *(version.name, version.version, version.parent, version.algorithm, version.step),
                *("yes" if version.metadata.get("candidate") else "", labels),
                *(measured or (None, None, None, None, "")),
                *(shortened(_content(version.resource), LONGEST_TEXT, rest=where), where),
            )


def _is_of(version: ResourceVersion, prefix: str) -> bool:
    """Return true if the run whose names begin with ``prefix`` made or initially registered this version."""
    made = f"{prefix}{version.algorithm}-{version.step}" if version.algorithm else f"{prefix}initial"
    return version.version.startswith(made)


def _content(resource: Resource) -> str:
    if isinstance(resource, PromptTemplate):
        return resource.template
    return to_json(resource.value if isinstance(resource, JsonResource) else resource).decode()


async def _candidates(store: Store, experiment: str, run: int) -> AsyncIterator[tuple[Cell, ...]]:
    records = await store.experiments(experiment)
    searches = [search for record in records for search in await searches_in(store, record) if search.run == run]
    for search in searches:
        for candidate in search.candidates:
            yield (search.algorithm, *_candidate(candidate))


def _candidate(candidate: Candidate) -> tuple[Cell, ...]:
    how, score = next(iter(candidate.scores.items()), ("", None))
    measured = (None,) * 3 if score is None else (score.mean, score.low, score.high)
    texts = candidate.texts
    whole = next(iter(texts.values())) if len(texts) == 1 else "\n\n".join(f"{k}:\n{v}" for k, v in texts.items())
    return (
        *(candidate.id, ", ".join(candidate.parents), candidate.operator, candidate.step, candidate.decision),
        *(shortened(candidate.why, LONGEST_TEXT), *measured, None if score is None else score.n, how),
        *(candidate.agent.rollouts, candidate.agent.tokens, candidate.optimizer.calls, candidate.optimizer.tokens),
        *(candidate.money, shortened(whole, LONGEST_TEXT)),
    )


def _alert(alert: Alert) -> tuple[Cell, ...]:
    found = alert.found
    texts = (shortened(text, LONGEST_TEXT) for text in (found.evidence, found.change))
    return (alert.kind, found.rule, found.algorithm, found.step, alert.time, *texts)


async def _rollouts(store: Store, experiment: str, run: int, store_url: str) -> AsyncIterator[tuple[Cell, ...]]:
    """Yield a table row for each of the run's most recently finished rollouts, newest first."""
    ends = tuple(sorted(TERMINAL_ROLLOUT))
    fields = {"experiment": experiment, "status": ends, "sort": "finished_at", "is_newest_first": True, "limit": NEWEST}
    count = 0
    query = msgspec.convert(fields, RolloutQuery)
    async for recording in read_recordings(store, query, spans=SpanQuery(kind="reward")):
        rollout, who = recording.rollout, recording.rollout.metadata
        count += 1
        # They come newest first, so the first rollout of an earlier run ends the table.
        if count > NEWEST or not rollout.rollout_id.startswith(f"{experiment}-{run}-"):
            return
        where = command("show", rollout.rollout_id, store_url=store_url)
        place = (str(who.get("algorithm", "")), cast("Cell", who.get("step")))
        yield (rollout.rollout_id, rollout.mode, *place, rollout.status, episode_reward(recording.spans), where)
