"""All replacements and reads of VERL's private parts, each behind a guard that fails closed.

A part of VERL is replaced or read only if it is as in VERL 0.9.1: a line of its source, the parameters of a function,
the shape of a table, or the attributes of an object. Otherwise nothing is changed, and a `ConfigError` names the
installed version, the expected part and its place, and the next step.

    repair_process_group   `verl.utils.distributed` asks torch for the group "cpu:gloo,<device>:<backend>". On the CPU
                           both halves name one device, which torch refuses. Here the second is named `cuda`, and
                           nothing uses it.
    repair_critic          `verl.utils.model` opens a critic only with flash-attention, which needs a GPU. Here the
                           critic gets the attention that its configuration names.
    repair_pinned_memory   the engine of a frozen reference keeps its weights in pinned memory, which needs a GPU
    register_replica       VERL has a public registry for the trainer's end of a replica, but a private table for the
                           worker's
    use_loss_worker        VERL's worker of a cluster names the class of the model that it trains in a class attribute,
                           and its trainer the class of the critic in its module
    report_tokens          VERL reports the difference of probabilities, which says little about unlikely tokens: their
                           ratio may be ten where the difference is a thousandth. It also reports the entropy as its
                           loss aggregates it, which may be a sum and not a mean over tokens
    introduce_trainer,     VERL saves a checkpoint after every so many steps, and has no way to request one when a
    save_checkpoint        validation or a stop needs it
    before_advantages      VERL corrects for other policies' tokens by rows, and has no hook before its advantages
    without_update         VERL's engine updates after each backward pass, even if no token has a gradient
    balancer_of            VERL's client has no public access to its servers
    schedule_of,           VERL's engine has no public access to its schedule and its optimizer
    use_rate_of_schedule,
    with_own_settings
    has_queue              VERL's queue has one name for a whole cluster, and a second run would read the first one's
    tensors_of             the engine's weights by name
    open_as_language_model VERL loads a value model only with flash-attention; its loader of language models uses the
                           attention that the configuration names

Importing this module repairs nothing. VERL imports `ray/process.py` and `ray/preparation.py` by their names in
processes of its cluster, and these call the repairs that the process needs. Every repair may be called twice.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import contextmanager
from functools import partial, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError
from agl_algo_verl.runtime import INSTALL, check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from torch import Tensor

GROUP = 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"'
ATTENTION = 'attn_implementation="flash_attention_2"'
PINNED = "CPUOffloadPolicy(pin_memory=True)"
OPENED = "self.actor = self.actor_worker_cls(config=actor_training_config)"
CRITIC = "self.role_worker_mapping[Role.Critic] = ray.remote(TrainingWorker)"
LOSS = "self.loss_fn = partial(ppo_loss, config=actor_config)"
REPORT = "metrics.update(calculate_debug_metrics(data))"
ENTROPIES = 'data["entropy"] = response_from_nested(data.pop("entropy"), data["response_mask"])'
LOADER = 'if self.model_config.model_type == "language_model":'
"""Lines of VERL's source that the repairs replace or depend on."""

TRAINER = "verl.trainer.ppo.v1.trainer_base"
"""The module of VERL's trainers."""

READ = "data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)"
"""The line that reads rows from VERL's queue."""

UPDATED = "grad_norm = self.optimizer_step()"
"""The line with which VERL's engine updates the weights, after a backward pass."""

QUEUE = 'name="TransferQueueController", namespace="transfer_queue"'
"""The name of the Ray actor that holds VERL's queue, as the source of the queue's `init` writes it."""

SAVED = 'f"global_step_{self.global_steps}"'
"""The expression in VERL's source for the name of a checkpoint's directory."""

LARGEST, MEAN, ENTROPY = "agl/logprob_gap", "agl/logprob_gap_mean", "agl/entropy"
"""Names of metrics logged with VERL's: the largest and the mean log-probability gap, and the mean entropy."""

ROLLOUT = ("agl_hf", "async"), "agl_algo_verl.ray.replica.HFRollout"
"""Key and class name of the replica `agl_hf` in the training worker."""


def repair_process_group() -> None:
    """Name the second device in the process group's backend `cuda`, because torch refuses two halves with one name."""
    module = _module("verl.utils.distributed")
    _expect_line(module, "initialize_global_process_group_ray", GROUP)
    _expect_attributes(module, "get_device_name", where=module.__name__)
    module.get_device_name = lambda: "cuda"


def repair_critic() -> None:
    """Make VERL open critics with the attention that their configuration names."""
    module = _module("verl.utils.model")
    found = getattr(module, "load_valuehead_model", None)
    if found is load_critic:
        return
    _expect_line(module, "load_valuehead_model", ATTENTION)
    _expect(
        list(inspect.signature(cast("Any", found)).parameters) == list(inspect.signature(load_critic).parameters),
        f"load_valuehead_model({', '.join(inspect.signature(load_critic).parameters)})",
        where=module.__name__,
    )
    module.load_valuehead_model = load_critic


def load_critic(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    """Load the network of a critic; its new value head always starts from the same numbers."""
    _module("torch").manual_seed(0)
    return _module("transformers").AutoModelForTokenClassification.from_pretrained(
        local_path, torch_dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def repair_pinned_memory() -> None:
    """Make VERL's engine offload weights to ordinary memory, not to pinned memory."""
    module = _module("verl.workers.engine.fsdp.transformer_impl")
    _expect_attributes(module, "CPUOffloadPolicy", where=module.__name__)
    if not isinstance(module.CPUOffloadPolicy, partial):
        _expect_line(module, "FSDPEngine", PINNED)
        module.CPUOffloadPolicy = partial(_unpinned, module.CPUOffloadPolicy)


def _unpinned(policy: Any, *, pin_memory: bool = False) -> Any:
    del pin_memory
    return policy(pin_memory=False)


def register_replica() -> None:
    """Register the replica `agl_hf` (the value of `rollout.name`) with VERL's trainer and workers."""
    base = _module("verl.workers.rollout.base")
    table = getattr(base, "_ROLLOUT_REGISTRY", None)
    known = cast("dict[Any, Any]", table) if isinstance(table, dict) else {}
    is_table = bool(known) and all(
        isinstance(key, tuple) and len(cast("tuple[Any, ...]", key)) == 2 and isinstance(name, str)
        for key, name in known.items()
    )
    _expect(is_table, "_ROLLOUT_REGISTRY, a table from (name, mode) to a class by its name", where=base.__name__)
    _module("verl.workers.rollout.replica").RolloutReplicaRegistry.register(ROLLOUT[0][0], _replica)
    known.update([ROLLOUT])


def _replica() -> type:
    return _module("agl_algo_verl.ray.replica").HFReplica


def use_loss_worker() -> None:
    """Make VERL's workers and trainers in this process train with `loss_worker.py`; without workers, do nothing."""
    workers, trainers = sys.modules.get("verl.workers.engine_workers"), sys.modules.get(TRAINER)
    if workers is None:
        return
    worker = cast("Any", workers).ActorRolloutRefWorker
    _expect_attributes(worker, "actor_worker_cls", where=workers.__name__)
    for line in (OPENED, LOSS):
        _expect_line(worker, "init_model", line)
    ours = _module("agl_algo_verl.losses.loss_worker")
    _expect(
        worker.actor_worker_cls in ours.ClusterWorker.__mro__,
        f"{worker.__name__}.actor_worker_cls = TrainingWorker",
        where=workers.__name__,
    )
    if trainers is not None:
        _expect_attributes(trainers, "PPOTrainer TrainingWorker", where=TRAINER)
        _expect_line(cast("Any", trainers).PPOTrainer, "_init_resource_pool_mgr", CRITIC)
        is_verls = cast("Any", trainers).TrainingWorker in ours.ClusterCritic.__mro__
        _expect(is_verls, "TrainingWorker of verl.workers.engine_workers", where=TRAINER)
        cast("Any", trainers).TrainingWorker = ours.ClusterCritic
    worker.actor_worker_cls = ours.ClusterWorker


def report_tokens() -> None:
    """Make VERL's trainer in this process report the gap of log-probabilities and the mean entropy of tokens."""
    trainer = _module(TRAINER)
    _expect_attributes(trainer, "calculate_debug_metrics", where=trainer.__name__)
    if not hasattr(trainer.calculate_debug_metrics, "__wrapped__"):
        for line in (REPORT, ENTROPIES):
            _expect_line(trainer.PPOTrainer, "_compute_old_log_prob", line)
        trainer.calculate_debug_metrics = with_tokens(trainer.calculate_debug_metrics)


def with_tokens(report: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap VERL's report so that it adds the mean gap and the mean entropy over trained tokens, and the largest gap.

    All are in nats. The gap of a token is |log pi_old - log pi_behaviour|.
    """

    @wraps(report)
    def reported(data: Any) -> dict[str, Any]:
        tensors = data.batch
        # [M]: the trained tokens of all rows; the inputs are padded, [B, R]
        mask_B_R = tensors["response_mask"].bool()
        away_M = (tensors["old_log_probs"] - tensors["rollout_log_probs"]).abs()[mask_B_R]
        if not len(away_M):
            return report(data)
        entropy = float(tensors["entropy"][mask_B_R].mean())
        return report(data) | {LARGEST: float(away_M.max()), MEAN: float(away_M.mean()), ENTROPY: entropy}

    return reported


def introduce_trainer() -> None:
    """Make VERL's trainers in this process set the attribute `trainer` of their agent loop manager."""
    module = _module(TRAINER)
    trainer: Any = getattr(module, "PPOTrainer", None)
    fit: Any = getattr(trainer, "fit", _absent)
    if not hasattr(fit, "__wrapped__"):
        has_loops = list(inspect.signature(fit).parameters) == ["self", "agent_loop_manager"]
        _expect(has_loops, "PPOTrainer.fit(agent_loop_manager)", where=module.__name__)
        trainer.fit = _introducing(fit)


def _absent() -> None:
    """Placeholder for a function that VERL does not have."""


def _introducing(fit: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @wraps(fit)
    def introduced(self: Any, agent_loop_manager: Any) -> Any:
        agent_loop_manager.trainer = self
        return fit(self, agent_loop_manager)

    return introduced


def save_checkpoint(trainer: Any, *, step: int) -> None:
    """Save a checkpoint of VERL's trainer as at the end of `step`, although the next step has begun."""
    _expect_attributes(trainer, "global_steps", where=_type_name(trainer))
    _expect_line(type(trainer), "_save_checkpoint", SAVED)
    begun = trainer.global_steps
    trainer.global_steps = step
    try:
        trainer._save_checkpoint()
    finally:
        trainer.global_steps = begun


def before_advantages(trainer: Any, complete: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Make a trainer of VERL call `complete(batch, metrics)` each time before it computes advantages.

    After the call, the trainer reads the rows from its queue again. The options that `complete` returns are passed to
    the training workers with the rows; entries that it adds to `metrics` are logged.
    """
    name, kind = "_compute_advantage", cast("Any", type(trainer))
    own: Any = getattr(kind, name, _absent)
    takes_batch = list(inspect.signature(own).parameters) == ["self", "batch", "metrics"]
    _expect(takes_batch, f"{name}(batch, metrics)", where=_type_name(trainer))
    _expect_line(kind, name, READ)

    def completed(batch: Any, metrics: dict[str, Any]) -> Any:
        options = complete(batch, metrics)
        done = own(trainer, batch, metrics)
        done.extra_info.update(options)
        return done

    trainer._compute_advantage = completed


@contextmanager
def without_update(engine: Any) -> Generator[None]:
    """Inside the block, VERL's engine runs forward and backward passes but leaves weights and moments unchanged."""
    _expect_line(type(engine), "train_batch", UPDATED)
    _expect_attributes(engine, "optimizer_step", where=_type_name(engine))
    engine.optimizer_step = lambda: 0.0  # the norm of the gradient
    try:
        yield
    finally:
        del engine.optimizer_step


def balancer_of(client: Any) -> Any:
    """Return the Ray actor of VERL that knows the addresses of all replicas."""
    balancer = getattr(client, "_load_balancer", None)
    _expect(
        hasattr(balancer, "get_all_servers"),
        "_load_balancer, an actor with get_all_servers",
        where=_type_name(client),
    )
    return balancer


def schedule_of(engine: Any) -> Any:
    """Return an engine's learning-rate schedule, torch's `LambdaLR`."""
    schedule = getattr(engine, "lr_scheduler", None)
    _expect_attributes(schedule, "base_lrs lr_lambdas last_epoch step", where=f"{_type_name(engine)}.lr_scheduler")
    return schedule


def use_rate_of_schedule(engine: Any, *, peak: float | None = None, place: int | None = None) -> None:
    """After loading a checkpoint, set the optimizer's learning rate to the schedule's value for the next update.

    A checkpoint contains the rate that was next when it was saved. If the run has more steps than it had then, the
    schedule falls more slowly, and that rate is too low.

    Args:
        engine: VERL's engine.
        peak: The highest rate of the schedule, if it differs from the checkpoint's.
        place: The number of completed steps of the schedule, if it differs from the checkpoint's.
    """
    schedule, groups = schedule_of(engine), _groups_of(engine)
    if peak is not None:
        schedule.base_lrs = [peak for _ in schedule.base_lrs]
    if place is not None:
        schedule.last_epoch = place
    for group, rate, shape in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = rate * shape(schedule.last_epoch)  # `last_epoch` is torch's name for the updates so far


@contextmanager
def with_own_settings(engine: Any) -> Generator[None]:
    """Inside the block, loading a checkpoint keeps the optimizer's current settings and learning rate.

    A checkpoint contains the settings of the run that saved it, and a run may be continued with others. Megatron's
    schedule is not torch's, and decides by itself which of the two apply.
    """
    if type(getattr(engine, "lr_scheduler", None)).__module__.partition(".")[0] == "megatron":
        yield
        return
    schedule, groups = schedule_of(engine), _groups_of(engine)
    rates, settings = schedule.base_lrs, [_settings_of(group) for group in groups]
    yield
    for group, own in zip(_groups_of(engine), settings, strict=True):  # loading makes new groups
        group.update(own)
    schedule.base_lrs = rates
    use_rate_of_schedule(engine)


def _groups_of(engine: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of the engine's optimizer."""
    optimizer: Any = getattr(engine, "optimizer", None)
    _expect_attributes(optimizer, "param_groups", where=f"{_type_name(engine)}.optimizer")
    return optimizer.param_groups


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def has_queue(ray: Any) -> bool:
    """Return true if the connected Ray cluster already has a queue of VERL."""
    _expect_line(_module("transfer_queue.interface"), "init", QUEUE)
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return False
    return True


def tensors_of(engine: Any) -> Iterable[tuple[str, Tensor]]:
    """Return the weights of an engine as (name, whole tensor)."""
    found = engine.get_per_tensor_param() if hasattr(engine, "get_per_tensor_param") else None
    is_pair = isinstance(found, tuple) and len(cast("tuple[Any, ...]", found)) == 2
    _expect(is_pair, "get_per_tensor_param() -> (names with tensors, adapters)", where=_type_name(engine))
    return cast("Any", found)[0]


def open_as_language_model(worker: Any) -> None:
    """Make a training worker load its network, even a value model, with VERL's loader of language models."""
    _expect_line(_module("verl.workers.engine.fsdp.transformer_impl"), "FSDPEngine", LOADER)
    _expect_attributes(getattr(worker, "model_config", None), "model_type", where=f"{_type_name(worker)}.model_config")
    worker.model_config.model_type = "language_model"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _expect_line(owner: Any, name: str, line: str) -> None:
    """Raise ConfigError unless `owner` has a function or class `name` whose source contains `line`."""
    found = getattr(owner, name, None)
    where = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    _expect(found is not None, name, where=where)
    _expect(line in inspect.getsource(cast("Any", found)), f"the line {line} in {name}", where=where)


def _expect_attributes(owner: Any, names: str, *, where: str) -> None:
    missing = [name for name in names.split() if not hasattr(owner, name)]
    _expect(not missing, ", ".join(missing), where=where)


def _expect(holds: bool, what: str, *, where: str) -> None:
    """Raise ConfigError, which names `what` and `where`, unless VERL is as this package expects (`holds`)."""
    check_version()
    if not holds:
        raise ConfigError(
            f"VERL {version('verl')} is installed, and agl-algo-verl expects {what} in {where}, which it replaces or "
            f"reads; it is not there, so nothing was changed. Run: {INSTALL}; or install an agl-algo-verl that knows "
            "this VERL."
        )
