"""Lines of code of every package beside its budget: ``nox -s size``.

Docstrings, comments and blank lines do not count. A budget is raised in ``pyproject.toml``, so that growth is a
decision of a reviewed change.
"""

import ast
import io
import tokenize
import tomllib
from pathlib import Path

from tools.public import ROOT

_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)


def lines_of(source: str) -> int:
    """Return the number of lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def sizes() -> dict[str, int]:
    """Return the lines of code of every package; templates belong to users and do not count."""
    return {
        folder.name: sum(lines_of(path.read_text(encoding="utf-8")) for path in _modules(folder))
        for folder in sorted(ROOT.glob("packages/*"))
        if (folder / "pyproject.toml").is_file()
    }


def budgets() -> dict[str, int]:
    """Return the greatest number of lines of every package, as ``pyproject.toml`` has them."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["agl"]["size"]


def _modules(folder: Path) -> list[Path]:
    return [path for path in folder.glob("src/**/*.py") if "templates" not in path.parts]


if __name__ == "__main__":
    found, allowed = sizes(), budgets()
    for name, lines in found.items():
        print(f"{lines:7,} of {allowed.get(name, 0):7,}  {name}")
    print(f"{sum(found.values()):7,} of {sum(allowed.values()):7,}  in {len(found)} packages")
