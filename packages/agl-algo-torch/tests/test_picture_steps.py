"""A step of each algorithm on rollouts with pictures, answered by the policy's server."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
import torch

from agl.contracts import POLICY_KEY_ENV
from agl.episodes import make_rows
from agl.errors import AglError
from agl.schemas import Episode, MediaSpan, Reward, Transition, pack_floats, pack_ids
from agl_algo_torch.distill import Distill
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.batch import RowSample, recompute_logprobs
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.learner.policy_learner import PolicyLearner
from agl_algo_torch.ppo import PPO
from agl_algo_torch.preferences import DPO
from agl_algo_torch.sdpo import SDPO
from agl_algo_torch.serving.policy import TorchPolicy
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder
from agl_vision.tiny import make_tiny

from .seeing_world import blob, picture, said
from .token_world import made, published, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ALGORITHMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (GRPO, {}),
    "ppo": (PPO, {"critic_lr": 1e-2}),
    "dpo": (DPO, {}),
    "sdpo": (SDPO, {}),
    "distill": (Distill, {"teacher": "./teacher"}),
}


class SeeingWorld:
    """Plays rollouts of one call with a picture, by the policy's server."""

    def __init__(self, folder: Path) -> None:
        self.modality = load_model(str(folder), device="cpu").modality
        self.bench: AlgorithmBench | None = None

    async def play(self, order: RolloutOrder) -> Episode:
        shown = blob(picture(sum(order.rollout.group_id.encode()), side=16))
        assert self.bench is not None
        await self.bench.store.save_blobs([shown])
        llm, name = order.llms["llm"], order.rollout.rollout_id
        messages: list[Any] = [{"role": "user", "content": said("look", shown.data)}]
        async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=os.environ[POLICY_KEY_ENV]) as client:
            found = await client.chat.completions.create(
                model=llm.model,
                messages=messages,
                max_tokens=4,
                logprobs=True,
                seed=order.seed,
                extra_body={"return_token_ids": True},
            )
        answer = found.model_dump()
        (choice,) = answer["choices"]
        index = int(name[-1])
        call = Transition(
            rollout_id=name,
            attempt_id=order.rollout.attempt_id,
            span_id=f"{name}/0",
            branch=0,
            start=len(answer["prompt_token_ids"]),
            prompt_ids=pack_ids(answer["prompt_token_ids"]),
            response_ids=pack_ids(choice["token_ids"]),
            logprobs=pack_floats(one["logprob"] for one in choice["logprobs"]["content"]),
            temperature=1.0,
            media=msgspec.convert(answer["prompt_media"], tuple[MediaSpan, ...]),
            processor=answer["processor"],
        )
        return Episode(
            rollout=order.rollout,
            attempt=None,
            reward=float(index % 2),
            rewards=(Reward(value=float(index % 2), source="evaluator", feedback="look closer"),),
            transitions=(call,),
            rows=make_rows([call], group_id=order.rollout.group_id),
        )


def bench_of(folder: Path, tmp_path: Path, algorithm: str, *, steps: int = 1, **given: Any) -> AlgorithmBench:
    factory, own = ALGORITHMS[algorithm]
    settings = {"steps": steps, "tasks_per_step": 2, "group_size": 2, "lr": 1e-2, "threads": 1, "device": "cpu"}
    world = SeeingWorld(folder)
    policies = given.pop("policies", {})
    scenario = AlgorithmScenario(
        make=lambda: made(factory, **{**settings, **own, **given}),
        play=world.play,
        tunes=("llm",),
        policies=lambda _: {
            name: TorchPolicy(name=name, model=str(path)) for name, path in {"llm": folder, **policies}.items()
        },
    )
    world.bench = AlgorithmBench(scenario, tmp_path)
    return world.bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("policy"), layers=2)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RowSample]:
    """The rows of all updates."""
    rows: list[RowSample] = []
    batches = PolicyLearner.batches

    def noted(self: PolicyLearner, samples: Any, weight: Any, *, total: float = 1.0) -> Any:
        rows.extend(samples)
        return batches(self, samples, weight, total=total)

    monkeypatch.setattr(PolicyLearner, "batches", noted)
    return rows


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_step_trains_on_pictures_with_the_logprobs_of_the_server(
    folder: Path, tmp_path: Path, algorithm: str, trained: list[RowSample]
) -> None:
    make_tiny(tmp_path / "teacher", layers=2, seed=1)
    bench = bench_of(folder, tmp_path, algorithm)
    asyncio.run(run(bench))
    start, end = (load_model(str(path), device="cpu") for path in (folder, published(bench)))
    after = end.model.state_dict()
    assert any(not tensor.equal(after[name]) for name, tensor in start.model.state_dict().items())
    answers = {row.rollout: row for row in trained if row.behaviour[row.mask].any()}
    assert len(answers) >= 2
    assert all(row.pictures for row in trained)
    found = recompute_logprobs(start.model, list(answers.values()), token_budget=1, device=start.device)
    for row, found_T in zip(answers.values(), found, strict=True):
        torch.testing.assert_close(found_T[row.mask], row.behaviour[row.mask], atol=1e-5, rtol=0)


def refusal(bench: AlgorithmBench) -> str:
    with pytest.raises(AglError) as caught:
        asyncio.run(run(bench))
    assert not bench.published
    return str(caught.value)


def test_teacher_behind_a_server_refuses_rows_with_pictures(folder: Path, tmp_path: Path) -> None:
    bench = bench_of(folder, tmp_path, "distill", teacher="big", policies={"big": folder})
    assert "'big' is a server, which gets no pictures" in refusal(bench)


def test_teacher_with_another_processor_refuses_rows_with_pictures(folder: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "teacher", layers=2, picture=16)
    message = refusal(bench_of(folder, tmp_path, "distill"))
    assert "has another processor of pictures than the policy" in message


@pytest.mark.parametrize("replay", [{}, {"replay_share": 0.5}])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_resumed_run_trains_on_pictures_as_an_uninterrupted_one(
    folder: Path, tmp_path: Path, algorithm: str, replay: dict[str, float]
) -> None:
    whole = bench_of(folder, tmp_path / "whole", algorithm, steps=2, **replay)
    reports = asyncio.run(run(whole))
    assert bool(replay) == bool(reports[-1].metrics.get("rollouts_replayed"))
    cut = bench_of(folder, tmp_path / "cut", algorithm, steps=2, **replay)

    async def one_step(state: Any) -> Any:
        async with cut:
            learner = cut.scenario.make()
            await learner.setup(cut.context())
            if state:
                await learner.restore(state)
            await learner.step()
            found = learner.state()
            await learner.close()
            return found

    asyncio.run(one_step(asyncio.run(one_step(None))))
    expected, found = (load_model(str(published(bench)), device="cpu").model.state_dict() for bench in (whole, cut))
    assert all(tensor.equal(found[name]) for name, tensor in expected.items())
