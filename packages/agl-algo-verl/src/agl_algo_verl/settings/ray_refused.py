"""Keys of VERL that `engine = "ray"` does not pass on: those that something else decides, and those refused.

Every key of VERL's configuration is in one of these tables, or VERL's trainer, its engines or its replicas read it as
the person wrote it; a test walks through all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_algo_verl.settings.keys import DECIDED_ELSEWHERE

if TYPE_CHECKING:
    from collections.abc import Iterable

SERVING = "actor_rollout_ref.rollout"
REFERENCE = "actor_rollout_ref.ref"
ACTOR = "actor_rollout_ref.actor"

CORRECTION = "algorithm.rollout_correction"

MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"
"""Read here: agl cuts updates, and VERL gets a mini-batch of all rows."""


def _each(names: str, why: str, *, below: Iterable[str]) -> dict[str, str]:
    """Return the reason for each of several keys in each of several groups."""
    return {f"{group}.{name}": why for group in below for name in names.split()}


_BY_TOKENS = (
    "{}: micro-batches are cut by tokens, for rows differ in number and length, and no update depends on the cut"
)
_AGENTS = "the agents' own requests, whose sampling parameters are recorded"

DECIDED = (
    {name: who for name, who in DECIDED_ELSEWHERE.items() if not name.startswith((f"{SERVING}.", REFERENCE))}
    | _each("temperature top_p top_k val_kwargs do_sample ignore_eos", _AGENTS, below=[SERVING])
    | _each(
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
        _BY_TOKENS.format("ppo_max_token_len_per_gpu"),
        below=[ACTOR, "critic"],
    )
    | _each(
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        _BY_TOKENS.format("log_prob_max_token_len_per_gpu"),
        below=[SERVING, REFERENCE],
    )
    | _each(
        "optim.total_training_steps",
        "trainer.total_training_steps",
        below=[ACTOR, "critic"],
    )
    | {
        "actor_rollout_ref.rollout.multi_turn": DECIDED_ELSEWHERE["actor_rollout_ref.rollout.multi_turn"],
        "actor_rollout_ref.rollout.mode": "this engine, which serves while it collects",
        "actor_rollout_ref.rollout.skip_tokenizer_init": "this engine, whose agents send text",
        "actor_rollout_ref.rollout.calculate_log_probs": "this engine, which always records them",
        "trainer.max_critic_ckpt_to_keep": DECIDED_ELSEWHERE["trainer.max_actor_ckpt_to_keep"],
        "trainer.resume_from_path": DECIDED_ELSEWHERE["trainer.resume_mode"],
    }
)
"""Keys that guides for VERL set, and what decides them with this engine; a key here covers those below it."""

_WHOLE_CRITIC = "the critic is trained without adapters, because VERL would then never train its value head"
_SCORED = "VERL's reward loop scores nothing here, for rows bring their rewards; "
_REWARD_LOOP = {
    "reward.reward_model": _SCORED + "let a [[reward]] ask the model, which may be a policy of the experiment",
    "reward.custom_reward_function": _SCORED + "a [[reward]] may be a function of your own",
    "reward.reward_manager": _SCORED + "reward.reward_kwargs.overlong_buffer_cfg has the punishment of `dapo`",
    "reward.num_workers": _SCORED + "it starts no worker",
    "reward.sandbox_fusion": _SCORED + "a [[reward]] may run code, and agl-harness has sandboxes",
}
_REWARDS = (
    "rewards are the experiment's: [[reward]]; DAPO's punishment of long answers is "
    "reward.reward_kwargs.overlong_buffer_cfg (enable, len, penalty_factor) with max_resp_len beside it"
)
_TASKS = "tasks are the experiment's `train` and `val`, and agents write the prompts; VERL loads no data set here"
_VALIDATION = "validation is the experiment's, and its rollouts are in the store"
_NOT_READ = "VERL 0.9.1 has this key, and its V1 trainer on FSDP2 never reads it"
_NOT_READ_BY_MEGATRON = "VERL 0.9.1 has this key, and its Megatron engine never reads it"
_OTHER_ESTIMATOR = "it belongs to an estimator of VERL's that cannot be used here"
_WHOLE_STATE = "a step that counts as done is never repeated, so each saves and loads all of the model and optimizer"
_OWN_OLD = 'old log-probabilities are always the engine\'s here; use rollout_is = "token", or engine = "inproc"'
_BY_TOKENS_ALWAYS = "micro-batches are always cut by tokens, as if it were true"
_READ_ELSEWHERE = "VERL's engine does not read it; set {} instead"
_ONE_MINI_BATCH = "an update has all of its rows in one mini-batch, in whatever order"
_NO_SECOND_COUNT = "VERL only checks that it is there; the rollouts of a task are actor_rollout_ref.rollout.n"
_FSDP1 = "VERL's FSDP2 engine never reads it, only its FSDP1 engine does"
_ASYNC_SAVE = "a step counts as done once all of its checkpoint is written"
_OFFLOADED = "VERL's FSDP2 engine always keeps the reference, which has no optimizer, in the CPU's memory"
_ENGINES = (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp")

SAME_STRATEGY = (
    f"{REFERENCE}.strategy",
    f"{REFERENCE}.fsdp_config.strategy",
    f"{ACTOR}.fsdp_config.strategy",
    "critic.fsdp.strategy",
)
"""Keys that may name the engine of `actor.strategy` once more."""

REFUSED = (
    _each("model.lora model.lora_rank model.lora_adapter_path", _WHOLE_CRITIC, below=["critic"])
    | _REWARD_LOOP
    | dict.fromkeys(("reward", "reward_model", "custom_reward_function", "sandbox_fusion"), _REWARDS)
    | _each(
        "tokenizer use_shm trust_remote_code train_max_samples val_max_samples prompt_key reward_fn_key custom_cls "
        "val_batch_size tool_config_path function_tool_path return_raw_input_ids return_raw_chat return_full_prompt "
        "dataloader_num_workers validation_shuffle filter_overlong_prompts_workers image_key image_patch_size "
        "video_key audio_key return_multi_modal_inputs apply_chat_template_kwargs mm_processor_kwargs",
        _TASKS,
        below=["data"],
    )
    | _each("log_val_generations validation_data_dir val_only", _VALIDATION, below=["trainer"])
    | _each("checkpoint.save_contents checkpoint.load_contents", _WHOLE_STATE, below=[ACTOR, "critic"])
    | _each("calculate_sum_pi_squared", _OTHER_ESTIMATOR, below=[ACTOR])
    | _each("fsdp_config.turbo_config", _NOT_READ, below=[ACTOR, REFERENCE])
    | _each("freeze_vision_tower use_prefix_grouper", _NOT_READ, below=[ACTOR])
    | _each("over_sample_rate multi_stage_wake_up", _NOT_READ, below=[SERVING])
    | _each(
        "forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu fsdp.turbo_config",
        _NOT_READ,
        below=["critic"],
    )
    | _each(
        "mtp.enable_train mtp.detach_encoder mtp.mtp_loss_scaling_factor",
        _NOT_READ,
        below=["actor_rollout_ref.model", "critic.model"],
    )
    | _each("use_pf_ppo pf_ppo", _NOT_READ, below=["algorithm"])
    | _each("esi_redundant_time ray_wait_register_center_timeout", _NOT_READ, below=["trainer"])
    | _each("model.mtp", _NOT_READ, below=["critic"])
    | _each("tiled_mlp", _NOT_READ, below=["actor_rollout_ref.model", "critic.model"])
    | _each("dtype use_orig_params wrap_policy.min_num_params", _FSDP1, below=_ENGINES)
    | _each("rollout_n", _NO_SECOND_COUNT, below=[ACTOR, REFERENCE, "critic"])
    | _each("shuffle data_loader_seed", _ONE_MINI_BATCH, below=[ACTOR, "critic"])
    | _each("param_offload offload_policy optimizer_offload", _OFFLOADED, below=[f"{REFERENCE}.fsdp_config"])
    | _each("checkpoint.async_save", _ASYNC_SAVE, below=[ACTOR, "critic"])
    | _each("qat", _READ_ELSEWHERE.format(f"{ACTOR}.fsdp_config.qat"), below=[ACTOR])
    | _each("use_remove_padding", _READ_ELSEWHERE.format("actor_rollout_ref.model.use_remove_padding"), below=[ACTOR])
    | _each("use_fused_kernels", _READ_ELSEWHERE.format("actor_rollout_ref.model.use_fused_kernels"), below=[ACTOR])
    | {
        f"{group}.use_torch_compile": _READ_ELSEWHERE.format(f"{group}.fsdp_config.use_torch_compile")
        for group in (ACTOR, REFERENCE)
    }
    | {
        f"{group}.megatron.use_remove_padding": _READ_ELSEWHERE.format(f"{model}.use_remove_padding")
        for group, model in ((ACTOR, "actor_rollout_ref.model"), (REFERENCE, "actor_rollout_ref.model"))
    }
    | _each(
        "megatron.dist_checkpointing_prefix megatron.router_replay.record_file megatron.router_replay.replay_file",
        _NOT_READ_BY_MEGATRON,
        below=[ACTOR, REFERENCE],
    )
    | dict.fromkeys(SAME_STRATEGY, f"it is the engine of {ACTOR}.strategy")
    | _each("use_dynamic_bsz", _BY_TOKENS_ALWAYS, below=[ACTOR])
    | _each("log_prob_use_dynamic_bsz", _BY_TOKENS_ALWAYS, below=[SERVING, REFERENCE])
    | {
        "critic.ppo_mini_batch_size": "all rows of a step share one update of the critic, too",
        "critic.loss_scale_factor": "the critic's loss is always a mean over tokens here",
        "critic.ulysses_sequence_parallel_size": _READ_ELSEWHERE.format("critic.fsdp.ulysses_sequence_parallel_size"),
        "distillation": "this engine collects for policy gradients only",
        "data.gen_batch_size": "a step collects the tasks of data.train_batch_size at once",
        f"{CORRECTION}.loss_type": "it is read in bypass_mode alone, which is refused",
        "algorithm.filter_groups": "groups without a difference are replaced with refill = ROUNDS, which stands beside "
        "VERL's groups of keys",
        f"{CORRECTION}.bypass_mode": _OWN_OLD,
        "algorithm.use_kl_in_reward": "advantages come from the experiment's credit; use actor.use_kl_loss",
        "actor_rollout_ref.hybrid_engine": "the trainer and the replicas always share their devices",
        "actor_rollout_ref.nccl_timeout": _NOT_READ,
        "actor_rollout_ref.model.lora": "adapters are described by model.lora_rank, lora_alpha, target_modules and "
        "exclude_modules, and merged for serving",
        "actor_rollout_ref.model.lora_adapter_path": "training starts from whole weights; merge the adapter first",
        "actor_rollout_ref.rollout.agent": "the agents are the experiment's",
        "actor_rollout_ref.rollout.nnodes": "replicas share the devices of trainer.nnodes",
        "actor_rollout_ref.rollout.router_config_path": "agl passes the agents' calls on to the replicas itself",
        "actor_rollout_ref.rollout.engine_kwargs.trtllm": "TensorRT-LLM is no replica that serves here",
        "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": "the routing of experts is not recorded",
        "actor_rollout_ref.rollout.trace": "every call is recorded in the store; export it from there",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": "replicas return the routing of experts to VERL's "
        "own client only, and it is not recorded",
        "trainer.balance_batch": "VERL's V1 trainer always balances a step's rows over its workers",
        "trainer.rollout_data_dir": "every rollout is in the store; export it from there",
        "trainer.del_local_ckpt_after_load": "a run that is killed again needs the checkpoint again; `keep` says how "
        "many stay",
        "trainer.v1": "groups are collected ahead by agl, with trainer_mode, colocate_async.num_warmup_batches, "
        "sampler.max_off_policy_threshold and sampler.max_off_policy_strategy",
        "trainer.use_v1": "the trainer is VERL's V1",
        "transfer_queue": "VERL's queue is set up by this engine",
        "skip": "rollouts are agl's and are never skipped",
    }
)
"""Keys of VERL that would have no effect here, with the reason and what to do instead; each covers those below it."""

FOR_GPU_SERVERS = tuple(
    f"{SERVING}.{name}"
    for name in (
        *("dtype", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "max_num_batched_tokens"),
        *("max_model_len", "max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode"),
        *("scheduling_policy", "seed", "full_determinism", "quantization", "quantization_config_file", "qat", "mtp"),
        *("prompt_length", "response_length", "expert_parallel_size", "engine_kwargs.vllm", "engine_kwargs.sglang"),
    )
)
"""Keys that VERL's replicas on GPUs read, and the one for machines without does not; each covers those below it."""

REFUSED_FSDP2 = {
    f"{ACTOR}.checkpoint.strict": "only VERL's Megatron engine reads it",
    "trainer.default_hdfs_dir": "VERL's FSDP2 engine never copies a checkpoint there, only its Megatron engine does",
}
"""Further keys that have an effect with `actor.strategy = "megatron"` alone."""

REFUSED_MEGATRON = _each(
    "entropy_from_logits_with_chunking entropy_from_logits_chunk_size",
    _READ_ELSEWHERE.format(f"{REFERENCE}.megatron.entropy_from_logits_with_chunking and _chunk_size"),
    below=[REFERENCE],
)
"""Further keys that have an effect with `actor.strategy = "fsdp2"` alone."""

REASONS = {"fsdp2": REFUSED | REFUSED_FSDP2, "megatron": REFUSED | REFUSED_MEGATRON}
"""The refused keys with each engine."""

ALLOWED: dict[str, tuple[Any, ...]] = {
    "algorithm.filter_groups.enable": (False,),
    "algorithm.use_kl_in_reward": (False,),
    f"{CORRECTION}.bypass_mode": (False,),
    f"{CORRECTION}.loss_type": ("ppo_clip",),
    "actor_rollout_ref.hybrid_engine": (True,),
    "actor_rollout_ref.model.lora_adapter_path": (None,),
    "reward.num_workers": (0,),
    "reward.reward_model.enable": (False,),
    "trainer.balance_batch": (True,),
    "trainer.use_v1": (True,),
    **dict.fromkeys((f"{ACTOR}.checkpoint.async_save", "critic.checkpoint.async_save"), (False,)),
    **dict.fromkeys((f"{REFERENCE}.fsdp_config.{name}" for name in ("param_offload", "offload_policy")), (True,)),
    f"{REFERENCE}.fsdp_config.optimizer_offload": (True, False),
    "trainer.default_hdfs_dir": (None,),
    f"{ACTOR}.use_dynamic_bsz": (True,),
    f"{SERVING}.log_prob_use_dynamic_bsz": (True,),
    f"{REFERENCE}.log_prob_use_dynamic_bsz": (True,),
}
"""Values of refused keys that are accepted, because they ask for what happens anyway."""
