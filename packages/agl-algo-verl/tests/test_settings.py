"""VERL's configuration keys: those used, those that the experiment decides, and those refused, with the messages."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import agl
from agl.errors import ConfigError
from agl_algo_verl.local.trainer import VERL
from agl_algo_verl.local.worker import check_device
from agl_algo_verl.losses.choice import chosen_estimator, chosen_loss
from agl_algo_verl.rows.training import advice
from agl_algo_verl.settings.keys import key_tables, table, verl_keys
from agl_algo_verl.settings.ray import read_ray_settings
from agl_algo_verl.settings.settings import OWN, Estimator, Loss, VerlSettings, read_settings

from .world import config

EXAMPLES = Path(__file__).parents[3] / "examples"

GUIDE: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {
        "train_files": "data/train.parquet",
        "val_files": "data/test.parquet",
        "train_batch_size": 32,
        "max_prompt_length": 4096,
        "max_response_length": 2048,
        "truncation": "error",
    },
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
            "name": "vllm",
            "gpu_memory_utilization": 0.8,
            "engine_kwargs": {"vllm": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}},
        },
        "actor": {
            "ppo_mini_batch_size": 32,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-6},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
            "fsdp_config": {"param_offload": True, "optimizer_offload": True},
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8, "fsdp_config": {"param_offload": True}},
        "model": {"path": "Qwen/Qwen2.5", "use_remove_padding": True, "enable_gradient_checkpointing": True},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "p",
        "experiment_name": "e",
        "nnodes": 1,
        "test_freq": 32,
        "total_epochs": 2,
    },
}
"""A configuration for a rented machine with one GPU, with the keys that guides use."""


def test_a_guides_configuration_is_taken_and_every_foreign_key_is_answered() -> None:
    settings, notes = read_settings(GUIDE)
    assert (32, 4, 1e-6, 0.3) == (
        settings.data.train_batch_size,
        settings.actor_rollout_ref.rollout.n,
        settings.actor.optim.lr,
        settings.actor.clip_ratio_high,
    )
    assert settings.actor_rollout_ref.model.use_remove_padding
    assert not settings.is_dynamic
    assert 17 == len(notes)
    assert "trainer.test_freq is decided by the experiment's `validate_every`" in notes
    assert 2 * 100 // 32 == settings.steps(100)


def test_a_gpus_settings_are_refused_where_there_is_none() -> None:
    settings, _ = read_settings(GUIDE)
    with pytest.raises(ConfigError, match=r"use_remove_padding, .*param_offload, .*optimizer_offload need a GPU"):
        check_device(settings, torch.device("cpu"))
    check_device(settings, torch.device("cuda"))
    check_device(read_settings(config())[0], torch.device("cpu"))


def test_a_plain_dict_and_keywords_name_the_same_algorithm() -> None:
    spec = agl.VERL(config(), tunes="llm", threads=2)
    assert "verl" == spec.name
    assert config()["data"]["train_batch_size"] == VERL(**spec.params).settings.data.train_batch_size


def test_the_tables_name_keys_that_verl_has() -> None:
    named = {*table("decided", "inproc"), *table("refused", "inproc")}
    assert {"agentlightning"} == {name for name in named if name not in verl_keys()}


def test_every_name_that_verl_registers_is_taken_or_refused_with_a_remedy() -> None:
    from verl.trainer.ppo import core_algos

    refused = key_tables()["values"]
    estimators = {str(getattr(name, "value", name)) for name in core_algos.ADV_ESTIMATOR_REGISTRY} - {"agl"}
    assert estimators == {*get_args(Estimator), *refused["algorithm.adv_estimator"]}
    losses = {*get_args(Loss), *refused["actor_rollout_ref.actor.policy_loss.loss_mode"]}
    assert set(core_algos.POLICY_LOSS_REGISTRY) == losses


NEEDED: dict[str, dict[str, Any]] = {"dro": {"actor.policy_loss.dro_beta": 0.1}}
"""Keys that one of VERL's losses requires."""

LACKING = {
    "gdpo": "credit gives one number",
    "optimal_token_baseline": "norm of the gradient of every token",
    "tir_optimal_token_baseline": "norm of the gradient of every token",
    "bypass_mode": "recorded log-probabilities",
}
"""Names that are refused, and the part of the error message that says what is missing."""


@pytest.mark.parametrize("read", [read_settings, read_ray_settings])
def test_every_loss_and_estimator_of_verl_trains_or_is_refused_with_what_it_lacks(read: Any) -> None:
    from verl.trainer.ppo import core_algos

    estimators = {str(getattr(name, "value", name)) for name in core_algos.ADV_ESTIMATOR_REGISTRY} - {"agl"}
    names = [("algorithm.adv_estimator", name) for name in sorted(estimators)]
    names += [("actor.policy_loss.loss_mode", name) for name in sorted(core_algos.POLICY_LOSS_REGISTRY)]
    assert 26 == len(names)
    for key, name in names:
        keys = {key: name, **NEEDED.get(name, {})}
        keys |= {"rollout.name": "agl_hf"} if read is read_ray_settings else {}
        keys |= {"actor.ppo_epochs": 2} if name == "kl_cov" else {}
        if name in LACKING:
            with pytest.raises(ConfigError, match=rf"{name}'.*{LACKING[name]}.*; .*use "):
                read(config(**keys))
            continue
        found = read(config(**keys))
        settings = found.settings if read is read_ray_settings else found[0]
        assert settings.has_critic or chosen_estimator(settings).call
        assert chosen_loss(settings) is not None or settings.actor.policy_loss.loss_mode in ("vanilla", "gspo")


def test_the_settings_are_keys_that_verl_has() -> None:
    def paths(shape: Any, before: str = "") -> list[str]:
        import msgspec

        found: list[str] = []
        for field in msgspec.structs.fields(shape):
            deeper = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
            found += paths(field.type, f"{before}{field.name}.") if deeper else [before + field.name]
        return found

    # The engines take `mixed_precision`, and the reward manager `dapo` its arguments; neither is in VERL's file.
    elsewhere = (".mixed_precision.", "reward.reward_kwargs.")
    named = [name for name in paths(VerlSettings) if name.split(".")[0] not in OWN]
    absent = [name for name in named if name not in verl_keys() and not any(e in name for e in elsewhere)]
    assert [] == absent
    source = importlib.metadata.distribution("verl").locate_file("verl/experimental/reward_loop/reward_manager/dapo.py")
    dapo = Path(str(source)).read_text(encoding="utf-8")
    for name in ("overlong_buffer_cfg.enable", "overlong_buffer_cfg.len", "penalty_factor", "max_resp_len"):
        assert name in dapo


@pytest.mark.parametrize("name", [f"{home}/large.toml" for home in ("calc", "crew", "rag", "sql")])
def test_the_examples_keys_are_taken(name: str) -> None:
    content = tomllib.loads((EXAMPLES / name).read_text())
    entry = next(item for item in content["algorithm"] if item["use"] == "verl")
    params = entry["params"]
    settings = VERL(**params).settings
    assert settings.data.train_batch_size == params["data"]["train_batch_size"]
    model = settings.actor_rollout_ref.model
    assert model.enable_gradient_checkpointing
    assert model.use_remove_padding is None  # rows are packed where they can be


def test_the_keys_of_the_example_without_a_gpu_are_taken() -> None:
    content = tomllib.loads((EXAMPLES / "calc/verl-inproc.toml").read_text())
    params = next(item for item in content["algorithm"] if item["use"] == "verl")["params"]
    assert VERL(**params).settings.data.train_batch_size == params["data"]["train_batch_size"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"algorithm.adv_estimatr": "grpo"},
            r"algorithm\.adv_estimatr: VERL has no such key; did you mean algorithm\.",
        ),
        ({"rollout.nn": 4}, r"rollout\.nn: VERL has no such key; did you mean"),
        ({"data.train_batch_size": "16"}, r"Expected `int`, got `str`.*train_batch_size"),
        ({"data.train_batch_size": 0}, r"train_batch_size = 0: Expected `int` >= 1"),
        (
            {"actor.use_kl_loss": True, "actor.loss_agg_mode": "seq-mean-token-mean"},
            r"use_kl_loss = True: .*not its rollouts",
        ),
        ({"actor.kl_loss_coef": 0.1}, r"actor_rollout_ref\.actor\.kl_loss_coef = 0\.1: no KL penalty"),
        ({"algorithm.kl_ctrl": {"type": "adaptive"}}, r"algorithm\.kl_ctrl\.type = 'adaptive': no KL penalty"),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "reinforce_plus_plus"},
            r"return per token.*use_kl_loss = true",
        ),
        ({"model.lora_rank": -1}, r"lora_rank = -1: Expected `int` >= 0"),
        ({"model.lora_alpha": 8}, r"actor_rollout_ref\.model\.lora_alpha = 8: .* without"),
        ({"model.lora_adapter_path": "adapter"}, r"merge the adapter into its base model first"),
        ({"actor.grad_clip": 0.5}, r"optim\.clip_grad"),
        ({"actor.strategy": "fsdp"}, r"strategy = 'fsdp'.*FSDP2"),
        ({"actor.shuffle": True}, r"actor\.shuffle: VERL has this key.*ignore"),
        ({"trainer.n_gpus_per_node": 8}, r"one process with one device"),
        ({"trainer.critic_warmup": 5}, r"trainer\.critic_warmup = 5: .*has a critic"),
        ({"algorithm.lam": 0.9}, r"algorithm\.lam = 0\.9: .*discounts"),
        ({"critic.optim.lr": 1e-5}, r"critic\.optim\.lr = 1e-05: .*\"gae\" has a critic"),
        ({"algorithm.adv_estimator": "gae", "algorithm.gamma": 2.0}, r"gamma = 2\.0: Expected `float` <= 1"),
        ({"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 3}, r"multiple of critic\.ppo_mini"),
        ({"algorithm.adv_estimator": "gae", "critic.use_dynamic_bsz": True}, r"micro-batches of rows"),
        (
            {"algorithm.adv_estimator": "remax", "trainer.v1.trainer_mode": "colocate_async"},
            r"adv_estimator = 'remax' compares with a greedy rollout.*'colocate_async'.*or rloo",
        ),
        ({"estimator": "remax", "algorithm.use_kl_in_reward": True}, r"use_kl_in_reward with estimator = 'remax'"),
        ({"estimator": "remax", "sampling.refill": 2}, r"refill = 2, which replaces groups.*greedy"),
        (
            {"actor.policy_loss.loss_mode": "bypass_mode"},
            r"loss_mode = 'bypass_mode': .*bypass_mode = true does for every loss",
        ),
        ({"estimator": "rloo", "algorithm.adv_estimator": "grpo"}, r"adv_estimator = 'grpo': two estimators are given"),
        ({"estimator_params": {"eps": 1.0}}, r"estimator_params.* = 1\.0: .*without an estimator"),
        ({"actor.kl_loss_type": "kl"}, r"kl_loss_type = 'kl': .*gradient is 0 on average; use low_var_kl"),
        ({"algorithm.adv_estimator": "best"}, r"Invalid enum value 'best'.*algorithm\.adv_estimator"),
        ({"algorithm.filter_groups.enable": True}, r"filter_groups\.enable = True: .*refill = ROUNDS"),
        ({"sampling.refill": -1}, r"refill = -1: Expected `int` >= 0"),
        ({"sampling.refill": 1, "rollout.n": 1, "estimator": "reinforce++"}, r"groups of 1 rollout"),
        ({"sampling.refill": 1, "estimator": "reinforce++"}, r"refill = 1.*over the whole batch"),
        ({"sampling.refill": 1, "algorithm.adv_estimator": "reinforce_plus_plus"}, r"refill = 1.*over the whole batch"),
        ({"sampling.curriculum": "easy"}, r"Invalid enum value 'easy'.*curriculum"),
        (
            {"sampling.curriculum": "frontier", "sampling.refill": 2, "trainer.v1.trainer_mode": "colocate_async"},
            r"sampling\.curriculum = 'frontier', sampling\.refill = 2: .*rewards of this one",
        ),
        ({"trainer.v1.trainer_mode": "separate_async"}, r"separate_async'.*use colocate_async"),
        ({"trainer.v1.sampler.max_off_policy_threshold": 2}, r"sampler\.max_off_policy_threshold = 2: with"),
        (
            {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.sampler.max_off_policy_threshold": 1},
            r"max_off_policy_threshold = 1: a group.*threshold above it",
        ),
        ({"rollout.n": 1}, r"compares the rollouts of a task"),
        ({"actor.ppo_mini_batch_size": 64}, r"not a multiple"),
        ({"actor.use_dynamic_bsz": False}, r"use_dynamic_bsz = False: it needs ppo_micro_batch_size_per_gpu"),
        ({"actor.use_dynamic_bsz": True, "actor.ppo_micro_batch_size_per_gpu": 2}, r"_gpu = 2: .*would ignore"),
        ({"actor.loss_agg_mode": "seq-mean-token-sum-norm"}, r"without loss_scale_factor"),
        ({"actor.loss_scale_factor": 4}, r"ignores loss_scale_factor"),
        ({"actor.entropy_coeff": 0.1, "actor.loss_agg_mode": "seq-mean-token-mean"}, r"not its rollouts"),
        ({"algorithm.adv_estimator": "rloo", "algorithm.norm_adv_by_std_in_grpo": False}, r"only grpo reads it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        VERL(**config(**keys))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"saving": {"keep": 0}}, "saving.keep = 0"),
        ({"threads": -1}, "threads = -1"),
        ({"reward": {"num_workers": 2}}, r"reward\.num_workers = 2: rewards are the experiment's"),
        ({"extra": 1}, "extra: VERL has no such key"),
        ({"agentlightning": {"port": 9999}}, r"agentlightning\.port = 9999: this is Agent Lightning's own"),
    ],
    ids=["keep", "threads", "reward", "unknown", "agentlightning"],
)
def test_parameters_beside_verls_keys_are_checked(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VERL(**config(), **params)


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (4, 0)])
def test_weights_that_an_optimizer_updates_in_bfloat16_are_advised_against(rank: int, told: int) -> None:
    keys = {
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16",
        "actor_rollout_ref.model.lora_rank": rank,
    }
    notes = advice(read_settings(config(**keys))[0])
    assert told == len(notes) == len([note for note in notes if "swallows small steps" in note])


def test_all_wrong_keys_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=re.compile(r"grad_clip.*shuffle", re.DOTALL)):
        VERL(**config(**{"actor.grad_clip": 0.5, "actor.shuffle": True}))


@pytest.mark.parametrize("found", ["0.8.0", "0.9.0", "0.10.0"])
def test_other_versions_of_verl_are_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("agl_algo_verl.runtime.version", lambda _: found)
    with pytest.raises(ConfigError, match=rf"VERL {re.escape(found)} is installed.*pip install"):
        VERL(**config())


def test_a_missing_verl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError("verl")

    monkeypatch.setattr("agl_algo_verl.runtime.version", absent)
    with pytest.raises(ConfigError, match=r"not installed\. Run: pip install"):
        VERL(**config())
