"""What an import loads: little, and nothing that the caller did not ask for."""

import statistics
import subprocess
import sys
import time

import pytest

HEAVY = ("rich", "click", "sqlite3", "httpx", "asyncio", "opentelemetry", "pluggy", "packaging", "torch", "openai")


def loaded_by(code: str) -> set[str]:
    """Modules that ``code`` adds to a bare interpreter."""
    script = f"import sys\nbefore = set(sys.modules)\n{code}\nnew = sorted(set(sys.modules) - before)\nprint(*new)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_import_agl_loads_almost_nothing():
    loaded = loaded_by("import agl")
    assert set() == loaded & set(HEAVY)
    assert {"agl"} == {name for name in loaded if name.partition(".")[0] == "agl"}
    assert len(loaded) <= 40


@pytest.mark.parametrize("name", ["emit_reward", "LLM", "GRPO", "hookimpl", "LitAgent", "PluginManager"])
def test_public_name_loads_no_heavy_module(name):
    loaded = loaded_by(f"from agl import {name}")
    assert set() == loaded & {"rich", "click", "sqlite3", "httpx", "httpx2", "opentelemetry.sdk", "torch", "openai"}
    assert len(loaded) <= 200


def test_plugin_module_of_the_core_loads_none_of_its_components():
    loaded = loaded_by("from agl import PluginManager; PluginManager()")
    ours = {name for name in loaded if name.startswith(("agl.stores.", "agl.run.", "agl.train.", "agl.cli"))}
    assert set() == ours


def test_import_agl_costs_at_most_twice_opentelemetry_sdk_trace():
    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        return time.perf_counter() - start

    ours, theirs, bare = [], [], []
    for _ in range(3):
        bare.append(seconds("pass"))
        ours.append(seconds("import agl; agl.hookimpl; agl.emit_reward; agl.Rollout"))
        theirs.append(seconds("import opentelemetry.sdk.trace"))
    base = min(bare)
    assert statistics.median(ours) - base <= 2 * (statistics.median(theirs) - base)
