"""Demonstrations are drawn from recorded good runs, and must pass the same checks and races as instructions."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl import semconv
from agl.errors import ConfigError
from agl.schemas import ModelCall, Outcome, PromptTemplate, Rollout, Span, new_span_id
from agl.stores import MemoryStore
from agl_algo_apo.acceptance.static_checks import ValidationMarks
from agl_algo_apo.measurement.scores import Measured, Scores
from agl_algo_apo.proposals.demonstrator import GoodRun, good_runs, read_demonstration
from agl_algo_apo.texts.demonstrations import HEADING, Demonstration, demonstrated, is_escapable
from agl_algo_apo.texts.lineage import PromptCandidate
from worlds.prompts import demonstrable, easy
from worlds.prompts_optimizer import ScriptedOptimizer

Optimize = Callable[..., Any]

SHOWN = Demonstration(input="2 + 2", output='{"sum": 4}', rollout="r-1", task=0)
CLERK = PromptTemplate(template="You are the clerk.\n{order}")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            PromptTemplate(template="Add up.\n{numbers}"),
            'Add up.\n\nExamples of good answers:\n\nInput: 2 + 2\nOutput: {{"sum": 4}}\n\n{numbers}',
        ),
        (
            PromptTemplate(template="Write {{}} around {numbers}."),
            'Examples of good answers:\n\nInput: 2 + 2\nOutput: {{"sum": 4}}\n\nWrite {{}} around {numbers}.',
        ),
        (
            PromptTemplate(template="Add up.\n{{ numbers }}", engine="jinja"),
            'Add up.\n\n{% raw %}Examples of good answers:\n\nInput: 2 + 2\nOutput: {"sum": 4}{% endraw %}\n\n'
            "{{ numbers }}",
        ),
        (
            PromptTemplate(template="Add up.", engine="plain"),
            'Add up.\n\nExamples of good answers:\n\nInput: 2 + 2\nOutput: {"sum": 4}\n',
        ),
    ],
)
def test_demonstrations_stand_before_the_first_placeholder_or_at_the_end(prompt: PromptTemplate, expected: str) -> None:
    assert expected == demonstrated(prompt.template, [SHOWN], like=prompt)


@given(said=st.text(min_size=1), answer=st.text(min_size=1), engine=st.sampled_from(["f-string", "jinja", "plain"]))
def test_filled_prompt_shows_demonstrations_as_they_were_recorded(said: str, answer: str, engine: Any) -> None:
    place = {"f-string": "{order}", "jinja": "{{ order }}", "plain": "the order"}[engine]
    prompt = PromptTemplate(template=f"You are the clerk.\n{place}", engine=engine)
    shown = Demonstration(input=said, output=answer, rollout="r-1", task=0)
    if engine == "jinja":
        pytest.importorskip("jinja2", reason="needs jinja2")
        said, answer = (re.sub(r"\r\n?", "\n", text) for text in (said, answer))  # as jinja reads every template
    if is_escapable(shown, like=prompt):
        whole = msgspec.structs.replace(prompt, template=demonstrated(prompt.template, [shown], like=prompt))
        filled = whole.format(order="the order")
        assert said in filled
        assert answer in filled
        assert f"\n\n{HEADING}\n\nInput:" in filled


def candidate(name: str) -> PromptCandidate:
    return PromptCandidate(id=name, texts={"clerk_prompt": CLERK.template})


def test_good_runs_are_the_best_of_their_task_and_above_the_mean() -> None:
    scores = Scores()
    measured = [("a", 0, 0.9), ("b", 0, 0.6), ("a", 1, 0.5), ("a", 2, 0.8), ("b", 2, 0.8)]
    for owner, task, reward in measured:
        scores.put(owner, "train", task, 0, Measured(reward=reward, rollout=f"{owner}-{task}"))
        scores.put(owner, "val", task, 0, Measured(reward=1.0, rollout=f"val-{owner}-{task}"))
        scores.put(owner, "test", task, 0, Measured(reward=1.0, rollout=f"test-{owner}-{task}"))
    scores.put("a", "train", 3, 0, Measured(reward=1.0, rollout="a-3", status="failed"))
    found = good_runs([candidate("a"), candidate("b")], scores, above=0.5)
    assert ["a-0", "b-2"] == [run.measured.rollout for run in found]


class Context:
    """The part of an algorithm's context that reading a run needs."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store


def read(store: MemoryStore, prompt: PromptTemplate = CLERK) -> Demonstration | None:
    context: Any = Context(store)
    run = GoodRun(0, candidate("a"), Measured(reward=1.0, rollout="r"))
    return asyncio.run(read_demonstration(context, run, resource=prompt))


async def record(store: MemoryStore, task: Any, *, reported: Any, calls: Sequence[ModelCall] = ()) -> None:
    await store.enqueue([Rollout(rollout_id="r", task=task, experiment="e", hidden=("expected", "why"))])
    (claim,) = await store.claim(worker="w")
    attempt = claim.attempt.attempt_id
    made = [
        {"name": "object answer", "attributes": {semconv.OBJECT: reported}},
        *({"name": "c", "call": c} for c in calls),
    ]
    spans = [Span(rollout_id="r", attempt_id=attempt, span_id=new_span_id(), **fields) for fields in made]
    await store.append_spans(spans)
    await store.finish([Outcome(attempt_id=attempt, status="succeeded")])


WORDS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)


@settings(max_examples=30)
@given(task=st.dictionaries(WORDS, st.one_of(WORDS, st.lists(WORDS)), min_size=1), secret=WORDS, hidden=st.data())
def test_hidden_fields_never_reach_a_demonstration(task: Any, secret: str, hidden: Any) -> None:
    kept = {key: value for key, value in task.items() if key not in ("expected", "why")}
    secrets = {key: f"<{secret}-{key}>" for key in hidden.draw(st.sets(st.sampled_from(["expected", "why"])))}
    store = MemoryStore("memory://")
    asyncio.run(record(store, {**kept, **secrets}, reported={"said": kept}))
    found = read(store)
    assert found is not None
    assert (kept, {"said": kept}) == (json.loads(found.input), json.loads(found.output))


def call(said: str, answer: str | None) -> ModelCall:
    message = {"role": "assistant", "content": answer, **({} if answer else {"tool_calls": [{"id": "1"}]})}
    return ModelCall(
        request_id=said,
        dialect="chat",
        model="m",
        request={"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": said}]},
        response={"choices": [{"message": message}]},
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (CLERK, ("two beds", "Room 7 {small}")),
        (PromptTemplate(template="Check {a} against {b}"), ("a: 7\nb: 8", "fine")),
        (PromptTemplate(template="Be kind.", engine="plain"), ('{"wish":"beds"}', "bye")),
        (PromptTemplate(template="Nobody reads {this}"), ('{"wish":"beds"}', '{"room":7}')),
    ],
)
def test_demonstration_is_of_the_last_answer_to_a_call_that_read_the_prompt(
    prompt: PromptTemplate, expected: tuple[str, str]
) -> None:
    store = MemoryStore("memory://")
    calls = [
        call("You are the clerk.\none bed", "Room 3"),
        call("You are the clerk.\ntwo beds", "Room 7 {small}"),
        call("You are the clerk.\nthree beds", None),
        call("Check 7 against 8", "fine"),
        call("hello", "bye"),
    ]
    asyncio.run(record(store, {"wish": "beds", "expected": "x"}, reported={"room": 7}, calls=calls))
    found = read(store, prompt)
    assert found is not None
    assert expected == (found.input, found.output)


def test_run_that_is_no_longer_in_the_store_shows_nothing() -> None:
    assert None is read(MemoryStore("memory://"))


TRAIN = [{"id": "train-1", "question": "How many beds has room 7?"}, {"id": "train-2", "question": "Is it 42?"}]
VAL: list[Any] = [
    {"id": "val-1", "question": "Which of the rooms on the second floor has a view of the lake and two beds?"},
    {"id": "val-2", "question": "Is it far?"},
]


@pytest.mark.parametrize(
    ("said", "answer", "found"),
    [
        ("How many beds has room 7?", "7 has 42", ""),
        ("Is it 42?", "As for val-2: no", "'val-2'"),
        ("Look", "the rooms on the second floor has a view of what", "'on the second floor has a view of'"),
        ('{"id":"val-2","question":"Is it far?"}', "no", "'val-2'"),
        ("val-2\nIs it far?", "no", "'val-2'"),
    ],
)
def test_demonstration_that_holds_a_validation_task_is_refused(said: str, answer: str, found: str) -> None:
    shown = Demonstration(input=said, output=answer, rollout="r-1", task=0)
    reason = ValidationMarks.of(VAL, TRAIN).violation({"p": (shown,)})
    assert (f"the demonstration from r-1 holds a validation task: {found}" if found else "") == reason


def test_demonstrations_teach_what_no_feedback_says(optimize: Optimize) -> None:
    world = demonstrable(2)
    without, run = (optimize(world, budget=700, demonstrations={"most": n}, folder=f"run{n}", seed=2) for n in (0, 4))
    assert world.gap_closed(without.best) < 0.7
    assert world.gap_closed(run.best) > 0.85
    assert not [row for row in without.lineage if row.get("demonstrations") or HEADING in row["texts"]["clerk_prompt"]]
    assert HEADING in run.best["clerk_prompt"]
    assert len(run.paid) <= 700
    rollouts = {rollout.rollout_id: rollout for rollout in run.rollouts}
    drawn = [row for row in run.lineage if row.get("operator") == "demonstrate"]
    assert drawn
    for row in drawn:
        shown = row["demonstrations"]["clerk_prompt"]
        assert [each["rollout"] for each in shown] == row["journal"]["evidence"]
        assert {"train"} == {rollouts[each["rollout"]].mode for each in shown}
        assert 0 < len(shown) <= 4
        assert all("expected" not in each["input"] and "val-" not in row["texts"]["clerk_prompt"] for each in shown)
        checks = row["journal"]["checks"]
        assert ["static checks", "trial on failures of its parent"] == [check["name"] for check in checks[:2]]
        if row["status"] == "pool":
            assert any("race" in c["name"] and c["has_passed"] and c["gain"]["mean"] > 0 for c in checks)
    deleted = [row["critique"] for row in run.lineage if row.get("operator") == "delete"]
    assert any(words.startswith("without 'the demonstration from orders-1-apo-") for words in deleted)


def test_editor_neither_sees_nor_loses_demonstrations(optimize: Optimize) -> None:
    asked: list[str] = []

    class Listener(ScriptedOptimizer):
        def respond(self, request: Any) -> Any:
            asked.append(request.last_text)
            return super().respond(request)

    run = optimize(demonstrable(2), budget=500, demonstrations={"most": 4}, script=Listener(), seed=2)
    known = {row["id"]: row for row in run.lineage}
    heirs = [row for row in run.lineage if row.get("operator") in ("edit", "merge") and row.get("demonstrations")]
    assert heirs
    for row in heirs:
        assert known[row["parents"][0]]["demonstrations"] == row["demonstrations"]
        assert HEADING in row["texts"]["clerk_prompt"]
    assert all(HEADING not in text and "Write no examples" in text for text in asked)


def test_characters_of_demonstrations_are_bounded_and_none_is_cut(optimize: Optimize) -> None:
    run = optimize(demonstrable(3), budget=300, demonstrations={"most": 9, "max_chars": 300}, seed=3)
    drawn = [row["demonstrations"]["clerk_prompt"] for row in run.lineage if row.get("demonstrations")]
    assert drawn
    for shown in drawn:
        assert sum(len(f"Input: {each['input']}\nOutput: {each['output']}") for each in shown) <= 300
        assert all(json.loads(each["output"])["fields"] for each in shown)


def test_demonstrations_of_training_tasks_that_repeat_validation_tasks_cost_no_rollout(optimize: Optimize) -> None:
    world = demonstrable(1)
    leaked: list[Any] = [{**task, "expected": dict.fromkeys(task["expected"], "EUR")} for task in world.val]
    run = optimize(world, train=leaked, budget=300, demonstrations={"most": 2})
    drawn = [row for row in run.lineage if row.get("operator") == "demonstrate"]
    assert drawn
    assert {"rejected"} == {row["status"] for row in drawn}
    assert all('holds a validation task: \'{"order":"val-' in row["reason"] for row in drawn)
    assert all("agent" not in row["journal"] for row in drawn)


def test_negative_number_of_demonstrations_is_refused(optimize: Optimize) -> None:
    with pytest.raises(ConfigError, match=r"demonstrations\.most is -1; write a whole number of at least 0"):
        optimize(easy(1), demonstrations={"most": -1})
