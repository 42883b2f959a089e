from importlib.util import find_spec

import pytest

from agl.errors import ConfigError
from agl.schemas import PromptTemplate


@pytest.mark.parametrize("name", ["self", "values", "template"])
def test_placeholder_may_have_any_name(name: str) -> None:
    assert "say hi" == PromptTemplate(template=f"say {{{name}}}").format(**{name: "hi"})


@pytest.mark.skipif(find_spec("jinja2") is None, reason="needs jinja2")
def test_value_of_any_name_reaches_a_jinja_template() -> None:
    assert "say hi" == PromptTemplate(template="say {{ word }}", engine="jinja").format(self="me", word="hi")


def test_placeholder_in_a_format_is_one_of_the_fields() -> None:
    prompt = PromptTemplate(template="{x:{w}} {y.real:{fill}>{w}}")
    assert {"x", "w", "y", "fill"} == prompt.fields
    assert "  a **1" == prompt.format(x="a".rjust(3), w=3, y=1, fill="*")
    with pytest.raises(ConfigError, match=r"needs \['fill', 'w'\] and got only \['x', 'y'\]"):
        prompt.format(x="a", y=1)


def test_missing_values_are_named() -> None:
    with pytest.raises(ConfigError, match=r"needs \['question'\] and got only \['answer'\]"):
        PromptTemplate(template="{question} {{literal}}").format(answer="a")
