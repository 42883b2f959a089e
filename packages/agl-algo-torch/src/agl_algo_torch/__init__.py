"""Training on one machine for agl: algorithms over the weights of a policy, and an embedded policy server.

Importing this module does not import torch. `plugin` names the modules of the algorithms and of the server.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
