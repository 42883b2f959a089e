"""Coding harnesses for agl: the table that describes them, and the contract of the sandboxes that they run in."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agl_harness.sandboxes.contract import (
        NO_LIMITS,
        CopyableSandbox,
        Finished,
        Limits,
        ManagedSandboxes,
        PathError,
        Purpose,
        Sandbox,
        SandboxError,
        Sandboxes,
        TaskSandboxes,
    )
    from agl_harness.table import Checked, Harness, Launch, Model, fill, find, load_file, load_table

__version__ = "0.1.0"

__all__ = [
    "NO_LIMITS",
    "Checked",
    "CopyableSandbox",
    "Finished",
    "Harness",
    "Launch",
    "Limits",
    "ManagedSandboxes",
    "Model",
    "PathError",
    "Purpose",
    "Sandbox",
    "SandboxError",
    "Sandboxes",
    "TaskSandboxes",
    "fill",
    "find",
    "load_file",
    "load_table",
]


def __getattr__(name: str) -> object:
    # Imported on first use, because every command of `agl` imports this package to learn about its commands.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    of_table = ("Checked", "Harness", "Launch", "Model", "fill", "find", "load_file", "load_table")
    home = "table" if name in of_table else "sandboxes.contract"
    return getattr(import_module(f"{__name__}.{home}"), name)
