"""VERL's own check of its whole configuration, before anything starts.

VERL's programs call `validate_config` when they start; its trainer does not, and neither do the processes of a cluster
before they open a model. Errors that VERL would find there, or in the first step, are found here: in the configuration
of actor, critic and rollout, and in the thresholds of the rollout correction. An assertion of VERL becomes a
ConfigError that names the keys concerned, with their values.
"""

from __future__ import annotations

import copy
import io
import os
import re
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError
from agl_algo_verl.ray.configuration import compose, environment
from agl_algo_verl.settings.keys import verl_keys
from agl_algo_verl.typed import verl_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agl_algo_verl.settings.ray import RaySettings

NAMED = {"n_gpus": ("trainer.nnodes", "trainer.n_gpus_per_node")}
"""Maps names in VERL's messages that are not keys to the keys from which VERL computes them."""

MOST_NAMED = 4
"""The maximum number of keys that a message names."""


def use_platform(environment: Mapping[str, str]) -> None:
    """Set the variables that VERL reads when this process imports it; variables that are set already stay."""
    for name in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_LOGGING_LEVEL"):
        if name in environment:
            os.environ.setdefault(name, environment[name])


def check_composed(read: RaySettings, *, steps: int, tasks: int) -> None:
    """Compose VERL's configuration as a run would, and let VERL check it; starts nothing.

    Raises ConfigError for settings that VERL refuses.
    """
    place = Path("run")
    use_platform(environment(read, folder=place, threads=1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = compose(read, model="model", folder=place, steps=steps, tasks=tasks, checkpoint=None, threads=1)
        checked(config, read)


def checked(config: Any, read: RaySettings) -> Any:
    """Return the configuration if VERL accepts it; raises ConfigError otherwise."""
    errors: tuple[type[Exception], ...] = (
        *(AssertionError, AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError),
        verl_part("omegaconf.errors:OmegaConfBaseException"),
        verl_part("hydra.errors:HydraException"),  # around what VERL's dataclasses refuse
    )
    try:
        # VERL prints that the check has passed, and warns of every engine that is not installed.
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check(config, read)
    except errors as error:
        raise ConfigError(_message(str(error), config, read)) from error
    return config


def _check(config: Any, read: RaySettings) -> None:
    settings, whole = read.settings, copy.deepcopy(config)
    with verl_part("omegaconf:open_dict")(whole):
        whole.critic.model = None  # VERL would load its configuration and tokenizer, which this machine may lack
    verl_part("verl.utils.config:validate_config")(
        whole,
        use_reference_policy=settings.actor.use_kl_loss or read.holds,
        use_critic=settings.has_critic,
    )
    verl_part("verl.utils.config:omega_conf_to_dataclass")(config.actor_rollout_ref.rollout)
    correction = config.algorithm.rollout_correction
    ones = verl_part("torch:ones")(1, 1)
    verl_part("verl.trainer.ppo.rollout_corr_helper:compute_rollout_correction_and_rejection_mask")(
        old_log_prob=-ones,
        rollout_log_prob=-ones,
        response_mask=ones,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
    )


def _message(said: str, config: Any, read: RaySettings) -> str:
    found = _keys_in(said, given=read.given, known=verl_keys(read.strategy))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    select: Any = verl_part("omegaconf:OmegaConf").select
    named = ", ".join(f"{name} = {select(config, name)!r}" for name in found)
    about = f"It is about {named}." if found else f"Look at what you set: {', '.join(sorted(read.given))}."
    return f"VERL's own check refuses the configuration: {' '.join(lines) or 'without a reason'} {about}"


def _keys_in(said: str, *, given: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Return the keys that a message of VERL mentions; those that the user set come first."""
    found: list[str] = []
    names = sorted(known, key=lambda name: (name not in given, not name.startswith("actor_rollout_ref.actor"), name))
    for word in dict.fromkeys(re.findall(r"[A-Za-z_][\w.]*\w", said)):
        if word in NAMED:
            found += NAMED[word]
        elif "_" in word or "." in word:
            hits = [name for name in names if name == word or name.endswith(f".{word}")]
            below = [name for name in given if any(name == hit or name.startswith(f"{hit}.") for hit in hits)]
            found += below or hits[:1]
    return list(dict.fromkeys(found))[:MOST_NAMED]
