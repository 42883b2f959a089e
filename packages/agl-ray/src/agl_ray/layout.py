"""Adds up the shares that an experiment asks of a cluster, and finds those for which no machine has room.

Only the machines' totals are compared here, which shows at once which share cannot fit. Ray itself decides with the
resources that are free at the moment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl.algorithms import PlacementConfig
from agl.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", re.IGNORECASE)
_POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}
_SLACK = 1e-6
"""Tolerance for sums of floats; Ray itself counts in steps of a ten-thousandth."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of one machine that a process asks for.

    Attributes:
        name: Name of the process for messages, such as ``algorithm 'grpo'``.
        amounts: Amounts by Ray's names: ``CPU``, ``GPU``, ``memory`` in bytes, and custom resources; all above 0.
        strategy: Ray's placement strategy for all shares that name it: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or
            ``STRICT_SPREAD``.
    """

    name: str
    amounts: Mapping[str, float]
    strategy: str = "PACK"


def share_of(name: str, placement: PlacementConfig | None, *, cpus: float) -> Share:
    """Return the share that a table asks for; ``cpus`` is used if the table does not give ``num_cpus``.

    Raises:
        ConfigError: An amount is negative or invalid, all are 0, or a custom resource has a built-in name such as
        ``CPU``.
    """
    given = placement or PlacementConfig()
    amounts = {
        "CPU": cpus if given.num_cpus is None else given.num_cpus,
        "GPU": given.num_gpus,
        "memory": float(_bytes(given.memory, name)),
    }
    for key in {"CPU", "GPU", "memory", "object_store_memory"}.intersection(given.custom):
        raise ConfigError(f"resources.custom of {name} has {key!r}; write num_cpus, num_gpus or memory for it")
    amounts.update(given.custom)
    for key, amount in amounts.items():
        if amount < 0:
            raise ConfigError(f"{name} asks for {amount:g} {key}; write 0 or more")
    if given.num_gpus > 1 and not float(given.num_gpus).is_integer():
        raise ConfigError(f"{name} asks for {given.num_gpus:g} GPUs; write a whole number, or a part of one GPU")
    wanted = {key: amount for key, amount in amounts.items() if amount}
    if not wanted:
        raise ConfigError(f"{name} asks for nothing of the cluster; give it a part of a CPU, such as num_cpus = 0.1")
    return Share(name=name, amounts=wanted, strategy=given.strategy)


def _bytes(size: str, name: str) -> int:
    if not size:
        return 0
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise ConfigError(f"resources.memory of {name} is {size!r}; write a size such as 512MB or 8GB")
    return int(float(found[1]) * (1 << _POWERS[found[2].upper()]))


class Room:
    """The resources that are left on the machines of a cluster while shares are placed.

    Args:
        machines: For each machine, amounts by name.
    """

    def __init__(self, machines: Sequence[Mapping[str, float]]) -> None:
        self._left = [dict(machine) for machine in machines]

    def place(self, shares: Sequence[Share]) -> list[Share]:
        """Place shares, those with one strategy together; return the shares that found no room."""
        missing: list[Share] = []
        for strategy in dict.fromkeys(share.strategy for share in shares):
            group = [share for share in shares if share.strategy == strategy]
            group.sort(key=lambda share: (-share.amounts.get("GPU", 0), -share.amounts.get("CPU", 0)))
            missing += self._place_on_one(group) if strategy == "STRICT_PACK" else self._place_each(group, strategy)
        return missing

    def _place_on_one(self, group: Sequence[Share]) -> list[Share]:
        names = {name for share in group for name in share.amounts}
        total = {name: sum(share.amounts.get(name, 0) for share in group) for name in names}
        for machine in self._left:
            if _fits(total, machine):
                _take(total, machine)
                return []
        return list(group)

    def _place_each(self, group: Sequence[Share], strategy: str) -> list[Share]:
        missing: list[Share] = []
        used: set[int] = set()
        for share in group:
            free = [number for number, machine in enumerate(self._left) if _fits(share.amounts, machine)]
            fresh = [number for number in free if number not in used]
            choices = fresh if strategy == "STRICT_SPREAD" else free
            if "SPREAD" in strategy and fresh:
                choices = fresh
            if not choices:
                missing.append(share)
                continue
            used.add(choices[0])
            _take(share.amounts, self._left[choices[0]])
        return missing

    def count(self, share: Share, *, most: int) -> int:
        """Take room for a share up to ``most`` times; return how many times there was room."""
        found = 0
        while found < most and not self.place([share]):
            found += 1
        return found


def _fits(amounts: Mapping[str, float], machine: Mapping[str, float]) -> bool:
    return all(machine.get(name, 0.0) + _SLACK >= amount for name, amount in amounts.items())


def _take(amounts: Mapping[str, float], machine: dict[str, float]) -> None:
    for name, amount in amounts.items():
        machine[name] = machine.get(name, 0.0) - amount


def amounts_text(amounts: Mapping[str, float]) -> str:
    """Return amounts as text, such as ``1 CPU, 2 GPU, 4 GB memory``."""
    parts = [
        f"{amount / 2**30:.3g} GB memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in amounts.items()
    ]
    return ", ".join(parts)


def total(machines: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Return the sums of the named amounts over all machines."""
    return {name: sum(machine.get(name, 0.0) for machine in machines) for name in names}


def no_room(share: Share, machines: Sequence[Mapping[str, float]]) -> str:
    """Explain why a share has no room: it fits on no machine, or not together with the other shares."""
    asked = amounts_text(share.amounts)
    if not any(_fits(share.amounts, machine) for machine in machines):
        best = {name: max((machine.get(name, 0.0) for machine in machines), default=0.0) for name in share.amounts}
        return (
            f"{share.name} asks for {asked}, and the most that one machine of the cluster has is {amounts_text(best)}"
        )
    have = amounts_text(total(machines, list(share.amounts)))
    return f"{share.name} asks for {asked} besides the rest of the experiment, and the whole cluster has {have}"
