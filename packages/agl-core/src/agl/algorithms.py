"""The configuration of algorithms and other components by name, as an experiment file and Python both build it.

It belongs to experiments and is in ``agl-run``, which runs them; here is the place from which it is imported.
"""

from typing import TYPE_CHECKING

from agl._lazy import lazy_names

if TYPE_CHECKING:
    from agl_run.algorithms import (
        APO,
        DPO,
        GEPA,
        GRPO,
        PPO,
        SFT,
        VERL,
        AlgorithmConfig,
        ComponentConfig,
        algorithm,
        component,
    )

__all__ = [
    "APO",
    "DPO",
    "GEPA",
    "GRPO",
    "PPO",
    "SFT",
    "VERL",
    "AlgorithmConfig",
    "ComponentConfig",
    "algorithm",
    "component",
]

__getattr__ = lazy_names(__name__, {"agl_run.algorithms": __all__})
