"""Lets agents play against past versions of a policy in training: ``use = "past"``.

The policy in training serves the past version besides its own weights. The opponent's version follows from the live
version of that policy: whatever makes another one live, an update, a rollback or a resumed run, moves the opponent too.
All rollouts of a step meet the same opponent, and the rollouts of a group stay comparable.
"""

import random
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from agl.contracts import Policy, ServedModel, Store, VersionedPolicy
from agl.errors import ConfigError
from agl.schemas import Resource, ResourceVersion, Weights

Versions = Annotated[str, Meta(pattern="^(last|best):[1-9][0-9]*$")]
"""A pool of versions: the last ones or the best ones, and how many."""


class PastPolicy:
    """Answers with an earlier version of another policy, drawn anew after each of its updates.

    Args:
        name: The policy's name.
        of: The policy whose versions answer.
        versions: The versions to draw from: ``last:5`` for the five before the newest, ``best:3`` for the three of all
            before the newest whose validation rewards are highest. Versions whose weights were never saved do not
            count.
    """

    has_token_ids = False  # no algorithm trains on its answers

    def __init__(self, *, name: str, of: str, versions: Versions = "last:5") -> None:
        self._name, self.of = name, of
        self._kind, _, count = versions.partition(":")
        self._count = int(count)
        self._pool: list[ResourceVersion] = []
        self._newest = ""
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
        before, self._loaded = self._loaded, version
        if version.version == self._newest:  # nothing came before it, so the other policy answers itself
            if before is not None:
                await self._policy.serve_versions([])
            return replace(self._served, version=version.version)
        return (await self._policy.serve_versions([version]))[version.version]

    def resource(self) -> Resource:
        """Return the first weights of the other policy."""
        return self._policy.resource()

    async def draw(self, store: Store, newest: ResourceVersion, *, seed: int) -> ResourceVersion:
        """Return the version to load; it follows from the newest one, and for ``best`` also from what was validated."""
        self._newest, self._pool = newest.version, await self._earlier(store, newest)
        drawn = random.Random(f"{seed}/{self._name}/{newest.version}").choice(self._pool or [newest])
        return replace(drawn, name=self._name, parent="")

    async def _earlier(self, store: Store, newest: ResourceVersion) -> list[ResourceVersion]:
        versions = {version.version: version for version in await store.resources(self.of)}
        found, parent = list[ResourceVersion](), versions.get(newest.parent)
        # Along the parents: versions that a rollback has left behind are no opponents.
        while parent is not None:
            if lost_weights(parent) is None:
                found.append(parent)
            parent = versions.get(parent.parent)
        if self._kind == "best":
            means = {score.version: score.mean for score in await store.scores(self.of)}
            scored = [version for version in found if version.version in means]
            found = sorted(scored, key=lambda version: means[version.version], reverse=True) or found
        return found[: self._count]

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
