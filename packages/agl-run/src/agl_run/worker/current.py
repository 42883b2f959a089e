"""Tracks the live version of every resource, and resolves the resources of a rollout."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from agl.contracts import Store
from agl.errors import NotFoundError, PolicyError
from agl.hints import did_you_mean
from agl.schemas import LLM, NamedResources, ResourceVersion, Rollout
from agl_run.messages import value_for_agent

_CACHED = 256
"""The most versions that are cached; the rollouts of a step share a few versions."""


class LiveResources:
    """Holds the live version of each resource, and resolves the versions to which a rollout is pinned.

    Args:
        store: The store of the versions.
        endpoints: For each policy, the LLM that agents get, with the gateway as its endpoint; for each further version
            that a policy serves as well, that of ``POLICY@VERSION``.
    """

    def __init__(self, store: Store, endpoints: Mapping[str, LLM]) -> None:
        self._store = store
        self._live: dict[str, ResourceVersion] = {}
        self._pinned = PinnedResources(store, endpoints, live=self._now)

    def current(self, name: str) -> ResourceVersion:
        """Return a resource's live version; raises :class:`NotFoundError`, which lists the known resources."""
        if name not in self._live:
            hint = did_you_mean(name, self._live, otherwise=f"there are {sorted(self._live)}")
            raise NotFoundError("resource", name, hint)
        return self._live[name]

    def versions(self) -> dict[str, str]:
        """Return the live version of every resource, by name."""
        return {name: version.version for name, version in self._live.items()}

    def set(self, version: ResourceVersion) -> None:
        """Make a version the live one of its resource."""
        self._live[version.name] = version
        # Most rollouts use the live weights, so they are cached.
        self._pinned.keep(version)

    async def publish(self, version: ResourceVersion) -> ResourceVersion:
        """Store a version without making it live; if an equal version exists, return that one."""
        existing = await self._find(version.name, version.version)
        number = 2
        # A step that is repeated after a kill may publish other weights under its own version;
        # versions never change, so it gets the next suffix.
        while existing is not None and existing.resource != version.resource:
            version = msgspec.structs.replace(version, version=f"{version.version.partition('.')[0]}.{number}")
            existing = await self._find(version.name, version.version)
            number += 1
        if existing is not None:
            return existing
        # Not made live here: its policy has to load it first.
        await self._store.publish([version])
        return version

    async def _find(self, name: str, version: str) -> ResourceVersion | None:
        try:
            return await self._store.resource(name, version)
        except NotFoundError:
            return None

    async def restore(self, versions: Mapping[str, str]) -> None:
        """Make the given versions live."""
        for name, version in versions.items():
            self.set(await self._store.resource(name, version))

    async def for_rollout(self, rollout: Rollout) -> NamedResources:
        """Return the agent's resources: the pinned version of each, or the live version if it is not pinned."""
        return await self._pinned.for_rollout(rollout)

    async def _now(self) -> Mapping[str, str]:
        return self.versions()


class PinnedResources:
    """Resolves a rollout's resources from the store.

    Args:
        store: The store of the versions.
        endpoints: The LLM that agents get, by policy and by ``POLICY@VERSION``, as in :class:`LiveResources`.
        live: Returns the live versions, for resources that are not pinned.
    """

    def __init__(
        self, store: Store, endpoints: Mapping[str, LLM], *, live: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._has_versions = {name.partition("@")[0] for name in endpoints if "@" in name}
        self._live = live
        self._cache: dict[tuple[str, str], ResourceVersion] = {}

    def keep(self, version: ResourceVersion) -> None:
        """Put a version into the cache."""
        self._cache[version.name, version.version] = version

    async def for_rollout(self, rollout: Rollout) -> NamedResources:
        """Return the resources of one rollout: a policy as the LLM that serves it, a JSON resource as its value.

        Raises:
            PolicyError: The rollout is pinned to a version that is not served, of a policy that serves several side by
                side. Of any other policy a rollout gets the live weights, which may have changed since it was queued;
                its calls are recorded with the version that answers.
        """
        # The pinned version wins: a rollout that waited in the queue runs with the versions of its
        # request.
        live = await self._live()
        versions = {**live, **rollout.resources}
        found = {name: await self._version(name, version) for name, version in versions.items()}
        return {
            name: self._endpoint(one, is_live=one.version == live.get(name)) or value_for_agent(one.resource)
            for name, one in found.items()
        }

    def _endpoint(self, version: ResourceVersion, *, is_live: bool) -> LLM | None:
        """Return the LLM that serves a version, or perhaps the live one; ``None`` unless the resource is a policy."""
        name = version.name
        exact = self._endpoints.get(f"{name}@{version.version}")
        if exact is None and name in self._has_versions and not is_live:
            raise PolicyError(f"policy {name!r} does not serve {version.version}, to which the rollout is pinned")
        return exact or self._endpoints.get(name)

    async def _version(self, name: str, version: str) -> ResourceVersion:
        if (name, version) not in self._cache:
            # Emptying all of it is crude and enough: the rollouts of a step share a handful of
            # versions.
            if len(self._cache) >= _CACHED:
                self._cache.clear()
            self.keep(await self._store.resource(name, version))
        return self._cache[name, version]
