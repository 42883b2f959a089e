"""The results of a search's steps: live versions, files for people, scores, metrics, the reason for the end."""

from typing import TYPE_CHECKING, Any

import msgspec

from agl_algo_apo.search import artifacts
from agl_algo_apo.search.progress import STOP_WORDS, StopReason
from agl_algo_apo.search.tools import SearchTools
from agl_algo_apo.search.version_scores import CandidateScore, candidate_scores
from agl_algo_apo.texts.lineage import resource_of

if TYPE_CHECKING:
    from agl.schemas import Json


async def publish_best(search: SearchTools, step: int, *, is_final: bool) -> tuple[str, ...]:
    """Make the best texts live where they are not, at every improvement or at the end; returns the versions."""
    is_new = search.progress.best != search.progress.published
    if not is_new or (search.settings.publish == "end" and not is_final):
        return ()
    before = search.lineage[search.progress.published].texts
    metadata: dict[str, Json] = {"candidate_id": search.best.id, "operator": search.best.operator}
    published: list[str] = []
    for rules in search.rules:
        text = search.best.texts[rules.name]
        if text != before[rules.name]:
            resource = resource_of(text, rules.seed)
            made = await search.context.publish(rules.name, resource, step=step, metadata=metadata)
            published.append(f"{rules.name}@{made.version}")
    search.progress.published = search.progress.best
    return tuple(published)


def current_scores(search: SearchTools) -> dict[str, CandidateScore]:
    """Return the score of every candidate that was measured, by id."""
    return candidate_scores(search.lineage, search.evaluator, seed=search.progress.seed, result=search.result)


def write_files(search: SearchTools, *, is_improved: bool) -> None:
    """Write the best texts where they are better, the lineage, and the result at the end."""
    workdir = search.context.workdir
    if is_improved or search.progress.step == 1:
        artifacts.write_best(workdir, search.best.texts)
    scores = current_scores(search)
    journal = search.journal.dump()
    rows = [
        {**msgspec.structs.asdict(c), "score": msgspec.to_builtins(scores.get(c.id)), "journal": journal.get(c.id)}
        for c in search.lineage.all()
    ]
    artifacts.write_lineage(workdir, rows)
    if search.result is not None:
        reason = {"stop_reason": search.progress.stop_reason, "stop_detail": search.progress.stop_detail}
        spent = {"spent": msgspec.structs.asdict(search.budget.spent), "texts": search.best.texts}
        artifacts.write_result(workdir, {**msgspec.structs.asdict(search.result), **reason, **spent})


def metrics_of(search: SearchTools) -> dict[str, float]:
    """Return the metrics of a step."""
    metrics: dict[str, float] = {
        "candidates": float(len(search.lineage.all())),
        "rejected": float(sum(c.status == "rejected" for c in search.lineage.all())),
        "unmeasured": float(search.evaluator.broken.total()),
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
    """Return the reason for the end with the result, in one line."""
    reason: StopReason = search.progress.stop_reason or "budget"
    detail = f" ({search.progress.stop_detail})" if search.progress.stop_detail else ""
    return f"{reason}: {STOP_WORDS[reason]}{detail}. {search.result.words if search.result else ''}".strip()


def note_scores(search: SearchTools) -> None:
    """Note in the journal the score of every candidate on the tasks of the selection, and the final ones."""
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
