"""Repairs of VERL's private parts: the effect of each, and that it is refused if VERL differs from what it expects."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensordict import TensorDict

from agl.errors import ConfigError
from agl_algo_verl import privates
from agl_algo_verl.losses.loss_worker import LossWorker

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "verl.utils.distributed"
MODEL = "verl.utils.model"
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
ROLLOUT = "verl.workers.rollout.base"
WORKERS = "verl.workers.engine_workers"
TRAINER = "verl.trainer.ppo.v1.trainer_base"
QUEUE = "transfer_queue.interface"


def other(local_path: str, torch_dtype: Any) -> None:
    """A critic loader with other parameters, whose source still has attn_implementation="flash_attention_2"."""


class Changed:
    """Stands for a class of VERL that lacks the expected lines."""

    actor_worker_cls = LossWorker

    def init_model(self) -> None: ...

    def _compute_old_log_prob(self) -> None: ...

    def _init_resource_pool_mgr(self) -> None: ...

    def fit(self) -> None: ...


GUARDS: list[tuple[str, str, Any, Callable[[], Any], str]] = [
    (GROUP, "initialize_global_process_group_ray", other, privates.repair_process_group, r"cpu:gloo.* in verl\.utils"),
    (GROUP, "get_device_name", None, privates.repair_process_group, r"get_device_name in verl\.utils\.distributed"),
    (MODEL, "load_valuehead_model", other, privates.repair_critic, r"load_valuehead_model\(local_path, .*trust_remote"),
    (MODEL, "load_valuehead_model", Changed, privates.repair_critic, "flash_attention_2.* in load_valuehead_model"),
    (ENGINE, "FSDPEngine", Changed, privates.repair_pinned_memory, "CPUOffloadPolicy.* in FSDPEngine"),
    (ENGINE, "CPUOffloadPolicy", None, privates.repair_pinned_memory, "CPUOffloadPolicy in verl"),
    (ROLLOUT, "_ROLLOUT_REGISTRY", {"vllm": object}, privates.register_replica, r"a table from \(name, mode\)"),
    (ROLLOUT, "_ROLLOUT_REGISTRY", None, privates.register_replica, r"_ROLLOUT_REGISTRY, a table"),
    (WORKERS, "ActorRolloutRefWorker", Changed, privates.use_loss_worker, "actor_worker_cls.* in init_model"),
    (TRAINER, "PPOTrainer", Changed, privates.report_tokens, "calculate_debug_metrics.* in _compute_old_log_prob"),
    (TRAINER, "calculate_debug_metrics", None, privates.report_tokens, "calculate_debug_metrics in verl"),
    (
        TRAINER,
        "PPOTrainer",
        Changed,
        privates.use_loss_worker,
        r"ray\.remote\(TrainingWorker\).* in _init_resource_pool",
    ),
    (TRAINER, "TrainingWorker", Changed, privates.use_loss_worker, "TrainingWorker of verl"),
    (QUEUE, "init", other, lambda: privates.has_queue(None), "TransferQueueController.* in init"),
    (TRAINER, "PPOTrainer", Changed, privates.introduce_trainer, r"PPOTrainer\.fit\(agent_loop_manager\) in verl"),
    (TRAINER, "PPOTrainer", None, privates.introduce_trainer, r"PPOTrainer\.fit\(agent_loop_manager\) in verl"),
    (
        ENGINE,
        "FSDPEngine",
        Changed,
        lambda: privates.open_as_language_model(SimpleNamespace(model_config=SimpleNamespace(model_type=""))),
        "model_type == .language_model.* in FSDPEngine",
    ),
]


@pytest.mark.parametrize(
    ("module", "name", "value", "repair", "expected"),
    GUARDS,
    ids=[f"{name}-{getattr(value, '__name__', value)}" for _, name, value, _, _ in GUARDS],
)
def test_a_verl_that_is_not_as_expected_is_refused_and_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, value: Any, repair: Callable[[], Any], expected: str
) -> None:
    place = importlib.import_module(module)
    if value is None:
        monkeypatch.delattr(place, name)
    else:
        monkeypatch.setattr(place, name, value)
    before = dict(vars(place))
    with pytest.raises(ConfigError, match=rf"^VERL 0\.9\.1 is installed, .* expects .*{expected}.*Run: pip install"):
        repair()
    assert before == vars(place)


ATTRIBUTES: list[tuple[Callable[[Any], Any], Any, str]] = [
    (privates.balancer_of, SimpleNamespace(), "_load_balancer"),
    (privates.balancer_of, SimpleNamespace(_load_balancer=object()), "with get_all_servers"),
    (privates.schedule_of, SimpleNamespace(), "base_lrs, lr_lambdas, last_epoch, step"),
    (privates.schedule_of, SimpleNamespace(lr_scheduler=SimpleNamespace(base_lrs=[], step=1)), "lr_lambdas, last"),
    (privates.tensors_of, SimpleNamespace(), "get_per_tensor_param"),
    (partial(privates.save_checkpoint, step=1), SimpleNamespace(), "global_steps"),
    (partial(privates.save_checkpoint, step=1), SimpleNamespace(global_steps=2), "_save_checkpoint"),
    (partial(privates.before_advantages, complete=print), SimpleNamespace(), r"_compute_advantage\(batch, metrics\)"),
    (privates.tensors_of, SimpleNamespace(get_per_tensor_param=lambda: iter(())), "names with tensors, adapters"),
    (lambda engine: privates.without_update(engine).__enter__(), SimpleNamespace(), "train_batch"),
    (privates.open_as_language_model, SimpleNamespace(), "model_type"),
]


@pytest.mark.parametrize(("read", "of", "expected"), ATTRIBUTES)
def test_an_object_of_verls_that_is_not_as_expected_is_refused(
    read: Callable[[Any], Any], of: Any, expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^VERL 0\.9\.1 is installed, .*{expected}.* in types.SimpleNamespace.*"):
        read(of)


class Trainer:
    """Stands for VERL's trainer, with its methods for checkpoints and rows only."""

    def __init__(self) -> None:
        self.global_steps, self.saved = 4, ""

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        def kv_batch_get(**_: Any) -> Any:
            return batch

        tq, fields = SimpleNamespace(kv_batch_get=kv_batch_get), metrics
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        return SimpleNamespace(extra_info={"seen": dict(metrics)}, data=data)

    def fit(self, agent_loop_manager: Any) -> Any:
        return agent_loop_manager

    def _save_checkpoint(self) -> None:
        self.saved = f"global_step_{self.global_steps}"


def test_a_trainer_is_known_to_its_loops_and_saves_the_step_before_the_one_that_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.import_module(TRAINER), "PPOTrainer", Trainer)
    privates.introduce_trainer()
    privates.introduce_trainer()
    trainer = Trainer()
    loops = trainer.fit(SimpleNamespace())
    privates.save_checkpoint(loops.trainer, step=3)
    assert ("global_step_3", 4) == (trainer.saved, trainer.global_steps)


def test_rows_are_completed_before_their_advantages() -> None:
    def complete(batch: Any, metrics: dict[str, Any]) -> dict[str, Any]:
        metrics["rows"] = len(batch.keys)
        return {"coef": 0.5}

    trainer: Any = Trainer()
    privates.before_advantages(trainer, complete)
    done = trainer._compute_advantage(SimpleNamespace(keys=["a", "b"], partition_id="train"), {})
    assert {"seen": {"rows": 2}, "coef": 0.5} == done.extra_info
    assert "_compute_advantage" not in vars(Trainer())


def test_a_trainer_that_reads_its_rows_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(self: Any, batch: Any, metrics: dict[str, Any]) -> None: ...

    monkeypatch.setattr(Trainer, "_compute_advantage", elsewhere)
    trainer = Trainer()
    with pytest.raises(ConfigError, match=r"data = tq\.kv_batch_get.* in _compute_advantage"):
        privates.before_advantages(trainer, lambda batch, metrics: {})
    assert "_compute_advantage" not in vars(trainer)


def test_verls_trainer_makes_advantages_as_expected() -> None:
    class Concrete(importlib.import_module(TRAINER).PPOTrainer):
        on_sample_end = on_step_end = None

    trainer = object.__new__(Concrete)
    privates.before_advantages(trainer, lambda batch, metrics: {})
    assert "_compute_advantage" in vars(trainer)


def test_a_schedule_without_an_optimizer_is_refused() -> None:
    schedule = SimpleNamespace(base_lrs=[1.0], lr_lambdas=[lambda _: 1.0], last_epoch=0, step=None)
    with pytest.raises(ConfigError, match=r"param_groups in types\.SimpleNamespace\.optimizer"):
        privates.use_rate_of_schedule(SimpleNamespace(lr_scheduler=schedule))


class OptimizerParamScheduler:
    """Stands for a Megatron schedule, which is not one of torch's."""

    __module__ = "megatron.core.optimizer_param_scheduler"


def test_megatrons_schedule_decides_by_itself_which_rate_a_continued_run_has() -> None:
    engine = SimpleNamespace(
        lr_scheduler=OptimizerParamScheduler(), optimizer=SimpleNamespace(param_groups=[{"lr": 1}])
    )
    with privates.with_own_settings(engine):
        engine.optimizer.param_groups[0]["lr"] = 2
    assert [{"lr": 2}] == engine.optimizer.param_groups
    engine.lr_scheduler = SimpleNamespace()
    with pytest.raises(ConfigError, match="base_lrs, lr_lambdas, last_epoch, step"):
        privates.with_own_settings(engine).__enter__()


def test_another_version_of_verl_is_refused_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_algo_verl.runtime.version", lambda _: "0.10.0")
    with pytest.raises(ConfigError, match=r"VERL 0\.10\.0 is installed, and agl-algo-verl works with verl>=0\.9\.1"):
        privates.repair_critic()


def test_all_repairs_can_be_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        (GROUP, "get_device_name"),
        (MODEL, "load_valuehead_model"),
        (ENGINE, "CPUOffloadPolicy"),
        (TRAINER, "calculate_debug_metrics"),
        (TRAINER, "TrainingWorker"),
    ]
    for module, name in places:
        place = importlib.import_module(module)
        monkeypatch.setattr(place, name, getattr(place, name))
    trainer = importlib.import_module(TRAINER).PPOTrainer
    monkeypatch.setattr(trainer, "fit", trainer.fit)
    worker = importlib.import_module(WORKERS).ActorRolloutRefWorker
    monkeypatch.setattr(worker, "actor_worker_cls", worker.actor_worker_cls)
    for _ in range(2):
        for repair in (privates.repair_process_group, privates.repair_critic, privates.repair_pinned_memory):
            repair()
        for repair in (privates.register_replica, privates.use_loss_worker, privates.report_tokens):
            repair()
        privates.introduce_trainer()
    assert "introduced" == trainer.fit.__code__.co_name
    assert privates.SAVED in inspect.getsource(trainer._save_checkpoint)
    assert issubclass(worker.actor_worker_cls, LossWorker)
    assert "ClusterCritic" == importlib.import_module(TRAINER).TrainingWorker.__name__
    assert "cuda" == importlib.import_module(GROUP).get_device_name()
    policy = importlib.import_module(ENGINE).CPUOffloadPolicy
    assert isinstance(policy, partial)
    assert not policy(pin_memory=True).pin_memory
    found = importlib.import_module(ROLLOUT).get_rollout_class("agl_hf", "async")
    assert "HFRollout" == found.__name__


IN_A_WORKER = """
import os
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "agl_algo_verl.ray.process"}
import warnings
warnings.simplefilter("ignore")
import verl.utils.distributed
import verl.workers.engine_workers as workers
from verl.utils.import_utils import import_external_libs
import_external_libs(["agl_algo_verl.ray.preparation"])
print(verl.utils.distributed.get_device_name(), workers.ActorRolloutRefWorker.actor_worker_cls.__name__)
import verl.trainer.ppo.v1.trainer_base as trainers
from agl_algo_verl.privates import use_loss_worker
use_loss_worker()
print(trainers.TrainingWorker.__name__)
"""


def test_a_process_that_verl_starts_makes_the_repairs_by_the_names_of_modules() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_WORKER], capture_output=True, text=True, check=False)
    assert ["cuda ClusterWorker", "ClusterCritic"] == done.stdout.strip().splitlines()[-2:], done.stderr


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of VERL's trainer; its attributes are restored afterwards."""
    module = importlib.import_module(TRAINER)
    monkeypatch.setattr(module, "calculate_debug_metrics", module.calculate_debug_metrics)
    return module


def batch(mask: list[list[int]]) -> Any:
    """Return the input of VERL's report: two rows whose recorded and recomputed values differ by 0.5 and 2."""
    from verl import DataProto

    recorded = torch.tensor([[-1.0, -9.0], [-3.0, -1.0]])
    tensors = {
        "rollout_log_probs": recorded,
        "old_log_probs": recorded + torch.tensor([[0.5, 2.0], [-0.5, 7.0]]),
        "response_mask": torch.tensor(mask),
        "responses": torch.zeros(2, 2, dtype=torch.int64),
        "entropy": torch.tensor([[1.0, 2.0], [6.0, 9.0]]),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=2))


def test_verls_report_has_the_gap_and_the_entropy_of_trained_tokens(trainer: Any) -> None:
    privates.report_tokens()
    privates.report_tokens()
    found = trainer.calculate_debug_metrics(batch([[1, 1], [1, 0]]))
    assert (2.0, 1.0, 3.0) == (found[privates.LARGEST], found[privates.MEAN], found[privates.ENTROPY])
    assert found["training/rollout_probs_diff_max"] < 0.5  # the unlikely token's gap does not show there
    silent = trainer.calculate_debug_metrics(batch([[0, 0], [0, 0]]))
    assert not {privates.LARGEST, privates.MEAN, privates.ENTROPY} & silent.keys()
