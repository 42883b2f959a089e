"""The losses of agl-objectives in the engines of VERL and of agl-algo-torch: values and gradients of whole updates."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_verl.local.worker import VerlWorker
from agl_algo_verl.losses.choice import chosen_loss, needs_entropies
from agl_algo_verl.losses.correction import Correction, corrected
from agl_algo_verl.ray import cluster as ray_cluster
from agl_algo_verl.ray.configuration import compose
from agl_algo_verl.ray.trainer import RayVERL
from agl_algo_verl.rows.rows import RowSample
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import read_settings
from agl_objectives.contract import LossTerms, TokenBatch
from agl_objectives.importance import Importance
from agl_objectives.registry import losses
from agl_objectives.settings import Objective
from agl_testing.conformance.bench import AlgorithmBench

from .test_inproc import train
from .world import World, config, scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

torch_batch = pytest.importorskip("agl_algo_torch.learner.batch", reason="needs agl-algo-torch")
torch_objective = pytest.importorskip("agl_algo_torch.learner.objective", reason="needs agl-algo-torch")

CPU = torch.device("cpu")

BINDING: dict[str, dict[str, Any]] = {
    "ppo-clip": {"clip_low": 0.1, "clip_high": 0.15, "clip_dual": 1.3},
    "gspo": {"clip_low": 0.01, "clip_high": 0.02},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.1},
    "cispo": {"clip_low": 0.2, "clip_high": 0.1},
    "sapo": {"tau_negative": 2.0},
    "clip-cov": {"ratio": 0.3, "cov_low": 0.0, "clip_low": 0.3},
    "kl-cov": {"ratio": 0.3, "kl_coef": 0.5},
    "dppo": {"clip_low": 1e-4, "clip_high": 1e-4, "ratio_max": 1.2},
    "gpg": {},
    "dro": {"beta": 0.3},
}
"""Parameters of each loss that are so tight that its bounds take effect."""

SHAPES = (("a", 3, 7), ("a", 5, 2), ("b", 2, 9), ("c", 8, 4), ("c", 1, 1), ("c", 4, 6))
"""Rows as (rollout, tokens of the prompt, tokens of the response)."""

MICRO = {"tokens": {"actor.ppo_max_token_len_per_gpu": 24}, "rows": {"actor.ppo_micro_batch_size_per_gpu": 4}}


@dataclass
class Update:
    """The rows of one update for both engines; the old log-probabilities differ from the policy's."""

    torch: list[Any] = field(default_factory=list)
    verl: list[RowSample] = field(default_factory=list)


@pytest.fixture(scope="session")
def policy(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="session")
def other(make_model: Callable[..., Path]) -> Any:
    """Another network, used as the reference of a KL penalty."""
    return AutoModelForCausalLM.from_pretrained(make_model(seed=7), dtype=torch.float32)


def update_of(policy: Any, other: Any, *, seed: int) -> Update:
    """Return random rows, several per rollout, whose responses contain untrained tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Any] = []
    for rollout, prompt, length in SHAPES:
        trained = torch.rand(length, generator=generator) < 0.7
        trained[[0, -1]] = True  # a response begins and ends with trained tokens
        mask = torch.cat([torch.zeros(prompt, dtype=torch.bool), trained])
        sample = torch_batch.RowSample(
            rollout=rollout,
            ids=torch.randint(0, 250, (prompt + length,), generator=generator),
            mask=mask,
            advantages=torch.randn(len(mask), generator=generator) * mask,
            behaviour=torch.randn(len(mask), generator=generator),
            temperature=torch.ones(len(mask)),
        )
        drawn.append(sample)
    now, reference = (
        torch_batch.recompute_logprobs(model, drawn, token_budget=64, device=CPU) for model in (policy, other)
    )
    found = Update()
    for sample, now_T, reference_T in zip(drawn, now, reference, strict=True):
        away = torch.randn(2, len(now_T), generator=generator)
        made = replace(sample, old=now_T + 0.3 * away[0], behaviour=now_T + 0.4 * away[1])
        found.torch.append(made)
        prompt = int(made.mask.nonzero()[0])
        found.verl.append(
            RowSample(
                rollout=made.rollout,
                group=0,
                ids=made.ids,
                mask=made.mask[prompt:],
                advantages=made.advantages[prompt:],
                behaviour=made.behaviour[prompt:],
                temperature=1.0,
                old=made.old[prompt:],
                reference=reference_T[prompt:],
            )
        )
    return found


def policy_objective(*, importance: Importance | None = None, **settings: Any) -> Any:
    """Return the objective of agl-algo-torch, with importance weights whose lower bound VERL's keys may set."""
    objective = torch_objective.PolicyObjective("grpo", Objective(**settings), updates=2)
    objective._importance = importance or Importance(cap=0.0)  # its own settings know one floor only
    return objective


def by_torch(update: Update, policy: Any, *, budget: int, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return an update's loss and gradient by agl-algo-torch; `reference` is the network of a KL penalty."""
    reference = options.pop("reference", None)

    class Tuned:
        class reference:  # noqa: N801 - an attribute of the policy that is tuned
            @staticmethod
            @contextmanager
            def active() -> Generator[Any]:
                yield reference

    objective = policy_objective(**options)
    weight, total = objective.weights(update.torch)
    learner = SimpleNamespace(
        logprobs=lambda rows: torch_batch.recompute_logprobs(policy, rows, token_budget=64, device=CPU)
    )
    rows = objective.surveyed(update.torch, learner=learner)
    policy.zero_grad()
    value = 0.0
    for batch in torch_batch.micro_batches(rows, weight, token_budget=budget, device=CPU, total=total):
        loss = objective.loss(batch, model=policy, tuned=Tuned, tally=torch_objective.Tally())
        loss.backward()
        value += float(loss.detach())
    return value, {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def by_verl(
    update: Update, model_dir: Path, *, held: Sequence[RowSample] = (), **keys: Any
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Return an update's loss, gradient and metrics by VERL's engine, without changing weights.

    `held` are rows of the anchor.
    """
    settings, _ = read_settings(config(**keys))
    worker = VerlWorker(origin=Weights(uri=str(model_dir)), settings=settings, steps=1)
    engine = worker._worker.engine
    found: dict[str, torch.Tensor] = {}

    def keep() -> float:
        found.update(
            {name: parameter.grad.full_tensor().clone() for name, parameter in engine.module.named_parameters()}
        )
        return 0.0

    engine.optimizer_step = keep
    metrics = worker.update(update.verl, rollouts=3, is_last=False, held=held)
    return metrics["loss"], found, metrics


def assert_equal(own: tuple[float, dict[str, Any]], theirs: tuple[float, dict[str, Any]]) -> None:
    assert own[0] == pytest.approx(theirs[0], abs=1e-6)
    assert own[1].keys() == theirs[1].keys()
    assert any(bool(values.any()) for values in theirs[1].values())
    for name, values in own[1].items():
        torch.testing.assert_close(values, theirs[1][name], atol=1e-6, rtol=1e-6)


def test_every_loss_of_ours_is_compared() -> None:
    assert {entry.name for entry in losses()} == {*BINDING}


@pytest.mark.parametrize(
    ("name", "micro"), [*((name, "tokens") for name in BINDING), ("gmpo", "rows"), ("clip-cov", "rows")]
)
def test_losses_and_their_gradients_are_those_of_the_torch_engine(
    name: str, micro: str, policy: Any, other: Any, model_dir: Path
) -> None:
    update = update_of(policy, other, seed=len(name))
    expected = by_torch(update, policy, budget=20, loss=name, loss_params=BINDING[name])
    keys = {"loss": name, "loss_params": BINDING[name], "actor.ppo_epochs": 2}  # of which `by_verl` does one update
    *found, _ = by_verl(update, model_dir, **keys, **MICRO[micro])
    assert_equal(expected, (found[0], found[1]))


def spread(tokens: TokenBatch, *, width: float = 0.5) -> LossTerms:
    """A user-defined loss that reads every field of the tokens."""
    away_M = (tokens.logp_M - tokens.old_M).clamp(-5.0, 5.0)
    entropy_M: Any = tokens.entropy_M
    noise_M = (tokens.old_M - tokens.behaviour_M).clamp(-1.0, 1.0).exp()
    loss_M = -tokens.advantages_M * away_M.exp() * noise_M + width * tokens.advantages_M.abs() * away_M**2
    return LossTerms(loss_M=loss_M * (1.0 + entropy_M), counts={"seen": len(away_M)})


class Centred:
    """A user-defined loss that compares the tokens of an update, as a class with a parameter."""

    def __init__(self, *, share: float = 0.5) -> None:
        self._share = share

    def survey(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
        away_M = (tokens.logp_M - tokens.old_M) * (tokens.weight_M > 0)
        return {"mean_M": away_M.mean().expand(len(away_M))}

    def __call__(self, tokens: TokenBatch) -> LossTerms:
        away_M = tokens.logp_M - tokens.old_M - self._share * tokens.extras["mean_M"]
        return LossTerms(loss_M=-tokens.advantages_M * away_M.exp())


@pytest.mark.parametrize("micro", MICRO)
@pytest.mark.parametrize(("name", "params"), [("spread", {"width": 0.3}), ("Centred", {"share": 0.7})])
def test_losses_of_a_users_own_are_the_same_in_both_engines(
    name: str, params: dict[str, Any], micro: str, policy: Any, other: Any, model_dir: Path
) -> None:
    update, keys = update_of(policy, other, seed=3), {"loss": f"{__name__}:{name}", "loss_params": params}
    expected = by_torch(update, policy, budget=20, **keys)
    *found, metrics = by_verl(update, model_dir, **keys, **MICRO[micro])
    assert_equal(expected, (found[0], found[1]))
    assert name != "spread" or metrics["seen"] == pytest.approx(1.0)


def test_only_losses_that_may_read_entropies_pay_for_them() -> None:
    own, mine = (read_settings(config(loss=name))[0] for name in ("cispo", f"{__name__}:spread"))
    plain, bonus = read_settings(config())[0], read_settings(config(**{"actor.entropy_coeff": 0.1}))[0]
    assert [False, True, False, True] == [needs_entropies(found) for found in (own, mine, plain, bonus)]


@pytest.mark.parametrize(("loss", "expected"), [("cispo", False), (f"{__name__}:spread", True)])
def test_on_ray_losses_get_the_same_entropies(loss: str, expected: bool) -> None:
    read = read_ray_settings(config(loss=loss, **{"rollout.name": "agl_hf"}))
    made = compose(read, model="m", folder=Path("f"), steps=3, tasks=2, checkpoint=None, threads=1)
    assert expected is made.actor_rollout_ref.actor.calculate_entropy


@pytest.mark.parametrize("given", ["", "/lib"])
def test_losses_beside_the_experiment_are_found_by_every_process_of_a_cluster(
    given: str, monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    class StartedError(Exception):
        pass

    def start(read: Any, *, environment: dict[str, str]) -> Any:
        raise StartedError(environment["PYTHONPATH"])

    policies = {"llm": VerlPolicy(name="llm", model=str(model_dir), threads=1)}
    bench = AlgorithmBench(replace(scenario(model_dir), policies=lambda _: policies), tmp_path)

    async def body() -> None:
        async with bench:
            algorithm = RayVERL(**config(**{"rollout.name": "agl_hf"}))
            await algorithm.setup(replace(bench.context(), folder=Path("beside"), defer=lambda save: None))
            await algorithm.step()

    monkeypatch.setenv("PYTHONPATH", given)
    monkeypatch.setattr(ray_cluster, "Cluster", start)
    with pytest.raises(StartedError) as caught:
        asyncio.run(body())
    assert [str(Path.cwd() / "beside"), *filter(None, [given])] == str(caught.value).split(os.pathsep)


AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token": {"actor.loss_agg_mode": "token-mean"},
    "sequence": {"actor.loss_agg_mode": "seq-mean-token-mean"},
    "constant": {"actor.loss_agg_mode": "seq-mean-token-sum-norm", "actor.loss_scale_factor": 5},
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_penalty_bonus_and_importance_weights_are_those_of_the_torch_engine(
    aggregation: str, policy: Any, other: Any, model_dir: Path
) -> None:
    update = update_of(policy, other, seed=1)
    expected = by_torch(
        update,
        policy,
        budget=20,
        loss="dro",
        loss_params={"beta": 0.3},
        aggregation=aggregation,
        **({"constant_tokens": 5} if aggregation == "constant" else {}),
        importance=Importance(cap=1.2),
        kl_coef=0.2,
        entropy_coef=0.1,
        reference=other,
    )
    keys = {
        "loss": "dro",
        "loss_params": {"beta": 0.3},
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.2,
        "actor.entropy_coeff": 0.1,
    }
    update.verl = corrected(update.verl, Correction(importance=Importance(cap=1.2)))
    value, gradient, metrics = by_verl(update, model_dir, **keys, **AGGREGATIONS[aggregation], **MICRO["tokens"])
    assert_equal(expected, (value, gradient))
    assert {"kl_loss", "entropy_loss", "ppo_kl", "pg_loss"} <= metrics.keys()


@pytest.mark.parametrize("micro", MICRO)
@pytest.mark.parametrize("loss", ["ours", "vanilla", "gspo"])
def test_counts_of_a_loss_are_reported_per_token(
    loss: str, micro: str, policy: Any, other: Any, model_dir: Path
) -> None:
    update = update_of(policy, other, seed=2)
    low, high = 0.1, 0.15
    keys: dict[str, Any] = {"loss": "ppo-clip", "loss_params": {"clip_low": low, "clip_high": high}}
    if loss != "ours":
        keys = {"actor.policy_loss.loss_mode": loss, "actor.clip_ratio_low": low, "actor.clip_ratio_high": high}
    *_, metrics = by_verl(update, model_dir, **keys, **MICRO[micro])
    now = torch_batch.recompute_logprobs(policy, update.torch, token_budget=64, device=CPU)
    away = [(p - s.old)[s.trained] for p, s in zip(now, update.torch, strict=True)]
    assert float(torch.cat(away).max().exp()) == pytest.approx(metrics["ratio_max"], rel=1e-5)
    if loss != "ours":
        assert float(-torch.cat(away).mean()) == pytest.approx(metrics["ppo_kl"], abs=1e-6)
        assert metrics["clipped_low"] + metrics["clipped_high"] == pytest.approx(metrics["pg_clipfrac"])
    away = [parts.mean().expand(len(parts)) for parts in away] if loss == "gspo" else away
    ratio_M = torch.cat(away).exp()
    advantages_M = torch.cat([s.advantages[s.trained] for s in update.torch])
    assert float(((ratio_M < 1 - low) & (advantages_M < 0)).float().mean()) == pytest.approx(metrics["clipped_low"])
    assert float(((ratio_M > 1 + high) & (advantages_M > 0)).float().mean()) == pytest.approx(metrics["clipped_high"])


VERLS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "cispo": ({"actor.clip_ratio_high": 0.1}, "cispo", {"clip_low": 0.2, "clip_high": 0.1}),
    "sapo": ({"actor.tau_neg": 2.0}, "sapo", {"tau_positive": 1.0, "tau_negative": 2.0}),
    "geo_mean": ({"actor.clip_ratio": 0.1}, "gmpo", {"clip_low": 0.1, "clip_high": 0.1}),
    "clip_cov": (
        {"actor.policy_loss.clip_cov_ratio": 0.3, "actor.policy_loss.clip_cov_lb": 0.1},
        "clip-cov",
        {"clip_low": 0.2, "clip_high": 0.2, "ratio": 0.3, "cov_low": 0.1, "cov_high": 5.0},
    ),
    "kl_cov": (
        {"actor.policy_loss.kl_cov_ratio": 0.3, "actor.policy_loss.ppo_kl_coef": 0.5, "actor.ppo_epochs": 2},
        "kl-cov",
        {"ratio": 0.3, "kl_coef": 0.5},
    ),
    "dppo_tv": (
        {"actor.clip_ratio_c": 20.0},
        "dppo",
        {"divergence": "tv", "clip_low": 0.2, "clip_high": 0.2, "ratio_max": 20.0},
    ),
    "dppo_kl": (
        {"actor.clip_ratio_low": 0.1},
        "dppo",
        {"divergence": "kl", "clip_low": 0.1, "clip_high": 0.2, "ratio_max": 3.0},
    ),
    "gpg": ({}, "gpg", {}),
    "dro": ({"actor.policy_loss.dro_beta": 0.3}, "dro", {"beta": 0.3}),
}
"""For each of VERL's losses, VERL's keys, our loss and our parameters."""


@pytest.mark.parametrize("mode", VERLS)
def test_verls_keys_of_a_loss_name_the_same_loss_with_its_parameters(mode: str) -> None:
    keys, name, params = VERLS[mode]
    read, _ = read_settings(config(**keys, **{"actor.policy_loss.loss_mode": mode}))
    choice = chosen_loss(read)
    assert choice is not None
    expected = "sequence" if mode in ("sapo", "geo_mean") else "token"
    assert (name, params, expected) == (choice.name, choice.params, choice.aggregation)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "cispoo"}, r"No loss is named 'cispoo'; did you mean 'cispo'"),
        ({"loss": "cispo", "loss_params": {"beta": 1.0}}, r"the loss 'cispo' takes no parameter 'beta'"),
        ({"loss_params": {"beta": 1.0}}, r"loss_params\.beta = 1\.0: .* without a loss"),
        (
            {"loss": "cispo", "actor.policy_loss.loss_mode": "gspo"},
            r"loss_mode = 'gspo': two losses are given.*loss = 'cispo'",
        ),
        (
            {"loss": "cispo", "actor.clip_ratio_low": 0.1},
            r"actor\.clip_ratio_low = 0\.1: .*does not read it.*loss = 'cispo'",
        ),
        (
            {"actor.policy_loss.loss_mode": "gpg", "actor.clip_ratio": 0.1},
            r"clip_ratio = 0\.1: .*does not read it.*loss_mode = 'gpg'",
        ),
        ({"actor.policy_loss.loss_mode": "dro"}, r"needs .*dro_beta"),
        ({"actor.policy_loss.loss_mode": "kl_cov"}, r"'kl-cov'.* a step has one update.*ppo_epochs"),
        ({"loss": "kl-cov", "actor.ppo_mini_batch_size": 2}, r"'kl-cov'.* a step has one update.*ppo_epochs"),
        (
            {"actor.policy_loss.loss_mode": "sapo", "actor.loss_agg_mode": "token-mean"},
            r"mean over sequences.*loss_agg_mode = 'token-mean'",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_losses_that_are_named_wrongly_or_twice_or_do_nothing_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(config(**keys))


@pytest.mark.parametrize("keys", [{"actor.ppo_epochs": 2}, {"actor.ppo_mini_batch_size": 1}], ids=str)
def test_a_penalty_on_the_ratio_is_taken_with_several_updates_per_step(keys: dict[str, Any]) -> None:
    read, _ = read_settings(config(loss="kl-cov", **keys))
    assert "kl-cov" == read.loss


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"loss": "gmpo", "actor.ppo_micro_batch_size_per_gpu": 3}, marks=pytest.mark.soak),
        {"actor.policy_loss.loss_mode": "clip_cov", "estimator": "opo"},
    ],
    ids=["gmpo", "clip_cov"],
)
def test_reward_rises_with_losses_that_compare_tokens_of_several_rows(
    model_dir: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    settings = {"trainer.total_training_steps": 5, "rollout.n": 16, "actor.optim.lr": 2e-2, "actor.ppo_epochs": 2}
    metrics, _ = train(tmp_path, model_dir, World(rows=2), **settings, **keys)
    assert metrics[0]["reward"] + 0.1 < metrics[-1]["reward"]
    assert {"clipped", "held_back"} & metrics[-1].keys()


def test_an_update_that_is_left_out_moves_the_schedule_alone(policy: Any, other: Any, model_dir: Path) -> None:
    keys = {"actor.optim.lr": 1e-2, "actor.optim.weight_decay": 0.1}
    settings = read_settings(config(**keys))[0]
    worker = VerlWorker(origin=Weights(uri=str(model_dir)), settings=settings, steps=4)
    rows = update_of(policy, other, seed=3).verl

    def moved_by(update: Callable[[], Any]) -> float:
        module = worker._worker.engine.module
        before = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
        update()
        return max(float((tensor.detach() - before[name]).abs().max()) for name, tensor in module.named_parameters())

    def left_out() -> None:
        options = {"global_batch_size": 3, "update_lr_scheduler": True, "calculate_entropy": False}
        found = worker._worker.train_batch(worker._batch(rows, agl_silent=(0, 2), **options))
        assert 0.0 == found["metrics"]["grad_norm"]

    assert 0 < moved_by(lambda: worker.update(rows, rollouts=3, is_last=True))
    assert 0 == moved_by(left_out)
    assert 2 == worker.place
    assert 0 < moved_by(lambda: worker.update(rows, rollouts=3, is_last=True))
