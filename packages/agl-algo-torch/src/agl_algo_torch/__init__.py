"""Training on one machine for agl: `sft`, `grpo`, `ppo`, `dpo`, `ipo`, `kto`, `rft` and an embedded policy server.

Importing this module does not import torch. The parts are in the modules that `plugin` names.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
