"""The part of a cluster that a process asks for, as an experiment file and Python both describe it."""

from typing import Literal

from agl.schemas import Record


class PlacementConfig(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[algorithm.resources]``, ``[runner.resources]``: the part of a cluster that a process gets.

    Attributes:
        num_cpus: CPUs, in fractions too; by default 1 for an algorithm and 0.5 for a worker.
        num_gpus: GPUs; the process sees no others.
        memory: Memory, such as ``4GB``; ``""`` to reserve none.
        custom: Resources that the cluster's machines have by name, such as ``{ browser = 1 }``.
        strategy: ``PACK`` for few machines and ``SPREAD`` for many; ``STRICT_PACK`` and ``STRICT_SPREAD``, which only
            algorithms have, refuse what does not go on one machine, or on one machine each.
    """

    num_cpus: float | None = None
    num_gpus: float = 0.0
    memory: str = ""
    custom: dict[str, float] = {}
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
