"""Runs a learner next to `agl serve`, on the same store, until it is stopped."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agl.contracts import Store
from agl.errors import ConfigError, FencedError, NotFoundError, StoreError
from agl.schemas import PromptTemplate, ResourceVersion
from agl_inspect.ownership import Ownership
from agl_inspect.records.labels import labelled
from agl_inspect.retention import parse_duration
from agl_learn.host import policy_of
from agl_learn.learner import Learner, Parts
from agl_learn.replay import TrialReplayer
from agl_learn.settings import LearnerFile
from agl_learn.traffic import traffic_of
from agl_learn.training import TrainerProposer
from agl_learn.users import contradicting
from agl_run import ExperimentConfig
from agl_run.engine import ExperimentLock, check_algorithms

SLOWEST_S = 5.0
"""The most seconds between two ticks."""


async def run_learner(file: LearnerFile, *, say: Callable[[str], None], stopping: asyncio.Event) -> None:
    """Learn until ``stopping`` is set.

    Raises:
        ConfigError: Another process runs the learner, or a resource has no version to start from.
        FencedError: Another process took the learner over.
    """
    settle_s = parse_duration(file.settings.settle)
    algorithms = file.config.algorithm
    await check_algorithms(file.plan(file.experiment(file.name, algorithms=algorithms), train=[], val=[]))
    parts = Parts(
        traffic=await traffic_of(file),
        proposer=TrainerProposer(file),
        replayer=TrialReplayer(file),
        contradicting=contradicting,
        clock=time.time,
        say=say,
    )
    workdir = file.folder / file.config.experiment.workdir / f"{file.name}-learner"
    lock = ExperimentLock(
        workdir, title=f"the learner {file.name!r}"
    )  # of this machine; the lease keeps out learners elsewhere
    lock.acquire()
    try:
        await _work(file, parts, settle_s=settle_s, workdir=workdir, stopping=stopping)
    finally:
        lock.release()


async def _work(
    file: LearnerFile,
    parts: Parts,
    *,
    settle_s: float,
    workdir: Path,
    stopping: asyncio.Event,
) -> None:
    """Take the learner's lease, and let the learner work."""
    say, own = parts.say, Ownership(file.store, f"learner-{file.name}", workdir=workdir, title=f"learner {file.name!r}")
    async with own:
        weights = [name for name in (file.tuned_policy,) if name]
        learner = Learner(
            own.store, name=file.name, settings=file.settings, settle_s=settle_s, parts=parts, weights=weights
        )
        await learner.start(versions=await first_versions(file))
        served = ", ".join(f"{name}@{version}" for name, version in learner.split.versions[file.settings.label].items())
        say(f"learning as {file.name!r}; {file.settings.label} is {served}")
        try:
            await _tick(learner, say=say, stopping=stopping, every_s=min(max(settle_s / 4, 0.2), SLOWEST_S))
        finally:
            await learner.stop()


async def _tick(learner: Learner, *, say: Callable[[str], None], stopping: asyncio.Event, every_s: float) -> None:
    """Let the learner work until ``stopping`` is set; a store that does not answer is asked again."""
    is_away = False
    while not stopping.is_set():
        try:
            await learner.tick()
            is_away = False
        except FencedError:
            raise
        except StoreError as error:
            if not is_away:
                say(f"the store does not answer, trying again: {error}")
            is_away = True
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await stopping.wait()


async def first_versions(file: LearnerFile) -> dict[str, str]:
    """Return the version of each tuned resource from which the learner starts.

    That is the version with the learner's label, or else the newest one, or else what the file says, which is
    published: the policy's initial weights, or the text.
    """
    return {name: await _first_version(file, name) for name in file.settings.tunes}


async def _first_version(file: LearnerFile, name: str) -> str:
    found = await labelled(file.store, name, file.settings.label) or await _newest(file.store, name)
    if found is not None:
        return found.version
    is_policy = name == file.tuned_policy
    resource = (await asyncio.to_thread(policy_of, file)).resource() if is_policy else _written(file.config, name)
    version = ResourceVersion(name=name, version=f"{file.name}-{name}-initial", resource=resource)
    await file.store.publish([version])
    return version.version


async def _newest(store: Store, name: str) -> ResourceVersion | None:
    try:
        return await store.resource(name)
    except NotFoundError:
        return None


def _written(config: ExperimentConfig, name: str) -> PromptTemplate:
    given = config.resource.get(name)
    if given is None or given.template is None:
        raise ConfigError(
            f"{name!r} has no version in the store to start from; publish the one that is served, and give it the "
            f"label: agl resources promote {name} VERSION"
        )
    return PromptTemplate(template=given.template, engine=given.engine)
