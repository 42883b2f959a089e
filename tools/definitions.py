"""Finds where a public name is defined, by following imports through the sources; nothing is imported."""

import ast
from dataclasses import dataclass
from functools import cache

from tools.public import MODULES, names_of, source_of

Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A class, function, constant or type alias in its module.

    Attributes:
        module: Where it is defined, often a private module.
        name: Its name there.
        node: Its syntax tree.
        doc: Its docstring, for a constant the string literal after it; ``""`` without one.
    """

    module: str
    name: str
    node: Node
    doc: str


class UndefinedNameError(Exception):
    """A module's ``__all__`` names what the module does not define or import."""


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of one of our modules."""
    path = source_of(module)
    if path is None:
        raise UndefinedNameError(f"there is no module {module}")
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def find(module: str, name: str) -> Definition | None:
    """The definition of ``name`` as ``module`` has it; ``None`` for what comes from elsewhere."""
    body = tree_of(module).body
    for position, node in enumerate(body):
        if _defines(node, name):
            return Definition(module=module, name=name, node=node, doc=_doc(body, position))  # pyright: ignore[reportArgumentType]  # _defines says so
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and source_of(node.module):
                    return find(node.module, alias.name)
    return None


def public(module: str, name: str) -> Definition:
    """The definition of a public name; raises :class:`UndefinedNameError` when there is none."""
    found = find(module, name)
    if found is None:
        raise UndefinedNameError(f"{module}.{name} is in __all__ and is not defined in this repository")
    return found


@cache
def homes() -> dict[tuple[str, str], tuple[str, str]]:
    """The public module and name under which a definition is described, by its own module and name.

    Of several modules that offer it, the deepest one describes it, and ``agl`` only what no other one does.
    """
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for module in sorted(MODULES, key=lambda module: (module == "agl", -module.count("."), module)):
        for name in names_of(module):
            definition = public(module, name)
            found.setdefault((definition.module, definition.name), (module, name))
    return found


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _doc(body: list[ast.stmt], position: int) -> str:
    node = body[position]
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node) or ""
    after = body[position + 1] if position + 1 < len(body) else None
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        return after.value.value
    return ""
