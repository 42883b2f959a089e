"""Every distribution declares and describes what it offers, and others take nothing else from it."""

import subprocess
import sys

import pytest

from tools.definitions import public
from tools.imports import Use, private_uses, uses
from tools.public import MODULES, ROOT, names_of, source_of
from tools.reference import undescribed


def test_nobody_takes_what_another_distribution_does_not_offer():
    assert [] == [str(use) for use in private_uses()]


REFUSED = {
    "from agl._hookspecs import PROJECT": "agl._hookspecs:PROJECT",
    "from agl import _hookspecs": "agl._hookspecs",
    "import agl._plugins.sources": "agl._plugins.sources",
    "from agl import Attempt": "agl:Attempt",
    "import agl\nagl.Attempt(number=1)": "agl:Attempt",
    "import agl as core\ndef f():\n    return core.schemas.nothing": "agl.schemas:nothing",
    "from agl import schemas\nschemas.Nothing()": "agl.schemas:Nothing",
    "from agl.schemas import _codec as codec\ncodec.encode(1)": "agl.schemas._codec:encode",
    "if 1:\n    from agl_run.config.sections import ExperimentConfig": "agl_run.config.sections:ExperimentConfig",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from agl_run import Session": "agl_run:Session",
    "FACTORY = 'agl_store_sqlite._store:SQLiteStore'": "agl_store_sqlite._store:SQLiteStore",
    "from agl_rewards.credit.turn import TurnCredit": "agl_rewards.credit.turn:TurnCredit",
}


@pytest.mark.parametrize(("source", "expected"), REFUSED.items())
def test_private_use_is_found(source: str, expected: str):
    assert f"here.py:{source.count(chr(10)) + 1}: {expected}" in [
        str(use) for use in uses(source, where="here.py", owner="agl_toy") if use.is_private
    ]


ACCEPTED = [
    "from agl import Rollout, hookimpl",
    "import agl\nagl.__version__, agl.Trainer.from_config",
    "import agl, agl.schemas\nagl.schemas.Attempt, agl.contracts.Store",
    "from agl import semconv\nsemconv.AGENT_NAME",
    "from agl_inspect.terminal.opening import pass_manager",
    "FACTORY = 'agl_toy.tracer:Toy'",
    "FACTORY = 'agl.stores:MemoryStore'",
    "from agl_toy._inner import anything",
    "import json\njson._private",
]


@pytest.mark.parametrize("source", ACCEPTED)
def test_public_use_and_own_use_are_accepted(source: str):
    assert [] == [use for use in uses(source, where="here.py", owner="agl_toy") if use.is_private]


def test_use_says_where_it_stands():
    assert "a.py:3: agl:X" == str(Use(module="agl", name="X", where="a.py:3"))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_public_module_exists_and_has_its_names(module: str):
    assert source_of(module) is not None
    assert [] == [name for name in names_of(module) if not public(module, name)]


def test_every_public_name_is_described():
    assert [] == undescribed()


def test_generated_files_are_what_the_sources_say():
    command = [sys.executable, "-m", "tools.generate", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (0, "") == (done.returncode, done.stdout), done.stdout + done.stderr
