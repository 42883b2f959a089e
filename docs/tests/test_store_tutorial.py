"""The store of the tutorial is as short as the page of plugins promises, and imports public names only."""

import ast
import io
import re
import tokenize

from docs.tests.conftest import blocks_of
from docs.tests.test_pages import ROOT

SOURCE = next(block.text for block in blocks_of(ROOT / "docs/tutorial/store.md") if block.title == "agl_journal.py")
PUBLIC = {"agl", "agl.contracts", "agl.errors", "agl.schemas", "agl.stores"}
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_store_has_at_most_120_lines_of_code():
    texts = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Expr)]
    docs = [node for node in texts if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline) if token.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert len(lines - {line for node in docs for line in range(node.lineno, (node.end_lineno or 0) + 1)}) <= 120


def test_store_imports_public_names_only():
    assert PUBLIC == {*re.findall(r"^from (agl[\w.]*) import", SOURCE, re.MULTILINE)}
