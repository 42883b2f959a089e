"""Evaluation: the reward of a candidate on a task, paid from the budget once and remembered.

Every rollout is paid for before it starts, found again by its id after a crash, and remembered by (candidate, split,
task, repeat). Rollouts that infrastructure broke are started again and never scored. Rollouts that the agent broke are
scored with the reward of a failure, because leaving them out would favour a text that makes the agent fail on hard
tasks. `measurement/faults.py` distinguishes the two.

Nothing here decides anything about candidates.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from agl import semconv
from agl.contracts import AlgorithmContext, RolloutQuery
from agl.errors import ConfigError, NotFoundError, RunError
from agl.schemas import Episode, Json, JsonResource, PromptTemplate, Resource, Span, to_json
from agl.stores import all_spans
from agl_algo_apo.measurement.estimates import Estimate, Range, estimate
from agl_algo_apo.measurement.faults import needs_calls, status_of
from agl_algo_apo.measurement.journal import Journal
from agl_algo_apo.measurement.scores import Measured, Scores, Split
from agl_algo_apo.search.budget import Budget, Spent
from agl_algo_apo.texts.lineage import PromptCandidate, resource_of

TRIES = 3
"""The maximum number of times that a rollout is started if infrastructure breaks it each time."""

FEEDBACK_CHARS = 1000
"""The maximum number of characters of feedback that are stored with a reward."""


class MeasureJob(NamedTuple):
    """A request to measure a candidate on tasks of a split, given by position; ``repeat`` numbers a task's rollouts."""

    candidate: PromptCandidate
    split: Split
    tasks: tuple[int, ...]
    repeat: int = 0


class Evaluator:
    """Runs candidates on tasks.

    Attributes:
        scores: The rewards that were paid for.
        environment: Versions of the resources that are not tuned here but affect rewards. Prompts and other texts among
            them are pinned; a policy always serves its newest weights. If a version changes, the same request makes new
            rollouts.
        journal: The costs of each candidate, and the search's records about it.
        broken: Number of this process's rollouts that could not be scored, by status.

    Args:
        context: The algorithm's context.
        budget: Pays for every rollout.
        failure_reward: The reward of a rollout in which the agent failed or ran out of time.
        perfect_score: The best reward that a task can get.
    """

    def __init__(
        self, context: AlgorithmContext, budget: Budget, *, failure_reward: float = 0.0, perfect_score: float = 1.0
    ) -> None:
        self._context = context
        self._budget = budget
        self._failure_reward = failure_reward
        self._perfect_score = perfect_score
        self._seed: dict[str, Resource] = {name: context.current(name).resource for name in context.tunes}
        self._live = {name: context.current(name).version for name in context.tunes}
        self.scores = Scores()
        self.journal = Journal()
        self.environment = environment_of(context)
        self.broken: Counter[str] = Counter()

    async def register(self, candidate: PromptCandidate, *, parent: PromptCandidate | None = None) -> PromptCandidate:
        """Return the candidate with versions that rollouts can pin; a text equal to the parent's shares its version.

        Raises:
            ValueError: A text cannot be a resource of its kind; the static checks refuse such texts before.
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

    async def adopt(
        self, candidate: PromptCandidate, validated: Sequence[Episode], *, test: frozenset[int] = frozenset()
    ) -> None:
        """Count the trainer's validation before the first step as measurements of the first candidate, and pay for it.

        Validations on the tasks in ``test`` count for that split. Validations of versions that are not live are left
        out: another algorithm had its turn meanwhile.
        """
        live = dict(self._context.live())
        ours = [(task, episode) for task, episode in enumerate(validated) if episode.rollout.resources == live]
        self._pay({candidate.id: len(ours)})
        for task, episode in ours:
            measured = await self._measured(candidate, episode)
            if measured is not None:
                self.scores.put(candidate.id, "test" if task in test else "val", task, 0, measured)
        self._check_scale()

    async def measure(self, jobs: Sequence[MeasureJob], *, step: int, purpose: str) -> None:
        """Run all measurements of all jobs that are not known yet, at once, and put the rewards into :attr:`scores`.

        Args:
            jobs: The rewards to get; tasks that infrastructure broke every time stay unknown.
            step: The current step; with ``purpose`` it determines the ids of the rollouts.
            purpose: Unique within the step; letters and digits.

        Raises:
            BudgetExhaustedError: The budget does not cover all of it; no rollout was started.
            ConfigError: A reward is above the perfect score.
        """
        for attempt in range(TRIES):
            # The first round runs everything; later rounds only rollouts that infrastructure broke, which are paid for
            # again.
            missing: list[MeasureJob] = []
            for job in jobs:
                tasks = (t for t in job.tasks if self.scores.get(job.candidate.id, job.split, t, job.repeat) is None)
                missing.append(job._replace(tasks=tuple(tasks)))
            missing = [job for job in missing if job.tasks]
            if not missing:
                return
            counts: Counter[str] = Counter()
            for job in missing:
                counts[job.candidate.id] += len(job.tasks)
            self._pay(counts)
            await asyncio.gather(*(self._run(job, step, f"{purpose}-{attempt}") for job in missing))
            self._check_scale()

    def mean(self, candidate: str, split: Split, tasks: Iterable[int] | None = None) -> float:
        """Return the mean of a candidate's known rewards; ``nan`` if there are none."""
        rewards = self.scores.rewards(candidate, split, tasks)
        return fmean(rewards.values()) if rewards else math.nan

    @property
    def range(self) -> Range:
        """The range of the rewards: from 0, or from the worst reward if that is lower, to the perfect score."""
        return Range(low=min(0.0, self._failure_reward, self.scores.floor()), high=self._perfect_score)

    def estimate(self, rewards: Mapping[int, float]) -> Estimate:
        """Return the mean of ``rewards``, which are keyed by task, with its confidence interval."""
        return estimate(list(rewards.values()), self.range)

    async def hidden_keys(self) -> tuple[str, ...]:
        """Return the task keys hidden from the agent, as a measured rollout recorded them; empty without a rollout."""
        measured = self.scores.any()
        if measured is None:
            return ()
        try:
            found = await self._context.store.rollouts(RolloutQuery(ids=(measured.rollout,)))
        except NotFoundError:  # deleted meanwhile
            return ()
        return found[0].hidden

    def tasks(self, split: Split) -> Sequence[Json]:
        """Return the tasks of a split."""
        return self._context.train if split == "train" else self._context.val

    def _check_scale(self) -> None:
        best, perfect = self.scores.ceiling(), self._perfect_score
        if best > perfect + 1e-6 * abs(perfect):  # rewards are sums of floats
            raise ConfigError(
                f"a rollout got the reward {best:g}, and scoring.perfect is {perfect:g}: every reward from {perfect:g} "
                f"on would count as perfect. Set scoring.perfect to the best reward that a task can get, such as "
                f"scoring.perfect = {_guessed_scale(best):g}, or correct the reward; then continue with --resume"
            )

    async def _run(self, job: MeasureJob, step: int, purpose: str) -> None:
        tasks, texts = self.tasks(job.split), (PromptTemplate, JsonResource)
        pinned = {
            name: version
            for name, version in self.environment.items()
            if isinstance(self._context.current(name).resource, texts)
        }
        # A step that is repeated after other resources have changed must not find the earlier rollouts.
        digest = hashlib.blake2b(to_json(self.environment), digest_size=4).hexdigest()
        prefix = f"{digest}-" if self.environment else ""
        collected = await self._context.collect(
            [tasks[position] for position in job.tasks],
            step=step,
            mode="train" if job.split == "train" else "val",
            resources={**pinned, **job.candidate.versions},
            key=f"{prefix}{purpose}-{job.candidate.id}-{job.repeat}",
            keeps_all=True,
        )
        for position, episode in zip(job.tasks, collected.episodes, strict=True):
            measured = await self._measured(job.candidate, episode)
            if measured is not None:
                self.scores.put(job.candidate.id, job.split, position, job.repeat, measured)

    def _pay(self, counts: Mapping[str, int]) -> None:
        """Pay for rollouts, given as numbers by candidate; raises :class:`BudgetExhaustedError` unless all fit."""
        self._budget.take_rollouts(sum(counts.values()))
        for candidate, count in counts.items():
            self.journal.paid(candidate, Spent(rollouts=count, money=count * self._budget.prices.rollout))

    async def _measured(self, candidate: PromptCandidate, episode: Episode) -> Measured | None:
        rollout = episode.rollout.rollout_id
        # An episode without a recorded call has no tokens to count.
        spans = await self._spans(rollout) if episode.transitions or needs_calls(episode) else ()
        self.journal.paid(candidate.id, Spent(tokens=sum(map(_tokens, spans))))
        status = status_of(episode, spans if needs_calls(episode) else ())
        if status in ("infrastructure", "unrewarded"):
            self.broken[status] += 1
            return None
        reward = episode.reward if status == "ok" and episode.reward is not None else self._failure_reward
        return Measured(reward=reward, rollout=rollout, status=status, feedback=feedback_of(episode))

    async def _spans(self, rollout: str) -> Sequence[Span]:
        try:
            return await all_spans(self._context.store, rollout)
        except NotFoundError:  # deleted meanwhile: its error still tells something
            return ()


def _tokens(span: Span) -> int:
    """Return the tokens of a recorded model call; 0 if they are unknown."""
    call = span.call
    if call is None:
        return 0
    read = call.prompt_len or span.attributes.get(semconv.INPUT_TOKENS) or 0
    written = call.response_len or span.attributes.get(semconv.OUTPUT_TOKENS) or 0
    return written + (read if call.choice == 0 else 0)  # all choices of a request share its prompt


def _guessed_scale(best: float) -> float:
    """Return the next power of ten above the best reward, because rewards are mostly shares of 1, 10 or 100."""
    return max(1.0, 10.0 ** math.ceil(math.log10(best) - 1e-9)) if best > 0 else 1.0


def feedback_of(episode: Episode) -> str:
    """Return the feedback of the rollout's rewards, and the rollout's error, as text."""
    parts = [reward.feedback for reward in episode.rewards if reward.feedback]
    error = episode.attempt.error if episode.attempt is not None else None
    if error is not None:
        parts.append(f"{error.type}: {error.message}")
    return "\n".join(parts)[:FEEDBACK_CHARS]


def nothing_scored(tried: int, broken: Mapping[str, int]) -> RunError:
    """Return the error for a measurement without any reward; ``broken`` counts its rollouts by status."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(broken.items()))
    return RunError(
        f"none of {tried} rollouts could be scored ({counts}). Check that the agent's model answers and that the agent "
        "returns or emits a reward, or that a reward is configured; agl show prints a rollout"
    )


def environment_of(context: AlgorithmContext) -> dict[str, str]:
    """Return the live versions of all resources that are not tuned here; rewards depend on these versions too."""
    return {name: version for name, version in sorted(context.live().items()) if name not in context.tunes}


def dataset_digest(context: AlgorithmContext) -> str:
    """Return a digest of the training and validation tasks, by which a resumed run detects that they have changed."""
    return hashlib.blake2b(to_json([list(context.train), list(context.val)]), digest_size=8).hexdigest()


def check_splits(context: AlgorithmContext) -> None:
    """Raise :class:`ConfigError` if the validation set is missing, or shares tasks with the training set."""
    if not context.train:
        raise ConfigError("there are no training tasks; set [experiment] train to a JSON-lines file")
    if not context.val:
        raise ConfigError(
            "there are no validation tasks to compare prompts on; set [experiment] val to tasks that are not in train, "
            "about as many"
        )
    train = {to_json(task) for task in context.train}
    shared = [task for task in context.val if to_json(task) in train]
    if shared:
        raise ConfigError(
            f"{len(shared)} of {len(context.val)} validation tasks are training tasks too, such as "
            f"{to_json(shared[0]).decode()[:120]}; take them out of one of the two, or the score means nothing"
        )
