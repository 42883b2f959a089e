"""VERL's check of its configuration, and what Megatron, the reward loop and the rollout correction require."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from omegaconf import OmegaConf

from agl.errors import ConfigError
from agl_algo_verl.algorithm import make
from agl_algo_verl.ray.configuration import compose
from agl_algo_verl.ray.validation import check_composed
from agl_algo_verl.settings.keys import classify, leaves
from agl_algo_verl.settings.ray import check_machine, read_ray_settings
from agl_algo_verl.settings.settings import VerlSettings
from agl_testing.conformance.bench import AlgorithmBench

from .test_ray_keys import config, passed_on
from .world import scenario

if TYPE_CHECKING:
    from agl_algo_verl.settings.ray import RaySettings

VLLM = {"rollout.name": "vllm"}
MEGATRON = VLLM | {"actor.strategy": "megatron"}
CORRECTION = "algorithm.rollout_correction"


def check(**keys: Any) -> None:
    check_composed(read_ray_settings(config(**keys)), steps=3, tasks=2)


def composed(read: RaySettings) -> dict[str, Any]:
    whole = compose(read, model="m", folder=Path("f"), steps=3, tasks=2, checkpoint=None, threads=1)
    found: Any = OmegaConf.to_container(whole, resolve=True)
    return {".".join(path): value for path, value in leaves(found)}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3},
        {"actor.use_kl_loss": True, "trainer.n_gpus_per_node": 2},
        VLLM | {"model.lora_rank": 8},
        MEGATRON | {"actor.megatron.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 4},
        MEGATRON | {"actor.use_kl_loss": True, "actor.optim.lr_decay_style": "cosine"},
    ],
    ids=["grpo", "gae", "kl", "lora", "megatron", "megatron-kl"],
)
def test_verl_accepts_what_this_package_composes(keys: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    check(**keys)
    assert "" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            VLLM | {"actor.ulysses_sequence_parallel_size": 2},
            r"you must enable `use_remove_padding`.*actor_rollout_ref.*use_remove_padding = False",
        ),
        (
            VLLM | {"rollout.expert_parallel_size": 3},
            r"must be equal to tensor_model.*It is about actor_rollout_ref\.rollout\.expert_parallel_size = 3",
        ),
        (MEGATRON | {"actor.megatron.router_replay.mode": "R9"}, r"router_replay.*about .*router_replay\.mode = 'R9'"),
    ],
)
def test_what_verl_refuses_is_refused_with_the_keys_before_anything_starts(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"VERL's own check refuses the configuration: .*{message}"):
        check(**keys)


def test_the_algorithm_lets_verl_check_its_configuration(model_dir: Path, tmp_path: Path) -> None:
    async def body(**keys: Any) -> None:
        async with AlgorithmBench(scenario(model_dir), tmp_path) as bench:
            algorithm = make(engine="ray", **config(**keys))
            try:
                await algorithm.check(bench.context())
            finally:
                await algorithm.close()

    asyncio.run(body())
    with pytest.raises(ConfigError, match=r"about actor_rollout_ref\.rollout\.expert_parallel_size = 3"):
        asyncio.run(body(**{"rollout.expert_parallel_size": 3}))


def test_a_rollout_correction_reaches_verl_as_it_was_written() -> None:
    keys = {
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.5_5.0",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.5_2.0,0.1",
    }
    read = read_ray_settings(config(**{f"{CORRECTION}.{name}": value for name, value in keys.items()}))
    found = composed(read)
    assert keys == {name: found[f"{CORRECTION}.{name}"] for name in keys}
    check_composed(read, steps=3, tasks=2)


@pytest.mark.parametrize(("keys", "coef"), [({}, 0.0), ({"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.3}, 0.3)])
def test_an_anchor_has_verls_reference_and_the_worker_that_reads_it(keys: dict[str, Any], coef: float) -> None:
    read = replace(read_ray_settings(config(**keys)), holds=True)
    found = composed(read)
    actor = "actor_rollout_ref.actor"
    assert (True, coef) == (found[f"{actor}.use_kl_loss"], found[f"{actor}.kl_loss_coef"])
    assert "agl_algo_verl.ray.preparation" in found["actor_rollout_ref.model.external_lib"]
    check_composed(read, steps=3, tasks=2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({f"{CORRECTION}.rollout_rs": "token_k9", f"{CORRECTION}.rollout_rs_threshold": "1"}, "'token_k9', which VERL"),
        ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "a_b"}, "threshold has 'a_b'"),
        ({f"{CORRECTION}.rollout_rs": "token_k1"}, "rollout_rs_threshold = None"),
        ({f"{CORRECTION}.bypass_mode": True}, "old log-probabilities are always the engine's"),
        ({f"{CORRECTION}.loss_type": "reinforce"}, "read in bypass_mode alone"),
    ],
)
def test_a_correction_that_cannot_be_made_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ray_settings(config(**keys))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("reward.reward_model.enable", "may be a policy of the experiment"),
        ("reward.reward_model.rollout.name", "may be a policy of the experiment"),
        ("reward.custom_reward_function.path", "a function of your own"),
        ("reward.reward_manager.name", "punishment of `dapo`"),
        ("reward.num_workers", "it starts no worker"),
        ("reward.sandbox_fusion.url", "agl-harness has sandboxes"),
    ],
)
def test_keys_of_the_reward_loop_are_refused_with_what_to_use(name: str, why: str) -> None:
    _, problem = classify(name, "anything", engine="fsdp2", shape=VerlSettings)
    assert problem.startswith(
        f"{name} = 'anything': VERL's reward loop scores nothing here, for rows bring their rewards; "
    )
    assert why in problem


def test_megatron_is_composed_from_verls_own_file() -> None:
    read = read_ray_settings(config(**MEGATRON, **{"actor.megatron.pipeline_model_parallel_size": 2}))
    found = composed(read)
    assert "actor_rollout_ref.actor.fsdp_config.model_dtype" not in found
    expected = {
        "actor_rollout_ref.actor.strategy": "megatron",
        "actor_rollout_ref.ref.strategy": "megatron",
        "actor_rollout_ref.actor._target_": "verl.workers.config.McoreActorConfig",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
    }
    assert expected == {name: found[name] for name in expected}


def test_every_key_of_megatron_reaches_verl_as_it_was_written() -> None:
    megatron = {name for name in passed_on("megatron") if ".megatron." in name}
    assert 40 < len(megatron)
    options = {
        "actor.megatron.override_transformer_config.recompute_granularity": "full",
        "actor.megatron.override_transformer_config.moe_router_dtype": "fp32",
        "actor.megatron.sequence_parallel": False,
    }
    found = composed(read_ray_settings(config(**MEGATRON, **options)))
    assert options == {name: found[f"actor_rollout_ref.{name}"] for name in options}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (MEGATRON | {"actor.fsdp_config.param_offload": True}, "fsdp_config.param_offload: VERL's Megatron engine has"),
        (MEGATRON | {"actor.optim.lr_scheduler_type": "cosine"}, "lr_scheduler_type: VERL's Megatron engine has no"),
        (VLLM | {"actor.megatron.tensor_model_parallel_size": 2}, "only VERL's Megatron engine reads it; set"),
        (MEGATRON | {"rollout.name": "agl_hf"}, "Megatron trains on GPUs alone; use vllm"),
        (MEGATRON | {"model.lora_rank": 4}, "adapters are merged here as FSDP2 saves them"),
        (MEGATRON | {"model.enable_gradient_checkpointing": True}, "recompute_granularity"),
        (MEGATRON | {"algorithm.adv_estimator": "gae"}, "critic is opened with FSDP2"),
        (MEGATRON | {"ref.strategy": "fsdp2"}, "the engine of actor_rollout_ref.actor.strategy"),
        (VLLM | {"actor.strategy": "veomni"}, "VERL's FSDP2 or Megatron. Write one of fsdp2, megatron"),
    ],
)
def test_what_megatron_cannot_do_here_is_refused_with_the_reason(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ray_settings(config(**keys))


def test_a_machine_without_megatron_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs megatron\.core and megatron\.bridge, not installed here\. Run: pip"):
        check_machine(read_ray_settings(config(**MEGATRON)), has_gpu=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, megatron-core and vllm")
def test_a_step_is_trained_with_megatron(model_dir: Path, tmp_path: Path) -> None:
    from .test_ray import train

    metrics, _ = train(tmp_path, model_dir, engine="ray", steps=1, **MEGATRON)
    assert metrics[0]["grad_norm"] > 0
