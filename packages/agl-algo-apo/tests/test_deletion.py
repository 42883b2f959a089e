"""Texts lose what only fits the training tasks: memorised answers, clutter, and lines that a merge carried along."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.schemas import PromptTemplate
from agl_algo_apo.acceptance.deletion import changes, without
from agl_algo_apo.acceptance.static_checks import identifiers_of
from agl_algo_apo.measurement.evaluation import Evaluator
from worlds.prompts import LINE, NOTE, cluttered, easy, line_of, memorising
from worlds.prompts_optimizer import ScriptedOptimizer

Optimize = Callable[..., Any]

FIRST = "You are the clerk.\nComplete the order.\n{order}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FIRST, []),
        ("You are the clerk.\nComplete the order.\nA.\nB.\n{order}", ["A.", "B."]),
        ("You are a clerk.\nComplete the order.\nA.\n{order}", ["You are a clerk.", "A."]),
        ("You are the clerk.\n{order}", []),
    ],
)
def test_changes_are_added_lines_and_replaced_ones(text: str, expected: list[str]) -> None:
    assert expected == [change.key for change in changes(FIRST, text)]


def test_change_of_a_text_of_one_line_is_a_sentence() -> None:
    found = changes("You are a clerk. Be kind.", "You are a clerk. Write dates as EUR. Be kind.")
    assert [("Write dates as EUR.", "You are a clerk. Be kind.")] == [(c.key, c.without) for c in found]


@given(
    added=st.lists(st.sampled_from("ABCDEFGH"), unique=True, max_size=6), places=st.lists(st.integers(0, 3), min_size=6)
)
def test_text_without_all_of_its_added_lines_is_the_first_one(added: list[str], places: list[int]) -> None:
    lines = FIRST.split("\n")
    for line, place in zip(added, places, strict=False):
        lines.insert(place, f"{line}.")
    first, text = f"{FIRST}\n", "\n".join([*lines, ""])
    keys = {change.key for change in changes(first, text)}
    assert {f"{line}." for line in added} == keys
    assert first == reduce(lambda left, key: without(first, left, key), sorted(keys), text)


def test_identifiers_are_words_with_a_digit_that_one_training_task_has_and_no_other() -> None:
    train = [{"ticket": "T-17", "about": "2 beds, ISO 8601"}, {"ticket": "T-18", "about": "beds", "answer": "A42"}]
    others = [{"ticket": "V-1", "about": "ISO 8601"}]
    assert {"t-17", "t-18"} == identifiers_of(train, others, hidden=("answer",))


def test_text_that_names_a_single_training_task_costs_no_rollout(optimize: Optimize) -> None:
    world = memorising(1)
    run = optimize(world, budget=400, script=ScriptedOptimizer(memorises=world.memorises))
    noted = [row for row in run.lineage if any(NOTE.search(text) for text in row["texts"].values())]
    assert noted
    assert {"rejected"} == {row["status"] for row in noted}
    assert all("the text names a single training task: 'train-" in row["reason"] for row in noted)
    assert world.gap_closed(run.best) > 0.5


def test_lines_that_only_help_on_training_tasks_are_taken_out(optimize: Optimize) -> None:
    world = msgspec.structs.replace(cluttered(2), noise=0.0)
    run = optimize(world, budget=700)
    local = {(rule.field, rule.style) for rule in world.local}
    tried = [row for row in run.lineage if local & {*LINE.findall(row["texts"]["clerk_prompt"])}]
    assert tried
    assert not local & {*LINE.findall(run.best["clerk_prompt"])}
    assert world.gap_closed(run.best) > 0.9


def test_measurements_of_one_step_have_purposes_of_their_own(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollout ids contain the purpose, so equal purposes with different tasks would share rollouts."""
    asked: list[tuple[int, str]] = []
    measure = Evaluator.measure

    async def listen(self: Evaluator, jobs: Any, *, step: int, purpose: str) -> None:
        asked.append((step, purpose))
        await measure(self, jobs, step=step, purpose=purpose)

    monkeypatch.setattr(Evaluator, "measure", listen)
    optimize(msgspec.structs.replace(cluttered(2), noise=0.0), budget=600)
    assert [purpose for _, purpose in asked if purpose.startswith("prune")]
    assert sorted(set(asked)) == sorted(asked)


def test_every_line_that_a_winner_keeps_lost_something_when_it_was_taken_out(optimize: Optimize) -> None:
    world = msgspec.structs.replace(easy(3), noise=0.0)
    useless = [line_of("weather", "EUR"), line_of("colour", "EUR")]
    useful = [rule.line for rule in world.rules[:2]]
    text = world.seeds()["clerk_prompt"].template

    class Stuffer(ScriptedOptimizer):
        """An optimiser that adds every rule that it knows at once."""

        def answer(self, text: str, *, model: str = "editor", seed: Any = None) -> str:
            said = super().answer(text, model=model, seed=seed)
            stuffing = "\n".join([*useless, *useful, "{order}"])
            return said.replace("{order}", stuffing) if useless[0] not in said else said

    run = optimize(world, resources={"clerk_prompt": PromptTemplate(template=text)}, budget=500, script=Stuffer())
    undone = [row for row in run.lineage if row.get("operator") == "delete"]
    assert undone
    assert not [line for line in useless if line in run.best["clerk_prompt"]]
    assert all(line in run.best["clerk_prompt"] for line in useful)


def test_search_that_still_improves_tests_no_line_before_its_end(optimize: Optimize) -> None:
    run = optimize(budget=200)
    assert {run.progress["step"]} == {row["step"] for row in run.lineage if row.get("operator") == "delete"}


def test_test_tasks_take_no_part_in_the_search(optimize: Optimize) -> None:
    run = optimize(budget=300, validation_limit=0)
    ran: dict[bool, set[str]] = {True: set(), False: set()}
    for rollout in run.paid:
        if rollout.mode == "val" and rollout.metadata["algorithm"] == "apo":
            ran["-final-" in rollout.rollout_id].add(str(rollout.task))
    assert (8, 24) == (len(ran[True]), len(ran[False]))
    assert not ran[True] & ran[False]
    assert ("test tasks", 8) == (run.result["how"], run.result["score"]["n"])
    assert "on 8 test tasks, which took no part in the search" in run.stop_reason


def test_few_validation_tasks_are_all_searched_with_and_the_report_is_of_fresh_rollouts(optimize: Optimize) -> None:
    world = easy(1)
    run = optimize(world, val=world.val[:16], budget=200)
    assert "fresh rollouts" == run.result["how"]


@pytest.mark.parametrize(("two_models", "kinds"), [(False, {"improve"}), (True, {"critique", "edit"})])
def test_one_question_makes_a_proposal_unless_another_model_criticises(
    optimize: Optimize, two_models: bool, kinds: set[str]
) -> None:
    asked: list[str] = []

    class Listener(ScriptedOptimizer):
        def respond(self, request: Any) -> Any:
            asked.append(request.last_text.splitlines()[0].removeprefix("# Job: "))
            return super().respond(request)

    run = optimize(budget=150, script=Listener(), two_models=two_models)
    assert kinds == {*asked} - {"merge"}
    edits = [row for row in run.lineage if row.get("operator") == "edit"]
    assert edits
    assert all("Advice: Write the " in row["critique"] for row in edits)


@pytest.mark.parametrize("seed", [214, 219])
def test_line_is_tested_if_the_text_without_it_is_in_the_pool(optimize: Optimize, seed: int) -> None:
    world = cluttered(seed)
    run = optimize(world, budget=600, seed=seed, script=ScriptedOptimizer(seed=seed))
    first = world.seeds()["clerk_prompt"].template
    pool = {row["texts"]["clerk_prompt"] for row in run.lineage if row["status"] == "pool"}
    rest = {change.key for change in changes(first, run.best["clerk_prompt"]) if change.without in pool}
    assert rest <= {*run.progress["proven"]["clerk_prompt"]}


def test_text_of_the_pool_without_a_useful_line_remains_a_parent(optimize: Optimize) -> None:
    run = optimize(msgspec.structs.replace(easy(1), noise=0.0), budget=80, branch_factor=1)
    assert run.progress["proven"]
    assert "pool" == run.lineage[0]["status"]
