"""Reserves the shares of algorithms: one placement group for all that name the same strategy."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from agl.errors import ConfigError
from agl_ray.cluster import Cluster, ray
from agl_ray.layout import Share, amounts_text


@dataclass(frozen=True, kw_only=True)
class Place:
    """A bundle of a placement group.

    Attributes:
        group: The placement group.
        bundle: The bundle's index.
        amounts: What it holds.
    """

    group: Any
    bundle: int
    amounts: Mapping[str, float]

    def strategy(self) -> Any:
        """Return Ray's strategy that schedules an actor here."""
        strategies: Any = import_module("ray.util.scheduling_strategies")
        return strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle
        )


class Reservation:
    """Holds room for algorithms until it is released.

    Args:
        cluster: The connection.
        wait_s: Seconds in which the room must be free.
    """

    def __init__(self, cluster: Cluster, *, wait_s: float) -> None:
        self._cluster = cluster
        self._wait_s = wait_s
        self._groups: list[Any] = []
        self._places: dict[str, Place] = {}

    async def make(self, shares: Sequence[Share]) -> None:
        """Reserve the shares; raises :class:`ConfigError` where others hold their room."""
        for strategy in dict.fromkeys(share.strategy for share in shares):
            group = [share for share in shares if share.strategy == strategy]
            if not await self._cluster.run(lambda g=group, s=strategy: self._make(g, s)):
                raise ConfigError(self._no_room(group, strategy))

    def _no_room(self, shares: Sequence[Share], strategy: str) -> str:
        asked = "; ".join(f"{share.name} asks for {amounts_text(share.amounts)}" for share in shares)
        names = {name for share in shares for name in share.amounts}
        free = amounts_text({name: amount for name, amount in _free().items() if name in names})
        return (
            f"the Ray cluster had no room within {self._wait_s:g} s: {asked} ({strategy}), and {free or 'nothing'} is "
            "free. Wait until others end, ask for less in the table resources, or raise wait_s in [runner.params] for "
            "a cluster that grows"
        )

    def _make(self, shares: Sequence[Share], strategy: str) -> bool:
        util: Any = import_module("ray.util")
        group = util.placement_group([dict(share.amounts) for share in shares], strategy=strategy)
        self._groups.append(group)
        for number, share in enumerate(shares):
            self._places[share.name] = Place(group=group, bundle=number, amounts=share.amounts)
        return bool(group.wait(timeout_seconds=self._wait_s))

    def place_of(self, name: str) -> Place:
        """Return the place of a share by its name."""
        return self._places[name]

    async def release(self) -> None:
        """Give the room back; idempotent."""
        groups, self._groups = self._groups, []
        for group in groups:
            with contextlib.suppress(Exception):  # the cluster may be gone
                await self._cluster.run(lambda g=group: import_module("ray.util").remove_placement_group(g))


def _free() -> dict[str, float]:
    return ray().available_resources()


def options_of(amounts: Mapping[str, float]) -> dict[str, Any]:
    """Return amounts as Ray's options of an actor."""
    custom = {name: amount for name, amount in amounts.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": amounts.get("CPU", 0),
        "num_gpus": amounts.get("GPU", 0),
        "memory": int(amounts["memory"]) if amounts.get("memory") else None,
        "resources": custom or None,
    }
