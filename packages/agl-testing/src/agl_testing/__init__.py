"""Test tools for plugin authors: a scripted model server, pytest fixtures, one conformance class per contract.

The server is in :mod:`agl_testing.model_server`, the classes are in :mod:`agl_testing.conformance`; they are named
here too, and imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_testing.conformance import (
        AlgorithmConformance,
        CreditConformance,
        PluginConformance,
        RewardConformance,
        RunnerConformance,
        StoreConformance,
        TracerConformance,
    )
    from agl_testing.model_server import ScriptedModelServer

__version__ = "0.1.0"

__all__ = [
    "AlgorithmConformance",
    "CreditConformance",
    "PluginConformance",
    "RewardConformance",
    "RunnerConformance",
    "ScriptedModelServer",
    "StoreConformance",
    "TracerConformance",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'agl_testing' has no {name!r}; it has {', '.join(__all__)}")
    home = "model_server" if name == "ScriptedModelServer" else "conformance"
    return getattr(import_module(f"agl_testing.{home}"), name)
