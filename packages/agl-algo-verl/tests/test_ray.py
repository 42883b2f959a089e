"""VERL's own trainer on a real Ray cluster on the CPU: two steps, `kill -9`, the interrupted step again, export."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from agl.contracts import RolloutQuery
from agl.schemas import ResourceVersion, Transition, Weights, pack_floats, pack_ids
from agl_algo_verl.algorithm import make
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.typed import from_bytes
from agl_inspect.records.state import trained_rollouts
from agl_inspect.terminal.program import cli
from agl_run.run.training_episodes import EpisodeSelection, read_episodes
from agl_store_sqlite._store import SQLiteStore
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench
from agl_testing.waiting import wait_until

from .world import SharedWorld, adapter, config, good_tokens, whole_model

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
pytest.importorskip("openai", reason="needs openai, which the example's agent calls with")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agl.schemas import Episode
    from agl_testing.conformance.bench import RolloutOrder

FORGOTTEN = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
"""On a busy machine a start of Ray may fail and be repeated; Ray then leaves the first processes unattended."""

PATIENCE_S = 900
"""Timeout in seconds for a busy machine; on an idle one, everything here takes about two minutes."""

TINY = {
    "experiment.validation_limit": 2,
    "algorithm.sft.params.updates": 2,
    "algorithm.sft.params.updates_per_step": 2,
    "algorithm.verl.params.trainer.total_training_steps": 3,
    "algorithm.verl.params.data.train_batch_size": 2,
    "algorithm.verl.params.actor_rollout_ref.rollout.n": 4,
    "algorithm.verl.params.trainer.v1.trainer_mode": "colocate_async",
    "algorithm.verl.params.algorithm.rollout_correction.rollout_is": "token",
    "algorithm.verl.params.algorithm.adv_estimator": "gae",
    "algorithm.verl.params.actor_rollout_ref.model.lora_rank": 4,
    "algorithm.verl.params.saving.keep": 4,
}
"""Settings for a small experiment that collects ahead and has a critic and adapters."""


def run(folder: Path, words: list[str]) -> str:
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(), check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "0"}


def metrics(folder: Path, name: str) -> dict[int, float]:
    """Return one of VERL's metrics by step; a step that was repeated must give the same value again."""
    file = folder / "out/verl-ray/calc-verl-ray/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found = [(row["step"], row["value"]) for row in rows if (row["algorithm"], row["name"]) == ("verl", name)]
    assert all(value == pytest.approx(dict(found)[step]) for step, value in found)
    return dict(found)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    def holds() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return what()

    wait_until(holds, within_s=PATIENCE_S, every_s=0.2)


def wait_for_the_end(processes: list[psutil.Process], *, patience_s: float) -> None:
    def is_left(one: psutil.Process) -> bool:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE

    wait_until(lambda: not any(map(is_left, processes)), within_s=patience_s, every_s=0.2)


@pytest.fixture(autouse=True)
def _address_of_an_ended_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the address file of a killed cluster behind."""
    with TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        note = Path(folder, "ray", "ray_current_cluster")
        note.parent.mkdir()
        note.write_text("192.0.2.2:6399")
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.skipif(sys.platform == "win32", reason="VERL runs on Linux and macOS")
def test_a_run_on_ray_is_killed_and_continues_and_its_model_can_be_taken_away(calc: Path) -> None:
    changes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "agl", "run", "verl-ray-cpu.toml", *changes]
    with (calc / "log.txt").open("w") as log:
        first = subprocess.Popen(command, cwd=calc, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment())
    wait_for(lambda: 2 in metrics(calc, "loss"), first)
    started = psutil.Process(first.pid).children(recursive=True)
    working = [p for p in started if "Agent" not in p.name()]
    assert {"raylet", "ray::HFServer"} <= {p.name() for p in working}
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for_the_end(working, patience_s=60)

    run(calc, [*command, "--resume"])
    wait_for_the_end(started, patience_s=120)  # Ray's agents look for its raylet and give up after a minute
    assert [1, 2, 3] == sorted(metrics(calc, "loss"))
    assert [0.0, 1.0, 1.0] == [age for _, age in sorted(metrics(calc, "staleness").items())]
    assert max(metrics(calc, gap)[1] for gap in ("probability_gap", "logprob_gap")) < 1e-5
    calls = asyncio.run(trained_calls(calc / "out/verl-ray/runs.db", count=24))
    served = {call.model_version for call in calls}
    assert {"global_step_0", "global_step_1"} <= served
    (saved,) = (calc / "out").rglob("global_step_1/actor/huggingface")
    assert gap_to(saved, [call for call in calls if call.model_version == "global_step_1"]) < 1e-5
    words = ["data", "export", "calc-lm", "--format", "model", "--output", str(calc / "mine")]
    exported = CliRunner().invoke(cli, [*words, "--store", f"sqlite:///{calc}/out/verl-ray/runs.db"])
    assert 0 == exported.exit_code, exported.output
    trained = AutoModelForCausalLM.from_pretrained(calc / "mine").state_dict()
    start = AutoModelForCausalLM.from_pretrained(calc / "out/model").state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in trained.items())


async def trained_calls(store_file: Path, *, count: int) -> list[Transition]:
    """Return the calls of the rollouts that VERL trained on; checks that `count` were requested, each trained once."""
    store = SQLiteStore(f"sqlite:///{store_file}")
    try:
        rollouts = await store.rollouts(RolloutQuery(experiment="calc-verl-ray", mode="train", limit=1000))
        assert count == len(rollouts)
        assert {rollout.rollout_id for rollout in rollouts} == await trained_rollouts(store, "calc-verl-ray", 1, "verl")
        episodes = await read_episodes(store, [r.rollout_id for r in rollouts], selection=EpisodeSelection())
        return [call for episode in episodes for call in episode.transitions]
    finally:
        await store.close()


def gap_to(folder: Path, calls: list[Transition]) -> float:
    """Return the largest difference between recorded log-probabilities and those of the weights in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = [0.0]
    for call in calls:
        prompt, response = from_bytes(call.prompt_ids, "<i4").long(), from_bytes(call.response_ids, "<i4").long()
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        own = (logits / call.temperature).log_softmax(-1).gather(1, response[:, None])[:, 0]
        found.append(float((own - from_bytes(call.logprobs, "<f4")).abs().max()))
    return max(found)


class Slow(SharedWorld):
    """A world in which groups, from the third on, run until the first step is over, on the weights of the start.

    The second call of the first rollout of each group is cut.
    """

    def __init__(self, start: Path, **options: Any) -> None:
        super().__init__(**options)
        self.goes_on = asyncio.Event()
        self._start = Weights(uri=str(start))

    def play(self, order: RolloutOrder) -> Episode:
        played = super().play(order)
        if not order.rollout.rollout_id.endswith("-0"):
            return played
        first, second, *others = played.transitions
        return msgspec.structs.replace(
            played, transitions=(first, msgspec.structs.replace(second, finish_reason="length"), *others)
        )

    async def play_slowly(self, order: RolloutOrder) -> Episode:
        if int(order.rollout.rollout_id.split("group")[1].split("-")[0]) >= 2:
            await self.goes_on.wait()
        return self.play_from_start(order)

    def play_from_start(self, order: RolloutOrder) -> Episode:
        """Sample with the weights of the start, so that rounded weights do not change any token."""
        return self.play(replace(order, resources={"llm": self._start}))


def train(
    folder: Path,
    model_dir: Path,
    *,
    engine: str,
    steps: int,
    reward: Callable[[list[int]], float] | None = None,
    start: Weights | None = None,
    samples_from_start: bool = False,
    **keys: Any,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train on rollouts of two rows each; returns the metrics of the steps and the weights after them."""
    world = Slow(model_dir, rows=2, **({} if reward is None else {"reward": reward}))
    asks_ahead = "trainer.v1.trainer_mode" in keys
    keys |= {"trainer.total_training_steps": steps} | ({"rollout.name": "agl_hf"} if engine == "ray" else {})
    scenario = AlgorithmScenario(
        make=lambda: make(engine=engine, threads=1, **config(**{"sampling.mask_truncated": True}, **keys)),
        play=world.play_slowly if asks_ahead else world.play_from_start if samples_from_start else world.play,
        agents="writer",
        tunes=("llm",),
        policies=lambda _: {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)},
    )

    async def body() -> tuple[list[dict[str, float]], Weights]:
        async with AlgorithmBench(scenario, folder) as bench:
            if start is not None:
                bench._live["llm"] = ResourceVersion(name="llm", version="sft-1", resource=start, algorithm="sft")
            algorithm = scenario.make()
            found: list[dict[str, float]] = []
            try:
                await algorithm.setup(bench.context())
                for _ in range(steps):
                    found.append(dict((await algorithm.step()).metrics))
                    world.goes_on.set()
                    if engine == "ray" and bench.published:
                        found[-1]["served_gap"] = await served_gap(bench)
            finally:
                await algorithm.close()
            weights = bench.published[-1].resource if bench.published else Weights(uri=str(model_dir))
            assert isinstance(weights, Weights)
            return found, weights

    metrics, weights = asyncio.run(body())
    return metrics, dict(whole_model(weights).state_dict())


async def served_gap(bench: AlgorithmBench) -> float:
    """Return how far the served log-probabilities are from those of the last published weights."""
    endpoint, weights = bench.context().endpoint("llm").endpoint, bench.published[-1].resource
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "llm"}
    asked |= {"logprobs": True, "return_token_ids": True}
    url, headers = f"{endpoint}/chat/completions", {"authorization": f"Bearer {os.environ['AGL_POLICY_KEY']}"}
    async with aiohttp.ClientSession() as session, session.post(url, json=asked, headers=headers) as reply:
        answer = await reply.json()
    choice = answer["choices"][0]
    call = Transition(
        rollout_id="r",
        attempt_id="a",
        span_id="s",
        prompt_ids=pack_ids(answer["prompt_token_ids"]),
        response_ids=pack_ids(choice["token_ids"]),
        logprobs=pack_floats(part["logprob"] for part in choice["logprobs"]["content"]),
    )
    assert isinstance(weights, Weights)
    return gap_to(Path(weights.uri), [call])


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, start: Path) -> float:
    """Return the distance of two trained models, relative to how far training moved them.

    Adam's first step has the sign of each gradient; if a gradient is only rounding error, the order of rows decides its
    sign.
    """
    origin = AutoModelForCausalLM.from_pretrained(start).state_dict()
    wrong = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
    moved = sum(float((tensor - origin[name]).square().sum()) for name, tensor in expected.items())
    return (wrong / moved) ** 0.5


@FORGOTTEN
def test_steps_on_ray_are_the_steps_in_one_process_and_collecting_goes_on_meanwhile(
    model_dir: Path, tmp_path: Path
) -> None:
    keys = {
        "actor.loss_agg_mode": "seq-mean-token-mean",  # the mode in which VERL counts rows and agl rollouts
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_batch_normalize": True,
        "algorithm.rollout_correction.rollout_rs": "token_k1,seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": "0.97_1.03,0.99_1.01",
        "trainer.v1.trainer_mode": "colocate_async",
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }
    here, expected = train(tmp_path / "inproc", model_dir, engine="inproc", steps=2, **keys)
    there, found = train(tmp_path / "ray", model_dir, engine="ray", steps=2, **keys)
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert [] == [p for p in left if "ray" in " ".join(p.cmdline())]
    assert [(14.0, 8.0, 0.25)] * 2 == [(step["rows"], step["rollouts"], step["truncated_share"]) for step in there]
    assert [(0.0, 2.0), (1.0, 0.0)] == [(step["staleness"], step["groups_carried"]) for step in there]
    assert there[0]["probability_gap"] < 1e-5 < there[1]["probability_gap"]
    assert max(step["served_gap"] for step in there) < 1e-5
    for mine, its in zip(here, there, strict=True):
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-3)
        assert mine["loss"] == pytest.approx(its["loss"], abs=1e-5)
        shares = [name for name in mine if name.endswith("_share")]
        assert 5 == len(shares)
        for name in (*shares, "tis_truncated", "anchor_kl"):
            assert its[name] == pytest.approx(mine[name], abs=1e-6)
        for name in ("entropy", "ratio_max"):
            assert its[name] == pytest.approx(mine[name], rel=1e-4)
    assert 0 < there[1]["rejected_share"] < 1
    assert 0 < there[1]["anchor_kl"]
    assert difference(found, expected, start=model_dir) < 0.05


@FORGOTTEN
@pytest.mark.soak
def test_loss_that_compares_all_tokens_of_an_update_learns_on_ray_what_it_learns_in_one_process(
    model_dir: Path, tmp_path: Path
) -> None:
    keys = {
        "loss": "clip-cov",
        "loss_params": {"ratio": 0.3, "cov_low": 0.0, "clip_low": 0.05},
        "estimator": "opo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.entropy_coeff": 0.01,
        "actor.ppo_mini_batch_size": 1,
        "actor.ppo_epochs": 2,
        "actor.optim.lr": 3e-2,  # the second epoch finds ratios beyond the clip
        "trainer.n_gpus_per_node": 1,
    }
    here, expected = train(tmp_path / "inproc", model_dir, engine="inproc", steps=2, **keys)
    there, found = train(tmp_path / "ray", model_dir, engine="ray", steps=2, **keys)
    for mine, its in zip(here, there, strict=True):
        for name in ("loss", "pg_loss", "grad_norm", "held_back"):
            assert mine[name] == pytest.approx(its[name], rel=1e-3, abs=1e-5)
        assert 0 < its["held_back"] < 1
    assert difference(found, expected, start=model_dir) < 0.05


@FORGOTTEN
@pytest.mark.soak
def test_a_step_without_a_gradient_on_ray_trains_nothing_as_in_one_process(model_dir: Path, tmp_path: Path) -> None:
    def silent_at_first() -> Callable[[list[int]], float]:
        rewards = chain(repeat(1.0, 8), repeat(None))  # the first step has eight rollouts
        return lambda ids: good_tokens(ids) if (fixed := next(rewards)) is None else fixed

    here, expected = train(tmp_path / "inproc", model_dir, engine="inproc", steps=2, reward=silent_at_first())
    there, found = train(tmp_path / "ray", model_dir, engine="ray", steps=2, reward=silent_at_first())
    for metrics in (here, there):
        assert [1.0, 0.0] == [step.get("updates_skipped", 0.0) for step in metrics]
    assert here[1]["grad_norm"] == pytest.approx(there[1]["grad_norm"], rel=1e-3)
    assert difference(found, expected, start=model_dir) < 0.05


@FORGOTTEN
@pytest.mark.soak
def test_a_step_all_of_whose_tokens_are_rejected_moves_nothing_on_ray_as_in_one_process(
    model_dir: Path, tmp_path: Path
) -> None:
    home = "algorithm.rollout_correction"
    keys = {f"{home}.rollout_rs": "token_k1", f"{home}.rollout_rs_threshold": "1.5_2.0", "anchor_coef": 0.0}
    start = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    for engine in ("inproc", "ray"):
        reports, weights = train(tmp_path / engine, model_dir, engine=engine, steps=2, **keys)
        assert [(1.0, 1.0)] * 2 == [(step["updates_skipped"], step["rejected_share"]) for step in reports]
        assert all(torch.equal(start[name], tensor) for name, tensor in weights.items())


@FORGOTTEN
@pytest.mark.soak
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean"])
def test_updates_of_whole_rollouts_on_ray_are_those_in_one_process(model_dir: Path, tmp_path: Path, mode: str) -> None:
    keys = {"actor.loss_agg_mode": mode, "actor.ppo_mini_batch_size": 1, "actor.ppo_epochs": 2}
    here, expected = train(tmp_path / "inproc", model_dir, engine="inproc", steps=2, **keys)
    there, found = train(tmp_path / "ray", model_dir, engine="ray", steps=2, **keys)
    for mine, its in zip(here, there, strict=True):
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-3)
        assert mine["lr"] == pytest.approx(its["lr"])
    assert difference(found, expected, start=model_dir) < 0.05


@FORGOTTEN
@pytest.mark.soak
def test_a_critic_and_adapters_learn_on_ray_what_they_learn_in_one_process(model_dir: Path, tmp_path: Path) -> None:
    keys = {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "critic.optim.lr": 1e-2,
        "model.lora_rank": 4,
        "anchor_coef": 0.0,
    }
    options: dict[str, Any] = {"steps": 2, "samples_from_start": True, **keys}
    here, expected = train(tmp_path / "inproc", model_dir, engine="inproc", **options)
    there, found = train(tmp_path / "ray", model_dir, engine="ray", **options)
    assert there[0]["probability_gap"] < 1e-5
    assert max(step["served_gap"] for step in there) < 1e-5
    for name in ("vf_loss", "value", "loss", "critic_grad_norm", "grad_norm"):
        assert [step[name] for step in here] == pytest.approx([step[name] for step in there], rel=1e-3, abs=1e-5)
    assert difference(found, expected, start=model_dir) < 0.05
    assert (tmp_path / "ray/verl-000000/global_step_2/critic").is_dir()


@FORGOTTEN
@pytest.mark.soak
def test_rollouts_that_are_trained_once_more_weigh_on_ray_what_they_weigh_in_one_process(
    model_dir: Path, tmp_path: Path
) -> None:
    keys = {
        "replay.share": 0.5,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 1.01,
        "actor.use_kl_loss": True,
        "actor.optim.lr": 1e-2,
    }
    here, _ = train(tmp_path / "inproc", model_dir, engine="inproc", steps=2, **keys)
    there, _ = train(tmp_path / "ray", model_dir, engine="ray", steps=2, **keys)
    assert 0 < here[1]["replay_truncated"] < 1
    for name in ("replay_weight", "replay_truncated", "kl", "ratio_max", "grad_norm"):
        assert there[1][name] == pytest.approx(here[1][name], rel=1e-3, abs=1e-6)
    assert not {"replay_weight", "replay_truncated"} & there[0].keys()


@FORGOTTEN
@pytest.mark.soak
def test_remax_goes_on_from_an_adapter_on_ray_as_in_one_process(model_dir: Path, tmp_path: Path) -> None:
    keys = {"algorithm.adv_estimator": "remax", "actor.use_kl_loss": True, "actor.optim.lr": 1e-2}
    start = adapter(model_dir, tmp_path / "sft")
    here, expected = train(tmp_path / "inproc", model_dir, engine="inproc", steps=2, start=start, **keys)
    there, found = train(tmp_path / "ray", model_dir, engine="ray", steps=2, start=start, **keys)
    assert [2.0] * 4 == [step["rollouts_greedy"] for step in (*here, *there)]
    for name in ("probability_gap", "served_gap"):
        assert max(step[name] for step in there) < 1e-5
    for name in ("kl", "loss", "grad_norm"):
        for mine, its in zip(here, there, strict=True):
            assert its[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6)
    origin = tmp_path / "origin"
    whole_model(start).save_pretrained(origin)
    assert difference(found, expected, start=origin) < 0.05
