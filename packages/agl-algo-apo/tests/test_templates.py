"""The static checks: what must stay, what is rejected, and that nothing is repaired."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl.schemas import JsonResource, PromptTemplate
from agl_algo_apo.acceptance.static_checks import TextRules, check_fields, check_seed, field_names, task_text, violation

F_STRING = TextRules(
    name="p", seed=PromptTemplate(template='Answer {question} as {{"answer": 1}} for {user[name]!r:>4}.')
)
JINJA = TextRules(
    name="p", seed=PromptTemplate(template="Answer {{ question }}{% if long %} at length{% endif %}.", engine="jinja")
)
PLAIN = TextRules(name="p", seed=PromptTemplate(template="Answer {in} braces.", engine="plain"))
TOOLS = TextRules(
    name="tools",
    seed=JsonResource(value=[{"name": "find", "description": "Finds.", "args": {"k": {"type": "int", "default": 3}}}]),
)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (F_STRING, 'Now {user[name]!r:>4}: {question} -> {{"answer": 2}} {{}}'),
        (F_STRING, "{question} twice {question} {user[name]!r:>4}"),
        (JINJA, "{% if long %}Long{% endif %} {{ question|upper }} with {literal} braces"),
        (JINJA, "{% set x = question %}{{ x }}{{ long }}"),
        (PLAIN, "Anything {goes} {{here}} {"),
        (TOOLS, '[{"name":"find","description":"Finds things, at most k.","args":{"k":{"type":"int","default":3}}}]'),
    ],
)
def test_text_that_keeps_the_rules_passes(rules: TextRules, text: str) -> None:
    assert "" == violation(text, rules)


@pytest.mark.parametrize(
    ("rules", "text", "reason"),
    [
        (F_STRING, "Answer {question}.", "lost the placeholders"),
        (F_STRING, "{question} {user[name]!r:>4} {context}", "which the first version lacks"),
        (F_STRING, '{question} {user[name]!r:>4} {"answer": 1}', "first version lacks"),
        (F_STRING, "{question} {user[name]}", "lost the placeholders"),
        (F_STRING, "{question.__class__} {user[name]!r:>4}", "lost the placeholders"),
        (F_STRING, "{question} {user[name]!r:>4} {", "no valid template"),
        (F_STRING, "{question} {user[name]!r:>4} {}", "no valid template"),
        (F_STRING, "  \n", "empty"),
        (JINJA, "{{ question }}", "lost the placeholders"),
        (JINJA, "{{ question }}{{ long }}{{ secret }}", "first version lacks"),
        (JINJA, "{{ question }}{% if long %}", "no valid template"),
        (JINJA, "{{ question.__class__ }}{{ long }}", "first version lacks"),
        (JINJA, "{{ question }}{{ long }}{% include '/etc/passwd' %}", "first version lacks"),
        (TOOLS, "[]", "differs at $"),
        (TOOLS, "not json", "it is not JSON"),
        (TOOLS, '[{"name":"seek","description":"x","args":{"k":{"type":"int","default":3}}}]', "$[0].name"),
        (TOOLS, '[{"name":"find","description":"x","args":{"k":{"type":"int","default":4}}}]', "$[0].args.k.default"),
        (TOOLS, '[{"name":"find","description":7,"args":{"k":{"type":"int","default":3}}}]', "$[0].description"),
    ],
)
def test_text_that_breaks_a_rule_is_rejected_with_its_words(rules: TextRules, text: str, reason: str) -> None:
    assert reason in violation(text, rules)


def test_length_invariants_and_copies_are_checked() -> None:
    rules = TextRules(name="p", seed=PromptTemplate(template="Say yes. {q}"), invariants=("Say yes.",), max_chars=200)
    assert "Say yes" in violation("Say no. {q}", rules)
    assert "200 are allowed" in violation("Say yes. {q}" + "x" * 200, rules)
    task = task_text({"q": "Which of the two large green trains left the old station first?", "n": 3})
    copied = "Say yes. {q} As in: of the two large green trains left the old station first"
    assert "copies a task" in violation(copied, rules, shown=[task])
    assert "" == violation("Say yes. {q} Trains leave stations, and some are green.", rules, shown=[task])


@given(st.text(max_size=60))
def test_literal_braces_survive_a_round_trip(literal: str) -> None:
    template = "{question}" + literal.replace("{", "{{").replace("}", "}}")
    rules = TextRules(name="p", seed=PromptTemplate(template="{question}"))
    assert "" == violation(template, rules)
    assert "Q" + literal == PromptTemplate(template=template).format(question="Q")


def test_rules_in_words_name_placeholders_and_invariants() -> None:
    words = "\n".join(TextRules(name="p", seed=F_STRING.seed, invariants=("Be kind.",), max_chars=50).words())
    for part in ("{question}", "{user[name]!r:>4}", "at most 50", "Be kind.", "{{ or }}"):
        assert part in words


def test_fields_that_tasks_lack_are_refused_unless_the_agent_fills_them() -> None:
    tasks: Any = [{"question": "a", "more": 1}, {"question": "b"}]
    with pytest.raises(ConfigError, match="user"):
        check_fields("p", F_STRING.seed, tasks, filled=())
    check_fields("p", F_STRING.seed, tasks, filled=("user",))
    check_fields("p", F_STRING.seed, ["a", "b"], filled=())
    assert frozenset({"question", "long"}) == field_names(JINJA.seed, name="p")


def test_seed_that_is_no_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no valid template"):
        check_seed(TextRules(name="p", seed=PromptTemplate(template="{a")))
