"""Coding harnesses for agl: the table that describes them, and the contract of the sandboxes that they run in."""

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
