"""Prompts recognised in recorded messages after their placeholders were filled."""

import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.schemas import JsonResource, PromptTemplate
from agl_algo_apo.texts.filled_templates import Filled, FilledTemplate, filled_template

WRITER = PromptTemplate(template="You are the writer. Write about {topic}.")


def recogniser(template: str) -> FilledTemplate:
    found = filled_template(PromptTemplate(template=template))
    assert found is not None
    return found


def expression(template: str) -> "re.Pattern[str]":
    """Return the regular expression with the same matches; it takes polynomial time in the text."""
    parts: list[str] = []
    named: set[str] = set()
    for literal, field, _, _ in string.Formatter().parse(template):
        parts.append(re.escape(literal))
        if field is not None:
            parts.append(".*?" if field in named or not field.isidentifier() else f"(?P<{field}>.*?)")
            named.add(field)
    return re.compile("".join(parts) + (r"\Z" if parts[-1].endswith(("*?", "*?)")) else ""), re.DOTALL)


@pytest.mark.parametrize(
    ("prompt", "text", "is_found"),
    [
        (WRITER, "You are the writer. Write about cats.", True),
        (WRITER, "You are the writer. Sing about cats.", False),
        (PromptTemplate(template="{a} and {a}"), "x and x", True),
        (PromptTemplate(template="Write {{}}: {a}"), "Write {}: x", True),
        (PromptTemplate(template="Hi {{ name }}, be kind to all.", engine="jinja"), "Hi Bo, be kind to all.", True),
        (PromptTemplate(template="Plain (.*) text", engine="plain"), "so: Plain (.*) text", True),
        (JsonResource(value=[{"role": "system", "content": "Be {how}."}]), "Be kind.", True),
    ],
)
def test_filled_template_is_recognised(prompt: PromptTemplate | JsonResource, text: str, is_found: bool) -> None:
    found = filled_template(prompt)
    assert found is not None
    assert is_found == (found.search(text) is not None)


@pytest.mark.parametrize("resource", [PromptTemplate(template=" \n"), JsonResource(value="text")])
def test_resource_that_is_no_template_or_an_empty_one_has_nothing_to_recognise(
    resource: PromptTemplate | JsonResource,
) -> None:
    assert filled_template(resource) is None


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("<{a}>", "x <1> <2>", Filled(2, 5, {"a": "1"})),
        ("<{a}>", "<< 1 >>", Filled(0, 6, {"a": "< 1 "})),
        ("{a}-{b}-", "1-2-3-", Filled(0, 4, {"a": "1", "b": "2"})),
        ("Do: {a}", "Do: 1\nDo: 2", Filled(0, 11, {"a": "1\nDo: 2"})),
        ("{a}{b}", "12", Filled(0, 2, {"a": "", "b": "12"})),
        ("{a} {a} {b.c} {d}", "1 2 3 4", Filled(0, 7, {"a": "1", "d": "4"})),
    ],
)
def test_match_starts_first_and_fills_each_placeholder_with_the_least(
    template: str, text: str, expected: Filled
) -> None:
    assert expected == recogniser(template).search(text)


def test_every_occurrence_is_replaced() -> None:
    new = recogniser("<{a}>").replace("x <1> y <2", lambda found: found.values["a"])
    assert "x 1 y <2" == new
    assert "(1)" == recogniser("{a}").replace("1", lambda found: f"({found.values['a']})")


PLACEHOLDERS = ("{x}", "{y}", "{x.z}")
PARTS = st.lists(st.sampled_from(["a", "b", "aa", "ab", "\n", "{{", "}}", *PLACEHOLDERS]), min_size=1, max_size=8)
TEXTS = st.lists(st.sampled_from(["a", "b", "aa", "ab", "\n", "{", "}", "c"]), max_size=16).map("".join)


@given(template=PARTS.map("".join).filter(str.strip), text=TEXTS)
def test_same_is_found_as_by_a_regular_expression(template: str, text: str) -> None:
    match = expression(template).search(text)
    assert (match and (*match.span(), match.groupdict())) == recogniser(template).search(text)


@given(parts=PARTS.filter(lambda parts: not {"\n", *PLACEHOLDERS}.issuperset(parts)), text=TEXTS)
def test_same_is_replaced_as_by_a_regular_expression(parts: list[str], text: str) -> None:
    template = "".join(parts)
    expected = expression(template).sub(lambda match: f"({match.groupdict()})", text)
    assert expected == recogniser(template).replace(text, lambda found: f"({found.values})")


@pytest.mark.parametrize("template", ["a".join(f"{{x{n}}}" for n in range(40)) + "!", "a{x}" * 40 + "b", "{x}"])
def test_time_is_linear_in_the_message(template: str) -> None:
    text, prompt = "a" * 1_000_000, recogniser(template)
    start = time.perf_counter()
    prompt.replace(text, lambda _: "")
    assert time.perf_counter() - start < 2.0
