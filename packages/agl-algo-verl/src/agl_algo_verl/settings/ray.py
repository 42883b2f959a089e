"""VERL's configuration keys with `engine = "ray"`: those that agl decides, those refused, and those passed on to VERL.

The keys of training in one process keep their meaning. Every other key that VERL has goes to VERL untouched, except
those below.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace as changed

from agl.errors import ConfigError
from agl.hints import pip_install
from agl_algo_verl.losses.choice import chosen_loss
from agl_algo_verl.runtime import check_attention
from agl_algo_verl.settings.keys import FIXED, has, is_verl_key, leaves, misspelling, put
from agl_algo_verl.settings.ray_refused import (
    ALLOWED,
    DECIDED,
    FOR_GPU_SERVERS,
    MINI_BATCH,
    REASONS,
    REFUSED,
    SAME_STRATEGY,
    SERVING,
)
from agl_algo_verl.settings.settings import OWN, VerlSettings, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU = "agl_hf"
"""Name of the replica for machines without a GPU."""

ROLLOUTS = (CPU, "vllm", "sglang")
"""Replicas that may serve: values of `actor_rollout_ref.rollout.name`."""

CONNECT_S = 5.0
"""Seconds to wait for a cluster's head to accept a connection."""

STRATEGY = "actor_rollout_ref.actor.strategy"
STRATEGIES = ("fsdp2", "megatron")
"""The key that names VERL's engine, and its values."""

UNHELD = (
    "agents that share the weights and are not trained are not held near the start, because VERL 0.9.1 cannot make the "
    'reference\'s log-probabilities beside a critic and adapters; engine = "inproc" can'
)

HERE = (
    STRATEGY,
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
)
"""Keys that training in one process fixes, and this engine passes on to VERL."""

PUNISHMENT = "reward.reward_kwargs."
"""The beginning of keys that VERL's reward manager would read; here agl's own rows do, and VERL does not get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """A configuration for `engine = "ray"`.

    Attributes:
        settings: The part that agl uses itself.
        given: Every key for VERL by its dotted name, as the person wrote it.
        ray_init: Arguments of `ray.init`.
        notes: A note for the person on every key that something else decides.
        unheld: Why agents that share the weights and are not trained cannot be held near the start, `""` if they can.
        holds: Whether they are; that depends on the experiment, too.
    """

    settings: VerlSettings
    given: dict[str, Any]
    ray_init: dict[str, Any]
    notes: list[str]
    unheld: str = ""
    holds: bool = False

    @property
    def rollout(self) -> str:
        """Name of the replica that serves."""
        return str(self.given["actor_rollout_ref.rollout.name"])

    @property
    def is_cpu(self) -> bool:
        """True if the cluster trains without GPUs."""
        return self.rollout == CPU

    @property
    def strategy(self) -> str:
        """Name of VERL's engine: `fsdp2` or `megatron`."""
        return str(self.given.get(STRATEGY, STRATEGIES[0]))

    @property
    def ranks(self) -> int:
        """Number of training workers, on all nodes together."""
        return int(self.given.get("trainer.nnodes", 1)) * int(self.given.get("trainer.n_gpus_per_node", 1))


def read_ray_settings(config: Mapping[str, Any]) -> RaySettings:
    """Return the settings in VERL's nested keys.

    Raises ConfigError for keys that are unknown or would be ignored, all in one message, and for combinations that
    cannot train.
    """
    ray_kwargs = cast("dict[str, Any]", config.get("ray_kwargs") or {})
    wrong = [f"ray_kwargs.{name}: only ray_kwargs.ray_init is used" for name in ray_kwargs if name != "ray_init"]
    given: dict[str, Any] = {}
    own: dict[str, Any] = {}
    notes: list[str] = []
    beside = {name: value for name, value in config.items() if name in OWN}
    keys = {name: value for name, value in config.items() if name not in ("ray_kwargs", *OWN)}
    written = {".".join(path): value for path, value in leaves(keys)}
    strategy = str(written.get(STRATEGY, STRATEGIES[0]))
    for name, value in written.items():
        if name == MINI_BATCH or (name.startswith(PUNISHMENT) and has(VerlSettings, tuple(name.split(".")))):
            put(own, tuple(name.split(".")), value)
            continue
        problem, note = classify(name, value, strategy=strategy)
        if problem:
            wrong.append(problem)
        elif note:
            notes.append(note)
        else:
            given[name] = value
    if wrong:
        raise ConfigError('The VERL configuration cannot be used with engine = "ray":\n- ' + "\n- ".join(wrong))
    for name, value in given.items():
        if has(VerlSettings, tuple(name.split("."))):
            put(own, tuple(name.split(".")), value)
    notes += _unserved(given)
    settings, unheld = read_settings(own | beside)[0], ""
    if "anchor_coef" not in beside and settings.has_critic and settings.is_lora:
        settings, unheld = changed(settings, anchor_coef=0.0), UNHELD
    _check_together(settings, given)
    ray_init = dict(ray_kwargs.get("ray_init", {}))
    return RaySettings(settings=settings, given=given, ray_init=ray_init, notes=notes, unheld=unheld)


def _unserved(given: Mapping[str, Any]) -> list[str]:
    """Return a note for every key that the replica for machines without a GPU does not read."""
    if given.get(f"{SERVING}.name") != CPU:
        return []
    keys = dict.fromkeys(FOR_GPU_SERVERS, "")
    return [f'{name} has no effect with {SERVING}.name = "{CPU}"' for name in given if _covering(keys, name)]


def classify(name: str, value: Any, *, strategy: str = STRATEGIES[0]) -> tuple[str, str]:
    """Return what is wrong with a key, and what else to say of it; both are `""` for a key that goes to VERL."""
    if strategy == "megatron" and not is_verl_key(name, strategy) and is_verl_key(name):
        return f"{name}: VERL's Megatron engine has no such key", ""
    if name.startswith("trainer.v1.") and has(VerlSettings, tuple(name.split("."))):
        return "", ""
    reasons = REASONS.get(strategy, REFUSED)  # `_check_engine` refuses other engines
    if refused := _covering(reasons, name):
        allowed = (strategy,) if name in SAME_STRATEGY else ALLOWED.get(name, ())
        return ("" if value in allowed else f"{name}: {reasons[refused]}"), f"{name} holds anyway"
    if decided := _covering(DECIDED, name):
        return "", f"{name} is decided by {DECIDED[decided]}"
    if name in FIXED and name not in HERE:
        allowed, why = FIXED[name]
        return ("" if value in allowed else f"{name} = {value!r}: {why}"), f"{name} holds anyway"
    if is_verl_key(name, strategy) or has(VerlSettings, tuple(name.split("."))):
        return "", ""
    if is_verl_key(name, "megatron"):
        return f'{name}: only VERL\'s Megatron engine reads it; set {STRATEGY} = "megatron", or remove it', ""
    return misspelling(name, VerlSettings, strategy=strategy), ""


def _covering(table: Mapping[str, str], name: str) -> str:
    """Return the key of the table that is `name` or stands above it; `""` where there is none."""
    return next((key for key in table if name == key or name.startswith(f"{key}.")), "")


def _check_together(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys that contradict each other, or would count rows instead of rollouts."""
    rollout = given.get("actor_rollout_ref.rollout.name")
    if rollout not in ROLLOUTS:
        raise ConfigError(
            f'actor_rollout_ref.rollout.name is {rollout!r}, and engine = "ray" serves with one of '
            f"{', '.join(ROLLOUTS)}. Use {CPU} without GPUs, vllm or sglang with them."
        )
    _check_critic(settings, given)
    _check_engine(settings, given)
    ignored = settings.actor.entropy_coeff or given.get("actor_rollout_ref.actor.use_kl_loss")
    if chosen_loss(settings) is None and settings.actor.loss_agg_mode != "token-mean" and ignored:
        raise ConfigError(
            f"loss_agg_mode = {settings.actor.loss_agg_mode!r} would divide the entropy or KL term by rows, not by "
            'rollouts. Use token-mean, or loss = "ppo-clip", or set entropy_coeff = 0 and use_kl_loss = false.'
        )
    nodes, workers = given.get("trainer.nnodes", 1), given.get("trainer.n_gpus_per_node", 1)
    if not all(isinstance(count, int) and count > 0 for count in (nodes, workers)):
        raise ConfigError(
            f"trainer.nnodes = {nodes!r} and trainer.n_gpus_per_node = {workers!r}; give whole numbers from 1."
        )


def _check_critic(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for keys of a critic where there is none, and for losses with one that would count rows."""
    if not settings.has_critic:
        unused = [name for name in given if name.startswith("critic.")]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} would be ignored: algorithm.adv_estimator = "
                f'{settings.algorithm.adv_estimator!r} has no critic. Use "gae", or remove them.'
            )
        return
    if settings.replay:
        raise ConfigError(
            'replay with algorithm.adv_estimator = "gae" would let VERL\'s critic on Ray learn from old rollouts as if '
            'they were new. Remove replay, or use engine = "inproc".'
        )
    if settings.is_lora and (settings.actor.use_kl_loss or settings.anchor_coef):
        reads = "actor.use_kl_loss" if settings.actor.use_kl_loss else "anchor_coef"
        raise ConfigError(
            f"With a critic, adapters and {reads} together, VERL 0.9.1 tries to switch off adapters of the critic, "
            f'which has none. Remove one of the three: {reads}, model.lora_rank or adv_estimator = "gae"; or use '
            'engine = "inproc".'
        )
    modes = {"critic.loss_agg_mode": settings.critic.loss_agg_mode}
    if chosen_loss(settings) is None:
        modes["actor_rollout_ref.actor.loss_agg_mode"] = settings.actor.loss_agg_mode
    wrong = [f"{name} = {mode!r}" for name, mode in modes.items() if mode != "token-mean"]
    if wrong:
        raise ConfigError(
            f'{" and ".join(wrong)} would divide by rows, not by rollouts, with a critic and engine = "ray". '
            'Use token-mean, or engine = "inproc".'
        )


def _check_engine(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for another engine than VERL's FSDP2 and Megatron, and for what Megatron cannot do here."""
    strategy, rollout = given.get(STRATEGY, STRATEGIES[0]), given["actor_rollout_ref.rollout.name"]
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"{STRATEGY} = {strategy!r}: the engine is VERL's FSDP2 or Megatron. Write one of {', '.join(STRATEGIES)}."
        )
    if strategy != "megatron":
        return
    cannot = {
        f"actor_rollout_ref.rollout.name = {rollout!r}": rollout == CPU and "Megatron trains on GPUs alone; use vllm",
        "actor_rollout_ref.model.lora_rank": settings.is_lora and "adapters are merged here as FSDP2 saves them",
        "actor_rollout_ref.model.enable_gradient_checkpointing": (
            settings.actor_rollout_ref.model.enable_gradient_checkpointing
            and "Megatron has actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity"
        ),
        'algorithm.adv_estimator = "gae"': settings.has_critic and "VERL's critic is opened with FSDP2 here",
    }
    wrong = [f"{name}: {why}" for name, why in cannot.items() if why]
    if wrong:
        raise ConfigError(f'With {STRATEGY} = "megatron" these cannot be had:\n- ' + "\n- ".join(wrong))


def check_machine(read: RaySettings, *, has_gpu: bool) -> None:
    """Raise ConfigError for what this machine lacks; a cluster elsewhere is checked when it is started."""
    absent = [name for name in ("ray", "transfer_queue") if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f'engine = "ray" needs the Python modules {absent}, which are not installed. '
            'Run: pip install "ray[default]" TransferQueue'
        )
    address = str(read.ray_init.get("address") or "")
    if address:
        _check_address(address)
    if read.is_cpu or address:
        return
    if not has_gpu:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name = {read.rollout!r} needs GPUs, and this machine has none that torch can "
            f'use. Use "{CPU}" here, or engine = "inproc" to train in this process, or name a Ray cluster with GPUs: '
            'ray_kwargs.ray_init.address = "HOST:6379".'
        )
    absent = [name for name in ("megatron.core", "megatron.bridge") if read.strategy == "megatron" and not _has(name)]
    if absent:
        raise ConfigError(
            f'{STRATEGY} = "megatron" needs {" and ".join(absent)}, not installed here. '
            "Run: pip install megatron-core megatron-bridge, as VERL's documentation says for your CUDA."
        )
    if find_spec(read.rollout) is None:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name = {read.rollout!r}, and {read.rollout} is not installed here. "
            f"Install {_how(read.rollout)}, or use another server."
        )
    check_attention(read.settings)
    if read.settings.has_critic and find_spec("flash_attn") is None:
        raise ConfigError(
            'algorithm.adv_estimator = "gae" needs flash-attn on GPUs, because VERL opens critics with nothing else. '
            'Run: pip install flash-attn --no-build-isolation, or use engine = "inproc".'
        )


def _has(module: str) -> bool:
    """Return whether a module below a package can be imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is absent
        return False


def _check_address(address: str) -> None:
    """Raise ConfigError where nothing listens at `host:port`; Ray itself would try for minutes and then say less."""
    host, _, port = address.rpartition(":")
    if address.startswith("ray://"):
        raise ConfigError(
            f"ray_kwargs.ray_init.address = {address!r} is Ray's client, through which VERL's trainer cannot run. "
            'Run on a machine of the cluster (ray start --address HEAD:6379) and write address = "auto".'
        )
    if not (host and port.isdigit()):
        return  # "auto" or "local", which Ray looks up
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"No Ray cluster answers at ray_kwargs.ray_init.address = {address!r} ({error}). "
            "Start one there (ray start --head --port 6379), or remove the address to start one here."
        ) from error


def _how(server: str) -> str:
    """Return what to install for a server, and how."""
    if server == "vllm":
        return f"it with: {pip_install('agl-algo-verl[vllm]')}"
    return "sglang 0.5.12 as VERL's documentation says (pip cannot: the extra of VERL 0.9.1 contradicts itself)"
