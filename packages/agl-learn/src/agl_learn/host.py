"""Serves the weights of a learner's policy: every version that the split, a variant or the candidate names.

All versions are served at one address, which the gateways know from their command line, each under a model name that
the host records in the store. So gateways and the learner may be killed and started in any order. A host that starts
again loads what is needed then; until it has, calls end with an error, and nothing is answered by other weights.

A version that is not needed any more is first taken from the record, and unloaded once the gateways have read that.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

from agl.contracts import POLICY_KEY_ENV, VersionedPolicy
from agl.errors import AglError, ConfigError, PolicyError, StoreError
from agl.schemas import ResourceVersion
from agl_inspect.records.splits import HOSTED, SERVED, VARIANTS, HostedVersions
from agl_learn.settings import LearnerFile
from agl_run.engine import policy_params

_LOG = logging.getLogger("agl_learn")

EVERY_S = 1.0
"""Seconds between two looks at the store; longer than gateways use a record again."""


def policy_of(file: LearnerFile, *, port: int = 0) -> VersionedPolicy | None:
    """Build the policy that the learner tunes, to serve at ``port``; ``None`` if it tunes texts only.

    Raises:
        ConfigError: The policy cannot serve several versions at once.
    """
    name = file.tuned_policy
    if not name:
        return None
    params = policy_params(file.plan(file.experiment(file.name), train=[], val=[]), name)
    own = {"port": port} if port and "base_url" not in params else {}
    use = file.config.policy[name].use
    policy = file.manager.build(file.manager.policy(use), name=name, **{**params, **own})
    if not isinstance(policy, VersionedPolicy):
        raise ConfigError(
            f"learn.{file.name}.tunes has the policy {name!r}, and use = {use!r} cannot serve the old and the new "
            'weights side by side; set use = "torch", or "vllm" with lora_rank'
        )
    return policy


async def run_host(file: LearnerFile, *, port: int, say: Callable[[str], None], stopping: asyncio.Event) -> None:
    """Serve the versions until ``stopping`` is set.

    Raises:
        ConfigError: The learner tunes no policy, or gateways could not know the key of its servers.
    """
    has_key, policy = bool(os.environ.get(POLICY_KEY_ENV)), await asyncio.to_thread(policy_of, file, port=port)
    if policy is None:
        raise ConfigError(f"learn.{file.name}.tunes has no policy, and texts need no host")
    await HOSTED.add(file.store, {file.tuned_policy: HostedVersions(models={})})  # not what a killed host served
    try:
        served = await policy.start()
        if served.api_key_env == POLICY_KEY_ENV and not has_key:
            raise ConfigError(f"export {POLICY_KEY_ENV} with a key of your own, here and where the gateways run")
        key = f",key_env={served.api_key_env}" if served.api_key_env else ""
        say(f"serving {file.tuned_policy!r}; gateways need --upstream {file.tuned_policy}={served.base_urls[0]}{key}")
        host = Host(file, policy, say=say)
        while not stopping.is_set():
            try:
                await host.tick()
            except (StoreError, PolicyError) as error:
                _LOG.warning("trying again: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await stopping.wait()
    finally:
        await policy.stop()


class Host:
    """Lets a started policy serve what the store names, and records what it serves."""

    def __init__(self, file: LearnerFile, policy: VersionedPolicy, *, say: Callable[[str], None]) -> None:
        self._file, self._policy, self._say = file, policy, say
        self._name = file.tuned_policy
        self._versions: dict[str, ResourceVersion] = {}
        self._record: HostedVersions | None = None

    async def tick(self) -> None:
        """Load what is missing and record it; unload what the last record did not name any more."""
        wanted, recorded = await self._wanted(), self._record.models if self._record else {}
        self._versions = {one: each for one, each in self._versions.items() if one in wanted or one in recorded}
        models, problems = await self._serve(), dict[str, str]()
        for version in sorted(wanted - self._versions.keys()):  # one by one: damaged files keep no other version away
            try:
                found = await self._file.store.resource(self._name, version)
                models = await self._serve(found)
            except StoreError:
                raise
            except Exception as error:  # noqa: BLE001 - reading weights may raise anything
                _LOG.warning("%s@%s: %s", self._name, version, error, exc_info=not isinstance(error, AglError))
                problems[version] = str(error)
            else:
                self._versions[version] = found
        models = {version: model for version, model in models.items() if version in wanted}
        await self._save(HostedVersions(models=models, problems=problems))

    async def _wanted(self) -> set[str]:
        """Return the versions of the split's arms, of users and agents, and of the candidate on its way."""
        records, store = self._file.records, self._file.store
        split, state = await SERVED.get(store), await records.state.get(store)
        arms = [*split.versions.values()] if split is not None else []
        arms += [each.versions for each in (await VARIANTS.read(store)).values()]
        current = await records.candidates.get(store, state.current) if state is not None and state.current else None
        arms += [current.versions] if current is not None else []
        return {versions[self._name] for versions in arms if self._name in versions}

    async def _serve(self, *more: ResourceVersion) -> dict[str, str]:
        """Serve the loaded versions and some more; return their models by version."""
        served = await self._policy.serve_versions([*self._versions.values(), *more])
        return {version: each.model for version, each in served.items()}

    async def _save(self, record: HostedVersions) -> None:
        if record == self._record:
            return
        await HOSTED.add(self._file.store, {self._name: record})
        self._record = record
        self._say(f"{self._name}: serving {', '.join(record.models) or 'no version'}")
        for version, problem in record.problems.items():
            self._say(f"{self._name}@{version} cannot be served: {problem}")
