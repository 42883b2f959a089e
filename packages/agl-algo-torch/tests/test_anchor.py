"""The KL anchor on calls of agents that share the weights and are not trained."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace

from agl.errors import ConfigError
from agl.schemas import Episode, Transition, Weights, pack_ids
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.anchor import Anchor
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.ppo import PPO
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder

from .token_world import World, made, paid_by_another, published, run

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

QUESTION, ANSWER = [40, 50], [60, 61, 62]


def other_call(rollout_id: str, **changes: Any) -> Transition:
    """Return a call of an agent with the same weights that is not trained."""
    call = Transition(
        rollout_id=rollout_id,
        attempt_id=f"{rollout_id}.1",
        span_id=f"{rollout_id}/other",
        agent="reader",
        policy="llm",
        prompt_ids=pack_ids(QUESTION),
        response_ids=pack_ids(ANSWER),
        reject="not_selected",
    )
    return replace(call, **changes)


class SharedWorld(World):
    """A world in which each rollout also has a call of an agent that is not trained."""

    def play(self, order: RolloutOrder) -> Episode:
        episode = super().play(order)
        return replace(episode, transitions=(*episode.transitions, other_call(order.rollout.rollout_id)))


def scenario_of(make: Any, model_dir: Path, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 4, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(make, **settings),
        play=SharedWorld().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(GRPO, model_dir, anchor_coef=0.1, updates_per_step=2, lora_rank=4)


def drift(model: Path, start: Path) -> float:
    """Return how much the log-probability of the other agent's answer has changed, in nats per token."""

    def logp(path: Path) -> torch.Tensor:
        ids = torch.tensor([QUESTION + ANSWER])
        with torch.no_grad():
            found = load_model(str(path), device="cpu").model(input_ids=ids).logits[0].log_softmax(-1)
        return found[len(QUESTION) - 1 : -1].gather(1, torch.tensor(ANSWER)[:, None])[:, 0]

    return float((logp(model) - logp(start)).abs().mean())


@pytest.mark.long
@pytest.mark.parametrize("make", [GRPO, PPO])
def test_other_agents_answers_stay_where_they_were(make: Any, model_dir: Path, tmp_path: Path) -> None:
    drifts: dict[float, float] = {}
    for coef in (0.0, 100.0):
        bench = AlgorithmBench(scenario_of(make, model_dir, steps=6, anchor_coef=coef), tmp_path / str(coef))
        reports = asyncio.run(run(bench))
        drifts[coef] = drift(published(bench), model_dir)
        assert bool(coef) == any("anchor_kl" in report.metrics for report in reports)
    assert drifts[100.0] < 0.5 * drifts[0.0], drifts


@pytest.mark.long
@pytest.mark.parametrize("make", [GRPO, PPO])
def test_other_agents_are_held_without_being_asked_for(make: Any, model_dir: Path, tmp_path: Path) -> None:
    drifts: dict[str, float] = {}
    for name, params in (("default", {}), ("off", {"anchor_coef": 0.0})):
        bench = AlgorithmBench(scenario_of(make, model_dir, steps=6, lr=1e-2, **params), tmp_path / name)
        asyncio.run(run(bench))
        drifts[name] = drift(published(bench), model_dir)
    assert drifts["default"] < 0.8 * drifts["off"], drifts


@pytest.mark.parametrize(("world", "is_needed"), [(World, False), (SharedWorld, True)])
def test_the_start_is_kept_in_memory_only_where_other_agents_share_the_weights(
    world: Any, is_needed: bool, model_dir: Path, tmp_path: Path
) -> None:
    async def body() -> None:
        scenario = dataclasses.replace(scenario_of(GRPO, model_dir), play=world().play)
        async with AlgorithmBench(scenario, tmp_path) as bench:
            grpo = bench.scenario.make()
            await grpo.setup(bench.context())
            await grpo.step()
            assert is_needed == (grpo._tuned._reference is not None)

    asyncio.run(body())


def test_a_resumed_run_holds_them_at_the_start_and_not_where_it_was_interrupted(
    model_dir: Path, tmp_path: Path
) -> None:
    async def body() -> dict[str, torch.Tensor]:
        async with AlgorithmBench(scenario_of(GRPO, model_dir), tmp_path) as bench:
            grpo = bench.scenario.make()
            await grpo.setup(bench.context())
            await grpo.step()
            again = bench.scenario.make()
            await again.setup(bench.context())
            await again.restore(grpo.state())
            with again._tuned.reference.active() as model:
                return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    found, start = asyncio.run(body()), load_model(str(model_dir), device="cpu").model.state_dict()
    for name, tensor in start.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_gradient_is_that_of_the_mean_distance_over_all_held_tokens(model_dir: Path, tmp_path: Path) -> None:
    anchor = Anchor(coef=0.7, kl="k3")
    longer = other_call("payer-001", response_ids=pack_ids([*ANSWER, 63, 64]), temperature=0.5)
    episodes = [
        replace(episode, transitions=(call,))
        for episode, call in zip(paid_by_another(model_dir, count=2), [other_call("payer-000"), longer], strict=True)
    ]

    async def body() -> None:
        bench = AlgorithmBench(scenario_of(GRPO, model_dir, kl_coef=0.1), tmp_path)
        async with bench:
            grpo = made(GRPO, anchor_coef=0.7, threads=1, device="cpu")
            await grpo.setup(bench.context())
            learner = await grpo._tuned.learner()
            model = learner.loaded.model
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01  # away from the reference
            rows = anchor.rows(episodes, policy="llm")
            found = anchor.add_gradient(learner, grpo._tuned, rows, rollouts={"payer-000", "payer-001"})
            ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            distances = []
            for call in (other_call("payer-000"), longer):
                answer = [60, 61, 62, 63, 64][: len(call.response_ids) // 4]
                ids = torch.tensor([QUESTION + answer])

                def logp(network: Any, ids: Any = ids, answer: Any = answer, heat: float = call.temperature) -> Any:
                    scores = (network(input_ids=ids).logits[0] / heat).log_softmax(-1)
                    return scores[len(QUESTION) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]

                with grpo._tuned.reference.active() as start:
                    reference = logp(start)
                d = reference - logp(model)
                distances.append(d.exp() - d - 1)
            whole = torch.cat(distances).mean()
            assert float(whole.detach()) == pytest.approx(found["anchor_kl"], abs=1e-6)
            (0.7 * whole).backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)

    asyncio.run(body())


@pytest.mark.parametrize(
    "changes",
    [{"reject": ""}, {"reject": "error"}, {"policy": "other"}, {"prompt_ids": b""}, {"response_ids": b""}],
    ids=str,
)
def test_other_calls_are_not_held(changes: dict[str, Any], model_dir: Path) -> None:
    (episode,) = paid_by_another(model_dir, count=1)
    anchor = Anchor(coef=1.0, kl="k3")
    held = replace(episode, transitions=(other_call("payer-000"),))
    assert 1 == len(anchor.rows([held], policy="llm"))
    assert [] == anchor.rows([replace(episode, transitions=(other_call("payer-000", **changes),))], policy="llm")
    assert [] == Anchor(coef=0.0, kl="k3").rows([held], policy="llm")


@pytest.mark.parametrize(("params", "message"), [({"anchor_coef": -1.0}, "anchor_coef"), ({"kl": "k1"}, "k1")])
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(GRPO, **{"anchor_coef": 0.1, **params})
