"""Finds what one distribution takes from another without its being public.

Read are the imports of packages, benchmarks, examples and of the documentation's Python blocks, the attributes of
modules that they import, and factories named as ``"module:attribute"``.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.public import MODULES, ROOT, folders, names_of, source_of

_FACTORY = re.compile(r"[a-z_]\w*(?:\.\w+)*:[A-Za-z_][\w.]*")
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of another distribution's module, or of a name in it; ``name`` is empty for the module itself."""

    module: str
    name: str
    where: str

    @property
    def is_private(self) -> bool:
        """Return true if the other distribution does not offer this."""
        if self.module not in MODULES:
            return True
        return bool(self.name) and not self.name.startswith("__") and self.name not in names_of(self.module)

    def __str__(self) -> str:
        return f"{self.where}: {self.module}{f':{self.name}' if self.name else ''}"


def private_uses() -> list[Use]:
    """Every private use in the repository, in order of place."""
    return sorted((use for use in all_uses() if use.is_private), key=str)


def all_uses() -> Iterator[Use]:
    """Every use of a distribution by another one, by an example, by a benchmark or by the documentation."""
    for module, folder in folders().items():
        for path in sorted(folder.rglob("*.py")):
            yield from uses(path.read_text(encoding="utf-8"), where=_place(path), owner=module)
    for path in sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/*.py")]):
        yield from uses(path.read_text(encoding="utf-8"), where=_place(path))
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]):
        for block in _BLOCK.finditer(path.read_text(encoding="utf-8")):
            yield from uses(block[1], where=_place(path))


def uses(source: str, *, where: str, owner: str = "") -> Iterator[Use]:
    """The uses in one text; ``owner`` is the module of the distribution that it belongs to."""
    tree = ast.parse(source)
    modules = dict(_modules(tree))
    for node in ast.walk(tree):
        for module, name in _found(node, modules):
            if module.partition(".")[0] in folders().keys() - {owner}:
                yield Use(module=module, name=name, where=f"{where}:{getattr(node, 'lineno', 0)}")


def _place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local names that stand for modules, with the modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if source_of(f"{node.module}.{alias.name}"):
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _found(node: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (_split(f"{node.module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Attribute) and (path := _dotted(node)):
        root, _, rest = path.partition(".")
        if root in modules:
            yield _split(f"{modules[root]}.{rest}")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _FACTORY.fullmatch(node.value):
        module, _, path = node.value.partition(":")
        yield module, path.partition(".")[0]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _split(path: str) -> tuple[str, str]:
    """The longest module in a dotted path, and the name after it."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        if source_of(module):
            return module, parts[count] if count < len(parts) else ""
    return path.rpartition(".")[0], path.rpartition(".")[2]
