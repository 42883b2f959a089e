"""Reserves room in the cluster: one placement group for all shares with the same strategy."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from agl.errors import ConfigError
from agl_ray.cluster import Cluster, ray
from agl_ray.layout import Share, amounts_text

LOOK_S = 0.1
"""Seconds between two checks of a placement group; Ray's own wait has whole seconds, and with 0 never succeeds."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A bundle of a placement group.

    Attributes:
        group: The placement group.
        bundle: The bundle's index.
        amounts: The amounts that the bundle reserves, by name.
    """

    group: Any
    bundle: int
    amounts: Mapping[str, float]

    def strategy(self) -> Any:
        """Return the scheduling strategy with which Ray places an actor in this bundle."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        return strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle
        )


class Patience:
    """A time limit for several waits together; the time begins with the first wait.

    Args:
        wait_s: The time limit in seconds.
    """

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._until: float | None = None

    def left_s(self) -> float:
        """Return the seconds that are left; the first call starts the time."""
        if self._until is None:
            self._until = time.monotonic() + self.wait_s
        return max(0.0, self._until - time.monotonic())


class Reservation:
    """Holds room for shares until it is released.

    Args:
        cluster: The connection to the cluster.
        patience: The time within which the cluster must have room; several reservations may share it.
    """

    def __init__(self, cluster: Cluster, patience: Patience) -> None:
        self._cluster = cluster
        self._patience = patience
        self._groups: list[Any] = []
        self._places: dict[str, Place] = {}

    async def make(self, shares: Sequence[Share]) -> None:
        """Reserve the shares; raises :class:`ConfigError` if the cluster does not have room in time."""
        groups: dict[str, list[Share]] = {}
        for share in shares:
            groups.setdefault(share.strategy, []).append(share)
        for strategy, group in groups.items():
            await self._cluster.run(lambda g=group, s=strategy: self._make(g, s))
        for (strategy, group), made in zip(groups.items(), list(self._groups), strict=True):
            while not await self._cluster.run(lambda m=made: _is_made(m)):
                if not self._patience.left_s():
                    raise ConfigError(self._no_room(group, strategy))
                await asyncio.sleep(LOOK_S)

    def _no_room(self, shares: Sequence[Share], strategy: str) -> str:
        asked = "; ".join(f"{share.name} asks for {amounts_text(share.amounts)}" for share in shares)
        names = {name for share in shares for name in share.amounts}
        free = amounts_text({name: amount for name, amount in _free().items() if name in names})
        return (
            f"the Ray cluster had no room within {self._patience.wait_s:g} s: {asked} ({strategy}), and "
            f"{free or 'nothing'} is free. Wait until others end, ask for less in the table resources, or raise wait_s "
            "in [runner.params] for a cluster that grows"
        )

    def _make(self, shares: Sequence[Share], strategy: str) -> None:
        util: Any = import_module("ray.util")
        group = util.placement_group([dict(share.amounts) for share in shares], strategy=strategy)
        self._groups.append(group)
        for number, share in enumerate(shares):
            self._places[share.name] = Place(group=group, bundle=number, amounts=share.amounts)

    def place_of(self, name: str) -> Place:
        """Return the place of a share by the share's name."""
        return self._places[name]

    async def release(self) -> None:
        """Release the reserved room; idempotent."""
        groups, self._groups = self._groups, []
        for group in groups:
            with contextlib.suppress(Exception):  # the cluster may be gone
                await self._cluster.run(lambda g=group: import_module("ray.util").remove_placement_group(g))


def _is_made(group: Any) -> bool:
    util: Any = import_module("ray.util")
    return util.placement_group_table(group)["state"] == "CREATED"


def _free() -> dict[str, float]:
    return ray().available_resources()


def options_of(amounts: Mapping[str, float]) -> dict[str, Any]:
    """Return amounts in the form of Ray's actor options."""
    custom = {name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": amounts.get("CPU", 0),
        "num_gpus": amounts.get("GPU", 0),
        "memory": int(amounts["memory"]) if amounts.get("memory") else None,
        "resources": custom or None,
    }
