"""Losses and advantage estimators for agl: the pure functions that policy-gradient algorithms share.

Importing this module does not import torch. `agl_objectives.contract` has the contract of losses and estimators;
`agl_objectives.registry` has the functions with which an algorithm finds them.
"""

from agl_objectives.entries import estimator, loss

__version__ = "0.1.0"

__all__ = ["estimator", "loss"]
