"""Every key that `engine = "ray"` passes on to VERL is read there from its own group, not from a similar key.

VERL has `use_remove_padding` in six groups and reads it from one of them. So the tables here give, for each group, the
names by which VERL's source refers to it, and the files that do. A key counts as read if one of these files takes it
from such a name, or if VERL's configuration copies it to a key that is read.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import yaml

from agl_algo_verl.settings.keys import leaves

from .test_ray_keys import NOT_RUN, VERL, passed_on

ENGINE = r"workers/engine/(fsdp|megatron)/|utils/fsdp_utils|utils/megatron|engine_workers"
QAT = (r"(qat|config|qat_config)", r"utils/(qat|modelopt)/|workers/engine/(fsdp|megatron)/|vllm_async_server")
PROFILER = (
    "",
    r"utils/profiler/|utils/memory_utils|constants_ppo|trainer_base|single_controller|workers/(engine|rollout)",
)

READERS: tuple[tuple[str, str, str], ...] = (
    (r".*\.qat\..*", *QAT),
    (r"(global_profiler|.*\.profiler)\..*", *PROFILER),
    (r".*\.wrap_policy\..*", r'"wrap_policy", {}\)', r"utils/fsdp_utils"),
    (r".*\.router_replay\..*", r"router_replay", r"workers/engine|engine_workers|utils/megatron"),
    (r".*\.(fsdp_config|fsdp|megatron)\.\w+", r"(engine_config|config)", ENGINE),
    (r".*\.optim\.\w+", r"(optim_config|optimizer_config|config)", rf"{ENGINE}|workers/config/optimizer"),
    (r".*\.policy_loss\.\w+", r"(policy_loss|policy_loss_config|config)", r"core_algos|workers/utils/losses"),
    (r".*\.checkpoint\.\w+", r"checkpoint_config", r"utils/checkpoint|engine_workers"),
    (r"actor_rollout_ref\.model\.mtp\.\w+", r"(mtp|mtp_config)", r"workers/rollout|trainer_base"),
    (r".*\.fused_kernel_options\.\w+", r"fused_kernel_options", ENGINE),
    (
        r"(actor_rollout_ref|critic)\.model\.\w+",
        r"(model_config|config\.model|self)",
        rf"{ENGINE}|workers/config/model|workers/rollout/(vllm|sglang)|trainer_base|metric_utils",
    ),
    (r"actor_rollout_ref\.rollout\.disaggregation\.\w+", r"(disagg|disaggregation|disagg_config)", r"workers/rollout"),
    (r"actor_rollout_ref\.rollout\.prometheus\.\w+", r"(prometheus|config)", r"workers/rollout/(utils|llm|vllm)"),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.\w+", r"engine_kwargs(\", {}\))?", r"workers/rollout"),
    (
        r"actor_rollout_ref\.rollout\..*",
        r"(rollout|rollout_config|self\.config|checkpoint_engine_config)",
        r"workers/rollout/(vllm|sglang|llm_server|replica|router)|engine_workers|trainer_base|checkpoint_engine",
    ),
    (r"actor_rollout_ref\.ref\.\w+", r"(config\.ref|ref_config|actor_rollout_ref\.ref)", ""),
    (r"actor_rollout_ref\.actor\.\w+", r"(config\.actor|actor_config|actor_rollout_ref\.actor)", ""),
    (r"actor_rollout_ref\.actor\.\w+", r"config", r"core_algos|workers/utils/losses"),
    (r"critic\.\w+", r"(config\.critic|critic_cfg)", ""),
    (r"critic\.\w+", r"config", r"workers/utils/losses"),
    (r"trainer\.\w+", r"config\.trainer", ""),
    (r"algorithm\..*", r"(algorithm|config|rollout_corr_config|kl_ctrl)", r"trainer/ppo"),
    (r"data\.\w+", r"(config\.data|data_config)", ""),
)
"""Patterns of keys, with the names of their group in VERL's source and the files; a key may match several."""

OTHERWISE = {
    r".*\.optim\.warmup_style": "VERL's OptimizerConfig takes it for lr_scheduler_type",
    r"actor_rollout_ref\.(actor|ref)\.ulysses_sequence_parallel_size": "VERL's ActorConfig hands it to the engine",
    r"critic\.ppo_max_token_len_per_gpu": "agl writes it into the key that VERL reads",
    r"data\.(filter_overlong_prompts|max_prompt_length|max_response_length)": "agl's rows take it",
    r"trainer\.v1\..*": "agl collects ahead",
    r"ray_kwargs\..*": "Ray takes it, or read_ray_settings refuses it",
    r"global_profiler\.global_tool_config\..*": "profilers take it as it is",
    r".*\.optim\.muon_\w+": "VERL's Megatron optimizer takes all of these by a list of their names",
    r".*\.megatron\.override_\w+_config\..*": "Megatron takes it as it is",
    r"critic\.(megatron\..*|nccl_timeout)": "a critic is refused with Megatron",
}
"""Patterns of keys that VERL reads in another way, and how it does."""

FOR_MEGATRON = ("workers/engine/megatron/", "utils/megatron", "models/mcore/")


@cache
def sources() -> dict[str, str]:
    """Return the code of the parts of VERL that a run uses, by file name, without docstrings."""
    skipped = tuple(name for name in NOT_RUN if name not in FOR_MEGATRON)
    files = {file.relative_to(VERL).as_posix(): file for file in VERL.rglob("*.py")}
    return {
        name: re.sub(r'"""[\s\S]*?"""', "", file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if not name.startswith(skipped)
    }


@cache
def copies(strategy: str) -> dict[str, str]:
    """Return the keys whose value VERL's configuration copies from another key, with their text."""
    name = "ppo_megatron_trainer" if strategy == "megatron" else "ppo_trainer"
    content: Any = yaml.safe_load((VERL / f"trainer/config/_generated_{name}.yaml").read_text(encoding="utf-8"))
    return {".".join(path): value for path, value in leaves(content) if "${" in str(value)}


def is_read(key: str, strategy: str) -> bool:
    """Return true if VERL reads the key from its own group."""
    if any(re.fullmatch(pattern, key) for pattern in OTHERWISE):
        return True
    last = re.escape(key.rpartition(".")[2])
    for pattern, names, files in READERS:
        if not re.fullmatch(pattern, key):
            continue
        taken = rf'{names}(\.{last}\b(?!\s*=[^=])|\.(get|pop)\(\s*"{last}"|\["{last}"\]|,\s*"{last}")'
        if any(re.search(taken, code) for name, code in sources().items() if re.search(files, name)):
            return True
    copied = re.compile(rf"\${{(oc\.select:)?\s*{re.escape(key)}\b")
    return any(is_read(name, strategy) for name, text in copies(strategy).items() if copied.search(text))


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_every_key_that_goes_to_verl_is_read_from_its_own_group(strategy: str) -> None:
    assert set() == {name for name in passed_on(strategy) if not is_read(name, strategy)}


@pytest.mark.parametrize(
    "name",
    [
        "actor_rollout_ref.actor.use_remove_padding",
        "actor_rollout_ref.actor.use_torch_compile",
        "actor_rollout_ref.ref.rollout_n",
        "critic.ulysses_sequence_parallel_size",
    ],
)
def test_key_that_is_read_from_another_group_alone_is_found(name: str) -> None:
    assert not is_read(name, "fsdp2")
