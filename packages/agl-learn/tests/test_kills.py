"""``kill -9`` and Ctrl-C during a round of training and during a replay: nothing runs twice, and no process is left."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_testing.model_server import ScriptedModelServer
from agl_testing.waiting import wait_until

from .conftest import POLITE

RUNNERS = 8
"""The default number of attempts at once."""

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform == "win32", reason="it looks at processes in /proc")]

PROGRAM = """
import asyncio, json, runpy, sys
from pathlib import Path
from agl.contracts import RolloutQuery
from agl_inspect.records.learning import GateRules, LearningCandidate
from agl_learn.replay import TrialReplayer
from agl_learn.training import TrainerProposer

what, folder, conftest = sys.argv[1], Path(sys.argv[2]), runpy.run_path(sys.argv[3])
talks = [conftest["conversation"](number) for number in range(24)]

async def work(file):
    if what == "train":
        found = await TrainerProposer(file).propose(talks, live={"prompt": "first"}, number=1)
        texts = [(await file.store.resource("prompt", each.versions["prompt"])).resource.template for each in found]
        return texts, await ids(file, "support-learn-1")
    await conftest["publish"](file.store, polite=conftest["POLITE"])
    candidate = LearningCandidate(id="c1", number=1, versions={"prompt": "polite"}, baseline={"prompt": "first"},
        origin="apo", conversations=24, created_at=0.0, moves=[], rules=GateRules())
    pairs = [(each.unit, each.old, each.new) async for each in TrialReplayer(file).pairs(candidate, talks, done=())]
    return pairs, await ids(file, "support-replay-c1")

async def ids(file, experiment):
    rollouts = await file.store.rollouts(RolloutQuery(experiment=experiment, limit=1_000))
    return {rollout.rollout_id: rollout.status for rollout in rollouts}

print(json.dumps(asyncio.run(conftest["run_with"](folder, work))))
"""


def start(what: str, folder: Path) -> "subprocess.Popen[str]":
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    words = [sys.executable, "program.py", what, str(folder), str(Path(__file__).with_name("conftest.py"))]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(what: str, folder: Path) -> Any:
    out, err = start(what, folder).communicate(timeout=240)
    assert out, err
    return json.loads(out.splitlines()[-1])


def children_of(pid: int) -> list[int]:
    fields = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    return [child for child, text in fields.items() if int(text.rpartition(")")[2].split()[1]) == pid]


def paid(server: ScriptedModelServer) -> int:
    """Return the number of the agent's calls."""
    return sum(b'"scripted"' in call.body for call in server.calls)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize(("what", "calls"), [("train", 3), ("train", 40), ("replay", 3), ("replay", 40)])
def test_learner_that_is_stopped_goes_on_where_it_was(
    folder: Path, server: ScriptedModelServer, what: str, calls: int, blow: int
) -> None:
    process = start(what, folder)
    wait_until(lambda: paid(server) >= calls or process.poll() is not None)
    children = children_of(process.pid)
    process.send_signal(blow)
    process.communicate(timeout=60)
    assert 0 != process.returncode
    assert (what == "train") == bool(children)
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    before = paid(server)

    found, rollouts = finish(what, folder)

    assert found == ([POLITE] if what == "train" else [[f"u{number}", 0.0, 1.0] for number in range(24)])
    assert {"succeeded"} == set(rollouts.values())
    assert before < len(rollouts), "it was stopped too late"
    assert paid(server) - len(rollouts) <= RUNNERS, "more rollouts ran twice than can be in flight"
