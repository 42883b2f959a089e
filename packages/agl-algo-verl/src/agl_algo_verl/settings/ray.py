"""VERL's configuration keys with `engine = "ray"`: keys that agl decides, refused keys, and keys passed on to VERL.

The keys of training in one process keep their meaning. Every other key of VERL is passed on unchanged, except those
below.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace as changed

from agl.errors import ConfigError
from agl.hints import pip_install
from agl_algo_verl.runtime import check_attention
from agl_algo_verl.settings.checks import check_rules
from agl_algo_verl.settings.keys import covering, has, key_tables, leaves, names_of, nested, read_keys
from agl_algo_verl.settings.settings import OWN, VerlSettings, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

CPU = "agl_hf"
"""The name of the replica for machines without a GPU."""

ROLLOUT = "actor_rollout_ref.rollout.name"
ROLLOUTS = (CPU, "vllm", "sglang")
"""The key that selects the replica that serves, and its possible values."""

CONNECT_S = 5.0
"""Seconds to wait for a cluster's head to accept a connection."""

STRATEGY = "actor_rollout_ref.actor.strategy"
STRATEGIES = ("fsdp2", "megatron")
"""The key that selects VERL's engine, and its possible values."""

UNHELD = (
    "agents that share the weights and are not trained are not held near the start, because VERL 0.9.1 cannot make the "
    'reference\'s log-probabilities with both a critic and adapters; engine = "inproc" can'
)

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
"""A key that is read here: agl cuts the updates, and VERL gets a mini-batch of all rows."""

PUNISHMENT = "reward.reward_kwargs."
"""Prefix of keys for VERL's reward manager; here agl applies them to its rows, and VERL does not get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """A configuration for `engine = "ray"`.

    Attributes:
        settings: The part that agl itself uses.
        given: Every key for VERL, by its dotted name, as the user wrote it.
        ray_init: Arguments of `ray.init`.
        notes: A note for the user on every key that the experiment overrules.
        unheld: The reason why agents that share the weights but are not trained cannot be held near their start; `""`
            if they can.
        holds: True if such agents are held; this also depends on the experiment.
    """

    settings: VerlSettings
    given: dict[str, Any]
    ray_init: dict[str, Any]
    notes: list[str]
    unheld: str = ""
    holds: bool = False

    @property
    def rollout(self) -> str:
        """The name of the replica that serves."""
        return str(self.given[ROLLOUT])

    @property
    def is_cpu(self) -> bool:
        """True if the cluster trains without GPUs."""
        return self.rollout == CPU

    @property
    def strategy(self) -> str:
        """The name of VERL's engine: `fsdp2` or `megatron`."""
        return str(self.given.get(STRATEGY, STRATEGIES[0]))

    @property
    def ranks(self) -> int:
        """The number of training workers, on all nodes together."""
        return int(self.given.get("trainer.nnodes", 1)) * int(self.given.get("trainer.n_gpus_per_node", 1))


def read_ray_settings(config: Mapping[str, Any]) -> RaySettings:
    """Return the settings from a configuration nested like VERL's.

    Raises ConfigError for keys that are unknown or would be ignored, all in one message, and for combinations that
    cannot train.
    """
    ray_kwargs = cast("dict[str, Any]", config.get("ray_kwargs") or {})
    wrong = tuple(f"ray_kwargs.{name}: only ray_kwargs.ray_init is used" for name in ray_kwargs if name != "ray_init")
    ours = {name: value for name, value in config.items() if name in OWN}
    keys = {name: value for name, value in config.items() if name not in ("ray_kwargs", *OWN)}
    strategy = {".".join(path): value for path, value in leaves(keys)}.get(STRATEGY, STRATEGIES[0])
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"{STRATEGY} = {strategy!r}: the engine is VERL's FSDP2 or Megatron. Write one of {', '.join(STRATEGIES)}."
        )
    used, notes = read_keys(keys, engine=strategy, shape=VerlSettings, wrong=wrong)
    own = {name: value for name, value in used.items() if has(VerlSettings, tuple(name.split(".")))}
    settings, unheld = read_settings(nested(own) | ours)[0], ""
    if "anchor_coef" not in ours and settings.has_critic and settings.is_lora:
        settings, unheld = changed(settings, anchor_coef=0.0), UNHELD
    _check_cluster(used)
    own_flat = {".".join(path): value for path, value in leaves(msgspec.to_builtins(ours))}
    check_rules(settings, used | own_flat, engine=strategy)
    given = {name: value for name, value in used.items() if name != MINI_BATCH and not name.startswith(PUNISHMENT)}
    ray_init = dict(ray_kwargs.get("ray_init", {}))
    notes += _unserved(given)
    return RaySettings(settings=settings, given=given, ray_init=ray_init, notes=notes, unheld=unheld)


def _unserved(given: Mapping[str, Any]) -> list[str]:
    """Return a note for each key that has no effect with the replica for machines without a GPU."""
    if given.get(ROLLOUT) != CPU:
        return []
    unread = dict.fromkeys(names_of(key_tables()["for_gpu_servers"]))
    return [f'{name} has no effect with {ROLLOUT} = "{CPU}"' for name in given if covering(unread, name)]


def _check_cluster(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown kind of replica, or an impossible size of the cluster."""
    if given.get(ROLLOUT) not in ROLLOUTS:
        raise ConfigError(
            f'{ROLLOUT} is {given.get(ROLLOUT)!r}, and engine = "ray" serves with one of {", ".join(ROLLOUTS)}. '
            f"Use {CPU} without GPUs, vllm or sglang with them."
        )
    nodes, workers = given.get("trainer.nnodes", 1), given.get("trainer.n_gpus_per_node", 1)
    if not all(isinstance(count, int) and count > 0 for count in (nodes, workers)):
        raise ConfigError(
            f"trainer.nnodes = {nodes!r} and trainer.n_gpus_per_node = {workers!r}; give whole numbers from 1."
        )


def check_machine(read: RaySettings, *, has_gpu: bool) -> None:
    """Raise ConfigError for missing packages or hardware; a cluster elsewhere is checked when it is started."""
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
    """Return true if a module inside a package exists; imports nothing but its package."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is absent
        return False


def _check_address(address: str) -> None:
    """Raise ConfigError if nothing listens at `host:port`; Ray itself would try for minutes, with a poorer message."""
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
    """Return how to install a server, as the end of a sentence."""
    if server == "vllm":
        return f"it with: {pip_install('agl-algo-verl[vllm]')}"
    return "sglang 0.5.12 as VERL's documentation says (pip cannot: the extra of VERL 0.9.1 contradicts itself)"
