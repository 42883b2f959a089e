"""Checks of settings against each other: settings that VERL would ignore, or that would count rows, are refused.

Means and statistics count rollouts here and never rows, so that how often an agent calls its model does not change its
weight. The rules about single keys are data (`keys.toml`); this module has the rules about numbers and about the parts
of agl-objectives. Every check raises ConfigError with the setting that was found and the one to write instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from agl.errors import ConfigError
from agl_algo_verl.losses.choice import chosen_estimator, chosen_loss, compares_batch, has_greedy
from agl_algo_verl.settings.keys import is_for, key_tables, names_of
from agl_objectives.groups import GroupSampler
from agl_objectives.replay import ReplayPool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl_algo_verl.settings.keys import Engine
    from agl_algo_verl.settings.settings import VerlSettings


def check_settings(settings: VerlSettings, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that cannot be combined; `given` holds the user's keys, with dotted names."""
    check_rules(settings, given, engine="inproc")
    _check_batches(settings)
    _check_updates(settings)
    _check_estimator(settings)
    _check_ranges(settings)
    GroupSampler(
        "verl",
        count=settings.data.train_batch_size,
        n=settings.actor_rollout_ref.rollout.n,
        refill=settings.sampling.refill,
        curriculum=settings.sampling.curriculum,
        has_greedy=has_greedy(settings),
        compares_batch=compares_batch(settings),
    )
    ReplayPool[Any]("verl", share=settings.replay.share, max_staleness=settings.replay.max_staleness)
    _ = settings.correction  # raises for thresholds that mean nothing


def check_rules(settings: VerlSettings, given: Mapping[str, Any], *, engine: Engine) -> None:
    """Raise ConfigError for keys that break a rule of `keys.toml`; one message names all of them."""
    wrong: list[str] = []
    for rule in key_tables()["rules"]:
        if is_for(rule, engine) and _is_broken(rule, settings, given):
            below = names_of(rule)
            broken = [
                f"{name} = {value!r}"
                for name, value in given.items()
                if any(name == key or name.startswith(f"{key}.") for key in below) and _matters(rule, value)
            ]
            states = [*rule.get("needs", ()), *rule.get("against", ())]
            found = {key: _value(settings, key) for state in states for key in state}
            now = ", ".join(f"{key} = {value!r}" for key, value in found.items() if value != "")
            wrong += [f"{', '.join(broken)}: {rule['why']}{f' ({now})' if now else ''}."] if broken else []
    if wrong:
        raise ConfigError("The VERL configuration has keys that VERL would ignore or misread:\n- " + "\n- ".join(wrong))


def _is_broken(rule: Mapping[str, Any], settings: VerlSettings, given: Mapping[str, Any]) -> bool:
    """Return true if the settings are in none of the states that a rule needs, or in a state that it forbids."""
    needs: list[dict[str, Any]] = rule.get("needs", [{}] if "against" in rule else [])
    if rule.get("explicit") and any(key in given for state in needs for key in state):
        return False
    holds = [all(_is(_value(settings, key), wanted) for key, wanted in state.items()) for state in needs]
    against: list[dict[str, Any]] = rule.get("against", [])
    forbidden = [all(_is(_value(settings, key), wanted) for key, wanted in state.items()) for state in against]
    return not any(holds) or any(forbidden)


def _value(settings: VerlSettings, name: str) -> Any:
    """Return the value of the setting with a dotted name."""
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _is(value: Any, expected: Any) -> bool:
    """Return true if a value is the expected one, or one of several; true and false match whatever is on or off."""
    if isinstance(expected, bool):
        return bool(value) is expected
    return value in (cast("list[Any]", expected) if isinstance(expected, list) else [expected])


def _matters(rule: Mapping[str, Any], value: Any) -> bool:
    """Return true if a rule applies to a value; by default it does if the value switches something on."""
    if "values" in rule:
        return any(value is each or (value == each and type(value) is type(each)) for each in rule["values"])
    return bool(value) and value not in rule.get("but", ())


def _check_batches(settings: VerlSettings) -> None:
    batch = settings.data.train_batch_size
    sizes = {
        "actor_rollout_ref.actor": settings.actor.ppo_mini_batch_size,
        "critic": settings.critic.ppo_mini_batch_size,
    }
    for name, mini in sizes.items():
        if mini is not None and (mini > batch or batch % mini):
            raise ConfigError(  # a last mini-batch with fewer tasks would weigh each of them more
                f"data.train_batch_size = {batch} is not a multiple of {name}.ppo_mini_batch_size = {mini}; "
                "both count tasks. Make one divide the other, or remove ppo_mini_batch_size for one update per step."
            )


def _check_updates(settings: VerlSettings) -> None:
    """Raise ConfigError if the loss needs several updates per step and there is one: in a first update, pi is
    pi_old.
    """
    actor, tasks, choice = settings.actor, settings.data.train_batch_size, chosen_loss(settings)
    updates = actor.ppo_epochs * (tasks // (actor.ppo_mini_batch_size or tasks))
    # In bypass mode the old policy is the one that sampled the tokens, as the server computed it.
    is_moved = updates > 1 or settings.algorithm.rollout_correction.bypass_mode
    if choice is not None and choice.found().entry.needs_updates and not is_moved:
        raise ConfigError(
            f"The loss {choice.name!r} has a penalty without a gradient in the first update of a step, and a step has "
            "one update. Give actor_rollout_ref.actor.ppo_epochs above 1 or a smaller ppo_mini_batch_size, or another "
            "loss."
        )


def _check_estimator(settings: VerlSettings) -> None:
    """Raise ConfigError for an estimator that cannot compare the step's rollouts as it has to."""
    if settings.has_critic:
        return
    found, algorithm = chosen_estimator(settings), settings.algorithm
    own = settings.estimator
    shown = f"estimator = {own!r}" if own else f"algorithm.adv_estimator = {algorithm.adv_estimator!r}"
    if found.entry.needs_baseline and settings.trainer.v1.is_async:
        raise ConfigError(
            f"{shown} compares with a greedy rollout of each task by the weights of the step, and "
            f"trainer.v1.trainer_mode = {settings.trainer.v1.trainer_mode!r} asks for groups ahead. Use "
            'trainer_mode = "sync", or rloo.'
        )
    # With one rollout the baseline is the rollout's own score, and every advantage is 0.
    is_alone = settings.actor_rollout_ref.rollout.n == 1 and not found.entry.needs_baseline
    if is_alone and found.entry.compares == "group":
        raise ConfigError(
            f"{shown} compares the rollouts of a task, but actor_rollout_ref.rollout.n is 1. Give at least 2, or use "
            "reinforce_plus_plus, which compares over the batch, or gae, which compares with its critic."
        )
    if algorithm.use_kl_in_reward and (found.entry.needs_baseline or found.entry.compares == "batch"):
        raise ConfigError(
            f"use_kl_in_reward with {shown} would need a return per token, and that estimator compares whole rollouts "
            "over the batch, or with greedy ones that bear no penalty. Use actor_rollout_ref.actor.use_kl_loss = true, "
            "or reinforce_plus_plus_baseline."
        )


def _check_ranges(settings: VerlSettings) -> None:
    """Raise ConfigError for numbers that contradict each other."""
    v1 = settings.trainer.v1
    ahead, threshold = v1.colocate_async.num_warmup_batches, v1.sampler.max_off_policy_threshold
    # A group requested in step s for step s + ahead spans ahead + 1 versions; none may be too old on arrival.
    if v1.is_async and ahead >= threshold:
        raise ConfigError(
            f"trainer.v1.colocate_async.num_warmup_batches = {ahead} and sampler.max_off_policy_threshold = "
            f"{threshold}: a group that is asked for N steps ahead spans N + 1 versions. Give a threshold above it."
        )
    long = settings.reward.reward_kwargs
    buffer = long.overlong_buffer_cfg
    if buffer.enable and not 0 < buffer.len <= (long.max_resp_len or 0):
        raise ConfigError(
            f"reward.reward_kwargs has overlong_buffer_cfg.len = {buffer.len} and max_resp_len = {long.max_resp_len}. "
            "Give the most tokens of an answer, and the part of them, at least 1, in which it is punished."
        )
