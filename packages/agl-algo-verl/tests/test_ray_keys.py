"""VERL's keys with `engine = "ray"`: those passed to VERL, those refused, and the whole configuration."""

from __future__ import annotations

import ast
import re
import socket
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from agl.errors import ConfigError
from agl_algo_verl.algorithm import make
from agl_algo_verl.losses.loss_worker import loss_of
from agl_algo_verl.ray.configuration import LIBRARIES, compose, environment
from agl_algo_verl.ray.trainer import RayVERL
from agl_algo_verl.runtime import check_attention
from agl_algo_verl.settings.keys import classify, key_tables, leaves, names_of, verl_keys
from agl_algo_verl.settings.ray import RaySettings, check_machine, read_ray_settings
from agl_algo_verl.settings.settings import OWN, VerlSettings

from .test_settings import GUIDE
from .world import config as small


def config(**keys: Any) -> dict[str, Any]:
    return small(**{"rollout.name": "agl_hf"} | keys)


def composed(**keys: Any) -> dict[str, Any]:
    """Return VERL's whole configuration, by dotted names."""
    options = {"model": "m", "folder": Path("f"), "steps": 3, "tasks": 2, "checkpoint": None, "threads": 1}
    found: Any = OmegaConf.to_container(compose(read_ray_settings(config(**keys)), **options), resolve=True)
    return {".".join(path): value for path, value in leaves(found)}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout.name": "hf"}, "one of agl_hf, vllm, sglang"),
        ({"actor.optim.lrr": 1.0}, "did you mean actor_rollout_ref.actor.optim.lr"),
        ({"algorithm.use_kl_in_reward": True}, "use actor.use_kl_loss"),
        ({"trainer.v1.trainer_mode": "separate_async"}, "devices of its own"),
        ({"trainer.v1.sampler.custom_sampler.name": "Mine"}, "collected ahead by agl"),
        ({"actor.use_kl_loss": True, "actor.loss_agg_mode": "seq-mean-token-sum"}, "by rows, not by rollouts"),
        ({"model.lora.rank": 8}, "described by model.lora_rank"),
        ({"actor.use_remove_padding": True}, "set actor_rollout_ref.model.use_remove_padding instead"),
        ({"actor.use_torch_compile": True}, r"set .*actor\.fsdp_config\.use_torch_compile instead"),
        ({"actor.qat.enable": True}, r"set .*actor\.fsdp_config\.qat instead"),
        ({"actor.fsdp_config.use_orig_params": True}, "only its FSDP1 engine"),
        ({"ref.fsdp_config.param_offload": False}, "always keeps the reference"),
        ({"ref.rollout_n": 3}, r"actor_rollout_ref\.rollout\.n$"),
        ({"actor.shuffle": True}, "one mini-batch"),
        ({"actor.checkpoint.async_save": True}, "once all of its checkpoint is written"),
        ({"actor.checkpoint.strict": False}, "only VERL's Megatron engine"),
        ({"rollout.router_config_path": "r.yaml"}, "agl passes the agents' calls on"),
        ({"rollout.nnodes": 2}, "share the devices of trainer.nnodes"),
        ({"critic.cliprange_value": 0.1}, '"gae" has a critic'),
        (
            {"algorithm.adv_estimator": "gae", "model.lora_rank": 4, "actor.use_kl_loss": True},
            "the critic, which has none",
        ),
        ({"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 1}, "one update of the critic"),
        ({"algorithm.adv_estimator": "gae", "critic.model.lora_rank": 4}, "never train its value head"),
        ({"algorithm.adv_estimator": "gae", "actor.loss_agg_mode": "seq-mean-token-mean"}, "with a critic and engine"),
        ({"trainer.n_gpus_per_node": 0}, "whole numbers from 1"),
    ],
)
def test_keys_that_would_not_do_what_they_say_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ray_settings(config(**keys))


def test_every_wrong_key_is_in_one_message() -> None:
    wrong = config() | {"skip": {"enable": True}, "reward": {"num_workers": 2}, "ray_kwargs": {"a": 1}}
    with pytest.raises(ConfigError, match=r"(?s)ray_kwargs\.a.*skip\.enable.*reward\.num_workers"):
        read_ray_settings(wrong)


def test_keys_that_others_decide_are_told() -> None:
    read = read_ray_settings(config(**{"trainer.logger": ["console"], "actor.use_dynamic_bsz": True}))
    assert ["trainer.logger is decided by"] == [note.split(" the ")[0] for note in read.notes]
    assert "actor_rollout_ref.actor.use_dynamic_bsz" not in read.given


def test_keys_of_servers_on_gpus_are_told_where_there_is_none() -> None:
    keys = {"rollout.max_num_seqs": 7, "rollout.engine_kwargs.vllm.swap_space": 4, "rollout.load_format": "auto"}
    said = [f'actor_rollout_ref.{name} has no effect with actor_rollout_ref.rollout.name = "agl_hf"' for name in keys]
    assert said[:2] == read_ray_settings(config(**keys)).notes
    assert [] == read_ray_settings(config(**keys | {"rollout.name": "vllm"})).notes


def test_the_tables_name_keys_that_verl_has() -> None:
    known = verl_keys()
    known = known | verl_keys("megatron")
    tables = key_tables()
    entries = [*tables["decided"], *tables["refused"], *tables["rules"], tables["for_gpu_servers"]]
    typed = {".".join(path) for path, _ in leaves(msgspec.to_builtins(VerlSettings()))} | set(OWN)
    named = {name for entry in entries for name in names_of(entry)} | set(tables["values"])
    absent = {name for name in named if name not in known | typed and not name.startswith("reward.reward_kwargs")}
    assert {"agentlightning"} == absent


LOSS_KEYS = {"loss": "cispo", "loss_params": {"clip_high": 0.1}, "estimator": "opo"}


@pytest.mark.parametrize("rollout", ["agl_hf", "vllm"])
def test_a_loss_of_ours_reaches_verls_workers_in_the_name_of_the_loss(rollout: str) -> None:
    found = composed(**LOSS_KEYS, **{"rollout.name": rollout})
    named = loss_of(found["actor_rollout_ref.actor.policy_loss.loss_mode"])
    assert named is not None
    assert ("cispo", 0.1) == (named.entry.name, named.call.clip_high)
    assert ["agl_algo_verl.ray.preparation"] == found[LIBRARIES]
    assert not set(LOSS_KEYS) & found.keys()
    own = composed(**{"rollout.name": rollout, "actor.policy_loss.loss_mode": "gspo"})
    assert "gspo" == own["actor_rollout_ref.actor.policy_loss.loss_mode"]


def test_a_loss_of_ours_takes_the_modes_in_which_verl_would_count_rows() -> None:
    keys = {"actor.loss_agg_mode": "seq-mean-token-mean", "actor.use_kl_loss": True, "actor.entropy_coeff": 0.1}
    assert "seq-mean-token-mean" == composed(**keys, loss="ppo-clip")["actor_rollout_ref.actor.loss_agg_mode"]
    assert "seq-mean-token-mean" == composed(loss="gmpo")["actor_rollout_ref.actor.loss_agg_mode"]


RS = {"algorithm.rollout_correction.rollout_rs": "token_k1", "algorithm.rollout_correction.rollout_rs_threshold": "2.0"}


@pytest.mark.parametrize("keys", [{}, RS, {"algorithm.adv_estimator": "gae"}], ids=["", "rejection", "critic"])
def test_every_run_trains_by_the_workers_of_this_package(keys: dict[str, Any]) -> None:
    assert ["agl_algo_verl.ray.preparation"] == composed(**keys)[LIBRARIES]


@pytest.mark.parametrize("given", ["mine", ["mine", "yours"]])
def test_libraries_of_the_person_are_imported_beside_those_of_this_package(given: str | list[str]) -> None:
    theirs = [given] if isinstance(given, str) else given
    keys: dict[str, Any] = {"model.external_lib": given}
    assert [*theirs, "agl_algo_verl.ray.preparation"] == composed(**keys)[LIBRARIES]


VERL = Path(next(iter(find_spec("verl").submodule_search_locations)))
NOT_RUN = (
    "experimental/",
    "model_merger/",
    "models/mcore/",
    "interactions/",
    "tools/",
    "trainer/config/",
    "trainer/distillation/",
    "trainer/main_",
    "trainer/ppo/ray_trainer.py",
    "trainer/sft",
    "utils/dataset/",
    "utils/megatron",
    "utils/reward_score/",
    "workers/engine/automodel/",
    "workers/engine/fsdp/fsdp_turbo",
    "workers/engine/megatron/",
    "workers/engine/mindspeed/",
    "workers/engine/torchtitan/",
    "workers/engine/veomni/",
    "workers/reward",
)
"""Parts of VERL that no run of agl uses: other trainers, engines and data."""

READ_ELSEWHERE = ("ray_kwargs.", "global_profiler.global_tool_config.", "data.filter_overlong_prompts")
"""Prefixes of keys that are read elsewhere: by Ray's start, by profilers, or by agl for its own rows."""


def passed_on(strategy: Any = "fsdp2") -> set[str]:
    """Return the keys, without groups, that are passed to VERL as the user wrote them."""
    known = verl_keys(strategy)
    lowest = {name for name in known if not any(other.startswith(f"{name}.") for other in known)}
    return {name for name in lowest if "used" == classify(name, object(), engine=strategy, shape=VerlSettings)[0]}


def words_in_verl() -> set[str]:
    """Return every attribute name and short string in the source of the parts of VERL that a run uses."""
    found: set[str] = set()
    for file in VERL.rglob("*.py"):
        if file.relative_to(VERL).as_posix().startswith(NOT_RUN):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                found.add(node.value.rpartition(".")[2])
    return found


def test_no_key_that_goes_to_verl_is_overwritten_on_the_way() -> None:
    typed = {".".join(path) for path, _ in leaves(msgspec.to_builtins(VerlSettings()))}
    given = {name: "as written" for name in passed_on() - typed - {"actor_rollout_ref.rollout.name"}}
    assert 300 < len(given)
    read = replace(read_ray_settings(config()), given=given | {"actor_rollout_ref.rollout.name": "vllm"})
    options = {"model": "m", "folder": Path("f"), "steps": 3, "tasks": 2, "checkpoint": None, "threads": 1}
    whole: Any = compose(read, **options)
    assert {LIBRARIES} == {name for name in given if "as written" != OmegaConf.select(whole, name)}
    assert ["as written", "agl_algo_verl.ray.preparation"] == OmegaConf.select(whole, LIBRARIES)


def test_every_key_that_goes_to_verl_is_read_by_a_part_of_it_that_runs() -> None:
    read = words_in_verl()
    assert {"ppo_epochs", "max_num_seqs"} <= read
    unread = {name for name in passed_on() if name.rpartition(".")[2] not in read}
    assert set() == {name for name in unread if not name.startswith(READ_ELSEWHERE)}


def test_verl_gets_what_was_written_and_what_this_engine_needs() -> None:
    found = composed(
        **{"actor.clip_ratio_high": 0.28, "rollout.max_num_seqs": 7, "actor.use_kl_loss": True, "trainer.nnodes": 2}
    )
    expected = {
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.rollout.max_num_seqs": 7,
        "actor_rollout_ref.rollout.n": 4,
        "trainer.nnodes": 2,
        "trainer.total_training_steps": 3,
        "trainer.device": "cpu",
        "algorithm.adv_estimator": "agl",
        "data.train_batch_size": 2,
    }
    assert expected == {name: found[name] for name in expected}


def test_a_guides_configuration_is_taken_and_passed_on() -> None:
    from verl.utils.config import validate_config

    read = read_ray_settings(GUIDE)
    assert 12 == len(read.notes)
    assert ("vllm", 32) == (read.rollout, read.settings.data.train_batch_size)
    whole = compose(read, model="m", folder=Path("f"), steps=3, tasks=32, checkpoint=None, threads=0)
    served = whole.actor_rollout_ref.rollout
    assert (4, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}) == (served.n, served.engine_kwargs.vllm)
    assert whole.actor_rollout_ref.actor.fsdp_config.param_offload
    assert "flash_attention_2" == whole.actor_rollout_ref.model.override_config.attn_implementation
    validate_config(whole, use_reference_policy=False, use_critic=False)


def test_a_critic_is_verls_own_with_verls_own_gae() -> None:
    found = composed(**{"algorithm.adv_estimator": "gae", "algorithm.lam": 0.9, "critic.optim.lr": 1e-3})
    expected = {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.9,
        "critic.enable": True,
        "critic.optim.lr": 1e-3,
        "critic.model.path": "m",
        "critic.ppo_infer_max_token_len_per_gpu": 32768,
        "critic.model.override_config.attn_implementation": "sdpa",
    }
    assert expected == {name: found[name] for name in expected}
    warm = read_ray_settings(config(**{"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 5}))
    options = {"model": "m", "folder": Path("f"), "steps": 3, "tasks": 2, "checkpoint": None, "threads": 1}
    assert [5, 1, 0] == [compose(warm, **options, before=done).trainer.critic_warmup for done in (0, 4, 9)]


def test_adapters_are_merged_where_a_server_would_serve_them_to_verl_alone() -> None:
    assert not composed(**{"model.lora_rank": 4})["actor_rollout_ref.model.lora.merge"]
    assert composed(**{"model.lora_rank": 4, "rollout.name": "vllm"})["actor_rollout_ref.model.lora.merge"]


def test_only_the_cpu_gets_what_the_cpu_needs() -> None:
    found = composed(**{"rollout.name": "vllm"})
    assert "cuda" == found["trainer.device"]
    assert ["agl_algo_verl.ray.preparation"] == found[LIBRARIES]
    assert found["actor_rollout_ref.rollout.free_cache_engine"]
    assert "sdpa" == found["actor_rollout_ref.model.override_config.attn_implementation"]


def test_a_machine_without_what_serves_is_told_what_to_do() -> None:
    gpu = read_ray_settings(config(**{"rollout.name": "vllm"}))
    with pytest.raises(ConfigError, match=r"needs GPUs.*ray_init\.address"):
        check_machine(gpu, has_gpu=False)
    with pytest.raises(ConfigError, match=r"vllm is not installed here.*agl-algo-verl\[vllm\]"):
        check_machine(gpu, has_gpu=True)
    with pytest.raises(ConfigError, match=r"sglang is not installed here.*contradicts itself"):
        check_machine(read_ray_settings(config(**{"rollout.name": "sglang"})), has_gpu=True)
    with pytest.raises(ConfigError, match="use_remove_padding = true needs flash-attn"):
        check_attention(read_ray_settings(GUIDE).settings)
    check_machine(read_ray_settings(config()), has_gpu=False)
    check_machine(at("auto"), has_gpu=False)


def at(address: str) -> RaySettings:
    return read_ray_settings(config(**{"rollout.name": "vllm"}) | {"ray_kwargs": {"ray_init": {"address": address}}})


def test_a_cluster_that_is_not_there_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_machine(at(f"127.0.0.1:{port}"), has_gpu=False)
    with pytest.raises(ConfigError, match=rf"No Ray cluster answers at .*127.0.0.1:{port}.*ray start"):
        check_machine(at(f"127.0.0.1:{port}"), has_gpu=False)
    with pytest.raises(ConfigError, match="Ray's client"):
        check_machine(at("ray://head:10001"), has_gpu=False)


def test_the_engine_is_chosen_by_name() -> None:
    assert isinstance(make(engine="ray", **config()), RayVERL)
    with pytest.raises(ConfigError, match="inproc, ray"):
        make(engine="spark")


def test_every_configuration_on_the_page_is_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/cluster.md").read_text(encoding="utf-8")
    blocks = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)]
    engines = [make(**block["algorithm"][0]["params"]) for block in blocks if "algorithm" in block]
    assert ["VERL", *["RayVERL"] * 4] == [type(engine).__name__ for engine in engines]


def test_the_example_differs_from_the_one_in_one_process_where_the_page_says() -> None:
    calc = Path(__file__).parents[3] / "examples/calc"
    here, there = (tomllib.loads((calc / name).read_text()) for name in ("verl-inproc.toml", "verl-ray-cpu.toml"))
    assert "verl" == there["policy"]["calc-lm"].pop("use") != here["policy"]["calc-lm"].pop("use")
    params = there["algorithm"][1]["params"]
    assert "agl_hf" == params["actor_rollout_ref"]["rollout"].pop("name")
    assert "ray" == params.pop("engine")
    assert [here[part] for part in ("policy", "algorithm", "reward")] == [
        there[part] for part in ("policy", "algorithm", "reward")
    ]


def test_a_missing_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_algo_verl.settings.ray.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs the Python modules \['ray', 'transfer_queue'\].*pip install"):
        check_machine(read_ray_settings(config()), has_gpu=False)


@pytest.mark.parametrize(("threads", "expected"), [(0, 1), (3, 3)])
def test_processes_of_a_cluster_get_the_threads_that_were_asked_for(threads: int, expected: int) -> None:
    options = {"model": "m", "folder": Path("f"), "steps": 3, "tasks": 2, "checkpoint": None, "threads": threads}
    read = read_ray_settings(config())
    assert expected == compose(read, **options).actor_rollout_ref.rollout.engine_kwargs.agl_hf.threads
    assert str(expected) == environment(read, folder=Path("f"), threads=threads)["OMP_NUM_THREADS"]
