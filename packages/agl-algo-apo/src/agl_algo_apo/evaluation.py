"""Paid, cached, budgeted evaluation: which reward a candidate gets on a task.

Every rollout is paid from the budget before it starts, found again by its id after a crash, and remembered by
(candidate, split, task, repeat). What infrastructure broke is started again and never scored; what the agent broke
is scored with the failure's reward. Nothing here decides anything about candidates.
"""

import asyncio
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import msgspec

from agl.contracts import AlgorithmContext
from agl.errors import ConfigError, RunError
from agl.schemas import Episode, Json, JsonResource, PromptTemplate, Record, Resource, to_json
from agl_algo_apo.budget import Budget
from agl_algo_apo.candidates import PromptCandidate, resource_of

Split = Literal["train", "val"]
Status = Literal["ok", "failed", "timeout", "unrewarded", "infrastructure"]

TRIES = 3
"""Times that a rollout which infrastructure broke is started at most."""

FRESH = 1
"""Number of the final measurement's rollouts of a task; 0 is the first measurement."""

FEEDBACK_CHARS = 1000
"""Characters of feedback that are remembered with a reward."""

_INFRASTRUCTURE = re.compile(
    r"^(?:[\w.]+\.)?(?:API(?:Connection|Timeout)Error|RateLimitError|InternalServerError|ServiceUnavailableError"
    r"|OverloadedError|ConnectError|ConnectTimeout|Connection(?:Error|ResetError|RefusedError|AbortedError)"
    r"|RemoteProtocolError|ReadError|WriteError|ReadTimeout|PoolTimeout|BrokenPipeError|MemoryError)(?::|$)",
    re.MULTILINE,
)
"""Errors that say nothing about the agent's text: the model's server or the network did not do its part."""


class Measured(Record, frozen=True, kw_only=True):
    """What one rollout said.

    Attributes:
        reward: The score; the failure's reward where the agent failed.
        rollout: The rollout's id.
        status: How the rollout ended.
        feedback: What its rewards said in words.
    """

    reward: float
    rollout: str
    status: Status = "ok"
    feedback: str = ""


class MeasureJob(NamedTuple):
    """A candidate on tasks of one split, by their positions; ``repeat`` counts fresh rollouts of the same task."""

    candidate: PromptCandidate
    split: Split
    tasks: tuple[int, ...]
    repeat: int = 0


class Estimate(Record, frozen=True, kw_only=True):
    """A mean with its 95 % confidence interval over ``n`` tasks; the interval is the mean where n < 2."""

    mean: float
    low: float
    high: float
    n: int


class Scores:
    """The rewards that were paid for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[tuple[int, int], Measured]] = {}

    def __len__(self) -> int:
        return sum(len(known) for known in self._known.values())

    def get(self, candidate: str, split: Split, task: int, repeat: int = 0) -> Measured | None:
        """What is known, ``None`` if nothing."""
        return self._known.get((candidate, split), {}).get((task, repeat))

    def put(self, candidate: str, split: Split, task: int, repeat: int, measured: Measured) -> None:
        """Remember a reward."""
        self._known.setdefault((candidate, split), {})[(task, repeat)] = measured

    def rewards(self, candidate: str, split: Split, tasks: Iterable[int] | None = None) -> dict[int, float]:
        """Rewards by task, of ``tasks`` or of all that are known; unknown ones are absent.

        Where a task was measured several times it is the mean, without :data:`FRESH`, which nothing may be chosen by.
        """
        wanted = None if tasks is None else set(tasks)
        found: dict[int, list[float]] = {}
        for (task, repeat), measured in self._known.get((candidate, split), {}).items():
            if repeat != FRESH and (wanted is None or task in wanted):
                found.setdefault(task, []).append(measured.reward)
        return {task: fmean(values) for task, values in found.items()}

    def fresh(self, candidate: str, split: Split) -> dict[int, float]:
        """Rewards of the final measurement by task."""
        known = self._known.get((candidate, split), {})
        return {task: measured.reward for (task, repeat), measured in known.items() if repeat == FRESH}

    def next_repeat(self, candidate: str, split: Split) -> int:
        """A number for measuring once more what was measured before."""
        return max([FRESH, *(repeat for _, repeat in self._known.get((candidate, split), {}))]) + 1

    def floor(self) -> float:
        """The worst reward that was ever measured; 0 before there is any."""
        return min((m.reward for known in self._known.values() for m in known.values()), default=0.0)

    def clear(self) -> None:
        """Forget everything: what the rewards depended on has changed."""
        self._known.clear()

    def dump(self) -> Json:
        """As JSON: one row per measurement."""
        return [
            [*place, *key, msgspec.to_builtins(measured)]
            for place, known in self._known.items()
            for key, measured in known.items()
        ]

    def load(self, data: Json) -> None:
        """Continue from :meth:`dump`."""
        self._known = {}
        for row in msgspec.convert(data, list[tuple[str, Split, int, int, Measured]]):
            self.put(*row)


class Evaluator:
    """Runs candidates on tasks.

    Attributes:
        scores: What was paid for.
        environment: Versions of the resources that are not tuned here, on which all that is measured now depends:
            rollouts keep to these, and are others for others. A policy serves its newest weights only, whatever a
            rollout was asked for with.
        broken: Rollouts of this process that could not be scored, by status.

    Args:
        context: The algorithm's context.
        budget: Pays.
        failure_reward: What a rollout scores in which the agent failed or ran out of time.
    """

    def __init__(self, context: AlgorithmContext, budget: Budget, *, failure_reward: float = 0.0) -> None:
        self._context = context
        self._budget = budget
        self._failure_reward = failure_reward
        self._seed: dict[str, Resource] = {name: context.current(name).resource for name in context.tunes}
        self._live = {name: context.current(name).version for name in context.tunes}
        self.scores = Scores()
        self.environment = environment_of(context)
        self.broken: Counter[str] = Counter()

    async def register(self, candidate: PromptCandidate, *, parent: PromptCandidate | None = None) -> PromptCandidate:
        """The candidate with versions that rollouts can pin; texts equal to the parent's share its versions.

        Raises:
            ValueError: A text cannot be a resource of its kind; the static gate refuses it before.
        """
        versions: dict[str, str] = {}
        for name, text in candidate.texts.items():
            if parent is None:
                versions[name] = self._live[name]
            elif parent.texts[name] == text:
                versions[name] = parent.versions[name]
            else:
                made = await self._context.propose(
                    name,
                    resource_of(text, self._seed[name]),
                    step=candidate.step,
                    key=candidate.id,
                    parent=parent.versions[name],
                    metadata={"candidate_id": candidate.id, "operator": candidate.operator},
                )
                versions[name] = made.version
        return candidate.replace(versions=versions)

    async def measure(self, jobs: Sequence[MeasureJob], *, step: int, purpose: str) -> None:
        """Get all rewards that are not known yet into :attr:`scores`, all jobs at once.

        Args:
            jobs: What to run; tasks that infrastructure broke every time stay unknown.
            step: The step that asks; with ``purpose`` it makes the rollouts' ids.
            purpose: Unique within the step; letters and digits.

        Raises:
            BudgetExhaustedError: The budget does not reach for all of it; nothing was started.
        """
        for attempt in range(TRIES):
            missing = [job._replace(tasks=self._unknown(job)) for job in jobs]
            missing = [job for job in missing if job.tasks]
            if not missing:
                return
            self._budget.take_rollouts(sum(len(job.tasks) for job in missing))
            await asyncio.gather(*(self._run(job, step, f"{purpose}-{attempt}") for job in missing))

    def mean(self, candidate: str, split: Split, tasks: Iterable[int] | None = None) -> float:
        """Mean of the known rewards; ``nan`` where none is known."""
        rewards = self.scores.rewards(candidate, split, tasks)
        return fmean(rewards.values()) if rewards else math.nan

    def tasks(self, split: Split) -> Sequence[Json]:
        """The tasks of a split."""
        return self._context.train if split == "train" else self._context.val

    def _unknown(self, job: MeasureJob) -> tuple[int, ...]:
        known = self.scores
        return tuple(t for t in job.tasks if known.get(job.candidate.id, job.split, t, job.repeat) is None)

    async def _run(self, job: MeasureJob, step: int, purpose: str) -> None:
        tasks = self.tasks(job.split)
        collected = await self._context.collect(
            [tasks[position] for position in job.tasks],
            step=step,
            mode=job.split,
            resources={**self._pinned_versions(), **job.candidate.versions},
            key=f"{self._environment_prefix()}{purpose}-{job.candidate.id}-{job.repeat}",
            keeps_all=True,
        )
        for position, episode in zip(job.tasks, collected.episodes, strict=True):
            measured = self._measured(episode)
            if measured is not None:
                self.scores.put(job.candidate.id, job.split, position, job.repeat, measured)

    def _pinned_versions(self) -> dict[str, str]:
        texts = (PromptTemplate, JsonResource)
        return {n: v for n, v in self.environment.items() if isinstance(self._context.current(n).resource, texts)}

    def _environment_prefix(self) -> str:
        """Makes other rollouts of those that depend on something else, which a step that is repeated may meet."""
        if not self.environment:
            return ""
        return f"{hashlib.blake2b(to_json(self.environment), digest_size=4).hexdigest()}-"

    def _measured(self, episode: Episode) -> Measured | None:
        status = status_of(episode)
        if status in ("infrastructure", "unrewarded"):
            self.broken[status] += 1
            return None
        reward = episode.reward if status == "ok" and episode.reward is not None else self._failure_reward
        return Measured(reward=reward, rollout=episode.rollout.rollout_id, status=status, feedback=feedback_of(episode))


def status_of(episode: Episode) -> Status:
    """How a rollout ended, told apart by who is to blame."""
    attempt = episode.attempt
    if episode.rollout.status == "succeeded":
        return "unrewarded" if episode.reward is None else "ok"
    if attempt is None or episode.rollout.status == "cancelled" or attempt.status in ("lost", "cancelled"):
        return "infrastructure"
    if attempt.status == "timeout":
        return "timeout"
    error = attempt.error
    is_foreign = error is not None and _INFRASTRUCTURE.search(f"{error.type}\n{error.traceback}")
    return "infrastructure" if is_foreign else "failed"


def feedback_of(episode: Episode) -> str:
    """What the rewards and the error of a rollout say in words."""
    parts = [reward.feedback for reward in episode.rewards if reward.feedback]
    error = episode.attempt.error if episode.attempt is not None else None
    if error is not None:
        parts.append(f"{error.type}: {error.message}")
    return "\n".join(parts)[:FEEDBACK_CHARS]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % interval of independent values, by Student's t."""
    mean, n = fmean(values), len(values)
    if n < 2:
        return Estimate(mean=mean, low=mean, high=mean, n=n)
    half = _t95(n - 1) * stdev(values) / math.sqrt(n)
    return Estimate(mean=mean, low=mean - half, high=mean + half, n=n)


def _t95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by the Cornish-Fisher expansion, within 1 % from 3 degrees of freedom."""
    exact = {1: 12.706, 2: 4.303}
    if freedom in exact:
        return exact[freedom]
    z, d = 1.959964, float(freedom)
    z3, z5, z7 = z**3, z**5, z**7
    first = (z3 + z) / (4 * d)
    second = (5 * z5 + 16 * z3 + 3 * z) / (96 * d * d)
    third = (3 * z7 + 19 * z5 + 17 * z3 - 15 * z) / (384 * d**3)
    return z + first + second + third


def environment_of(context: AlgorithmContext) -> dict[str, str]:
    """Versions of what rewards depend on besides the candidate: every resource that is not tuned here."""
    return {name: version for name, version in sorted(context.live().items()) if name not in context.tunes}


def dataset_digest(context: AlgorithmContext) -> str:
    """Tells one pair of training and validation sets from another, so that a resumed run notices the change."""
    return hashlib.blake2b(to_json([list(context.train), list(context.val)]), digest_size=8).hexdigest()


def check_splits(context: AlgorithmContext) -> None:
    """Refuse a missing validation set, or one that shares tasks with training; raises :class:`ConfigError`."""
    if not context.train:
        raise ConfigError("there are no training tasks; set [experiment] train to a JSON-lines file")
    if not context.val:
        raise ConfigError(
            "there are no validation tasks, by which prompts are compared; set [experiment] val to tasks that are "
            "not in train, about as many"
        )
    train = {to_json(task) for task in context.train}
    shared = [task for task in context.val if to_json(task) in train]
    if shared:
        raise ConfigError(
            f"{len(shared)} of {len(context.val)} validation tasks are training tasks too, such as "
            f"{to_json(shared[0]).decode()[:120]}; take them out of one of the two, or the score means nothing"
        )


def nothing_scored(tried: int, broken: Mapping[str, int]) -> RunError:
    """The error of a measurement in which no rollout gave a reward; ``broken`` counts by status."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(broken.items()))
    return RunError(
        f"none of {tried} rollouts could be scored ({counts}). Check that the agent's model answers and that the agent "
        "returns or emits a reward, or that a reward is configured; agl show prints a rollout"
    )
