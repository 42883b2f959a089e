"""Steps that are not saved yet: the state after a kill and after a stop, and weights served from memory."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.errors import ConfigError
from agl.stores import read_recordings
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.learner.tuned_policy import TunedPolicy
from agl_algo_torch.serving.policy import TorchPolicy
from agl_run import Quiet, policy
from agl_testing.waiting import wait_until

from .token_world import sorted_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

STEPS = 8
ROLLOUTS = 8  # of a step
TASKS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]

AGENT = """\
import os
import time
import zlib

import openai

import agl


@agl.agent
def write(task: dict[str, str], llm: agl.LLM) -> float:
    time.sleep(float(os.environ["PAUSE_S"]))
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        answer = client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["text"]}], max_tokens=4
        )
    return zlib.crc32((answer.choices[0].message.content or "").encode()) % 5 / 4
"""

EXPERIMENT = """\
[experiment]
name = "small"
agent = "agent_that_saves:write"
store = "sqlite:///runs.db"
workdir = "."
train = "train.jsonl"

[runner]
use = "async"
concurrency = 1         # the same batches, and so the same rounding, in every run

[policy.llm]
use = "torch"
model = {model}
threads = 1

[[algorithm]]
use = "grpo"
tunes = "llm"

[algorithm.params]
steps = {steps}
tasks_per_step = 2
group_size = 4

[algorithm.params.optim]
lr = 3e-3

[algorithm.params.compute]
threads = 1
device = "cpu"

[algorithm.params.saving]
save_every = {save_every}
"""


class Told(Quiet):
    """Collects the messages that a run shows to the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Small:
    """An experiment with `grpo` in its own folder; `on_call` gets the number of each call of the agent."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir()
        self.folder, self.model = folder, model
        self.calls = 0
        self.on_call: Callable[[int], None] = lambda number: None

    def trainer(self, told: Told | None = None, **settings: Any) -> agl.Trainer:
        given = {"steps": STEPS, "tasks_per_step": 2, "group_size": 4, "lr": 3e-3, "threads": 1, "device": "cpu"}
        return agl.Trainer(
            name="small",
            algorithm=algorithm("grpo", tunes="llm", **sorted_settings(GRPO, given | {"save_every": 3} | settings)),
            policies={"llm": policy("torch", model=str(self.model), threads=1)},
            store=f"sqlite:///{self.folder}/runs.db",
            n_runners=1,  # the same batches, and so the same rounding, in every run
            folder=self.folder,
            progress=told or Quiet(),
        )

    def write(self, task: dict[str, str], llm: agl.LLM) -> float:
        """Make one call; the reward is an arbitrary function of the answer."""
        self.calls += 1
        self.on_call(self.calls)
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
            answer = client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": task["text"]}], max_tokens=4
            )
        return zlib.crc32((answer.choices[0].message.content or "").encode()) % 5 / 4

    def fit(self, told: Told | None = None, *, resume: bool = False, **settings: Any) -> Any:
        return self.trainer(told, **settings).fit(self.write, TASKS, resume=resume)

    def stopped(self, **settings: Any) -> list[str]:
        """Run until `stop` is set, then stop the run as Ctrl-C does; returns the run's messages."""
        told = Told()

        async def work() -> None:
            fit = asyncio.ensure_future(self.trainer(told, **settings).fit_async(self.write, TASKS))
            await asyncio.to_thread(self.stop.wait, 300)
            fit.cancel()
            await asyncio.sleep(0.1)  # the run learns of it in its own loop before the agent goes on
            self.is_cancelled.set()
            await asyncio.gather(fit, return_exceptions=True)

        self.stop, self.is_cancelled = threading.Event(), threading.Event()
        asyncio.run(work())
        return told.lines

    def states(self) -> list[str]:
        """Return the names of the checkpoints on disk, which are numbers of steps."""
        return sorted(path.name for path in self.folder.glob("**/grpo/state/[0-9]*"))

    def outcome(self) -> Mapping[str, Any]:
        """Return the ledger of trained rollouts, the rewards of each step, and the last weights."""
        newest = max(self.folder.glob("**/grpo/weights/[0-9]*"))
        weights = {name: tensor.tolist() for name, tensor in load_model(str(newest)).model.state_dict().items()}
        return {**asyncio.run(self._stored()), "newest": newest.name, "weights": weights}

    async def _stored(self) -> dict[str, Any]:
        manager = agl.PluginManager.from_environment()
        store = manager.build(manager.store_entry("sqlite"), url=f"sqlite:///{self.folder}/runs.db")
        try:
            metrics = await store.metrics("small", run=1)
            rollouts = await store.rollouts(RolloutQuery(experiment="small", limit=1000))
            return {
                "ledger": await store.trained("small", run=1, algorithm="grpo"),
                "rollouts": {rollout.rollout_id: rollout.status for rollout in rollouts},
                "rewards": {each.step: each.value for each in metrics if each.name == "reward"},
            }
        finally:
            await store.close()


def check_same(expected: Mapping[str, Any], found: Mapping[str, Any], *, steps: int = STEPS) -> None:
    """Check that every rollout trained once, in its own step, and that metrics and weights are the expected ones."""
    assert dict.fromkeys(range(1, steps + 1), ROLLOUTS) == Counter(found["ledger"].values())
    assert dict.fromkeys(found["ledger"], "succeeded") == found["rollouts"]
    assert {**expected, "weights": None} == {**found, "weights": None}
    assert list(expected["weights"]) == list(found["weights"])
    for name, weight in expected["weights"].items():
        # Weights that were read from a file lie elsewhere in memory, and on some processors the vectorised sums of an
        # update then differ in their last bits, which Adam magnifies; three steps move a weight by about 1e-2.
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(weight), rtol=1e-4, atol=2e-6)


@pytest.fixture
def model_dir(make_loaded: Any, tmp_path: Path) -> Path:
    """Directory of a saved tiny model that may sample any token."""
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("takes_from_memory", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_a_kill_between_two_saves_leaves_ends_like_an_undisturbed_run(
    takes_from_memory: bool, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at some moment leaves the folder like a copy made at that moment."""
    if not takes_from_memory:
        monkeypatch.delattr(TorchPolicy, "offer_weights")  # as with vLLM, every step then writes its weights
    dead = "agl_run.run.saving.worker_is_dead"
    monkeypatch.setattr(dead, lambda name: True)  # this process stands for the one that was killed
    small = Small(tmp_path / "small", model_dir)

    def keep(number: int) -> None:
        if number == 5 * ROLLOUTS + 3:  # in the sixth step: three steps are saved, two more wait
            shutil.copytree(small.folder, tmp_path / "left")

    small.on_call = keep
    small.fit()
    assert ["000006", "000008"] == small.states()
    undisturbed = small.outcome()
    small.folder.rename(tmp_path / "whole")
    (tmp_path / "left").rename(small.folder)
    assert ["000003"] == small.states()
    written = ["000003"] if takes_from_memory else ["000003", "000004", "000005"]
    assert written == sorted(path.name for path in small.folder.glob("**/grpo/weights/[0-9]*"))

    told = Told()
    small.calls = 100  # nothing is kept any more
    small.fit(told, resume=True)

    assert "grpo: continues after step 3" in told.lines
    assert small.calls - 100 < 3 * ROLLOUTS, "the rollouts that had finished are found again"
    check_same(undisturbed, small.outcome())


@pytest.mark.parametrize("takes_from_memory", [True, pytest.param(False, marks=pytest.mark.long)])
def test_kill_between_a_checkpoint_and_the_state_that_names_it_leaves_the_weights_of_the_state_before(
    takes_from_memory: bool, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_from_memory:
        monkeypatch.delattr(TorchPolicy, "offer_weights")
    monkeypatch.setattr("agl_run.run.saving.worker_is_dead", lambda name: True)
    small, plain = Small(tmp_path / "small", model_dir), TunedPolicy.save

    async def save(self: TunedPolicy, must: bool) -> bool:
        is_saved = await plain(self, must)
        if is_saved and "000004" in small.states() and not (tmp_path / "left").exists():
            shutil.copytree(small.folder, tmp_path / "left")
        return is_saved

    monkeypatch.setattr(TunedPolicy, "save", save)
    small.fit(steps=4, save_every=2, keep=1)
    monkeypatch.setattr(TunedPolicy, "save", plain)
    small.folder.rename(tmp_path / "whole")
    (tmp_path / "left").rename(small.folder)

    told = Told()
    small.fit(told, resume=True, steps=4, save_every=2, keep=1)
    assert "grpo: continues after step 2" in told.lines
    assert dict.fromkeys(range(1, 5), ROLLOUTS) == Counter(small.outcome()["ledger"].values())


def test_run_that_is_stopped_while_it_collects_saves_what_waits(model_dir: Path, tmp_path: Path) -> None:
    small = Small(tmp_path / "small", model_dir)

    def stop(number: int) -> None:
        if number == 5 * ROLLOUTS + 3:
            small.stop.set()
            small.is_cancelled.wait(60)

    small.on_call = stop
    small.stopped(save_every=100)
    assert ["000005"] == small.states()

    told = Told()
    small.on_call = lambda number: None
    small.fit(told, resume=True, save_every=100)
    assert "grpo: continues after step 5" in told.lines
    assert dict.fromkeys(range(1, STEPS + 1), ROLLOUTS) == Counter(small.outcome()["ledger"].values())


def test_run_that_is_stopped_in_an_update_ends_the_step_and_saves_it(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(tmp_path / "small", model_dir)
    plain, updates = GRPO._update, [0]

    def update(self: GRPO, *args: Any, **kwargs: Any) -> dict[str, float]:
        updates[0] += 1
        if updates[0] == 5:
            small.stop.set()
            small.is_cancelled.wait(60)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GRPO, "_update", update)
    lines = small.stopped(save_every=100)

    assert ["000005"] == small.states()
    assert any(line.startswith("stopping grpo once it has ended its update") for line in lines)
    assert dict.fromkeys(range(1, 6), ROLLOUTS) == Counter(small.outcome()["ledger"].values())


def test_interval_that_cannot_be_kept_is_refused(model_dir: Path, tmp_path: Path) -> None:
    small = Small(tmp_path / "small", model_dir)
    with pytest.raises(ConfigError, match=r"grpo got save_every = '0s'. Give a number of steps .* such as \"5%\""):
        small.fit(save_every="0s")
    settings = sorted_settings(GRPO, {"steps": 1, "save_every": 3, "device": "cpu"})
    with pytest.raises(ConfigError, match=r"save every step. Remove it, or let them take turns"):
        agl.Trainer(
            name="small",
            algorithm=[algorithm("grpo", tunes=name, name=name, **settings) for name in ("one", "two")],
            policies={name: policy("torch", model=str(model_dir), threads=1) for name in ("one", "two")},
            schedule="concurrent",
            store="memory://",
            folder=tmp_path,
            progress=Quiet(),
        ).fit(small.write, TASKS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_run_killed_twenty_times_ends_like_an_undisturbed_one_with_its_rollouts(
    model_dir: Path, tmp_path: Path
) -> None:
    steps, draw = 60, random.Random(1)
    killed, whole = Small(tmp_path / "killed", model_dir), Small(tmp_path / "whole", model_dir)
    write_experiment(killed, steps=steps, save_every=3)
    write_experiment(whole, steps=steps, save_every=1)

    kills, words = 0, ()
    while kills < 20:
        before = steps_with_numbers(killed)
        process = started(killed, *words, pause_s=0.1)
        wait_for_a_step(killed, process, before=before)
        time.sleep(draw.uniform(0, 3))
        assert process.poll() is None, "it ended before it was killed often enough"
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills, words = kills + 1, ("--resume",)
    assert 0 == started(killed, "--resume", pause_s=0).wait(3000)

    # A rollout that was killed draws anew, so the undisturbed run is given the rollouts and not only their seeds.
    asyncio.run(copy_rollouts(killed, whole))
    assert 0 == started(whole, pause_s=1000).wait(3000)
    check_same(whole.outcome(), killed.outcome(), steps=steps)


def write_experiment(small: Small, *, steps: int, save_every: int) -> None:
    (small.folder / "agent_that_saves.py").write_text(AGENT)
    (small.folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    text = EXPERIMENT.format(model=json.dumps(str(small.model)), steps=steps, save_every=save_every)
    (small.folder / "experiment.toml").write_text(text)


async def copy_rollouts(source: Small, target: Small) -> None:
    """Copy the finished rollouts of an experiment to another one that has not begun."""
    manager = agl.PluginManager.from_environment()
    old, new = (
        manager.build(manager.store_entry("sqlite"), url=f"sqlite:///{each.folder}/runs.db")
        for each in (source, target)
    )
    try:
        query = RolloutQuery(experiment="small", limit=1000)
        await new.restore([each async for each in read_recordings(old, query, spans="all")])
    finally:
        await old.close()
        await new.close()


def started(small: Small, *words: str, pause_s: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "agl", "run", "experiment.toml", "--quiet", *words],
        cwd=small.folder,
        env={**os.environ, "PAUSE_S": str(pause_s)},
    )


def wait_for_a_step(small: Small, process: subprocess.Popen[bytes], *, before: int) -> None:
    wait_until(lambda: process.poll() is not None or steps_with_numbers(small) > before, within_s=600)


def steps_with_numbers(small: Small) -> int:
    """Return the number of steps that logged a reward, repeated steps included."""
    file = small.folder / "small" / "metrics.jsonl"
    return file.read_text().count('"reward"') if file.exists() else 0
