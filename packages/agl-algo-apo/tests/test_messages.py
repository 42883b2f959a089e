"""Prompts of several messages: tuned as one text, with their roles and placeholders kept."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl.schemas import JsonResource, ModelCall, PromptTemplate
from agl.stores import MemoryStore
from agl_algo_apo.acceptance.static_checks import TextRules, field_names, violation
from agl_algo_apo.texts.demonstrations import Demonstration, demonstrated, is_escapable
from agl_algo_apo.texts.filled_templates import filled_template
from agl_algo_apo.texts.lineage import resource_of, text_of
from agl_run.messages import value_for_agent
from worlds.prompts import demonstrable, easy
from worlds.prompts_run import filled

from .test_demonstrations import read, record

Optimize = Callable[..., Any]

FIRST = {"role": "system", "content": "You are the clerk.\nComplete the order."}
CLERK = JsonResource(value=[FIRST, {"role": "user", "content": "{order}"}])
DOCUMENT = "=== system ===\nYou are the clerk.\nComplete the order.\n=== user ===\n{order}"
RULES = TextRules(name="clerk_prompt", seed=CLERK)


def test_text_has_a_line_with_the_role_before_each_message() -> None:
    assert DOCUMENT == text_of(CLERK, name="clerk_prompt")
    assert CLERK == resource_of(DOCUMENT, CLERK)


CONTENTS = st.text().filter(lambda text: "===" not in text)


@given(given=st.lists(st.tuples(st.sampled_from(["system", "developer", "user", "assistant"]), CONTENTS), min_size=1))
def test_messages_are_read_back_as_they_were_written(given: list[tuple[str, str]]) -> None:
    prompt = JsonResource(value=[{"role": role, "content": content} for role, content in given])
    assert prompt == resource_of(text_of(prompt, name="p"), prompt)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DOCUMENT.replace("clerk.", "clerk. Write dates as EUR."), ""),
        (
            DOCUMENT.replace("=== user ===\n", ""),
            "the text has messages of ['system'], and the first version of ['system', 'user']: the roles and their "
            "order stay",
        ),
        (
            DOCUMENT.replace("user ===", "manager ==="),
            "the text has messages of ['system', 'manager'], and the first version of ['system', 'user']: the roles "
            "and their order stay",
        ),
        (
            "=== system ===\nComplete {order}.\n=== user ===\nGo on.",
            "message 1 (system) has the placeholders ['order'], and [] must stay",
        ),
        (f"{DOCUMENT} {{name}}", "message 2 (user) has the placeholders ['name', 'order'], and ['order'] must stay"),
        (
            "You are the clerk. {order}",
            "the text is no valid template: it does not start with a line that names a role, such as '=== system ==='",
        ),
        (DOCUMENT + " }", "the text is no valid template: Single '}' encountered in format string"),
    ],
)
def test_roles_and_the_placeholders_of_each_message_must_stay(text: str, reason: str) -> None:
    assert reason == violation(text, RULES)


def test_rules_of_messages_are_told_to_the_editor() -> None:
    words = RULES.words()
    assert (
        "- It is a list of messages: keep these lines in this order, each before its text: === system ===, " in words[0]
    )
    assert "- Keep exactly these placeholders, written exactly like this: {order}." in words
    assert not [line for line in words if "JSON" in line]
    assert frozenset({"order"}) == field_names(CLERK, name="clerk_prompt")


def test_calls_that_read_the_first_message_are_known_as_calls_of_the_prompt() -> None:
    prompt = filled_template(CLERK)
    assert prompt is not None
    assert prompt.search("You are the clerk.\nComplete the order.")
    assert not prompt.search("You are the checker.")


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "manager", "content": "Hi."}, "message 2 of the prompt 'clerk_prompt' has the role 'manager'"),
        (
            {"role": "user", "content": "a\n=== user ==="},
            "message 2 of the prompt 'clerk_prompt' has the line '=== user",
        ),
    ],
)
def test_messages_that_cannot_be_tuned_are_refused_at_the_start(
    optimize: Optimize, message: dict[str, str], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        optimize(easy(1), resources={"clerk_prompt": JsonResource(value=[FIRST, message])})


@pytest.mark.parametrize("use", ["apo", "random"])
def test_search_tunes_messages_and_agents_get_them_ready_to_fill(optimize: Optimize, use: str) -> None:
    world, store = easy(1), MemoryStore("memory://")
    run = optimize(world, use=use, resources={"clerk_prompt": CLERK}, store=store, budget=300)
    if use == "apo":
        assert world.gap_closed(run.best) > 0.5
    assert run.best["clerk_prompt"].startswith("=== system ===\nYou are the clerk.\n")
    for version in asyncio.run(store.resources("clerk_prompt")):
        assert not isinstance(version.resource, PromptTemplate)
        assert ["system", "user"] == [message["role"] for message in version.resource.value]
    live = asyncio.run(store.resource("clerk_prompt", run.fit.resources["clerk_prompt"])).resource
    assert run.best["clerk_prompt"] == text_of(live, name="clerk_prompt")


SHOWN = Demonstration(input="2 {beds}", output='{"room": 7}', rollout="r-1", task=0)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (
            "=== system ===\nBe kind.\n=== user ===\nThe order: {order}",
            "=== system ===\nBe kind.\n=== user ===\nThe order: 2 {{beds}}\n=== assistant ===\n"
            '{{"room": 7}}\n=== user ===\nThe order: {order}',
        ),
        (
            "=== user ===\nHi\n=== assistant ===\nHello\n=== user ===\n{a} and {b}",
            "=== user ===\nHi\n=== assistant ===\nHello\n=== user ===\n2 {{beds}}\n=== assistant ===\n"
            '{{"room": 7}}\n=== user ===\n{a} and {b}',
        ),
        (
            "=== system ===\nBe kind.",
            '=== system ===\nBe kind.\n=== user ===\n2 {{beds}}\n=== assistant ===\n{{"room": 7}}',
        ),
        ("no messages", "no messages"),
        ("=== user ===\n{broken", "=== user ===\n{broken"),
    ],
)
def test_demonstrations_are_pairs_of_messages_before_the_last_question(first: str, expected: str) -> None:
    assert expected == demonstrated(first, [SHOWN], like=CLERK)


@given(said=st.text(min_size=1), answer=st.text(min_size=1))
def test_agents_get_demonstrations_as_they_were_recorded(said: str, answer: str) -> None:
    shown = Demonstration(input=said, output=answer, rollout="r-1", task=0)
    if not is_escapable(shown, like=CLERK):
        assert "===" in shown.text
        return
    prompt = value_for_agent(resource_of(demonstrated(DOCUMENT, [shown], like=CLERK), CLERK))
    assert [
        FIRST,
        {"role": "user", "content": said},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "three beds"},
    ] == prompt.format(order="three beds")


def test_question_of_a_demonstration_is_what_filled_the_last_user_message() -> None:
    asked = [FIRST, {"role": "user", "content": "two beds"}, {"role": "assistant", "content": "Room 7"}]
    call = ModelCall(
        request_id="1",
        dialect="chat",
        model="m",
        request={"messages": [*asked, {"role": "user", "content": "one bed"}]},
        response={"choices": [{"message": {"role": "assistant", "content": "Room 3"}}]},
    )
    store = MemoryStore("memory://")
    asyncio.run(record(store, {"wish": "a bed"}, reported={"room": 3}, calls=[call]))
    found = read(store, CLERK)
    assert found is not None
    assert ("one bed", "Room 3") == (found.input, found.output)


def test_demonstrations_in_messages_teach_what_no_feedback_says(optimize: Optimize) -> None:
    world, store = demonstrable(2), MemoryStore("memory://")
    settings: dict[str, Any] = {"budget": 700, "demonstrations": {"most": 4}, "seed": 2}
    run = optimize(world, resources={"clerk_prompt": CLERK}, store=store, **settings)
    live = asyncio.run(store.resource("clerk_prompt", run.fit.resources["clerk_prompt"])).resource
    roles = [message["role"] for message in live.value]
    assert ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"] == roles
    assert 4 <= len(roles) <= 2 + 2 * 4
    text = filled(value_for_agent(live), "")
    assert world.gap_closed({"clerk_prompt": text}) > 0.8  # without demonstrations below 0.6
    drawn = [row for row in run.lineage if row.get("operator") == "demonstrate"]
    for row in drawn:
        assert [each["rollout"] for each in row["demonstrations"]["clerk_prompt"]] == row["journal"]["evidence"]
        checks = [check["name"] for check in row["journal"]["checks"]]
        begun = 1 if row["status"] == "proposed" else 2  # the search may end before a trial
        assert ["static checks", "trial on failures of its parent"][:begun] == checks[:2]
