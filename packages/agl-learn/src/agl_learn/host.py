"""Serves the weights of a learner's policy: every version that the split, a variant or the candidate names.

All versions are served at one address, which the gateways know from their command line, each under a model name that
the host records in the store. So gateways and the learner may be killed and started in any order. A policy has one
host, by a lease. A host that starts again loads what is needed then; until it has, calls end with an error, and nothing
is answered by other weights.

A version that is not needed any more is first taken from the record, and unloaded once the gateways have read that.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from agl.contracts import POLICY_KEY_ENV, VersionedPolicy
from agl.errors import AglError, ConfigError, FencedError, NotFoundError, StoreError
from agl.schemas import ResourceVersion
from agl_inspect.ownership import Ownership
from agl_inspect.records.labels import labels_of
from agl_inspect.records.splits import HOSTED, SERVED, VARIANTS, HostedVersions
from agl_learn.settings import LearnerFile
from agl_run.engine import ExperimentLock, policy_params

_LOG = logging.getLogger("agl_learn")

EVERY_S = 1.0
"""Seconds between two looks at the store; longer than gateways use a record again."""

_LASTING = (ConfigError, FileNotFoundError, NotFoundError)
"""Errors of a load that another attempt cannot change."""


def policy_of(file: LearnerFile, *, port: int = 0) -> VersionedPolicy:
    """Build the policy that the learner tunes, to serve at ``port``; loads its model.

    Raises:
        ConfigError: The policy cannot serve several versions at once.
    """
    name = file.tuned_policy
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
        ConfigError: The learner tunes no policy, gateways could not know the key of its servers, or the policy has
            another host.
        FencedError: Another host took over.
    """
    name, has_key = file.tuned_policy, bool(os.environ.get(POLICY_KEY_ENV))
    if not name:
        raise ConfigError(f"learn.{file.name}.tunes has no policy, and texts need no host")
    workdir, title = file.folder / file.config.experiment.workdir / f"{name}-host", f"the host of {name!r}"
    lock = ExperimentLock(workdir, title=title)  # of this machine; the lease keeps out hosts elsewhere
    lock.acquire()
    try:
        async with Ownership(file.store, f"host-{name}", workdir=workdir, title=title) as own:
            policy = await asyncio.to_thread(policy_of, file, port=port)
            try:
                url, key = await _start(policy, has_key=has_key)
                say(f"serving {name!r}; gateways need --upstream {name}={url}{key}")
                await _serve(Host(replace(file, store=own.store), policy, say=say), own, stopping=stopping)
            finally:
                await policy.stop()
    finally:
        lock.release()


async def _start(policy: VersionedPolicy, *, has_key: bool) -> tuple[str, str]:
    """Start the policy; returns its address, and the setting of the key with which a gateway calls it."""
    served = await policy.start()
    if served.api_key_env == POLICY_KEY_ENV and not has_key:
        raise ConfigError(f"export {POLICY_KEY_ENV} with a key of your own, here and where the gateways run")
    return served.base_urls[0], f",key_env={served.api_key_env}" if served.api_key_env else ""


async def _serve(host: "Host", own: Ownership, *, stopping: asyncio.Event) -> None:
    await host.forget()
    while not stopping.is_set():
        try:
            await own.check()
            await host.tick()
        except FencedError:
            raise
        except StoreError as error:
            _LOG.warning("trying again: %s", error)
        with suppress(TimeoutError):
            async with asyncio.timeout(EVERY_S):
                await stopping.wait()


class Host:
    """Lets a started policy serve what the store names, and records what it serves."""

    def __init__(self, file: LearnerFile, policy: VersionedPolicy, *, say: Callable[[str], None]) -> None:
        self._file, self._policy, self._say = file, policy, say
        self._name = file.tuned_policy
        self._versions: dict[str, ResourceVersion] = {}
        self._record = HostedVersions(models={})
        self._failures: dict[str, str] = {}

    async def forget(self) -> None:
        """Clear the record of an earlier host, whose models this one has yet to load."""
        await HOSTED.add(self._file.store, {self._name: self._record})

    async def tick(self) -> None:
        """Load what is missing and record it; unload what the last record did not name any more.

        What could not be loaded is tried again, and is recorded as a problem only if that cannot help.
        """
        wanted, recorded = await self._wanted(), self._record.models
        self._versions = {one: each for one, each in self._versions.items() if one in wanted or one in recorded}
        try:
            models = await self._serve()
        except Exception as error:  # noqa: BLE001 - reading weights may raise anything
            _LOG.warning("%s: loading all versions again: %s", self._name, error)
            self._versions, models = {}, {}
        problems: dict[str, str] = {}
        for version in sorted(wanted - self._versions.keys()):  # one by one: damaged files keep no other version away
            try:
                found = await self._file.store.resource(self._name, version)
                models = await self._serve(found)
            except Exception as error:
                if isinstance(error, StoreError) and not isinstance(error, NotFoundError):
                    raise
                self._log(version, error)
                if isinstance(error, _LASTING) or isinstance(error.__cause__, FileNotFoundError):
                    problems[version] = str(error)
            else:
                self._versions[version] = found
                self._failures.pop(version, None)
        models = {version: model for version, model in models.items() if version in wanted}
        await self._save(HostedVersions(models=models, problems=problems))

    def _log(self, version: str, error: Exception) -> None:
        """Log why a version could not be loaded, once for each reason."""
        if self._failures.get(version) != str(error):
            self._failures[version] = str(error)
            has_trace = not isinstance(error, AglError)
            _LOG.warning("%s@%s is not served: %s", self._name, version, error, exc_info=has_trace)

    async def _wanted(self) -> set[str]:
        """Return the versions of the split's arms, of users and agents, of the candidate on its way, and of the label.

        The learner serves the version of its label once it is hosted.
        """
        records, store = self._file.records, self._file.store
        split, state = await SERVED.get(store), await records.state.get(store)
        arms = [*split.versions.values()] if split is not None else []
        arms += [each.versions for each in (await VARIANTS.read(store)).values()]
        current = await records.candidates.get(store, state.current) if state is not None and state.current else None
        arms += [current.versions] if current is not None else []
        label = (await labels_of(store, self._name)).get(self._file.settings.label)
        return {versions[self._name] for versions in arms if self._name in versions} | ({label} if label else set())

    async def _serve(self, *more: ResourceVersion) -> dict[str, str]:
        """Serve the loaded versions and some more; return their models by version."""
        served = await self._policy.serve_versions([*self._versions.values(), *more])
        return {version: each.model for version, each in served.items()}

    async def _save(self, record: HostedVersions) -> None:
        self._record = record
        if record == await HOSTED.get(self._file.store, self._name):
            return
        await HOSTED.add(self._file.store, {self._name: record})
        self._say(f"{self._name}: serving {', '.join(record.models) or 'no version'}")
        for version, problem in record.problems.items():
            self._say(f"{self._name}@{version} cannot be served: {problem}")
