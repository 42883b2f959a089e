"""Steps that are not saved yet: after a kill between two saves, the run ends like an uninterrupted one."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
openai = pytest.importorskip("openai", reason="needs openai, which the agent calls with")

import agl  # noqa: E402  # behind the checks
from agl.algorithms import algorithm  # noqa: E402
from agl.errors import ConfigError  # noqa: E402
from agl_algo_verl.algorithm import make  # noqa: E402
from agl_algo_verl.local.learner import VerlLearner  # noqa: E402
from agl_objectives.settings import Saving  # noqa: E402
from agl_run import Quiet, policy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

STEPS, ROLLOUTS = 4, 8
TASKS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 2},
    "actor_rollout_ref": {"rollout": {"n": 4}, "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}}},
    "trainer": {"total_training_steps": STEPS},
}
RAY = {"actor_rollout_ref": {"rollout": {"name": "agl_hf", "n": 4}}}


class Small:
    """An experiment with `verl` in one process; `on_call` gets the number of each call of the agent."""

    def __init__(self, folder: Path, model: Path, *, lora_rank: int = 0) -> None:
        folder.mkdir()
        self.folder, self.model = folder, model
        trained = {"actor_rollout_ref": CONFIG["actor_rollout_ref"] | {"model": {"lora_rank": lora_rank}}}
        self.config = CONFIG | trained
        self.calls = 0
        self.on_call: Callable[[int], None] = lambda number: None

    def write(self, task: dict[str, str], llm: agl.LLM) -> float:
        """Make one call; the reward is an arbitrary function of the answer."""
        self.calls += 1
        self.on_call(self.calls)
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
            answer = client.completions.create(model=llm.model, prompt=task["text"], max_tokens=4)
        return zlib.crc32(answer.choices[0].text.encode()) % 5 / 4

    def fit(self, *, resume: bool = False, **settings: Any) -> Any:
        return self.trainer(**settings).fit(self.write, TASKS, resume=resume)

    def trainer(self, **settings: Any) -> agl.Trainer:
        return agl.Trainer(
            name="small",
            algorithm=algorithm(
                "verl", tunes="llm", threads=1, **({"saving": {"save_every": 2}} | self.config | settings)
            ),
            policies={"llm": policy("torch", model=str(self.model), threads=1)},
            store=f"sqlite:///{self.folder}/runs.db",
            n_runners=1,  # the same batches, and so the same rounding, in every run
            folder=self.folder,
            progress=Quiet(),
        )

    def steps(self, kind: str) -> list[str]:
        """Return the names of the steps that have files of a kind on disk."""
        return sorted(path.name for path in self.folder.glob(f"**/verl/{kind}/[0-9]*"))

    def outcome(self) -> Mapping[str, Any]:
        """Return the record of trained rollouts, and the last weights."""
        newest = max(self.folder.glob("**/verl/weights/[0-9]*"))
        state = AutoModelForCausalLM.from_pretrained(newest).state_dict()
        weights = {name: tensor.tolist() for name, tensor in state.items()}
        return {"ledger": asyncio.run(self._ledger()), "newest": newest.name, "weights": weights}

    def largest(self, name: str) -> float:
        """Return the largest value of a metric over all steps."""
        return max(metric.value for metric in asyncio.run(self._read(lambda store: store.metrics("small", name=name))))

    async def _ledger(self) -> Mapping[str, int]:
        return await self._read(lambda store: store.trained("small", run=1, algorithm="verl"))

    async def _read(self, what: Callable[[Any], Any]) -> Any:
        manager = agl.PluginManager.from_environment()
        store = manager.build(manager.store_entry("sqlite"), url=f"sqlite:///{self.folder}/runs.db")
        try:
            return await what(store)
        finally:
            await store.close()


@pytest.mark.parametrize(("lora_rank", "takes_from_memory"), [(4, True), (0, False)])
def test_what_a_kill_between_two_saves_leaves_ends_like_an_undisturbed_run(
    make_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora_rank: int,
    takes_from_memory: bool,
) -> None:
    """A kill at some moment leaves the folder like a copy made at that moment."""
    if not takes_from_memory:
        monkeypatch.setattr("agl_algo_verl.local.trainer.offer_of", lambda context, name: None)
    dead = "agl_run.run.saving.worker_is_dead"
    monkeypatch.setattr(dead, lambda name: True)  # this process stands for the one that was killed
    small = Small(tmp_path / "small", make_model(), lora_rank=lora_rank)

    def keep(number: int) -> None:
        if number == 3 * ROLLOUTS + 3:  # in the fourth step: two steps are saved, one more waits
            shutil.copytree(small.folder, tmp_path / "left")

    small.on_call = keep
    small.fit(saving={"keep": 1, "save_every": 2})
    undisturbed = small.outcome()
    assert small.largest("logprob_gap") < 1e-5  # what the policy takes from memory is what was trained
    assert dict.fromkeys(range(1, STEPS + 1), ROLLOUTS) == Counter(undisturbed["ledger"].values())
    small.folder.rename(tmp_path / "whole")
    (tmp_path / "left").rename(small.folder)
    weights = ["000002"] if takes_from_memory else ["000002", "000003"]  # a run that goes on serves the second step's
    assert (["000002"], weights) == (small.steps("state"), small.steps("weights"))

    small.calls = 100  # nothing is kept any more
    small.fit(resume=True, saving={"keep": 1, "save_every": 2})

    assert small.calls - 100 < ROLLOUTS, "the rollouts that had finished are found again"
    assert undisturbed == small.outcome()


def test_run_that_collects_ahead_and_is_stopped_in_an_update_ends_the_step_and_saves_it(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(tmp_path / "small", make_model())
    ahead = {"saving": {"save_every": 100}, "trainer": CONFIG["trainer"] | {"v1": {"trainer_mode": "colocate_async"}}}
    is_updating, is_cancelled = threading.Event(), threading.Event()
    plain, updates = VerlLearner.train, [0]

    async def train(self: VerlLearner, *args: Any, **options: Any) -> Any:
        updates[0] += 1
        if updates[0] == 2:
            is_updating.set()
            await asyncio.to_thread(is_cancelled.wait, 60)
            await asyncio.sleep(0.1)  # a step that is cancelled ends here
        return await plain(self, *args, **options)

    async def stopped() -> None:
        fit = asyncio.ensure_future(small.trainer(**ahead).fit_async(small.write, TASKS))
        await asyncio.to_thread(is_updating.wait, 60)
        fit.cancel()
        is_cancelled.set()
        await asyncio.gather(fit, return_exceptions=True)

    monkeypatch.setattr(VerlLearner, "train", train)
    small.on_call = lambda number: time.sleep(0.2)  # rollouts of the next step are under way in the update
    asyncio.run(stopped())
    assert ["000002"] == small.steps("state")

    small.on_call = lambda number: None
    small.fit(resume=True, **ahead)
    assert dict.fromkeys(range(1, STEPS + 1), ROLLOUTS) == Counter(small.outcome()["ledger"].values())


def test_interval_that_is_none_is_refused_on_ray() -> None:
    with pytest.raises(ConfigError, match=r"verl got save_every = 'often'. Give a number of steps"):
        make(engine="ray", saving=Saving(save_every="often"), **RAY)
    make(engine="ray", saving=Saving(save_every="10m"), **RAY)
