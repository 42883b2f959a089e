"""Records the validations of a run: the versions measured, their rewards, and which validation is best.

Every validation is saved in the store with its rewards by task, so that a run that was killed and resumed knows its
best versions. The algorithms' states at the best validation are saved too, so that training can return to them. The
label ``best`` points at the best versions of the resources that algorithms tune.

Validations of a run share their tasks, so they are compared task by task, by :class:`agl.Gate`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from agl import Gate
from agl.contracts import Moments, Store, VersionScore
from agl.schemas import Episode, Json, Record, ResourceVersion, to_json
from agl_inspect.records import labels
from agl_inspect.records.names import broke_in_reward
from agl_inspect.records.shelf import Shelf, run_key
from agl_inspect.records.state import AlgorithmState
from agl_inspect.statistics import interval, span_of

BEST = "best"
"""The label that points at the versions of the best validation."""

FINALISTS = 3
"""The most validations, the best one included, whose versions are measured again at the end."""

FALL_ODDS = 100.0
"""The odds from which a validation counts as worse than the best one.

The best of many validations is the luckiest one, so a single fall may be chance. In simulated runs whose policy does
not change (``benchmarks/falls.py``), two validations in a row had fallen in 2 of 1,600 runs of 20 validations, and in
16 of 800 runs of 100.
"""

FEWEST_TASKS = 11
"""The least number of tasks with which the odds can reach `FALL_ODDS`."""

_HOW = "validation"
_HOW_AGAIN = "fresh validation"


class Validation(Record, frozen=True, kw_only=True):
    """A validation: the versions that it measured, and their rewards.

    Attributes:
        turn: Number of steps that all algorithms together had taken.
        versions: The live version of every resource, by name.
        steps: For each algorithm, the steps whose files hold these versions and the algorithm's state.
        rewards: One reward per validation task, in the order of the tasks; 0 for a rollout that failed or has no
            reward.
        tasks: Digest of the validation tasks: only validations on the same tasks are compared.
        train: Digest of the training tasks, ``""`` in records of older releases.
        agent: The agent, ``""`` in records of older releases.
        failed: Number of rollouts that failed.
        unjudged: Indices in ``rewards`` of rollouts whose reward emitter raised an error, which says nothing about the
            versions.
        parts: The parts of the rewards by name.
    """

    turn: int
    versions: dict[str, str]
    rewards: tuple[float, ...]
    tasks: str
    steps: dict[str, tuple[int, ...]] = {}
    train: str = ""
    agent: str = ""
    failed: int = 0
    unjudged: tuple[int, ...] = ()
    parts: dict[str, Moments] = {}

    @property
    def mean(self) -> float:
        """The mean reward."""
        return fmean(self.rewards)

    @property
    def place(self) -> str:
        """The position of the validation in its run, such as ``after step 5``."""
        return after_step(self.turn)

    @property
    def words(self) -> str:
        """Mean reward and position, such as ``0.950 after step 5``, and the number of failed rollouts if any failed."""
        note = f" ({self.failed} of {len(self.rewards)} failed)" if self.failed else ""
        return f"{self.mean:.3f} {self.place}{note}"


class _Best(Record, frozen=True, kw_only=True):
    """The states of the algorithms at the best validation."""

    turn: int
    states: dict[str, AlgorithmState]


class Validations:
    """The validations of one run of an experiment. Call ``load`` first.

    Args:
        store: The experiment's store.
        name: The experiment's name.
        run: The run's number, from 1.
        tasks: The validation tasks.
        train: The training tasks.
        agent: The agent's identity.
        tuned: Names of the resources that algorithms tune.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        run: int,
        tasks: Sequence[Json],
        train: Sequence[Json],
        agent: str,
        tuned: frozenset[str],
    ) -> None:
        self._store, self._name, self._run = store, name, run
        self._shelf = validations_of(name, run)
        self._bests = Shelf(_Best, run_key(name, run, "best-validation"))
        self._digest, self._train = digest_of(tasks), digest_of(train)
        self._agent, self._tuned = agent, tuned
        self._found: dict[int, Validation] = {}
        self._states: Mapping[str, AlgorithmState] = {}
        self._running: list[Mapping[str, tuple[int, ...]]] = []

    async def load(self) -> None:
        """Load the run's validations on the current tasks, and point the label ``best`` at the best of them."""
        every = (await self._shelf.read(self._store)).values()
        self._found |= {one.turn: one for one in every if one.tasks == self._digest}
        kept = await self._bests.get(self._store)
        if self._found and kept is not None and kept.turn == self.best.turn:
            self._states = kept.states
        if self._found:
            await self._label()

    def at(self, turn: int) -> Validation | None:
        """Return the validation after ``turn`` steps; ``None`` if the run was not validated then."""
        return self._found.get(turn)

    def all(self) -> list[Validation]:
        """Return all validations, first to last."""
        return [self._found[turn] for turn in sorted(self._found)]

    @property
    def best(self) -> Validation:
        """The validation with the highest mean reward; of several with that mean, the last one."""
        return max(self._found.values(), key=_rank)

    @property
    def states(self) -> Mapping[str, AlgorithmState]:
        """The states of the algorithms at the best validation, by algorithm."""
        return self._states

    def begin(self, steps: Mapping[str, tuple[int, ...]]) -> None:
        """Record that a validation has begun, so that the files of ``steps`` stay until it has ended."""
        self._running.append(steps)

    async def add(
        self,
        *,
        turn: int,
        versions: Mapping[str, str],
        steps: Mapping[str, tuple[int, ...]],
        episodes: Sequence[Episode],
        states: Mapping[str, AlgorithmState],
    ) -> Validation:
        """Store and return a finished validation; if it is the best so far, point the label ``best`` at its versions.

        ``states`` are the algorithms' states at that time; they are stored only with the best validation. The rewards
        become the score of the versions, except where an algorithm has measured a version itself.
        """
        one = Validation(
            turn=turn,
            versions=dict(versions),
            steps=dict(steps),
            rewards=tuple(rewards_of(episodes)),
            tasks=self._digest,
            train=self._train,
            agent=self._agent,
            failed=failures_of(episodes),
            unjudged=tuple(place for place, one in enumerate(episodes) if broke_in_reward(one.attempt)),
            parts=parts_of(episodes),
        )
        self._found[turn] = one
        saved = self._shelf.states({f"{turn:08d}": one})
        if self.best is one:
            self._states = dict(states)
            saved |= self._bests.states({"": _Best(turn=turn, states=dict(states))})
        await self._store.save_state(saved)
        self._running = [running for running in self._running if running is not steps]
        await self.score(one, episodes)
        if self.best is one:
            await self._label()
        return one

    async def score(self, one: Validation, episodes: Sequence[Episode], *, is_fresh: bool = False) -> None:
        """Save the rewards as the score of a validation's tuned versions; scores from algorithms are not replaced.

        ``is_fresh`` marks rollouts of another measurement, made after the validation.
        """
        rewards, parts = rewards_of(episodes), parts_of(episodes)
        low, high = interval(rewards) if len(rewards) > 1 else (rewards[0], rewards[0])
        for name in sorted(self._tuned.intersection(one.versions)):
            version = one.versions[name]
            known = {score.version: score.how for score in await self._store.scores(name)}
            if known.get(version, _HOW) in (_HOW, _HOW_AGAIN):
                how = _HOW_AGAIN if is_fresh else _HOW
                mean, count = fmean(rewards), len(rewards)
                score = VersionScore(
                    name=name, version=version, mean=mean, low=low, high=high, n=count, how=how, parts=parts
                )
                await self._store.save_scores([score])

    async def label(self, one: Validation, reason: str) -> None:
        """Point the label ``best`` at the tuned resources' versions in this validation."""
        for name in sorted(self._tuned.intersection(one.versions)):
            await labels.move(self._store, name, BEST, one.versions[name], reason=reason)

    def kept(self, algorithm: str) -> frozenset[int]:
        """Return the steps of an algorithm whose files must stay, because the run may return to them."""
        wanted = [one.steps for one in self.finalists()] if self._found else []
        return frozenset(step for steps in (*wanted, *self._running) for step in steps.get(algorithm, ()))

    def finalists(self) -> list[Validation]:
        """Return up to three validations of different versions that have not fallen, best first.

        The last validation is one of them unless it has fallen.
        """
        found: list[Validation] = []
        for one in sorted(self._found.values(), key=_rank, reverse=True):
            if all(one.versions != other.versions for other in found) and not self.has_fallen(one):
                found.append(one)
        last = self._found[max(self._found)]
        return found[:FINALISTS] if last not in found[FINALISTS:] else [*found[: FINALISTS - 1], last]

    def has_fallen(self, one: Validation) -> bool:
        """Return true if a validation is worse than the best one: the odds are at least `FALL_ODDS`."""
        return self.evidence_of_fall(one) >= FALL_ODDS

    def evidence_of_fall(self, one: Validation) -> float:
        """Return the odds that a validation is worse than the best one, on the tasks that both could judge."""
        best = self.best
        gate = Gate(span=span_of([*best.rewards, *one.rewards]))
        left_out = {*one.unjudged, *best.unjudged}
        for task, (before, after) in enumerate(zip(best.rewards, one.rewards, strict=True)):
            if task not in left_out:
                gate.update(before, after)
        return gate.evidence_of_harm

    async def _label(self) -> None:
        await self.label(self.best, f"validation reward {self.best.words} of experiment {self._name}")


def validations_of(name: str, run: int) -> Shelf[Validation]:
    """Return the shelf of a run's validations; a record's name is the number of steps before the validation."""
    return Shelf(Validation, run_key(name, run, "validation/"))


async def read_validations(store: Store, name: str, run: int) -> list[Validation]:
    """Read all validations of a run in order of their steps, whatever tasks they used."""
    return list((await validations_of(name, run).read(store)).values())


def rewards_of(episodes: Sequence[Episode]) -> list[float]:
    """Return the reward of each validation rollout, 0 for a rollout without a reward."""
    return [0.0 if episode.reward is None else episode.reward for episode in episodes]


def parts_of(episodes: Iterable[Episode]) -> dict[str, Moments]:
    """Return the parts of rewards by name; a part of a part, such as ``form.pattern``, is left out."""
    found: dict[str, Moments] = {}
    for episode in episodes:
        parts = {name: value for reward in episode.rewards for name, value in reward.dimensions.items()}
        for name, value in parts.items():
            if value is not None and name.rpartition(".")[0] not in parts:
                found[name] = found.get(name, Moments()).plus(Moments(count=1, mean=value))
    return found


def failures_of(episodes: Sequence[Episode]) -> int:
    """Count the rollouts that did not succeed."""
    return sum(episode.rollout.status != "succeeded" for episode in episodes)


def digest_of(tasks: Sequence[Json]) -> str:
    """Return a digest of tasks, by which validations on the same tasks are recognised."""
    return hashlib.blake2b(to_json(list(tasks)), digest_size=8).hexdigest()


def files_of(versions: Sequence[ResourceVersion], states: Mapping[str, AlgorithmState]) -> dict[str, tuple[int, ...]]:
    """Map each algorithm to the steps that made its versions or its state, whose files must stay."""
    found = {name: {state.step} for name, state in states.items()}
    for version in versions:
        if version.algorithm in found:
            found[version.algorithm].add(version.step)
    return {name: tuple(sorted(steps)) for name, steps in found.items()}


def after_step(turn: int) -> str:
    """Describe the position of a validation in its run, such as ``after step 5``."""
    return f"after step {turn}" if turn else "before the first step"


def _rank(one: Validation) -> tuple[float, int]:
    return one.mean, one.turn
