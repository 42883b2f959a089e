"""Every key that training in one process accepts changes what is trained, or is refused with a reason.

A run is played with one key at two values. The input of VERL (the configurations of its workers, every batch, the
order of updates), the requests to the agents, and the reports must differ. A recorder that computes nothing takes the
place of VERL's worker, so that a run takes a moment.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from msgspec.structs import replace as changed

from agl.errors import AglError, ConfigError
from agl_algo_verl.local import critic, models, trainer, worker
from agl_algo_verl.losses import loss_worker
from agl_algo_verl.settings.settings import OWN, VerlSettings, read_settings
from agl_algo_verl.typed import ragged
from agl_testing.conformance.bench import AlgorithmBench

from .test_anchor import other_call
from .world import World, config, episode, scenario

if TYPE_CHECKING:
    from agl.schemas import Episode, Weights
    from agl_testing.conformance.bench import RolloutOrder

LORA: dict[str, Any] = {"model.lora_rank": 4}
GAE: dict[str, Any] = {"algorithm.adv_estimator": "gae"}
KL: dict[str, Any] = {"actor.use_kl_loss": True}
REWARD_KL: dict[str, Any] = {"algorithm.use_kl_in_reward": True}
ADAPTIVE: dict[str, Any] = {**REWARD_KL, "algorithm.kl_ctrl.type": "adaptive"}
IS: dict[str, Any] = {"algorithm.rollout_correction.rollout_is": "token"}
RS: dict[str, Any] = {
    "algorithm.rollout_correction.rollout_rs": "token_k2",
    "algorithm.rollout_correction.rollout_rs_threshold": 0.02,
}
AHEAD: dict[str, Any] = {"trainer.v1.trainer_mode": "colocate_async"}
LONG: dict[str, Any] = {
    "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
    "reward.reward_kwargs.overlong_buffer_cfg.len": 1,
    "reward.reward_kwargs.max_resp_len": 2,
}


def mode(name: str, **keys: Any) -> dict[str, Any]:
    return {"actor.policy_loss.loss_mode": name, **keys}


EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "algorithm.adv_estimator": ("rloo", {}),
    "algorithm.norm_adv_by_std_in_grpo": (False, {}),
    "algorithm.gamma": (0.5, GAE),
    "algorithm.lam": (0.5, GAE),
    "algorithm.use_kl_in_reward": (True, {}),
    "algorithm.kl_penalty": ("k3", REWARD_KL),
    "algorithm.kl_ctrl.type": ("adaptive", REWARD_KL),
    "algorithm.kl_ctrl.kl_coef": (0.5, REWARD_KL),
    "algorithm.kl_ctrl.horizon": (10, ADAPTIVE),
    "algorithm.kl_ctrl.target_kl": (10.0, ADAPTIVE),
    "algorithm.rollout_correction.rollout_is": ("token", {}),
    "algorithm.rollout_correction.rollout_is_threshold": ("0.9_1.1", IS),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (True, IS),
    "algorithm.rollout_correction.rollout_rs": ("seq_max_k2", RS),
    "algorithm.rollout_correction.rollout_rs_threshold": (1e-6, RS),
    "algorithm.rollout_correction.bypass_mode": (True, {}),
    "data.train_batch_size": (1, {}),
    "data.max_prompt_length": (2, {}),
    "data.max_response_length": (2, {}),
    "data.filter_overlong_prompts": (False, {"data.max_prompt_length": 2}),
    "actor.ppo_mini_batch_size": (1, {}),
    "actor.ppo_micro_batch_size_per_gpu": (2, {}),
    "actor.ppo_max_token_len_per_gpu": (64, {}),
    "actor.ppo_epochs": (2, {}),
    "actor.clip_ratio": (0.1, {}),
    "actor.clip_ratio_low": (0.1, {}),
    "actor.clip_ratio_high": (0.1, {}),
    "actor.clip_ratio_c": (2.0, {}),
    "actor.tau_pos": (2.0, mode("sapo")),
    "actor.tau_neg": (2.0, mode("sapo")),
    "actor.loss_agg_mode": ("seq-mean-token-sum", {}),
    "actor.loss_scale_factor": (9, {"actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
    "actor.entropy_coeff": (0.1, {}),
    "actor.use_kl_loss": (True, {}),
    "actor.kl_loss_coef": (0.1, KL),
    "actor.kl_loss_type": ("k2", KL),
    "actor.policy_loss.loss_mode": ("gspo", {}),
    "actor.policy_loss.clip_cov_ratio": (0.1, mode("clip_cov")),
    "actor.policy_loss.clip_cov_lb": (0.5, mode("clip_cov")),
    "actor.policy_loss.clip_cov_ub": (3.0, mode("clip_cov")),
    "actor.policy_loss.kl_cov_ratio": (0.1, mode("kl_cov", **{"actor.ppo_epochs": 2})),
    "actor.policy_loss.ppo_kl_coef": (0.2, mode("kl_cov", **{"actor.ppo_epochs": 2})),
    "actor.policy_loss.dro_beta": (0.3, mode("dro")),
    "actor.fsdp_config.model_dtype": ("bf16", {}),
    "actor.fsdp_config.mixed_precision.param_dtype": ("bf16", {}),
    "actor.fsdp_config.mixed_precision.reduce_dtype": ("bf16", {}),
    "actor.fsdp_config.mixed_precision.buffer_dtype": ("bf16", {}),
    "actor.fsdp_config.param_offload": (True, {}),
    "actor.fsdp_config.optimizer_offload": (True, {}),
    "model.use_remove_padding": (True, {}),
    "model.enable_gradient_checkpointing": (True, {}),
    "model.lora_rank": (4, {}),
    "model.lora_alpha": (32, LORA),
    "model.target_modules": ("q_proj", LORA),
    "model.exclude_modules": ("q_proj", LORA),
    "rollout.n": (3, {}),
    "critic.fsdp.model_dtype": ("bf16", GAE),
    "critic.fsdp.mixed_precision.param_dtype": ("bf16", GAE),
    "critic.fsdp.mixed_precision.reduce_dtype": ("bf16", GAE),
    "critic.fsdp.mixed_precision.buffer_dtype": ("bf16", GAE),
    "critic.fsdp.param_offload": (True, GAE),
    "critic.fsdp.optimizer_offload": (True, GAE),
    "critic.model.enable_gradient_checkpointing": (True, GAE),
    "critic.ppo_mini_batch_size": (1, GAE),
    "critic.ppo_micro_batch_size_per_gpu": (2, GAE),
    "critic.ppo_max_token_len_per_gpu": (64, GAE),
    "critic.ppo_epochs": (2, GAE),
    "critic.cliprange_value": (0.1, GAE),
    "critic.loss_agg_mode": ("seq-mean-token-sum", GAE),
    "reward.reward_kwargs.overlong_buffer_cfg.enable": (
        True,
        {name: LONG[name] for name in LONG if "enable" not in name},
    ),
    "reward.reward_kwargs.overlong_buffer_cfg.len": (2, LONG),
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": (0.3, LONG),
    "reward.reward_kwargs.max_resp_len": (3, LONG),
    "trainer.critic_warmup": (2, GAE),
    "trainer.total_epochs": (2, {"trainer.total_epochs": 1, "trainer.total_training_steps": None}),
    "trainer.total_training_steps": (1, {}),
    "trainer.v1.trainer_mode": ("colocate_async", {}),
    "trainer.v1.colocate_async.num_warmup_batches": (2, AHEAD),
    "loss": ("cispo", {}),
    "loss_params": ({"clip_high": 0.1}, {"loss": "cispo"}),
    "estimator": ("opo", {}),
    "estimator_params": ({"eps": 0.5}, {"estimator": "grpo"}),
    "sampling.refill": (1, {}),
    "sampling.curriculum": ("frontier", {}),
    "replay.share": (0.5, IS),
    "replay.max_staleness": (1, {**IS, "replay.share": 0.43}),
    "anchor_coef": (0.5, {}),
}
"""For each key, a value that differs from the default, and the other keys that it needs."""

for _home in ("actor", "critic"):
    EFFECTS |= {
        f"{_home}.optim.{name}": (value, {**(GAE if _home == "critic" else {}), **beside})
        for name, value, beside in (
            ("lr", 0.5, {}),
            ("betas", (0.8, 0.99), {}),
            ("weight_decay", 0.5, {}),
            ("clip_grad", 0.5, {}),
            ("lr_scheduler_type", "cosine", {}),
            ("lr_warmup_steps", 2, {}),
            ("lr_warmup_steps_ratio", 0.5, {}),
            ("min_lr_ratio", 0.5, {}),
            ("num_cycles", 1.5, {}),
        )
    }

ALONE = {
    "data.filter_overlong_prompts": "it needs a prompt that is too long",
    "trainer.total_epochs": "guides give it beside total_training_steps, which ends the run first",
}
"""Keys whose effect depends on more than other keys, and on what."""

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "algorithm.rollout_correction.loss_type": ("reinforce", {}, "cispo"),
    "actor.use_dynamic_bsz": (False, {}, "ppo_micro_batch_size_per_gpu"),
    "reward.reward_kwargs.overlong_buffer_cfg.log": (True, LONG, "is not logged"),
}
"""Keys whose only other value is refused: that value, the other keys it needs, and a part of the error message."""

ELSEWHERE = {
    "trainer.v1.sampler.max_off_policy_threshold": "test_supply.py",
    "trainer.v1.sampler.max_off_policy_strategy": "test_supply.py",
    "sampling.mask_truncated": "test_truncated.py",
    "saving.keep": "test_saving.py",
    "saving.save_every": "test_saving.py",
    "threads": "test_ray_keys.py",
    "max_nonfinite": "test_nonfinite.py",
    "entropy": "test_inproc.py",
    "probe": "test_probe.py",
}
"""Keys whose effect depends on more than the rollouts here, and the tests that cover them."""


def typed_keys(shape: Any = VerlSettings, before: str = "") -> list[str]:
    found: list[str] = []
    for field in msgspec.structs.fields(shape):
        deeper = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        found += typed_keys(field.type, f"{before}{field.name}.") if deeper else [before + field.name]
    return [name.removeprefix("actor_rollout_ref.") for name in found]


class Recorder:
    """Stands in for VERL's training worker: records its input and answers with meaningless numbers."""

    def __init__(self, seen: list[Any], given: Any) -> None:
        self.seen = seen
        self.seen.append(plain(given))
        policies = [each for each in seen if isinstance(each, dict) and each.get("model_type") == "language_model"]
        self.is_reference = given["model_type"] == "language_model" and len(policies) == 2
        self.model_config = SimpleNamespace(model_type="")
        self.engine = SimpleNamespace(lr_scheduler=SimpleNamespace(last_epoch=0), lr_scheduler_step=lambda: None)

    def reset(self) -> None: ...

    def set_loss_fn(self, loss_fn: Any) -> None:
        self.seen.append(plain(loss_fn.keywords["config"]))

    def infer_batch(self, data: Any) -> Any:
        self.seen.append(("infer", plain(data)))
        rows = [
            torch.arange(len(ids)).float() * 0.01 + float(ids.sum() % 7) * 0.1 for ids in data["input_ids"].unbind()
        ]
        found = {name: ragged(rows) for name in ("log_probs", "entropy", "values")}
        if self.is_reference or "no_lora_adapter" in data:
            found["log_probs"] = ragged([row - 0.3 for row in rows])
        return found

    def train_batch(self, data: Any) -> Any:
        self.seen.append(("train", plain(data)))
        return {"metrics": {"loss": 0.5, "grad_norm": 1.0}}

    def save_checkpoint(self, folder: str, **_: Any) -> None: ...


def plain(value: Any) -> Any:
    """Return any value as text and numbers that can be compared."""
    if isinstance(value, torch.Tensor):
        return [plain(row) for row in value.unbind()] if value.is_nested else value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if hasattr(value, "keys") and hasattr(value, "batch_size"):  # a batch
        return {name: plain(value[name]) for name in sorted(value.keys())}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, SimpleNamespace):
        return plain(vars(value))
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


class Scripted(World):
    """Rollouts whose tokens and reward depend only on their ids; some rollouts of a task are equal."""

    def __init__(self, orders: list[str]) -> None:
        super().__init__()
        self.orders = orders

    def play(self, order: RolloutOrder) -> Episode:
        self.orders.append(f"{order.rollout.rollout_id} {order.rollout.task} {sorted(order.rollout.resources.items())}")
        draw = random.Random(order.rollout.rollout_id)
        ids = [10, 20, 30, *(draw.randrange(250) for _ in range(6))]
        logprobs = [0.0] * 3 + [-draw.random() for _ in range(6)]
        place = int(order.rollout.group_id.rpartition("-")[2].replace("refill", "") or 0)
        is_first = "-1-train-" in order.rollout.group_id
        reward = draw.random() if place % 2 == 0 or is_first else 1.0
        found = episode(order.rollout, ids, logprobs, reward, rows=1 + len(ids) % 2)
        calls = [
            changed(call, prompt_ids=b"\0" * 12, response_ids=b"\0" * 4 * draw.randrange(1, 5))
            for call in found.transitions
        ]
        return changed(found, transitions=(*calls, other_call(order.rollout.rollout_id)))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`play(keys)` returns everything that a short run with these keys sends and reports."""
    seen: list[Any] = []

    def described(path: str, **options: Any) -> Any:
        seen.append(plain({"path": path, **options}))
        return SimpleNamespace(hf_config=SimpleNamespace(architectures=["OneForCausalLM"]))

    def export(self: Any, workdir: Path, *, step: int, **_: Any) -> Weights:
        return self.served(workdir, step=step)

    for module in (models, critic):
        monkeypatch.setattr(module, "model_config", described)
    monkeypatch.setattr(critic, "check_family", lambda *_, **__: None)
    monkeypatch.setattr(loss_worker, "LossWorker", lambda given: Recorder(seen, given))
    monkeypatch.setattr("verl.workers.config.TrainingWorkerConfig", lambda **given: given)
    monkeypatch.setattr(worker.VerlWorker, "export", export)
    monkeypatch.setattr(worker, "check_device", lambda *_: None)
    monkeypatch.setattr(trainer, "check_machine", lambda *_: None)

    def run(keys: dict[str, Any]) -> list[Any]:
        seen.clear()
        orders: list[str] = []
        whole = {"trainer.total_training_steps": 3, "rollout.n": 2, **keys}
        bench = AlgorithmBench(scenario(Path("model"), Scripted(orders), **whole), tmp_path / str(random.random()))

        async def body() -> list[Any]:
            async with bench:
                algorithm = bench.scenario.make()
                await algorithm.setup(bench.context())
                reports = [await algorithm.step()]
                while not reports[-1].is_finished:
                    reports.append(await algorithm.step())
                await algorithm.close()
                times = ("collect_s", "update_s")
                return [{n: v for n, v in report.metrics.items() if n not in times} for report in reports]

        try:
            found = asyncio.run(body())
        except AglError as error:
            found = [str(error)]
        return [list(seen), orders, found]

    return run


def full(name: str) -> str:
    return (
        name
        if name.split(".")[0] in {*OWN, "algorithm", "data", "critic", "reward", "trainer"}
        else (f"actor_rollout_ref.{name}")
    )


def test_every_typed_key_is_walked() -> None:
    assert sorted(typed_keys()) == sorted([*EFFECTS, *REFUSED, *ELSEWHERE])
    for name, (value, _) in EFFECTS.items():
        default: Any = VerlSettings()
        for part in full(name).split("."):
            default = getattr(default, part)
        assert default != value, name


def test_two_runs_with_the_same_keys_leave_the_same(play: Any) -> None:
    for keys in ({}, GAE, {**IS, "replay.share": 0.5}):
        assert play(keys) == play(keys)


@pytest.fixture(scope="module")
def left() -> dict[str, Any]:
    """A cache of the results of runs, by their keys, because one run with each base configuration is enough."""
    return {}


@pytest.mark.parametrize("name", EFFECTS)
def test_keys_that_are_taken_have_an_effect(name: str, play: Any, left: dict[str, Any]) -> None:
    value, beside = EFFECTS[name]
    if str(beside) not in left:
        left[str(beside)] = play(beside)
    assert play({**beside, name: value}) != left[str(beside)]


@pytest.mark.parametrize("name", [name for name, (_, beside) in EFFECTS.items() if beside and name not in ALONE])
def test_keys_without_what_they_need_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        read_settings(config(**{name: EFFECTS[name][0]}))


@pytest.mark.parametrize("name", ["horizon", "target_kl"])
def test_keys_of_an_adaptive_weight_are_refused_where_it_is_fixed(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"kl_ctrl\.{name} = 10: with algorithm\.kl_ctrl\.type = \"fixed\""):
        read_settings(config(**REWARD_KL, **{f"algorithm.kl_ctrl.{name}": 10}))


@pytest.mark.parametrize("name", REFUSED)
def test_keys_without_an_effect_are_refused_with_their_reason(name: str) -> None:
    value, beside, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        read_settings(config(**beside, **{name: value}))
