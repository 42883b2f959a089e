"""Routes the calls of rollouts to the backend that serves the version to which they are pinned.

The pinned versions are in the store, so all gateways route alike and a restart changes nothing. A cache of the pins
follows the change feed. Addresses and keys come only from the command line: a resource in the store names a version or
a model, and can only select among the configured addresses.

A host of weights (`agl learn host`) serves several versions of a policy at one address, and records their models in the
store. It unloads a version whose arm has ended. Conversations that began in that arm continue with the version of the
arm with the largest share, and are recorded with it. The same holds for calls without a version, and for variants whose
weights nobody serves. While a host lacks a version, its calls end with an error; its base weights never answer instead.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agl.contracts import Change, RolloutQuery, Store, Upstream
from agl.errors import ConfigError, NotFoundError
from agl.schemas import LLM, Resource, Rollout, Weights
from agl_gateway.recent import Recent
from agl_gateway.record.outage import Outage
from agl_gateway.relay.routing import Router, UpstreamTarget
from agl_gateway.wire.problems import Problem, store_away
from agl_inspect.records.splits import HOSTED, SERVED, HostedVersions, Pins, decided, placement_of

FRESH_S = 0.5
"""Seconds for which a record of hosted versions is used again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CallRoute:
    """The destination of a call.

    Attributes:
        model: The model to request from the backend; ``""`` leaves the choice to the upstream.
        version: The policy's version; ``""`` if the rollout pins none.
        arm: The label of the rollout's arm; ``""`` if it has none.
    """

    target: UpstreamTarget
    model: str = ""
    version: str = ""
    arm: str = ""


@dataclass(frozen=True, kw_only=True)
class _RolloutPins:
    """The arm and the pinned versions of a rollout, and the resources that its split decides."""

    arm: str
    resources: dict[str, str]
    chosen: frozenset[str]


_UNPLACED = _RolloutPins(arm="", resources={}, chosen=frozenset())


def with_distinct_names(upstreams: Sequence[Upstream]) -> list[Upstream]:
    """Return the upstreams with distinct names: the second and later upstreams of a policy become ``NAME@VERSION``.

    Raises:
        ConfigError: Upstreams share a name without distinct versions.
    """
    found: dict[str, Upstream] = {}
    versions: dict[str, set[str]] = {}
    for upstream in upstreams:
        known = versions.setdefault(upstream.name, set())
        if known and (not upstream.model_version or known & {"", upstream.model_version}):
            raise ConfigError(
                f"two upstreams are named {upstream.name!r}; give each policy its own name, and each of several "
                "versions of one policy its own version=V, as the arms of a split need"
            )
        name = f"{upstream.name}@{upstream.model_version}" if known else upstream.name
        known.add(upstream.model_version)
        found[name] = msgspec.structs.replace(upstream, name=name)
    return list(found.values())


def policy_of(upstream: Upstream) -> str:
    """Return the name of the upstream's policy, without the ``@VERSION`` part."""
    return upstream.name.partition("@")[0]


class ArmRoutes:
    """Routes the calls of rollouts to the versions to which they are pinned; other calls keep their target."""

    def __init__(self, store: Store, router: Router, *, outage: Outage, has_hosts: bool) -> None:
        self._has_hosts = has_hosts  # false in a trial, whose policies are its own
        self._store = store
        self._outage = outage
        self._targets = list(router.targets.values())
        self._pinned: Recent[str, _RolloutPins] = Recent(10_000)
        self._resources: dict[tuple[str, str], Resource] = {}
        self._hosted: dict[str, tuple[float, HostedVersions | None]] = {}
        self._missed: set[tuple[str, str]] = set()

    async def route(self, target: UpstreamTarget, rollout_id: str) -> CallRoute:
        """Return the destination of a call whose model name selects ``target``.

        Raises:
            Problem: 503 if no upstream serves the version that the split chose, or any version of a policy with a host;
                or if the store does not answer, the rollout's arm is unknown, and the policy has several versions.
        """
        name = policy_of(target.upstream)
        pinned = await self._pins(rollout_id)
        wanted = version = pinned.resources.get(name, "") if pinned is not None else ""
        is_hosted = await self._hosted_versions(name, wanted) is not None
        if pinned is None:
            if is_hosted or len([each for each in self._targets if policy_of(each.upstream) == name]) > 1:
                raise store_away(f"it is not known which of the versions of {name!r} serves this rollout")
            return CallRoute(target=target)
        found = await self._find_upstream(name, wanted)
        if found is None and is_hosted:
            version = await self._shared_version(name, wanted)
            found = await self._find_upstream(name, version)
        if version and found is None and (is_hosted or name in pinned.chosen):
            raise Problem(503, _unserved_message(name, version), code="version_not_served")
        if wanted and not pinned.chosen and (found is None or version != wanted):
            self._warn(pinned.arm, name, wanted)
        if found is None:
            return CallRoute(target=target, arm=pinned.arm)
        return CallRoute(target=found[0], model=found[1], version=version, arm=pinned.arm)

    def _warn(self, arm: str, name: str, version: str) -> None:
        """Log, once for a version, that others serve in its place."""
        if (name, version) not in self._missed:
            self._missed.add((name, version))
            _log.warning("%s, which is pinned, gets another: %s", arm, _unserved_message(name, version))

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Drop finished rollouts from the cache; the arm of others does not change."""
        for change in changes:
            if change.status not in ("queued", "running"):
                self._pinned.pop(change.key, None)

    def forget(self, rollout_id: str = "") -> None:
        """Drop a rollout from the cache, or all rollouts if no id is given and the store answers.

        During an outage the cache may miss the end of a rollout, but never a change of its arm.
        """
        if rollout_id:
            self._pinned.pop(rollout_id, None)
        elif not self._outage.is_on:
            self._pinned.clear()

    async def check(self, pins: Pins) -> None:
        """Raise :class:`ConfigError` unless upstreams serve every model version that differs between the arms."""
        for name in decided(pins):
            for version in dict.fromkeys(own[name] for own in pins.values()):
                is_model = isinstance(await self._resource(name, version), LLM | Weights)
                if is_model and await self._find_upstream(name, version) is None:
                    raise ConfigError(_unserved_message(name, version))

    async def _shared_version(self, name: str, pinned: str) -> str:
        """Return the version of the arm with the largest share, or ``pinned`` if it belongs to an arm.

        It takes the place of a variant's version that nobody serves, and of one that a host has unloaded because its
        arm has ended.
        """
        split = await self._outage.unless(lambda: SERVED.get(self._store), lambda: None)
        arms = {label: own.get(name, "") for label, own in split.versions.items()} if split else {}
        if split is None or pinned in arms.values():
            return pinned
        return arms[max(split.shares, key=split.shares.__getitem__)]

    async def _hosted_versions(self, name: str, version: str) -> HostedVersions | None:
        """Return what the policy's host serves, ``None`` without a host; read again if ``version`` is missing."""
        read_at, known = self._hosted.get(name, (-FRESH_S, None))
        is_missing = bool(version) and known is not None and version not in known.models
        if self._has_hosts and (is_missing or time.monotonic() - read_at >= FRESH_S):
            known = await self._outage.unless(lambda: HOSTED.get(self._store, name), lambda: known)
            self._hosted[name] = time.monotonic(), known
        return known

    async def _find_upstream(self, name: str, version: str) -> tuple[UpstreamTarget, str] | None:
        """Return the upstream that serves a version, and the model name to request from it; ``None`` if there is none.

        An upstream configured for the version comes first, then the policy's host, then the backend that the version's
        LLM resource names.
        """
        if not version:
            return None
        own = [target for target in self._targets if policy_of(target.upstream) == name]
        for target in own:
            if target.upstream.model_version == version:
                return target, ""
        hosted = await self._hosted_versions(name, version)
        if own and hosted is not None and version in hosted.models:
            return own[0], hosted.models[version]
        resource = await self._resource(name, version)
        if not isinstance(resource, LLM) or not resource.model:
            return None
        wanted = resource.endpoint.rstrip("/")
        found = (target for target in own if wanted in ("", target.upstream.base_url.rstrip("/")))
        target = next(found, None)
        return None if target is None else (target, resource.model)

    async def _resource(self, name: str, version: str) -> Resource:
        key = (name, version)
        if key not in self._resources:
            found = await self._outage.unless(lambda: self._store.resource(name, version), lambda: None)
            if found is None:
                raise store_away(f"{name}@{version} cannot be read")
            self._resources[key] = found.resource
        return self._resources[key]

    async def _pins(self, rollout_id: str) -> _RolloutPins | None:
        """Return the rollout's pins; ``None`` if they are not cached and the store does not answer."""
        known = self._pinned.get(rollout_id) or await self._read(rollout_id)
        if known is not None and rollout_id not in self._pinned:
            self._pinned[rollout_id] = known
        return known

    async def _read(self, rollout_id: str) -> _RolloutPins | None:
        query = RolloutQuery(ids=(rollout_id,))
        try:
            found = await self._outage.unless(lambda: self._store.rollouts(query), list[Rollout])
        except NotFoundError:
            return _UNPLACED
        if not found:
            return None
        placement = placement_of(found[0])
        if placement is None:
            configured = {(policy_of(each.upstream), each.upstream.model_version) for each in self._targets}
            pins = dict(pin for pin in found[0].resources.items() if pin in configured)
            return _RolloutPins(arm="", resources=pins, chosen=frozenset())
        chosen = frozenset(decided(placement.versions))
        return _RolloutPins(arm=placement.arm, resources=found[0].resources, chosen=chosen)


def _unserved_message(name: str, version: str) -> str:
    return (
        f"no upstream serves {name}@{version}; start the gateway with --upstream {name}=URL,version={version}, publish "
        f"the version as an LLM with the endpoint of an upstream {name!r}, or serve the weights with agl learn host"
    )
