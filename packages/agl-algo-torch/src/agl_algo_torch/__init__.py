"""Training on one machine for agl: `sft`, `grpo` and an embedded policy server.

Importing this module imports no torch; the parts are in the modules that the plugin names.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
