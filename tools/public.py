"""The public modules of our distributions, and the names that each offers.

A name is public when a module in :data:`PUBLIC` has it in ``__all__``; a module without ``__all__`` offers everything
that it defines without a leading underscore, and what it imports under the same name (``from a import b as b``).
Everything else is private to its distribution. Nothing is imported to find out, so that no framework is needed.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

PUBLIC: dict[str, tuple[str, ...]] = {
    "agl-core": (
        "agl",
        "agl.acceptance",
        "agl.algorithms",
        "agl.contracts",
        "agl.dialects",
        "agl.episodes",
        "agl.errors",
        "agl.hints",
        "agl.owned_process",
        "agl.schemas",
        "agl.semconv",
        "agl.served_calls",
        "agl.stores",
        "agl.tracing",
        "agl.urls",
    ),
    "agl-algo-torch": (
        "agl_algo_torch.data.credited_rows",
        "agl_algo_torch.learner.batch",
        "agl_algo_torch.learner.objective",
        "agl_algo_torch.learner.policy_learner",
        "agl_algo_torch.learner.tuned_policy",
        "agl_algo_torch.serving.hosting",
    ),
    "agl-data": ("agl_data.export.trl",),
    "agl-environments": ("agl_environments.openenv",),
    "agl-harness": ("agl_harness", "agl_harness.conformance"),
    "agl-inspect": (
        "agl_inspect.advice.agent_changes",
        "agl_inspect.advice.past_runs",
        "agl_inspect.advice.ranking",
        "agl_inspect.advice.run_differences",
        "agl_inspect.advice.suggestions",
        "agl_inspect.exports",
        "agl_inspect.forecast.costs",
        "agl_inspect.forecast.faults",
        "agl_inspect.forecast.fitting",
        "agl_inspect.forecast.models",
        "agl_inspect.forecast.observed",
        "agl_inspect.forecast.queueing",
        "agl_inspect.forecast.silence",
        "agl_inspect.keys",
        "agl_inspect.learning",
        "agl_inspect.ownership",
        "agl_inspect.records.gold",
        "agl_inspect.records.labels",
        "agl_inspect.records.learning",
        "agl_inspect.records.metrics",
        "agl_inspect.records.names",
        "agl_inspect.records.shelf",
        "agl_inspect.records.sources",
        "agl_inspect.records.spending",
        "agl_inspect.records.splits",
        "agl_inspect.records.state",
        "agl_inspect.records.validations",
        "agl_inspect.presence",
        "agl_inspect.retention",
        "agl_inspect.rollouts.answers",
        "agl_inspect.rollouts.conversations",
        "agl_inspect.rollouts.explanations",
        "agl_inspect.rollouts.span_reader",
        "agl_inspect.rollouts.step_tallies",
        "agl_inspect.rollouts.training",
        "agl_inspect.rollouts.tree",
        "agl_inspect.rollouts.turns",
        "agl_inspect.searches",
        "agl_inspect.statistics",
        "agl_inspect.stores",
        "agl_inspect.terminal.opening",
        "agl_inspect.terminal.output",
        "agl_inspect.terminal.program",
        "agl_inspect.terminal.query",
        "agl_inspect.terminal.fits",
        "agl_inspect.text",
        "agl_inspect.versions",
    ),
    "agl-learn": ("agl_learn.contracts", "agl_learn.users"),
    "agl-lightning": ("agl_lightning",),
    "agl-objectives": (
        "agl_objectives",
        "agl_objectives.adapters",
        "agl_objectives.aggregation",
        "agl_objectives.answers",
        "agl_objectives.comparison",
        "agl_objectives.contract",
        "agl_objectives.advantages",
        "agl_objectives.directories",
        "agl_objectives.groups",
        "agl_objectives.importance",
        "agl_objectives.kl",
        "agl_objectives.minting",
        "agl_objectives.reports",
        "agl_objectives.registry",
        "agl_objectives.replay",
        "agl_objectives.saving",
        "agl_objectives.settings",
        "agl_objectives.tasks",
        "agl_objectives.testing",
        "agl_objectives.uses",
    ),
    "agl-replay": ("agl_replay.rescoring",),
    "agl-run": (
        "agl_run",
        "agl_run.access",
        "agl_run.engine",
        "agl_run.fleets",
        "agl_run.programs",
        "agl_run.replay",
        "agl_run.terminal",
    ),
    "agl-store-sqlite": (
        "agl_store_sqlite",
        "agl_store_sqlite.sql.batches",
        "agl_store_sqlite.sql.changes",
        "agl_store_sqlite.sql.compaction",
        "agl_store_sqlite.sql.loaded_tables",
        "agl_store_sqlite.sql.needs",
        "agl_store_sqlite.sql.packing",
        "agl_store_sqlite.sql.rows",
        "agl_store_sqlite.sql.servers",
        "agl_store_sqlite.sql.statistics",
    ),
    "agl-testing": (
        "agl_testing.conformance",
        "agl_testing.model_server",
    ),
    "agl-vision": ("agl_vision.tiny",),
    "agl-vllm": ("agl_vllm.client", "agl_vllm.tokens"),
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
    """The names that a module offers, in the order of its ``__all__`` if it has one."""
    path = source_of(module)
    tree = ast.parse(path.read_text(encoding="utf-8")) if path else ast.Module(body=[], type_ignores=[])
    values = {target.id: value for statement in tree.body for target, value in _assigned(statement)}
    if "__all__" in values:
        return tuple(ast.literal_eval(values["__all__"]))
    defined = [
        *(name for name, value in values.items() if not ast.unparse(value).startswith("TypeVar(")),
        *(node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)),
        *_reexported(tree),
    ]
    return tuple(sorted({name for name in defined if not name.startswith("_")}))


def _reexported(tree: ast.Module) -> list[str]:
    """The names that a module imports for others: ``from a import b as b``."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names if alias.name == alias.asname]


def _assigned(statement: ast.stmt) -> list[tuple[ast.Name, ast.expr]]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
        return [(statement.target, statement.value)]
    if isinstance(statement, ast.Assign):
        return [(target, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    return []
