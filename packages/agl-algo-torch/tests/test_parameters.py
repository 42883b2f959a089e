"""Parameters that make no sense are refused when an algorithm is constructed, before a model is loaded."""

import re
from typing import Any

import pytest

from agl import PluginManager
from agl.errors import AglError

from .token_world import sorted_settings

NEEDED: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {},
    "dpo": {},
    "ipo": {},
    "kto": {},
    "rft": {"min_reward": 0.5},
    "sft": {"data": "d"},
    "distill": {"teacher": "./big"},
    "sdpo": {},
}
SHARED: dict[str, list[Any]] = {
    "lora_rank": [-3],
    "lora_alpha": [16.0],
    "lora_targets": [["q_proj"]],
    "lr": [0.0, -1e-6, float("nan")],
    "warmup": [-1],
    "weight_decay": [-0.1],
    "betas": [[0.9, 1.0], [-0.1, 0.9]],
    "max_grad_norm": [0.0],
    "token_budget": [0, -1],
    "dtype": ["float8"],
    "threads": [-1],
    "keep": [0],
}
UPDATES: dict[str, list[Any]] = {
    "steps": [0],
    "tasks_per_step": [0],
    "group_size": [0],
    "updates_per_step": [0],
    "epochs": [0],
    "constant_tokens": [0],
    "loss": ["ppo-clib"],
    "loss_params": [{"clip_low": -0.2}, {"clip_high": -0.2}, {"clip_dual": 0.5}, {"clip_dual": -1.0}],
    "entropy_coef": [-0.1],
    "kl_coef": [-0.1],
    "anchor_coef": [-0.1],
    "correction_cap": [-1.0],
    "overlong_limit": [-1],
    "aggregation": ["tokens"],
}
COLLECTED: dict[str, list[Any]] = {
    "steps": [0],
    "tasks_per_step": [0],
    "group_size": [0],
    "max_age": [-2],
    "epochs": [0],
}
OWN: dict[str, dict[str, list[Any]]] = {
    "grpo": {**UPDATES, "estimator": ["grop"]},
    "ppo": {
        **UPDATES,
        "gamma": [-0.1, 1.5],
        "lam": [-0.1, 1.5],
        "critic_clip": [-0.5],
        "critic_warmup": [-1],
        "critic_lr": [-1e-5, 0.0],
    },
    "dpo": {**COLLECTED, "beta": [0.0], "min_gap": [0.0], "pairs_per_update": [0], "pairs": ["extreme"]},
    "ipo": {**COLLECTED, "beta": [0.0], "min_gap": [0.0], "pairs_per_update": [0], "pairs": ["extreme"]},
    "kto": {**COLLECTED, "beta": [0.0], "weights": [[0.0, 1.0], [1.0, -1.0], "even"], "rollouts_per_update": [0]},
    "rft": {**COLLECTED, "best": [-1], "rollouts_per_update": [0], "aggregation": ["tokens", "constant"]},
    "distill": {
        **{name: UPDATES[name] for name in ("steps", "tasks_per_step", "group_size", "updates_per_step", "epochs")},
        "loss": ["ppo-clib"],
        "correction_cap": [-1.0],
        "aggregation": ["tokens"],
        "teacher": [""],
        "reward_coef": [-0.1],
    },
    "sdpo": {
        **{name: UPDATES[name] for name in ("steps", "tasks_per_step", "group_size")},
        "aggregation": ["tokens", "constant"],
        "sources": [[], ["sibling"]],
        "divergence": ["js"],
        "top_k": [-1],
        "teacher_start": [-0.1, 1.5],
        "grpo_coef": [-0.1],
        "estimator": ["grop"],
        "sibling_words": ["Right."],
        "feedback_words": [""],
        "max_tokens": [0],
    },
    "sft": {
        "updates": [-1],
        "batch_size": [0],
        "updates_per_step": [0],
        "decay": ["linaer"],
        "aggregation": ["tokens"],
    },
}
CASES = [
    (algorithm, name, value)
    for algorithm in NEEDED
    for name, values in {**SHARED, **OWN[algorithm]}.items()
    for value in values
]


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.from_environment()


def build(manager: PluginManager, algorithm: str, **params: Any) -> None:
    entry = manager.algorithm(algorithm)
    manager.build(entry, **sorted_settings(manager.resolve(entry), {**NEEDED[algorithm], **params}))


@pytest.mark.parametrize(("algorithm", "name", "value"), CASES)
def test_value_that_makes_no_sense_is_refused_with_the_parameters_name(
    manager: PluginManager, algorithm: str, name: str, value: Any
) -> None:
    with pytest.raises(AglError) as caught:
        build(manager, algorithm, **{name: value})
    message = str(caught.value)
    field = re.sub("^(lora|critic|correction|gae|teacher)_", "", name)
    assert {"loss_params": "clip"}.get(name, field) in message
    assert 1 == len(message.splitlines())


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_setting_that_would_change_nothing_is_refused_where_it_has_no_effect_alone(
    manager: PluginManager, algorithm: str
) -> None:
    with pytest.raises(AglError, match=r'constant_tokens = 512, .* and the aggregation is "token"'):
        build(manager, algorithm, constant_tokens=512)
    build(manager, algorithm, constant_tokens=512, aggregation="constant")
    with pytest.raises(AglError, match=f'{algorithm} got loss = "kl-cov", .* and a step has one update'):
        build(manager, algorithm, loss="kl-cov")
    with pytest.raises(AglError, match=f'{algorithm} got loss = "kl-cov", .* and a step has one update'):
        build(
            manager, algorithm, loss="kl-cov", replay_share=0.5
        )  # the old policy of replayed tokens is the step's as well
    for params in ({"updates_per_step": 2}, {"epochs": 2}):
        build(manager, algorithm, loss="kl-cov", **params)


@pytest.mark.parametrize(
    ("algorithm", "params"), [("grpo", {}), ("distill", {"reward_coef": 0.5}), ("sdpo", {"grpo_coef": 0.5})]
)
def test_rounds_are_refused_where_groups_are_compared_with_each_other(
    manager: PluginManager, algorithm: str, params: dict[str, Any]
) -> None:
    """If the estimator compares over the batch, a group of equal rollouts teaches, but `refill` would drop it."""
    build(manager, algorithm, estimator="reinforce++", **params)
    build(manager, algorithm, estimator="reinforce++-baseline", refill=2, **params)
    with pytest.raises(AglError, match=f"{algorithm} got refill = 2.*over the whole batch"):
        build(manager, algorithm, estimator="reinforce++", refill=2, **params)


@pytest.mark.parametrize("algorithm", NEEDED)
def test_defaults_are_accepted(manager: PluginManager, algorithm: str) -> None:
    build(manager, algorithm)
    build(manager, algorithm, lora_rank=8)


def test_misspelt_choice_is_answered_with_the_closest_and_with_all(manager: PluginManager) -> None:
    with pytest.raises(AglError) as caught:
        build(manager, "grpo", estimator="grop")
    assert "did you mean 'grpo'?" in str(caught.value).lower()
    assert "rloo" in str(caught.value)


@pytest.mark.parametrize("name", ["dpo", "ipo", "kto", "rft"])
def test_algorithm_that_may_have_a_source_says_how_many_rollouts_a_step_runs(name: str) -> None:
    manager = PluginManager.from_environment()
    entry = manager.algorithm(name)

    given = manager.build(entry, **NEEDED[name], tasks_per_step=5, group_size=3)

    assert (16, 4) == manager.build(entry, **NEEDED[name]).step_size(100)
    assert (5, 3) == given.step_size(100)
    assert (2, 3) == given.step_size(2)
