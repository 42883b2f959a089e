"""Evaluation: the reward of a candidate on a task, paid from the budget once and remembered.

Every rollout is paid before it starts, found again by its id after a crash, and remembered by (candidate, split, task,
repeat). Rollouts that infrastructure broke are started again and never scored; those that the agent broke are scored
with the reward of a failure, for leaving these out would favour a text that makes the agent fail on hard tasks. The two
are told apart in `faults.py`.

Nothing here decides anything about candidates.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from agl import semconv
from agl.contracts import AlgorithmContext, RolloutQuery
from agl.errors import ConfigError, NotFoundError, RunError
from agl.schemas import Episode, Json, JsonResource, PromptTemplate, Record, Resource, Span, to_json
from agl.stores import all_spans
from agl_algo_apo.budget import Budget, Spent
from agl_algo_apo.candidates import PromptCandidate, resource_of
from agl_algo_apo.estimates import Estimate, Range, estimate
from agl_algo_apo.faults import Status, needs_calls, status_of
from agl_algo_apo.journal import Journal

Split = Literal["train", "val", "test"]
"""Training tasks; the validation tasks of the search; those that are held back, by their place among all of them."""

TRIES = 3
"""Most starts of a rollout that infrastructure breaks each time."""

FRESH = 1
"""The `repeat` of the final measurement's rollouts; 0 is the first measurement, from 2 on come further ones."""

FEEDBACK_CHARS = 1000
"""Characters of feedback that are remembered with a reward."""


class Measured(Record, frozen=True, kw_only=True):
    """The outcome of one rollout.

    Attributes:
        reward: The score; that of a failure where the agent failed.
        rollout: The rollout's id.
        status: How the rollout ended.
        feedback: The feedback of its rewards and its error, as text.
    """

    reward: float
    rollout: str
    status: Status = "ok"
    feedback: str = ""


class MeasureJob(NamedTuple):
    """Asks for a candidate's rewards on tasks of one split, by position; ``repeat`` tells rollouts of a task apart."""

    candidate: PromptCandidate
    split: Split
    tasks: tuple[int, ...]
    repeat: int = 0


class Scores:
    """Remembers the rewards that were paid for."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[tuple[int, int], Measured]] = {}

    def __len__(self) -> int:
        return sum(len(known) for known in self._known.values())

    def get(self, candidate: str, split: Split, task: int, repeat: int = 0) -> Measured | None:
        """Return what one rollout brought, ``None`` if it is not known."""
        return self._known.get((candidate, split), {}).get((task, repeat))

    def put(self, candidate: str, split: Split, task: int, repeat: int, measured: Measured) -> None:
        """Remember a reward."""
        self._known.setdefault((candidate, split), {})[(task, repeat)] = measured

    def rewards(self, candidate: str, split: Split, tasks: Iterable[int] | None = None) -> dict[int, float]:
        """Return rewards by task, of ``tasks`` or of all that are known; unknown ones are absent.

        A task that was measured several times has the mean. :data:`FRESH` ones are left out, as nothing may be chosen
        by them.
        """
        wanted = None if tasks is None else set(tasks)
        found: dict[int, list[float]] = {}
        for (task, repeat), measured in self._known.get((candidate, split), {}).items():
            if repeat != FRESH and (wanted is None or task in wanted):
                found.setdefault(task, []).append(measured.reward)
        # One number per task, however often it ran: tasks and not rollouts are what intervals and races count.
        return {task: fmean(values) for task, values in found.items()}

    def fresh(self, candidate: str, split: Split) -> dict[int, float]:
        """Return the rewards of the final measurement by task."""
        known = self._known.get((candidate, split), {})
        return {task: measured.reward for (task, repeat), measured in known.items() if repeat == FRESH}

    def next_repeat(self, candidate: str, split: Split) -> int:
        """Return a ``repeat`` that was not used yet, for measuring once more what was measured before."""
        return max([FRESH, *(repeat for _, repeat in self._known.get((candidate, split), {}))]) + 1

    def keep_fresh(self) -> None:
        """Count the final measurement's rewards as further ones: a search that goes on chooses by them too."""
        for known in self._known.values():
            repeat = 1 + max(repeat for _, repeat in known)
            for task in [task for task, old in known if old == FRESH]:
                known[(task, repeat)] = known.pop((task, FRESH))

    def floor(self) -> float:
        """Return the worst reward that was ever measured; 0 before there is any."""
        return min(self._all(), default=0.0)

    def ceiling(self) -> float:
        """Return the best reward that was ever measured; minus infinity before there is any."""
        return max(self._all(), default=-math.inf)

    def clear(self) -> None:
        """Forget everything: what the rewards depended on has changed."""
        self._known.clear()

    def dump(self) -> Json:
        """Return everything as JSON, one row per measurement."""
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

    def any(self) -> Measured | None:
        """Return any measurement, ``None`` before there is one."""
        return next((measured for known in self._known.values() for measured in known.values()), None)

    def _all(self) -> Iterable[float]:
        return (measured.reward for known in self._known.values() for measured in known.values())


class Evaluator:
    """Runs candidates on tasks.

    Attributes:
        scores: The rewards that were paid for.
        environment: Versions of the resources that are not tuned here and on which rewards depend. Prompts and other
            texts among them are pinned; a policy always serves its newest weights. Where they change, the same
            request makes new rollouts.
        journal: The costs of each candidate, beside what the search notes there.
        broken: Count of the rollouts of this process that could not be scored, by status.

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
        """Return the candidate with versions that rollouts can pin; texts equal to the parent's share its versions.

        Raises:
            ValueError: A text cannot be a resource of its kind; the static gate refuses such texts before.
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
        """Count the trainer's validation before the first step as measurements of the first candidate, and pay them.

        Those on the tasks in ``test`` are measurements of that split. Validations of other versions than the live ones
        are left out: another algorithm had its turn meanwhile.
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
        """Run what is not known yet, all jobs at once, and put the rewards into :attr:`scores`.

        Args:
            jobs: The rewards to get; tasks that infrastructure broke every time stay unknown.
            step: The step that asks; with ``purpose`` it makes the rollouts' ids.
            purpose: Unique within the step; letters and digits.

        Raises:
            BudgetExhaustedError: The budget does not reach for all of it; none of it was started.
            ConfigError: A reward is above the perfect score.
        """
        for attempt in range(TRIES):
            # The first round runs everything; later ones only what infrastructure broke, paid once more.
            missing = [job._replace(tasks=self._unknown(job)) for job in jobs]
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
        """Return the mean of the known rewards; ``nan`` where none is known."""
        rewards = self.scores.rewards(candidate, split, tasks)
        return fmean(rewards.values()) if rewards else math.nan

    @property
    def range(self) -> Range:
        """The range of the rewards: from 0, or the worst one if that is below it, to the perfect score."""
        return Range(low=min(0.0, self._failure_reward, self.scores.floor()), high=self._perfect_score)

    def estimate(self, rewards: Mapping[int, float]) -> Estimate:
        """Return the mean of rewards by task, with its interval."""
        return estimate(list(rewards.values()), self.range)

    async def hidden_keys(self) -> tuple[str, ...]:
        """Return the keys of tasks that the agent does not see, as any rollout that was measured names them."""
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
                f"a rollout got the reward {best:g}, and perfect_score is {perfect:g}: every reward from {perfect:g} "
                f"on would count as perfect. Set perfect_score to the best reward that a task can get, such as "
                f"perfect_score = {_guessed_scale(best):g}, or correct the reward; then continue with --resume"
            )

    def _unknown(self, job: MeasureJob) -> tuple[int, ...]:
        known = self.scores
        return tuple(t for t in job.tasks if known.get(job.candidate.id, job.split, t, job.repeat) is None)

    async def _run(self, job: MeasureJob, step: int, purpose: str) -> None:
        tasks = self.tasks(job.split)
        collected = await self._context.collect(
            [tasks[position] for position in job.tasks],
            step=step,
            mode="train" if job.split == "train" else "val",
            resources={**self._pinned_versions(), **job.candidate.versions},
            key=f"{self._environment_prefix()}{purpose}-{job.candidate.id}-{job.repeat}",
            keeps_all=True,
        )
        for position, episode in zip(job.tasks, collected.episodes, strict=True):
            measured = await self._measured(job.candidate, episode)
            if measured is not None:
                self.scores.put(job.candidate.id, job.split, position, job.repeat, measured)

    def _pay(self, counts: Mapping[str, int]) -> None:
        """Pay rollouts of several candidates, all or none."""
        self._budget.take_rollouts(sum(counts.values()))
        for candidate, count in counts.items():
            self.journal.paid(candidate, Spent(rollouts=count, money=count * self._budget.prices.rollout))

    def _pinned_versions(self) -> dict[str, str]:
        texts = (PromptTemplate, JsonResource)
        return {n: v for n, v in self.environment.items() if isinstance(self._context.current(n).resource, texts)}

    def _environment_prefix(self) -> str:
        """Return the part of rollout ids that depends on the environment.

        A step that is repeated after other resources have changed must not find the rollouts of before.
        """
        if not self.environment:
            return ""
        return f"{hashlib.blake2b(to_json(self.environment), digest_size=4).hexdigest()}-"

    async def _measured(self, candidate: PromptCandidate, episode: Episode) -> Measured | None:
        rollout = episode.rollout.rollout_id
        # An episode without a recorded call has none whose tokens could be counted.
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
    """Return the tokens of a recorded model call, 0 where they are not known."""
    call = span.call
    if call is None:
        return 0
    read = call.prompt_len or span.attributes.get(semconv.INPUT_TOKENS) or 0
    written = call.response_len or span.attributes.get(semconv.OUTPUT_TOKENS) or 0
    return written + (read if call.choice == 0 else 0)  # all choices of a request share its prompt


def _guessed_scale(best: float) -> float:
    """Return the next power of ten: rewards are mostly shares of 1, 10 or 100."""
    return max(1.0, 10.0 ** math.ceil(math.log10(best) - 1e-9)) if best > 0 else 1.0


def feedback_of(episode: Episode) -> str:
    """Return the feedback of a rollout's rewards and its error, as text."""
    parts = [reward.feedback for reward in episode.rewards if reward.feedback]
    error = episode.attempt.error if episode.attempt is not None else None
    if error is not None:
        parts.append(f"{error.type}: {error.message}")
    return "\n".join(parts)[:FEEDBACK_CHARS]


def environment_of(context: AlgorithmContext) -> dict[str, str]:
    """Return the version of every resource that is not tuned here, on which rewards depend besides the candidate."""
    return {name: version for name, version in sorted(context.live().items()) if name not in context.tunes}


def dataset_digest(context: AlgorithmContext) -> str:
    """Return a digest of the training and validation tasks, by which a resumed run notices that they have changed."""
    return hashlib.blake2b(to_json([list(context.train), list(context.val)]), digest_size=8).hexdigest()


def check_splits(context: AlgorithmContext) -> None:
    """Refuse a missing validation set, or one that shares tasks with training; raises :class:`ConfigError`."""
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


def nothing_scored(tried: int, broken: Mapping[str, int]) -> RunError:
    """Return the error of a measurement in which no rollout gave a reward; ``broken`` counts them by status."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(broken.items()))
    return RunError(
        f"none of {tried} rollouts could be scored ({counts}). Check that the agent's model answers and that the agent "
        "returns or emits a reward, or that a reward is configured; agl show prints a rollout"
    )
