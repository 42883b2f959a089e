"""Only texts that the gate calls better than the first prompt are published; the error is that of the whole search."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agl.errors import ConfigError
from agl_algo_apo.acceptance.proof import gate_of, warning_of
from agl_algo_apo.measurement.estimates import Range
from agl_algo_apo.measurement.scores import FRESH, Measured, Scores
from agl_algo_apo.search.progress import SearchProgress
from agl_algo_apo.search.settings import Scoring
from worlds.prompts import cluttered, easy

Optimize = Callable[..., Any]


def search(raced: Sequence[str], scores: Scores | None = None, *, error: float = 0.2) -> Any:
    """Return the parts of a search that the gate reads, with two validation tasks and one test task."""
    return SimpleNamespace(
        progress=SearchProgress(seed="first", raced=list(raced)),
        settings=SimpleNamespace(scoring=Scoring(error=error)),
        evaluator=SimpleNamespace(scores=scores or Scores(), range=Range()),
        order=(1, 0),
        test=(2,),
    )


def test_errors_of_all_candidates_add_up_to_that_of_the_search() -> None:
    names = [f"c{number}" for number in range(2000)]
    errors = [gate_of(search(names), SimpleNamespace(id=name)).error for name in names]  # pyright: ignore[reportArgumentType] - only the id is read
    assert 0.19 < sum(errors) < 0.2
    assert 1 == len(set(errors[:5]))
    assert errors[5] == pytest.approx(errors[4] / 4)


def test_gate_reads_each_task_once_with_the_mean_of_its_rollouts() -> None:
    scores = Scores()
    for owner, split, task, repeat, reward in (
        ("first", "val", 0, 0, 0.0),
        ("first", "val", 1, 0, 0.0),
        ("c", "val", 0, 0, 1.0),
        ("c", "val", 0, FRESH, 0.5),
        ("c", "val", 0, 2, 0.0),
        ("first", "test", 2, 0, 0.25),
        ("c", "test", 2, 0, 0.75),
    ):
        scores.put(owner, split, task, repeat, Measured(reward=reward, rollout="r"))  # pyright: ignore[reportArgumentType] - "val" and "test" are splits
    gate = gate_of(search(["c"], scores), SimpleNamespace(id="c"))  # pyright: ignore[reportArgumentType] - only the id is read
    assert (2, 0.5) == (gate.count, gate.mean), "task 1 was not run, and task 0 has the mean of 0.5 and 0.5"


@pytest.mark.parametrize("use", ["apo", "gepa"])
def test_no_text_is_published_where_none_can_be_better(optimize: Optimize, use: str) -> None:
    if use == "gepa":
        pytest.importorskip("gepa", reason="needs gepa")
    for seed in (103, 104):
        world = msgspec.structs.replace(cluttered(seed), noise=0.25)
        first = dict(world.solution())
        run = optimize(world, use=use, resources=first, budget=300, seed=seed, folder=f"run-{seed}")
        assert run.best == {name: prompt.template for name, prompt in first.items()}
        assert "orders-1-initial" == run.fit.resources["clerk_prompt"]


def test_text_without_proof_stays_unpublished_and_is_reported_with_its_evidence(optimize: Optimize) -> None:
    world = easy(1)
    run = optimize(world, budget=250, scoring={"error": 1e-6})
    assert "orders-1-initial" == run.fit.resources["clerk_prompt"]
    assert run.progress["winner"] == run.progress["seed"] == run.result["winner"]
    best = next(row for row in run.lineage if row["id"] == run.result["beaten"])
    assert world.gap_closed(best["texts"]) > 0.5
    assert "the first prompt stays, with a score of 0." in run.stop_reason
    assert "; over all tasks, cannot be told apart, " in run.stop_reason
    assert " would do; a proof takes evidence of over 1,000,000 to 1" in run.stop_reason


def test_error_of_zero_is_refused(optimize: Optimize) -> None:
    with pytest.raises(ConfigError, match=r"scoring\.error"):
        optimize(budget=250, scoring={"error": 0})


@pytest.mark.parametrize("use", ["apo", "gepa", "random"])
def test_search_with_too_few_tasks_for_a_proof_warns_and_publishes_nothing(optimize: Optimize, use: str) -> None:
    if use == "gepa":
        pytest.importorskip("gepa", reason="needs gepa")
    world = easy(1)
    run = optimize(world, use=use, val=world.val[:6], budget=200)
    assert any(
        "6 validation tasks are too few to prove any text better than the first one" in text for text in run.said
    )
    assert any("Give at least 9 tasks " in text for text in run.said)
    assert "orders-1-initial" == run.fit.resources["clerk_prompt"]
    assert run.best == {name: prompt.template for name, prompt in world.seeds().items()}
    if use != "random":
        assert f"the best candidate, {run.result['beaten']}, has " in run.stop_reason


@pytest.mark.parametrize(("tasks", "error"), [(9, 0.2), (6, 1)])
def test_search_that_may_prove_or_need_not_warns_of_nothing(tasks: int, error: float) -> None:
    assert not warning_of(error, tasks)
