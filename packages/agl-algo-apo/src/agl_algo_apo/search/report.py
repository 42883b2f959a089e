"""The results of a search's steps: live versions, files for users, scores, metrics, the reason for the end.

A candidate has one score at any time, and all outputs use it: the store's versions, `lineage.jsonl`, the metrics of a
step, and `result.json`. Before the final measurement the score is the mean of all rewards on validation tasks. After
it, candidates in the result have the mean of their fresh rewards.

A version has the score of the candidate that introduced it. The live versions have the score of the published
candidate, all of whose texts are live together.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from agl.contracts import VersionScore
from agl.schemas import Json, to_json
from agl_algo_apo.measurement.estimates import Estimate
from agl_algo_apo.search.progress import STOP_WORDS, StopReason
from agl_algo_apo.texts.lineage import resource_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agl_algo_apo.acceptance.final_measurement import How
    from agl_algo_apo.search.tools import SearchTools


async def publish_best(search: SearchTools, step: int, *, is_final: bool) -> tuple[str, ...]:
    """Make the winner's texts live, at every improvement or at the end; returns the new versions."""
    is_new = search.progress.winner != search.progress.published
    if not is_new or (search.settings.publish == "end" and not is_final):
        return ()
    before = search.lineage[search.progress.published].texts
    metadata: dict[str, Json] = {"candidate_id": search.winner.id, "operator": search.winner.operator}
    published: list[str] = []
    for rules in search.rules:
        text = search.winner.texts[rules.name]
        if text != before[rules.name]:
            resource = resource_of(text, rules.seed)
            made = await search.context.publish(rules.name, resource, step=step, metadata=metadata)
            published.append(f"{rules.name}@{made.version}")
    search.progress.published = search.progress.winner
    return tuple(published)


def write_files(search: SearchTools, *, is_improved: bool) -> None:
    """Write the result files: the best texts if they have improved, the lineage, and, at the end, the result."""
    workdir = search.context.workdir
    if is_improved or search.progress.step == 1:
        write_best(workdir, search.winner.texts)
    scores = current_scores(search)
    journal = search.journal.dump()
    rows = [
        {**msgspec.structs.asdict(c), "score": msgspec.to_builtins(scores.get(c.id)), "journal": journal.get(c.id)}
        for c in search.lineage.all()
    ]
    _write(workdir / "lineage.jsonl", b"".join(to_json(row) + b"\n" for row in rows))
    if search.result is not None:
        reason = {"stop_reason": search.progress.stop_reason, "stop_detail": search.progress.stop_detail}
        spent = {"spent": msgspec.structs.asdict(search.budget.spent), "texts": search.winner.texts}
        result = to_json({**msgspec.structs.asdict(search.result), **reason, **spent})
        _write(workdir / "result.json", msgspec.json.format(result, indent=2) + b"\n")


def metrics_of(search: SearchTools) -> dict[str, float]:
    """Return the metrics of a step."""
    metrics: dict[str, float] = {
        "candidates": float(len(search.lineage.all())),
        "rejected": float(sum(c.status == "rejected" for c in search.lineage.all())),
        "unmeasured": float(search.evaluator.broken.total()),
        "unusable_answers": float(search.progress.unusable),
    }
    if search.result is not None:
        score, first = search.result.score, search.result.seed_score
        metrics |= {"score": score.mean, "score_low": score.low, "score_high": score.high, "seed_score": first.mean}
    elif search.progress.best in (scores := current_scores(search)):
        best = scores[search.progress.best]
        metrics |= {"best_val_score": best.mean, "best_val_score_low": best.low, "best_val_score_high": best.high}
    spent: dict[str, Any] = msgspec.structs.asdict(search.budget.spent)
    return metrics | {f"spent_{name}": float(value) for name, value in spent.items()}


def stop_words(search: SearchTools) -> str:
    """Return the reason why the search ended, and the result, in one line."""
    reason: StopReason = search.progress.stop_reason or "budget"
    detail = f" ({search.progress.stop_detail})" if search.progress.stop_detail else ""
    return f"{reason}: {STOP_WORDS[reason]}{detail}. {search.result.words if search.result else ''}".strip()


def note_scores(search: SearchTools) -> None:
    """Record every candidate's score on validation tasks in the journal, and the scores of the final measurement."""
    for candidate in search.lineage.all():
        rewards = search.evaluator.scores.rewards(candidate.id, "val")
        if rewards:
            search.journal.scored(candidate.id, "validation tasks", search.evaluator.estimate(rewards))
    result = search.result
    if result is None or result.how in ("selection", "first measurement"):
        return
    final = {search.progress.seed: result.seed_score, result.winner: result.score, result.beaten: result.beaten_score}
    for owner, score in final.items():
        if score is not None:
            search.journal.scored(owner, result.how, score)


def write_best(workdir: Path, texts: Mapping[str, str]) -> None:
    """Write ``best/<name>.txt`` for every tuned resource."""
    for name, text in texts.items():
        _write(workdir / "best" / f"{name}.txt", text.encode())


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)


class CandidateScore(Estimate, frozen=True, kw_only=True, omit_defaults=False):
    """The score of a candidate, and the name of the rewards from which it is computed (``how``)."""

    how: How


def current_scores(search: SearchTools) -> dict[str, CandidateScore]:
    """Return the score of every candidate that has rewards on validation tasks, by candidate id."""
    scores: dict[str, CandidateScore] = {}

    def put(candidate: str, value: Estimate, how: How) -> None:
        scores[candidate] = CandidateScore(**msgspec.structs.asdict(value), how=how)

    for candidate in search.lineage.all():
        if rewards := search.evaluator.scores.rewards(candidate.id, "val"):
            how: How = "first measurement" if candidate.id == search.progress.seed else "selection"
            put(candidate.id, search.evaluator.estimate(rewards), how)
    if (result := search.result) is not None:
        put(search.progress.seed, result.seed_score, result.how)
        put(result.winner, result.score, result.how)
        if result.beaten_score is not None:
            put(result.beaten, result.beaten_score, result.how)
    return scores


def version_scores(search: SearchTools) -> list[VersionScore]:
    """Return the score of every version whose candidate was measured."""
    progress, context, scores = search.progress, search.context, current_scores(search)
    owners: dict[tuple[str, str], str] = {}
    for candidate in search.lineage.all():
        for version in candidate.versions.items():
            owners.setdefault(version, candidate.id)  # children share unchanged versions; the first one owns them
    if progress.published != progress.seed:
        owners |= {(name, context.current(name).version): progress.published for name in context.tunes}
    return [
        VersionScore(name=name, version=version, **msgspec.structs.asdict(scores[owner]))
        for (name, version), owner in owners.items()
        if owner in scores
    ]
