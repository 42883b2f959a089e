"""The reference has every reward with every parameter and its default, and registering rewards imports none of them."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agl import PluginManager
from agl.contracts import RewardEntry
from agl_rewards import group_judge, plugin
from agl_rewards.judge import SCORE, TEMPLATE
from agl_rewards.spans import EVENTS, WEIGHTS
from agl_run import plugin as builtin

TEXT = (Path(__file__).parents[3] / "docs/reference/rewards.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## `([\w-]+)`\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
ENTRIES = {entry.name: entry for entry in (*builtin.agl_rewards(), *plugin.agl_rewards())}
STANDS_FOR = {"template": (TEMPLATE, group_judge.TEMPLATE), "score": (SCORE,)}
FILLED = {
    ("spans", "weights"): dict(WEIGHTS),
    ("judge", "request"): {"temperature": 0.0},
    ("group-judge", "request"): {"temperature": 0.0},
}


def rows(name: str) -> list[tuple[str, str]]:
    table = SECTIONS[name].partition("| Parameter |")[2]
    return [(cells[0], cells[1]) for cells in re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", table, re.MULTILINE)]


def parameters(entry: RewardEntry) -> list[tuple[str, str]]:
    factory: Any = entry.factory
    module, _, attribute = factory.partition(":")
    signature = inspect.signature(getattr(__import__(module, fromlist=[attribute]), attribute))
    return [(p.name, shown(entry.name, p)) for p in signature.parameters.values() if p.name != "setup"]


def shown(reward: str, parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    if parameter.default in STANDS_FOR.get(parameter.name, ()):
        return "built in"
    value = FILLED.get((reward, parameter.name), parameter.default)
    if value is None:
        return "none"
    return "`" + msgspec.json.encode(value).decode().replace(",", ", ").replace(":", ": ") + "`"


def test_reference_has_every_reward() -> None:
    assert list(ENTRIES) == sorted(SECTIONS, key=list(ENTRIES).index)


@pytest.mark.parametrize("name", ENTRIES)
def test_reference_has_every_parameter_with_its_default(name: str) -> None:
    assert parameters(ENTRIES[name]) == rows(name)


def test_reference_has_every_event() -> None:
    table = SECTIONS["spans"].partition("| Parameter |")[0]
    named = [
        name for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert list(EVENTS) == named


@pytest.mark.parametrize("name", [entry.name for entry in plugin.agl_rewards()])
def test_installed_plugin_offers_the_reward(name: str) -> None:
    entry = PluginManager.from_environment(environ={}).reward(name)
    assert (name, True) == (entry.name, bool(entry.summary))


def test_plugin_imports_no_emitter() -> None:
    code = (
        "import sys, agl_rewards.plugin as plugin; list(plugin.agl_rewards())\n"
        "print([name for name in sys.modules if name.startswith('agl_rewards.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "['agl_rewards.plugin']" == done.stdout.strip()
