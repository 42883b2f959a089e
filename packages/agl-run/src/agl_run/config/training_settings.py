"""Describes the settings that influence an algorithm's training, to be saved with the algorithm's state.

A resumed run compares the saved settings with the current ones and names those that changed. A value that is long, or
may be a secret, is saved as a digest, so that a change is noticed but the old value cannot be shown.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from agl.algorithms import AlgorithmConfig, ComponentConfig
from agl.errors import ConfigError
from agl_run.config.sections import ExperimentConfig

_OF_EXPERIMENT = (
    *("seed", "failed", "missing_reward", "penalty", "unseen_calls", "unattributed_calls", "trust_agent_rewards"),
    "reward_weights",
)
"""Keys of ``[experiment]`` that decide which rewards train."""

_SECRET = re.compile(r"key|token|secret|password|authorization", re.IGNORECASE)
_NO_SECRET = ("_env", "group_key")

_LONGEST = 60
_DIGEST = "sha256:"


def training_settings(config: ExperimentConfig, algorithm: AlgorithmConfig) -> dict[str, str]:
    """Return an algorithm's settings, and the experiment's settings that influence its training, as texts by name."""
    # Rewards belong to an algorithm's settings: with another reward it trains for something else.
    of_rewards = {item.use: _component(item) for item in config.reward}
    # Of a policy only the model matters; it makes no difference where the model is served.
    models = {name: policy.params.get("model") for name, policy in config.policy.items() if name in algorithm.tunes}
    of_experiment = {key: getattr(config.experiment, key) for key in _OF_EXPERIMENT}
    parts: dict[str, Any] = {
        "use": algorithm.use,
        "tunes": list(algorithm.tunes),
        "agents": algorithm.agents,
        "source": list(algorithm.source),
        "credit": _component(algorithm.credit or config.credit),
        "reward": of_rewards,
        "experiment": of_experiment,
        "policy": {name: {"model": model} for name, model in models.items()},
        **algorithm.params,
    }
    return dict(_flat(parts))


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe the settings that differ, such as ``lr 0.01 (was 0.1)``; an empty list if nothing was saved before."""
    if not before:
        return []
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [f"{name} {_shown(now.get(name))} (was {_shown(before.get(name))})" for name in differing]


def is_secret(name: str) -> bool:
    """Return true if the value of the setting with this dotted name may be a secret."""
    return bool(_SECRET.search(name)) and not name.endswith(_NO_SECRET)


def refuse_other_kind(experiment: str, algorithm: AlgorithmConfig, before: Mapping[str, str]) -> None:
    """Raise :class:`ConfigError` if the saved state of this algorithm's name is from another kind of algorithm."""
    kind = before.get("use")
    if kind not in (None, _text("use", algorithm.use)):
        raise ConfigError(
            f"the algorithm {algorithm.name!r} of experiment {experiment!r} began as {kind} and its use is now "
            f"{_text('use', algorithm.use)}, which cannot continue from that state; give the new one a name of its own "
            "(name = ... in [[algorithm]]), or start again with --fresh (fresh=True)"
        )


def _component(component: ComponentConfig) -> dict[str, Any]:
    return {"use": component.use, **component.params}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(cast("Mapping[str, Any]", value), f"{name}.")
        else:
            yield name, _text(name, value)


def _text(name: str, value: Any) -> str:
    """Return a value as JSON, or as a digest if it is long or may be a secret."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        text = f"an object of {type(value).__name__}"
    if len(text) > _LONGEST or (isinstance(value, str) and is_secret(name)):
        # With the digest a change is noticed although the old value is not saved.
        return _DIGEST + hashlib.sha256(text.encode()).hexdigest()
    return text


def _shown(text: str | None) -> str:
    if text is None:
        return "not set"
    return "another value" if text.startswith(_DIGEST) else text
