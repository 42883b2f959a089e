"""The public modules of our distributions, and the names that each offers.

A name is public when a module in :data:`PUBLIC` has it in ``__all__``; a module without ``__all__`` offers its
constants. Everything else is private to its distribution. Nothing is imported to find out, so that no framework is
needed.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

PUBLIC: dict[str, tuple[str, ...]] = {
    "agl-core": (
        "agl",
        "agl.algorithms",
        "agl.contracts",
        "agl.dialects",
        "agl.episodes",
        "agl.errors",
        "agl.hints",
        "agl.schemas",
        "agl.semconv",
        "agl.stores",
        "agl.tracing",
    ),
    "agl-algo-torch": ("agl_algo_torch.serving.hosting",),
    "agl-data": ("agl_data.export.trl",),
    "agl-environments": ("agl_environments.openenv",),
    "agl-harness": ("agl_harness", "agl_harness.conformance"),
    "agl-inspect": (
        "agl_inspect.advice",
        "agl_inspect.exports",
        "agl_inspect.forecast",
        "agl_inspect.keys",
        "agl_inspect.ownership",
        "agl_inspect.records",
        "agl_inspect.retention",
        "agl_inspect.rollouts",
        "agl_inspect.searches",
        "agl_inspect.statistics",
        "agl_inspect.stores",
        "agl_inspect.terminal",
        "agl_inspect.text",
        "agl_inspect.versions",
    ),
    "agl-lightning": ("agl_lightning",),
    "agl-objectives": (
        "agl_objectives",
        "agl_objectives.adapters",
        "agl_objectives.aggregation",
        "agl_objectives.answers",
        "agl_objectives.contract",
        "agl_objectives.advantages",
        "agl_objectives.groups",
        "agl_objectives.importance",
        "agl_objectives.kl",
        "agl_objectives.reports",
        "agl_objectives.registry",
        "agl_objectives.replay",
        "agl_objectives.saving",
        "agl_objectives.settings",
        "agl_objectives.tasks",
        "agl_objectives.testing",
        "agl_objectives.uses",
    ),
    "agl-run": (
        "agl_run",
        "agl_run.access",
        "agl_run.engine",
        "agl_run.fleets",
        "agl_run.programs",
        "agl_run.replay",
        "agl_run.terminal",
    ),
    "agl-store-sqlite": ("agl_store_sqlite", "agl_store_sqlite.sql"),
    "agl-testing": (
        "agl_testing.conformance",
        "agl_testing.model_server",
    ),
}
"""Public modules by distribution; a distribution that is not here offers plugins and nothing to import."""

MODULES = frozenset(module for modules in PUBLIC.values() for module in modules)


@cache
def folders() -> dict[str, Path]:
    """The folder of every distribution's module, by the module's name, such as ``agl_run``."""
    return {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/src/*/__init__.py"))}


@cache
def source_of(module: str) -> Path | None:
    """The file of one of our modules; ``None`` if there is no such module."""
    top, *rest = module.split(".")
    if top not in folders():
        return None
    path = folders()[top].joinpath(*rest)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def names_of(module: str) -> tuple[str, ...]:
    """The names that a module offers, in the order of its ``__all__``."""
    path = source_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module(body=[], type_ignores=[])
    values = {target.id: value for statement in tree.body for target, value in _assigned(statement)}
    if "__all__" in values:
        return tuple(ast.literal_eval(values["__all__"]))
    return tuple(sorted(name for name in values if name.isupper() and not name.startswith("_")))


def _assigned(statement: ast.stmt) -> list[tuple[ast.Name, ast.expr]]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return [(statement.target, statement.value)]
    if isinstance(statement, ast.Assign):
        return [(target, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    return []
