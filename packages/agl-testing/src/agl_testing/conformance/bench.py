"""Runs an algorithm without an experiment: provides its context, with collecting, publishing, policies and a store.

The bench itself holds everything that survives a crash: the store, published versions, collected rollouts, and the work
directory. Algorithm objects and policies do not survive, so a test can discard them and continue with new ones.
"""

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from agl.contracts import Algorithm, AlgorithmContext, Collected, Credit, Policy, Recorded
from agl.episodes import EpisodeCredit
from agl.errors import ConfigError, ConflictError, NotFoundError
from agl.schemas import LLM, Episode, Json, Resource, ResourceVersion, Rollout
from agl.stores import MemoryStore

NAME = "under-test"
"""The algorithm's name in the bench's context."""


@dataclass(frozen=True, kw_only=True)
class RolloutOrder:
    """One rollout that an algorithm has requested.

    Attributes:
        rollout: The rollout as it would be enqueued, with its task, group and mode. If the step is repeated, the
            rollout has the same id.
        resources: Resources that the agent would read, by name.
        llms: Endpoints of the policies, by name.
        seed: A seed for the rollout, which is the same if the step is repeated.
        is_greedy: True if the tuned policies must answer at temperature 0.
    """

    rollout: Rollout
    resources: Mapping[str, Resource]
    llms: Mapping[str, LLM]
    seed: int
    is_greedy: bool = False


def no_policies(_: Path) -> Mapping[str, Policy]:
    """Return an empty mapping, for algorithms that tune no weights."""
    return {}


@dataclass(frozen=True, kw_only=True)
class AlgorithmScenario:
    """An algorithm, and a small world in which it can learn.

    Attributes:
        make: Returns a new algorithm, always with the same parameters.
        play: Runs one rollout and returns its episode, with reward and rows; may be a coroutine function.
        resources: The first version of each resource, by name.
        policies: Returns new policies by name; the bench publishes their first resources, and starts and stops them.
        tunes: Names of the resources that the algorithm tunes.
        train: Training tasks.
        val: Validation tasks.
        files: Text files that the algorithm's parameters refer to, by name relative to the work directory.
        max_steps: The number of steps within which the algorithm must finish.
        make_longer: Returns a new algorithm with the parameters of ``make`` but more steps. ``None`` skips the tests
            of an :class:`~agl.contracts.ExtendableAlgorithm`.
        agents: Regular expression for the names of the agents that train, in the algorithm's context; ``""`` for all.
    """

    make: Callable[[], Algorithm]
    play: Callable[[RolloutOrder], Episode | Awaitable[Episode]]
    tunes: tuple[str, ...]
    resources: Mapping[str, Resource] = field(default_factory=dict[str, Resource])
    policies: Callable[[Path], Mapping[str, Policy]] = field(default=no_policies)
    train: Sequence[Json] = tuple({"question": f"q{number}"} for number in range(8))
    val: Sequence[Json] = ({"question": "v0"}, {"question": "v1"})
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    max_steps: int = 20
    make_longer: Callable[[], Algorithm] | None = None
    agents: str = ""


class AlgorithmBench:
    """Runs an algorithm in the world of a scenario.

    Each ``async with`` block simulates one process: it starts new policies, and stops them at its end.
    """

    def __init__(
        self, scenario: AlgorithmScenario, workdir: Path, *, credit: Credit | None = None, given: Recorded | None = None
    ) -> None:
        """Create the bench; policies start when it is entered.

        Args:
            scenario: The scenario.
            workdir: The work directory; created if it does not exist.
            credit: The credit in the context; by default :class:`EpisodeCredit`.
            given: Rollouts of another algorithm, which become the source ``payer``; ``None`` for no source.
        """
        self.scenario = scenario
        self.workdir = workdir
        self.store = MemoryStore("memory://")
        self.published: list[ResourceVersion] = []
        self.proposed: dict[tuple[str, str], ResourceVersion] = {}
        self.collected: dict[str, Episode] = {}
        self._asked: dict[str, Rollout] = {}
        self._versions: dict[tuple[str, str], ResourceVersion] = {}
        self.requests = 0
        self.kept: set[int] = set()  # steps whose files the algorithm must not remove
        self.sources = () if given is None else ("payer",)
        self._given = given
        self._credit: Credit = credit or EpisodeCredit()
        self._live: dict[str, ResourceVersion] = {}
        self._policies: Mapping[str, Policy] = {}
        self._llms: dict[str, LLM] = {}
        workdir.mkdir(parents=True, exist_ok=True)
        for name, text in scenario.files.items():
            (workdir / name).write_text(text, encoding="utf-8")

    async def __aenter__(self) -> Self:
        self._policies = self.scenario.policies(self.workdir)
        self._llms = {name: (await policy.start()).llm for name, policy in self._policies.items()}
        firsts = {**{name: policy.resource() for name, policy in self._policies.items()}, **self.scenario.resources}
        for name, resource in firsts.items():
            first = self._live.setdefault(name, ResourceVersion(name=name, version="v0", resource=resource))
            await self._keep(first)
        for name, policy in self._policies.items():
            if self._live[name].version != "v0":
                self._llms[name] = (await policy.load(self._live[name])).llm
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for policy in self._policies.values():
            await policy.stop()

    def context(self, *, tunes: tuple[str, ...] | None = None) -> AlgorithmContext:
        """Return the context of a new algorithm object."""
        return AlgorithmContext(
            experiment="bench",
            name=NAME,
            tunes=self.scenario.tunes if tunes is None else tunes,
            train=self.scenario.train,
            validation=0,
            validated=lambda: (),
            val=self.scenario.val,
            seed=7,
            workdir=self.workdir,
            folder=self.workdir,
            store=self.store,
            credit=self._credit,
            collect=self.collect,
            sources=self.sources,
            recorded=self.recorded,
            publish=self.publish,
            propose=self.propose,
            live=lambda: {name: version.version for name, version in self._live.items()},
            endpoint=self._llms.__getitem__,
            current=self._live.__getitem__,
            policy=self.policy,
            progress=lambda done, total, text: None,
            say=lambda text: None,
            clock=time.time,
            kept=lambda: frozenset(self.kept),
            agents=self.scenario.agents,
        )

    async def said(self, *, steps: int) -> list[str]:
        """Return the lines that a new algorithm prints in the setup and the first steps.

        The method enters and leaves the bench itself.
        """
        lines: list[str] = []
        async with self:
            algorithm = self.scenario.make()
            await algorithm.setup(replace(self.context(), say=lines.append))
            for _ in range(steps):
                await algorithm.step()
            await algorithm.close()
        return lines

    def policy(self, name: str) -> Policy:
        """Return the running policy of that name; raises ConfigError if it does not exist."""
        if name not in self._policies:
            raise ConfigError(f"there is no policy {name!r}; there are {sorted(self._policies)}")
        return self._policies[name]

    def versions(self) -> dict[str, ResourceVersion]:
        """Return the live versions by name, to be passed to :meth:`go_back`."""
        return dict(self._live)

    async def go_back(self, versions: Mapping[str, ResourceVersion]) -> None:
        """Make earlier versions live, and load them into their policies."""
        for name, version in versions.items():
            self._live[name] = version
            if name in self._policies:
                self._llms[name] = (await self._policies[name].load(version)).llm

    async def collect(
        self,
        tasks: Sequence[Json],
        *,
        step: int,
        n: int = 1,
        mode: Literal["train", "val", "test"] = "train",
        resources: Mapping[str, str] | None = None,
        key: str = "",
        keeps_all: bool = False,
        greedy: bool = False,
    ) -> Collected:
        """Play every task ``n`` times; rollouts that an earlier process collected are returned without playing again.

        Raises:
            ConfigError: A repeated step requests a rollout that differs from the one it requested first.
            NotFoundError: A pinned version does not exist.
        """
        del keeps_all  # the bench has no failed rollouts to drop
        self.requests += 1
        episodes: list[Episode] = []
        for position, task in enumerate(task for task in tasks for _ in range(n)):
            group = f"{NAME}-{step}-{mode}-{key}{'-' if key else ''}{position // n}"
            order = self._order(task, f"{group}-{position % n}", group, mode=mode, pinned=resources or {})
            order = replace(order, is_greedy=greedy)
            _check_repeated(self._asked.setdefault(order.rollout.rollout_id, order.rollout), order.rollout, resources)
            if order.rollout.rollout_id not in self.collected:
                played = self.scenario.play(order)
                episode = await played if inspect.isawaitable(played) else played
                self.collected[order.rollout.rollout_id] = episode
            episodes.append(self.collected[order.rollout.rollout_id])
        return Collected(episodes=tuple(episodes))

    async def recorded(self, *, after: Mapping[str, int] | None = None, max_age: int | None = None) -> Recorded:
        """Return the rollouts passed as ``given``, as step 1 of a finished source named ``payer``."""
        del max_age  # all given rollouts are recent
        if self._given is None:
            raise ConfigError("the bench was given no rollouts, so the algorithm has no source")
        if (after or {}).get("payer"):
            return Recorded(steps={"payer": 1}, is_over=True)
        return Recorded(episodes=self._given.episodes, dropped=self._given.dropped, steps={"payer": 1}, is_over=True)

    async def publish(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None = None
    ) -> ResourceVersion:
        """Publish a version of a tuned resource and make it live; a repeated step replaces its earlier version."""
        if name not in self.scenario.tunes:
            raise ConfigError(f"{NAME!r} published {name!r} and tunes only {list(self.scenario.tunes)}")
        version = ResourceVersion(
            name=name,
            version=f"{NAME}-{step}",
            resource=resource,
            parent=self._live[name].version,
            algorithm=NAME,
            step=step,
            metadata=dict(metadata or {}),
        )
        if name in self._policies:
            await self._policies[name].load(version)
        await self._keep(version)
        self._live[name] = version
        self.published = [*(old for old in self.published if (old.name, old.step) != (name, step)), version]
        return version

    async def propose(
        self,
        name: str,
        resource: Resource,
        *,
        step: int,
        key: str,
        parent: str = "",
        metadata: Mapping[str, Json] | None = None,
    ) -> ResourceVersion:
        """Store a version of a tuned resource without making it live."""
        if name not in self.scenario.tunes:
            raise ConfigError(f"{NAME!r} proposed {name!r} and tunes only {list(self.scenario.tunes)}")
        version = ResourceVersion(
            name=name,
            version=f"{NAME}-{step}-{key}",
            resource=resource,
            parent=parent or self._live[name].version,
            algorithm=NAME,
            step=step,
            metadata={**(metadata or {}), "candidate": True},
        )
        await self._keep(version)
        self.proposed[(name, version.version)] = version
        return version

    async def _keep(self, version: ResourceVersion) -> None:
        """Publish a version to the store, so that it can have scores; a repeated step publishes it only once."""
        self._versions[version.name, version.version] = version
        with suppress(ConflictError):
            await self.store.publish([version])

    def _order(
        self,
        task: Json,
        rollout_id: str,
        group: str,
        *,
        mode: Literal["train", "val", "test"],
        pinned: Mapping[str, str],
    ) -> RolloutOrder:
        versions = {v.name: v for v in self._live.values()}
        for name, wanted in pinned.items():
            if (name, wanted) not in self._versions:
                raise NotFoundError("resource version", f"{name}@{wanted}")
            versions[name] = self._versions[name, wanted]
        rollout = Rollout(
            rollout_id=rollout_id,
            task=task,
            experiment="bench",
            group_id=group,
            mode=mode,
            resources={name: version.version for name, version in versions.items()},
            status="succeeded",
            attempts=1,
            attempt_id=f"{rollout_id}.1",
        )
        resources: dict[str, Any] = {name: version.resource for name, version in versions.items()}
        return RolloutOrder(
            rollout=rollout, resources=resources, llms=self._llms, seed=len(rollout_id) + sum(rollout_id.encode())
        )


def _check_repeated(asked: Rollout, again: Rollout, pinned: Mapping[str, str] | None) -> None:
    """Raise ConfigError if a repeated step requests a different rollout; only versions that are pinned are compared."""
    has_other_versions = any(asked.resources.get(name) != version for name, version in (pinned or {}).items())
    found = {
        "another task": asked.task != again.task,
        "another group": asked.group_id != again.group_id,
        "other versions": has_other_versions,
    }
    differing = [words for words, is_true in found.items() if is_true]
    if differing:
        raise ConfigError(
            f"the rollout {asked.rollout_id} was asked for again with {' and '.join(differing)}; a step that is "
            "repeated asks for what it asked before, so keep what it depends on in the state"
        )
