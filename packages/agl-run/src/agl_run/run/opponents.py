"""Lets agents play against past versions of a policy in training: ``use = "past"``.

The policy in training serves the past version besides its own weights. After each of its updates the opponent moves to
another version, so all rollouts of a step meet the same one, and the rollouts of a group stay comparable.
"""

import random
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from agl.contracts import Policy, ServedModel, Store, VersionedPolicy
from agl.errors import ConfigError
from agl.schemas import Resource, ResourceVersion, Weights


class PastPolicy:
    """Answers with one of the last versions of another policy, drawn anew after each of its updates.

    Args:
        name: The policy's name.
        of: The policy whose versions answer.
        last: The number of versions to draw from. The newest one is not among them, nor are versions whose weights were
            never saved.
    """

    has_token_ids = False  # no algorithm trains on its answers

    def __init__(self, *, name: str, of: str, last: Annotated[int, Meta(ge=1)] = 5) -> None:
        self._name, self.of, self._last = name, of, last
        self._pool: list[ResourceVersion] = []
        self._loaded: ResourceVersion | None = None

    def bind(self, policy: Policy | None, served: ServedModel | None) -> None:
        """Take the running policy whose versions answer; raises :class:`ConfigError` if it cannot serve several."""
        if not isinstance(policy, VersionedPolicy) or served is None:
            raise ConfigError(
                f'[policy.{self._name}] of = "{self.of}" needs a policy that serves several versions at once; name one '
                'with use = "torch", or "vllm" with lora_rank'
            )
        self._policy, self._served = policy, served

    async def start(self) -> ServedModel:
        """Return the address of the other policy, whose weights answer until its first update."""
        return self._served

    async def stop(self) -> None:
        """Do nothing: the other policy stops its server."""

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve a version besides the newest weights of the other policy, and unload the one before."""
        self._loaded = version
        return (await self._policy.serve_versions([version]))[version.version]

    def resource(self) -> Resource:
        """Return the first weights of the other policy."""
        return self._policy.resource()

    async def draw(self, store: Store, newest: ResourceVersion, *, seed: int) -> ResourceVersion:
        """Return the next version to load; a repeated step draws the same one."""
        versions = {version.version: version for version in await store.resources(self.of)}
        self._pool, parent = [], versions.get(newest.parent)
        # Along the parents: versions that a rollback has left behind are no opponents.
        while parent is not None and len(self._pool) < self._last:
            if lost_weights(parent) is None:
                self._pool.append(parent)
            parent = versions.get(parent.parent)
        drawn = random.Random(f"{seed}/{self._name}/{newest.version}").choice(self._pool or [newest])
        return replace(drawn, name=self._name, parent="")

    def kept(self, algorithm: str) -> frozenset[int]:
        """Return the steps of an algorithm whose files must stay, because they may answer again."""
        may_answer = [*self._pool, *([self._loaded] if self._loaded else [])]
        return frozenset(version.step for version in may_answer if version.algorithm == algorithm)


def lost_weights(version: ResourceVersion) -> Path | None:
    """Return the folder of a version's weights if it is missing; ``None`` if they can be loaded, or lie elsewhere."""
    if not isinstance(version.resource, Weights) or not version.algorithm:
        return None
    path = Path(version.resource.uri)
    # Algorithms save some of their versions, and keep a bounded number of them.
    return path if path.is_absolute() and not path.is_dir() else None
