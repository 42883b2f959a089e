"""The reference of hooks is complete, exact and runs; and every hook has a test."""

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl import PluginManager
from agl import _hookspecs as hookspecs
from agl._plugins.hooks import HOOKS, OBSERVERS
from agl.contracts import StepReport

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### `(agl_\w+)[^\n]*\n(.*?)(?=^##|\Z)", REFERENCE, re.MULTILINE | re.DOTALL))

SAMPLES: dict[str, Any] = {
    "experiment": "sql",
    "algorithm": "grpo",
    "workdir": Path("runs/sql"),
    "run": 1,
    "experiment_step": 3,
    "report": StepReport(step=1, metrics={"loss": 0.5}),
    "kind": "suggestion",
    "rule": "silent-groups",
    "step": 1,
    "evidence": "80% of the rollouts taught nothing",
    "change": "easier tasks",
}


def signatures() -> dict[str, str]:
    """Every hook's signature as it stands in the specification, without ``self``."""
    tree = ast.parse(inspect.getsource(hookspecs))
    spec = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AglSpec")
    found: dict[str, str] = {}
    for function in spec.body:
        if isinstance(function, ast.FunctionDef):
            function.args.args = function.args.args[1:]
            returns = ast.unparse(function.returns) if function.returns else "None"
            found[function.name] = f"{function.name}({ast.unparse(function.args)}) -> {returns}"
    return found


def example(code: str, name: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(code, f"{name}.py", "exec"), vars(module))
    return module


def test_reference_has_every_hook_and_no_other():
    assert sorted(HOOKS) == sorted(SECTIONS)


@pytest.mark.parametrize("hook", HOOKS)
def test_reference_has_the_exact_signature(hook):
    assert f"### `{signatures()[hook]}`\n" in REFERENCE


@pytest.mark.parametrize("hook", HOOKS)
def test_reference_says_when_a_hook_is_called_and_what_it_returns(hook):
    text = SECTIONS[hook]
    assert "Called when" in text
    assert (hook in OBSERVERS) != ("Returns" in text)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let what the observers of agl-run write land in a folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("hook", HOOKS)
def test_example_of_the_reference_runs(hook, capsys):
    run_example(hook, re.findall(r"```python\n(.*?)```", SECTIONS[hook], re.DOTALL), capsys)


@pytest.mark.parametrize("hook", HOOKS)
def test_example_of_the_docstring_runs(hook, capsys):
    lines = (inspect.getdoc(getattr(hookspecs.AglSpec, hook)) or "").partition(".. code-block:: python")[2]
    run_example(hook, ["import agl\n" + inspect.cleandoc(lines)], capsys)


def run_example(hook: str, blocks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == len(blocks)
    manager = PluginManager()
    before = set(sys.modules)
    manager.register(example(blocks[0], f"example_of_{hook}"), name="example")
    if hook in OBSERVERS:
        parameters = list(inspect.signature(vars(hookspecs.AglSpec)[hook]).parameters)[1:]
        manager.notify(hook, **{name: SAMPLES[name] for name in parameters})
        assert capsys.readouterr().out
        assert 0 == manager.status()[1].failures
    else:
        assert 1 == len(manager.status()[1].components)
        assert not {name for name in set(sys.modules) - before if name.startswith("agl_")}


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_occurs_in_a_test_of_a_package(hook):
    files = ROOT.glob("packages/*/tests/**/test_*.py")
    assert [path for path in files if re.search(rf"\b{hook}\b", path.read_text(encoding="utf-8"))]
