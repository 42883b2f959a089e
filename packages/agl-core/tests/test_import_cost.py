"""Imports load little, and nothing that the caller did not request."""

import os
import subprocess
import sys
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEAVY = ("rich", "click", "sqlite3", "httpx", "asyncio", "opentelemetry", "pluggy", "packaging", "torch", "openai")


def loaded_by(code: str) -> set[str]:
    """Return the modules that ``code`` loads in a new interpreter."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nnew = sorted(set(sys.modules) - before)\nprint(*new)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_import_agl_loads_almost_nothing():
    loaded = loaded_by("import agl")
    assert set() == loaded & set(HEAVY)
    assert {"agl", "agl._lazy"} == {name for name in loaded if name.partition(".")[0] == "agl"}
    assert len(loaded) <= 40


@pytest.mark.parametrize("name", ["emit_reward", "LLM", "GRPO", "hookimpl", "LitAgent", "PluginManager"])
def test_public_name_loads_no_heavy_module(name):
    loaded = loaded_by(f"from agl import {name}")
    assert set() == loaded & {"rich", "click", "sqlite3", "httpx", "httpx2", "opentelemetry.sdk", "torch", "openai"}
    assert len(loaded) <= 200


def test_plugin_module_of_the_core_loads_none_of_its_components():
    loaded = loaded_by("from agl import PluginManager; PluginManager()")
    ours = {
        name for name in loaded if name.startswith(("agl.stores.", "agl_run.runners.", "agl.episodes.", "agl_run.cli"))
    }
    assert set() == ours


def test_everything_but_the_opentelemetry_tracer_imports_without_opentelemetry():
    code = """
import importlib, pkgutil, sys
sys.modules["opentelemetry"] = None
import agl
names = [found.name for found in pkgutil.walk_packages(agl.__path__, "agl.")]
for name in names:
    if name not in ("agl.__main__", "agl.tracing._otel"):
        importlib.import_module(name)
for module in [importlib.import_module(name) for name in ("agl", "agl.tracing", "agl.contracts", "agl.schemas")]:
    for name in set(module.__all__) - {"OtelTracer", "ExperimentConfig", "Trainer"}:
        getattr(module, name)
try:
    agl.tracing.OtelTracer
except ImportError as error:
    assert "pip install" in str(error) and "agl-core[otel]'" in str(error), error
else:
    raise AssertionError("the tracer was imported without OpenTelemetry")
print(len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stderr
    assert int(done.stdout) > 50


def test_import_agl_costs_at_most_twice_opentelemetry_sdk_trace():
    def cpu(code: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    cases = ("pass", "import agl", "import opentelemetry.sdk.trace")
    bare, ours, theirs = (min(taken) for taken in zip(*([cpu(code) for code in cases] for _ in range(5)), strict=True))
    assert ours - bare <= 2 * (theirs - bare)


def test_core_brings_at_most_ten_distributions():
    found: set[str] = set()
    waiting = ["agl-core"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        wanted = [Requirement(line) for line in distribution(name).requires or ()]
        waiting += [item.name for item in wanted if not item.marker or item.marker.evaluate({"extra": ""})]
    assert len(found) <= 10, sorted(found)
