"""Losses and advantage estimators for agl: the pure functions that policy-gradient algorithms share.

Importing this module does not import torch. The contract is in `agl_objectives.contract`, what an algorithm calls in
`agl_objectives.registry`.
"""

from agl_objectives.entries import EstimatorEntry, LossEntry

__version__ = "0.1.0"

__all__ = ["EstimatorEntry", "LossEntry"]
