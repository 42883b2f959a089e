"""The pages' tests can fail: each kind of block, broken, is refused."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from agl.errors import ConfigError

PLUGIN = """```toml title="pyproject.toml"
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "agl-odd"
version = "1.0"
dependencies = ["agl-core>=0.1,<0.2"]
[project.entry-points.agl]
odd = "agl_odd"
```
"""
REWARD = """```python title="agl_odd.py"
import agl


def odd(rollout, spans):
    return VALUE


@agl.hookimpl
def agl_rewards():
    yield agl.RewardEntry(name="odd", factory="agl_odd:odd", summary="odd")
```
```python title="test_odd.py"
import pytest
from agl_odd import odd
from agl_testing.conformance import PluginConformance, RewardConformance


class TestPlugin(PluginConformance):
    module = "agl_odd"


class TestOdd(RewardConformance):
    @pytest.fixture
    def emitter(self):
        return odd
```
"""
CHECKED = "```console\n$ pip install .\n$ agl plugins check odd\nall well\n$ pytest\npassed\n```\n"
UNSOUND = PLUGIN + REWARD.replace("VALUE", 'float("nan")') + CHECKED

BROKEN = {
    "python that raises": ("```python\nassert 1 == 2\n```\n", AssertionError, None),
    "python that awaits and raises": (
        "```python\nimport asyncio\n\nawait asyncio.sleep(0)\n1 / 0\n```\n",
        ZeroDivisionError,
        None,
    ),
    "file with bad syntax": ('```python title="a.py"\ndef\n```\n', SyntaxError, "invalid syntax"),
    "json that is none": ('```json title="a.jsonl"\n{"a": }\n```\n', ValueError, None),
    "experiment with an unknown key": ("```toml\n[experiment]\nsede = 1\n```\n", ConfigError, "did you mean 'seed'"),
    "output that differs": ("```console\n$ agl --version\nversion 9\n```\n", AssertionError, "lacks 'version 9'"),
    "command that fails": ("```console\n$ agl check none.toml\n```\n", AssertionError, "no experiment file"),
    "program that is not known": ("```console\n$ rm -r x\n```\n", AssertionError, "cannot run 'rm'"),
    "block without commands": ("```console\nagl --version\n```\n", AssertionError, "lines that start with"),
    "distribution without its module": (PLUGIN + CHECKED, AssertionError, "pip install"),
    "plugin that breaks its contract": (UNSOUND, AssertionError, "test_rewards_are_finite_numbers"),
    "language without a rule": ("```ruby\nputs 1\n```\n", pytest.fail.Exception, "no rule"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_block_is_refused(name, run_page, tmp_path):
    text, error, message = BROKEN[name]
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        run_page(page)


def test_blocks_share_a_namespace_and_the_folder(run_page, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '```text title="a.txt"\nhello\n```\n'
        "```python\nfound = __import__('pathlib').Path('a.txt').read_text()\n```\n"
        "```python\nassert found == 'hello\\n'\n```\n"
        "```console\n$ NAME=agl python -c \"import os; print(os.environ['NAME'], 'is', 'here')\"\nagl ... here\n```\n",
        encoding="utf-8",
    )
    run_page(page)


def test_the_folder_of_a_page_is_not_one_that_another_pytest_closes(run_page, tmp_path_factory):
    assert tmp_path_factory.getbasetemp().parent not in Path.cwd().parents


def test_plugin_of_a_page_is_installed_for_its_commands_only(run_page, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PLUGIN + REWARD.replace("VALUE", "1.0") + CHECKED, encoding="utf-8")
    run_page(page)
    assert [] == [point.name for point in entry_points(group="agl") if point.name == "odd"]
