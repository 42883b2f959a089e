"""One class per contract; a plugin's tests subclass it, give it one fixture, and run everything the contract says.

``StoreConformance``, ``TracerConformance``, ``RewardConformance``, ``AlgorithmConformance``, ``RunnerConformance``,
``CreditConformance`` and ``PluginConformance``. Capability flags have the strictest value as their default; a test
is weakened only by overriding it with ``pytest.mark.xfail(reason=...)``.
"""

from agl_testing.conformance.store import StoreConformance, StoreLocation

__all__ = ["StoreConformance", "StoreLocation"]
