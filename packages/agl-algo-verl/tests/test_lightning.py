"""A script in the manner of Agent Lightning's training examples, whose configuration trains the smallest model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("agl_algo_torch", reason="needs agl-algo-torch, which serves the policy")
openai = pytest.importorskip("openai", reason="needs openai, which the agent calls with")

import agl_lightning as agl  # noqa: E402  # behind the checks
from agl_run import FitResult, Quiet  # noqa: E402

TRAINING: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 32, "truncation": "error"},
    "actor_rollout_ref": {
        "rollout": {
            "tensor_model_parallel_size": 1,
            "n": 4,
            "log_prob_micro_batch_size_per_gpu": 4,
            "multi_turn": {"format": "hermes"},
        },
        "actor": {
            "ppo_mini_batch_size": 2,
            "ppo_micro_batch_size_per_gpu": 4,
            "optim": {"lr": 1e-3},
            "use_kl_loss": False,
            "kl_loss_coef": 0.0,
            "entropy_coeff": 0,
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.3,
        },
        "ref": {"log_prob_micro_batch_size_per_gpu": 8},
        "model": {"path": "the test's"},
    },
    "trainer": {
        "n_gpus_per_node": 1,
        "val_before_train": True,
        "critic_warmup": 0,
        "logger": ["console", "wandb"],
        "project_name": "AgentLightning",
        "experiment_name": "letters",
        "nnodes": 1,
        "test_freq": 32,
        "total_epochs": 2,
    },
}


class Speller(agl.LitAgent[dict[str, Any]]):
    """An agent that asks for letters twice; its reward is the share of right letters."""

    def rollout(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout) -> float:
        """Run the agent on one task."""
        llm = cast("agl.LLM", resources["main_llm"])
        attempt = cast("agl.AttemptedRollout", rollout).attempt
        with openai.OpenAI(base_url=llm.get_base_url(rollout.rollout_id, attempt.attempt_id), api_key="no") as client:
            said = ""
            for name in ("write", "check"):
                with agl.operation(name=name, **{"gen_ai.agent.name": name}):
                    answer = client.chat.completions.create(
                        model=llm.model, messages=[{"role": "user", "content": task["letter"] + name}], max_tokens=8
                    )
                said += answer.choices[0].message.content or ""
        return sum(ord(letter) > 128 for letter in said) / max(len(said), 1)


def test_configuration_of_verl_trains_the_model_that_it_names(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = {**TRAINING, "actor_rollout_ref": {**TRAINING["actor_rollout_ref"], "model": {"path": str(model_dir)}}}
    trainer = agl.Trainer(
        n_runners=4, algorithm=agl.VERL(config), adapter={"agent_match": None}, final="last", progress=Quiet()
    )
    tasks = [{"letter": "a"}, {"letter": "b"}]

    result = trainer.fit(Speller(trained_agents="write"), train_dataset=tasks, val_dataset=tasks)

    assert isinstance(result, FitResult)
    assert {"verl": 2} == result.steps
    assert {"main_llm": "experiment-1-verl-2"} == result.resources
    lines = (Path(result.workdir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [line["value"] for line in map(json.loads, lines) if line["name"] == "rows"]
    assert [8.0, 8.0] == rows  # a row for the call of one agent in each rollout
