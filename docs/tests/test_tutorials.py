"""The tutorials' plugins are short, complete and tested; that they work is tested with the pages' other blocks."""

import ast
import io
import tokenize
import tomllib
from pathlib import Path

import pytest

from docs.tests.conftest import INSTALL, Block, blocks_of

FOLDER = Path(__file__).parents[1] / "tutorial"
LIMITS = {"reward": 40, "tracer": 40, "store": 120, "algorithm": 40, "credit": 40, "modality": 60}
"""Lines of code that a plugin of each kind may have."""

KINDS = [kind for kind in LIMITS if (FOLDER / f"{kind}.md").exists()]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def blocks(kind: str) -> list[Block]:
    return blocks_of(FOLDER / f"{kind}.md")


def module_of(kind: str) -> str:
    """The module that the entry point names, in the first of the page's descriptions of the distribution."""
    text = next(block.text for block in blocks(kind) if block.title == "pyproject.toml")
    (module,) = tomllib.loads(text)["project"]["entry-points"]["agl"].values()
    return str(module).partition(".")[0]


def code_lines(source: str) -> int:
    """Lines with code on them: no blank ones, no comments, no docstrings."""
    strings = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    docs = {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs)


def plugin_lines(kind: str) -> int:
    """Lines of code of everything that the page's distribution installs."""
    module = module_of(kind)
    sources = [block.text for block in blocks(kind) if block.title.startswith((f"{module}.py", f"{module}/"))]
    assert sources
    return sum(code_lines(source) for source in sources if source)


def commands(kind: str) -> list[str]:
    texts = [block.text for block in blocks(kind) if block.language == "console"]
    return [line.removeprefix("$ ") for text in texts for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("kind", KINDS)
def test_plugin_is_as_short_as_promised(kind):
    assert plugin_lines(kind) <= LIMITS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_plugin_is_tested_against_its_conformance_class(kind):
    tests = "".join(block.text for block in blocks(kind) if block.title.startswith("test_"))
    bases = {base.id for node in ast.walk(ast.parse(tests)) for base in getattr(node, "bases", ())}
    assert {"PluginConformance", f"{kind.capitalize()}Conformance"} <= bases


@pytest.mark.parametrize("kind", KINDS)
def test_page_installs_tests_and_uses_its_plugin(kind):
    given = commands(kind)
    assert set(given) & set(INSTALL)
    assert [command for command in given if command.startswith("pytest")]
    assert [command for command in given if command.startswith(("agl dev", "agl run", "python"))]


def test_index_leads_to_every_kind():
    text = (FOLDER / "plugin.md").read_text(encoding="utf-8")
    assert [] == [kind for kind in KINDS if f"({kind}.md)" not in text]
    assert [] == [kind for kind in LIMITS if f"| {kind} |" not in text]


def test_only_code_is_counted():
    source = ['"""Doc.', "", 'More."""', "# comment", 'x = """a', 'b"""  # two lines', "", "def f():", '    """Doc."""']
    assert 6 == code_lines("\n".join([*source, "    return (", "        x", "    )"]))
