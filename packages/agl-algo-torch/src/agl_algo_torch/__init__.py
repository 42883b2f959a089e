"""Training on one machine for agl: algorithms over the weights of a policy, and an embedded policy server.

Importing this module does not import torch. The parts are in the modules that `plugin` names.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
