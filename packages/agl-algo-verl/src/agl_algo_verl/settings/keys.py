"""VERL's configuration keys: those used here, those that something else decides, and those that do not exist.

Every key that a person writes is accounted for. It is used, or it asks for what happens anyway, or a note says what
in the experiment decides it, or it is refused. The keys that exist are read from the configuration that VERL ships.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import yaml

from agl.errors import ConfigError
from agl.hints import closest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ENDPOINT = "the policy that serves: [policy.NAME]"
_SAMPLING = "the agent's own requests, whose sampling parameters are recorded"
_LOGGERS = "the run itself, which prints its progress, and keeps every number for `agl metrics`"

DECIDED_ELSEWHERE: dict[str, str] = {
    "data.train_files": "the experiment's `train`",
    "data.val_files": "the experiment's `val`",
    "data.shuffle": "the experiment's `seed`, from which the order of tasks follows",
    "data.seed": "the experiment's `seed`",
    "actor_rollout_ref.model.path": "the policy that is tuned",
    "actor_rollout_ref.rollout.temperature": _SAMPLING,
    "actor_rollout_ref.rollout.top_p": _SAMPLING,
    "actor_rollout_ref.rollout.top_k": _SAMPLING,
    "actor_rollout_ref.rollout.val_kwargs": _SAMPLING,
    "actor_rollout_ref.rollout.name": _ENDPOINT,
    "actor_rollout_ref.rollout.mode": _ENDPOINT,
    "actor_rollout_ref.rollout.dtype": _ENDPOINT,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": _ENDPOINT,
    "actor_rollout_ref.rollout.gpu_memory_utilization": _ENDPOINT,
    "actor_rollout_ref.rollout.enforce_eager": _ENDPOINT,
    "actor_rollout_ref.rollout.engine_kwargs": _ENDPOINT,
    "actor_rollout_ref.rollout.multi_turn": "the agent, which has as many turns as it takes",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "actor_rollout_ref.actor's micro-batches",
    "actor_rollout_ref.ref": "actor_rollout_ref.actor, whose engine and micro-batches the reference shares",
    "critic.model.path": "the policy that is tuned, whose network the critic starts from",
    "trainer.logger": _LOGGERS,
    "trainer.project_name": _LOGGERS,
    "trainer.experiment_name": "the experiment's `name`",
    "trainer.val_before_train": "the experiment's `validate_every`",
    "trainer.test_freq": "the experiment's `validate_every`",
    "trainer.save_freq": "this algorithm's `save_every`",
    "trainer.resume_mode": "`agl run --resume`",
    "trainer.default_local_dir": "the experiment's `workdir`",
    "trainer.max_actor_ckpt_to_keep": "this algorithm's `keep`",
}
"""Keys that guides for VERL set, and what decides them in an experiment; a key here covers those below it."""

MEGATRON_OVERRIDES = ("override_transformer_config", "override_ddp_config", "override_mcore_model_config")
"""Groups of VERL's Megatron engine that take arguments of Megatron's own."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.model.lora_adapter_path": (
        (None,),
        "training starts from whole weights; merge the adapter into its base model first",
    ),
    "actor_rollout_ref.actor.strategy": (("fsdp2",), "the engine is VERL's FSDP2"),
    "actor_rollout_ref.actor.grad_clip": ((), "VERL's engine reads actor_rollout_ref.actor.optim.clip_grad instead"),
    "algorithm.filter_groups.enable": (
        (False,),
        "groups without a difference are replaced with refill = ROUNDS, which stands beside VERL's groups of keys",
    ),
    "data.truncation": (
        ("error",),
        "a cut row would train on what the policy never read; see data.filter_overlong_prompts",
    ),
    "trainer.nnodes": ((1,), "the engine 'inproc' is one process"),
    "trainer.n_gpus_per_node": ((1,), "the engine 'inproc' is one process with one device"),
    "critic.strategy": (("fsdp2",), "the engine is VERL's FSDP2"),
    "critic.enable": ((None,), 'algorithm.adv_estimator = "gae" has a critic, and the others have none'),
    "critic.use_dynamic_bsz": (
        (),
        "give critic.ppo_micro_batch_size_per_gpu for micro-batches of rows, or nothing to cut them by tokens",
    ),
    "critic.grad_clip": ((), "VERL's engine reads critic.optim.clip_grad instead"),
    "trainer.balance_batch": ((True, False), "one device has nothing to balance"),
}
"""Keys with the values that ask for what happens anyway, and the answer to any other value."""


def check_keys(config: Mapping[str, Any], shape: type[msgspec.Struct]) -> tuple[dict[str, Any], list[str]]:
    """Return the part of VERL's nested keys that `shape` has, and a note for every key that something else decides.

    Raises ConfigError for keys that do not exist, that this engine would ignore, or that ask for what it cannot do;
    one message names them all.
    """
    used: dict[str, Any] = {}
    notes: list[str] = []
    wrong: list[str] = []
    for path, value in leaves(config):
        name = ".".join(path)
        covering = next((key for key in DECIDED_ELSEWHERE if name == key or name.startswith(f"{key}.")), "")
        if has(shape, path):
            put(used, path, value)
        elif name in FIXED:
            allowed, why = FIXED[name]
            wrong += [] if value in allowed else [f"{name} = {value!r}: {why}"]
        elif covering:
            notes.append(f"{name} is decided by {DECIDED_ELSEWHERE[covering]}")
        else:
            wrong.append(_unknown(name, shape))
    if wrong:
        raise ConfigError("The VERL configuration cannot be used as it is:\n- " + "\n- ".join(wrong))
    return used, notes


@cache
def verl_keys(strategy: str = "fsdp2") -> frozenset[str]:
    """Return the dotted names of all keys in the configuration that VERL ships, groups included; imports nothing.

    `strategy` is the engine: `fsdp2`, or `megatron`, for which VERL has other keys.
    """
    spec = find_spec("verl")
    folder = Path(next(iter(spec.submodule_search_locations or ["."]))) if spec else Path()
    name = "ppo_megatron_trainer" if strategy == "megatron" else "ppo_trainer"
    file = folder / "trainer" / "config" / f"_generated_{name}.yaml"
    if not file.is_file():
        return frozenset()
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return frozenset(".".join(path) for path in _every(content, ()) if not path[-1].startswith("_"))


def is_verl_key(name: str, strategy: str = "fsdp2") -> bool:
    """Return whether VERL has this key with an engine, or takes any key at this place."""
    known = verl_keys(strategy)
    return name in known or any(name.startswith(f"{key}.") for key in _open_keys(known))


def _unknown(name: str, shape: type[msgspec.Struct]) -> str:
    if name.split(".")[0] in ("reward", "reward_model", "custom_reward_function"):
        return (
            f"{name}: rewards are the experiment's [[reward]] and what agents emit; DAPO's punishment of long answers "
            "is reward.reward_kwargs.overlong_buffer_cfg (enable, len, penalty_factor) with max_resp_len beside it"
        )
    if name.split(".")[0] == "agentlightning":
        return f"{name}: this is Agent Lightning's own; calls become rows by their tokens here, without a setting"
    if is_verl_key(name):
        return f"{name}: VERL has this key, and the engine 'inproc' would ignore it; remove it"
    return misspelling(name, shape)


def misspelling(name: str, shape: type[msgspec.Struct], *, strategy: str = "fsdp2") -> str:
    """Return the answer to a key that does not exist, with the closest one that does."""
    known = verl_keys(strategy)
    near = closest(name, sorted(known | set(_paths(shape))), cutoff=0.75)
    return f"{name}: VERL has no such key; " + (f"did you mean {near}?" if near else "remove it")


def _open_keys(known: frozenset[str]) -> Iterator[str]:
    """Yield the keys whose value is a mapping of the person's own."""
    ends = ("_kwargs", "override_config", "engine_kwargs.vllm", *MEGATRON_OVERRIDES)
    return (key for key in known if key.endswith(ends))


def leaves(config: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of every key of a nested configuration; dots in a name nest as well."""
    for name, value in config.items():
        path = (*before, *str(name).split("."))
        if isinstance(value, dict) and value:
            yield from leaves(cast("dict[str, Any]", value), path)
        else:
            yield path, value


def _every(content: Any, before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of nested mappings, those with mappings below them included."""
    if isinstance(content, dict):
        for name, value in cast("dict[Any, Any]", content).items():
            yield (*before, str(name))
            yield from _every(value, (*before, str(name)))


def _fields(shape: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(shape)}


def has(shape: type[msgspec.Struct], path: tuple[str, ...]) -> bool:
    """Return whether a struct has the key at `path`."""
    kind = _fields(shape).get(path[0])
    if kind is None:
        return False
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return len(path) > 1 and has(kind, path[1:])
    return len(path) == 1


def _paths(shape: type[msgspec.Struct], before: str = "") -> Iterator[str]:
    """Yield the dotted name of every key of a struct and of those below it."""
    for name, kind in _fields(shape).items():
        yield before + name
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _paths(kind, f"{before}{name}.")


def put(target: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the key at `path` of a nested configuration."""
    for name in path[:-1]:
        target = target.setdefault(name, {})
    target[path[-1]] = value
