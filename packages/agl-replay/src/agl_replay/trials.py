"""Runs a trial of several versions, and reports it: task by task, and each version against the first, paired by task.

A failed rollout counts as 0, as in ``agl resources compare``; a successful rollout without a reward is left out.
"""

import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from agl import semconv
from agl.dialects import call_messages
from agl.hints import count_of
from agl.schemas import Episode, Json, Record, ResourceVersion, Rollout, Span, to_json
from agl_inspect.records.names import ORIGIN, PROMPT_TRIAL, error_of
from agl_inspect.rollouts.conversations import labelled_texts
from agl_inspect.rollouts.explanations import tokens_of
from agl_inspect.statistics import Comparison, compare_tasks, interval
from agl_inspect.terminal.output import echo, print_table
from agl_inspect.text import short
from agl_inspect.versions import TrialScore
from agl_replay.candidates import Contender
from agl_replay.forking import read_ended
from agl_run import Progress
from agl_run.engine import MOST_FREQUENT, Driver, Plan, cancel_unfinished, kind_of, trial


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The versions and tasks of a trial.

    Attributes:
        name: The resource.
        present: The live or labelled version of the resource; ``""`` if there is only the value in the experiment's
            file, and no version holds this value.
        versions: The versions to compare, the baseline first; ``None`` is the value in the experiment's file.
        tasks: The tasks.
        samples: Rollouts of each task with each version.
    """

    name: str
    present: str
    versions: Sequence[ResourceVersion | None]
    tasks: Sequence[Json]
    samples: int = 1


class Ran(NamedTuple):
    """A finished rollout of a trial, with the spans of its deciding attempt."""

    episode: Episode
    spans: Sequence[Span]


@dataclass(kw_only=True)
class Contested:
    """The progress of a trial, filled in while the trial runs, so that an interrupted trial can be reported.

    Attributes:
        versions: The published versions, in the order of the contest.
        rollouts: All rollouts, in the order in which they are queued.
        ran: The rollouts that have ended, by id.
        is_complete: True once all rollouts have ended.
    """

    versions: list[ResourceVersion] = field(default_factory=list[ResourceVersion])
    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    ran: dict[str, Ran] = field(default_factory=dict[str, Ran])
    is_complete: bool = False


async def try_versions(plan: Plan, contest: Contest, *, progress: Progress, found: Contested) -> None:
    """Run the contest as the experiment ``NAME-try``, and fill in ``found``, even if the call is cancelled.

    New versions are published; nothing else in the experiment changes.
    """
    live = {contest.name: contest.present} if contest.present else {}
    arms = [{contest.name: version.version} for version in contest.versions if version is not None]
    name = f"{plan.name}{PROMPT_TRIAL}"
    async with trial(plan, record_as=name, progress=progress, live=live, arms=arms) as driver:
        found.versions = [await _published(driver, contest.name, version) for version in contest.versions]
        collector = driver.collector(f"try-{time.time_ns() // 1_000_000}", None)
        arms = [{contest.name: version.version} for version in found.versions]
        found.rollouts = collector.side_by_side(contest.tasks, arms, n=contest.samples)
        try:
            episodes = await collector.run(found.rollouts)
            found.is_complete = True
            driver.agreement.report(episodes, trains=False)
        finally:
            await cancel_unfinished(driver.running.store, driver.name)
            ended = await read_ended(driver.running.store, found.rollouts)
            found.ran = {one.rollout.rollout_id: Ran(collector.episode(one), one.spans) for one in ended}


async def _published(driver: Driver, name: str, version: ResourceVersion | None) -> ResourceVersion:
    live = driver.running.live
    if version is None:
        return live.current(name)
    parent = version.parent or (live.current(name).version if version.metadata.get("origin") == ORIGIN else "")
    return await live.publish(replace(version, parent=parent))


LISTED = 20
"""Largest number of tasks in the table without ``--full``."""

_ERROR = 0.05
"""The largest probability of a wrong verdict among all candidates of a trial."""


class TriedRollout(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A finished rollout of a trial.

    Attributes:
        tokens: Number of prompt and response tokens in the rollout's model calls, as far as they are known.
        seconds: Wall time of the deciding attempt.
        answer: The agent's output, or else the answer of the last model call.
        error: Type and first line of the error, ``""`` if the rollout succeeded.
    """

    rollout_id: str
    status: str
    reward: float | None
    tokens: int
    seconds: float
    answer: str = ""
    error: str = ""

    @property
    def score(self) -> float | None:
        """The rollout's reward in the trial, which is 0 if the rollout failed."""
        return self.reward if self.status == "succeeded" else 0.0


class TriedTask(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A task of a trial, with the rollouts of each candidate; ``number`` is its position among all tasks, from 0."""

    number: int
    task: Json
    rollouts: dict[str, list[TriedRollout]]

    def scores(self, mark: str) -> list[float]:
        """Return the rewards on this task of the candidate with the letter ``mark``; a failed rollout counts as 0."""
        return [each.score for each in self.rollouts[mark] if each.score is not None]

    def mean(self, mark: str) -> float | None:
        """Return the candidate's mean reward on this task; ``None`` without rewards."""
        return fmean(scores) if (scores := self.scores(mark)) else None

    def difference(self, mark: str, baseline: str) -> float | None:
        """Return the candidate's mean reward minus the baseline's; ``None`` if either is missing."""
        new, old = self.mean(mark), self.mean(baseline)
        return None if new is None or old is None else new - old


class TriedCandidate(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A candidate of a trial.

    Attributes:
        mark: The candidate's letter; ``A`` is the baseline.
        origin: A description of the candidate's origin.
        mean: Mean reward of the candidate's rollouts, ``None`` without rewards.
        tokens: Mean number of tokens of a rollout, 0 if no counts are known; ``None`` without rollouts.
        seconds: Mean wall time of a rollout; ``None`` without rollouts.
    """

    mark: str
    version: str
    origin: str
    mean: float | None
    rollouts: int
    failed: int
    without_reward: int
    tokens: float | None
    seconds: float | None


class TriedPair(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A candidate against the baseline.

    Attributes:
        comparison: The comparison by task; ``None`` if no task has rewards of both.
        words: The outcome in a sentence.
    """

    mark: str
    baseline: str
    comparison: Comparison | None
    words: str


class TrialReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A trial of ``agl resources try``; ``is_complete`` is false if the trial was stopped.

    ``tasks`` are in the order of the trial; ``source`` describes them, such as ``3 of 9 validation tasks``.
    """

    experiment: str
    resource: str
    source: str
    samples: int
    is_complete: bool
    candidates: list[TriedCandidate]
    tasks: list[TriedTask]
    pairs: list[TriedPair]


def report_of(
    resource: str, contenders: Sequence[Contender], tasks: Sequence[tuple[int, Json]], found: Contested, *, source: str
) -> TrialReport:
    """Make the report of a trial from the rollouts that have ended."""
    marks = string.ascii_uppercase[: len(contenders)]
    arms = {version.version: mark for mark, version in zip(marks, found.versions, strict=True)}
    samples = len(found.rollouts) // (len(tasks) * len(contenders))
    tried = [TriedTask(number=number, task=task, rollouts={mark: [] for mark in marks}) for number, task in tasks]
    for place, rollout in enumerate(found.rollouts):
        if (ran := found.ran.get(rollout.rollout_id)) is not None:
            task = tried[place // (samples * len(contenders))]
            task.rollouts[arms[rollout.resources[resource]]].append(_rollout(ran))
    candidates = [
        _candidate(mark, version.version, one.words, tried)
        for mark, version, one in zip(marks, found.versions, contenders, strict=True)
    ]
    return TrialReport(
        experiment=found.rollouts[0].experiment,
        resource=resource,
        source=source,
        samples=samples,
        is_complete=found.is_complete,
        candidates=candidates,
        tasks=tried,
        pairs=[compare_pair(tried, mark, marks[0], error=_ERROR / 2 / len(marks[1:])) for mark in marks[1:]],
    )


def compare_pair(tasks: Sequence[TriedTask], mark: str, baseline: str, *, error: float = _ERROR / 2) -> TriedPair:
    """Compare a candidate with the baseline by the gate, over the tasks on which both have rewards."""
    both = [task for task in tasks if task.difference(mark, baseline) is not None]
    comparison, words = None, "cannot be compared: no task has rewards of both"
    if both:
        old, new = ({str(task.number): task.scores(each) for task in both} for each in (baseline, mark))
        comparison = compare_tasks(old, new, error=error)
        words = comparison.words
    return TriedPair(mark=mark, baseline=baseline, comparison=comparison, words=f"{mark} against {baseline}: {words}")


def scores_of(report: TrialReport) -> list[TrialScore]:
    """Return the scores of a trial's versions: means with intervals over tasks, and comparisons with the baseline."""
    pairs = {pair.mark: pair.comparison for pair in report.pairs}
    found: list[TrialScore] = []
    for each in report.candidates:
        means = [average for task in report.tasks if (average := task.mean(each.mark)) is not None]
        low, high = interval(means) if len(means) > 1 else (None, None)
        found.append(
            TrialScore(
                version=each.version,
                mean=fmean(means) if means else None,
                low=low,
                high=high,
                tasks=len(means),
                comparison=pairs.get(each.mark),
            )
        )
    return found


def best_of(report: TrialReport) -> TriedCandidate | None:
    """Return the candidate with the largest gain of those better than the baseline; ``None`` if no candidate is."""
    better = {
        pair.mark: pair.comparison.difference
        for pair in report.pairs
        if pair.comparison is not None and pair.comparison.verdict == "better"
    }
    best = max(better, key=better.__getitem__, default="")
    return next((each for each in report.candidates if each.mark == best), None)


def print_report(report: TrialReport, *, is_full: bool) -> None:
    """Print the tasks (largest differences first), then the candidates, and each candidate against the baseline."""
    begun = [task for task in report.tasks if any(task.rollouts.values())]
    ordered = sorted(begun, key=lambda task: -_spread(task, report))
    shown = ordered if is_full else ordered[:LISTED]
    marks = [each.mark for each in report.candidates]
    columns = ("task", *marks, *(f"{mark} - {marks[0]}" for mark in marks[1:]), "what")
    print_table(columns, [_row(task, marks) for task in shown], whole=columns[:-1])
    if len(shown) < len(ordered):
        echo(f"… and {len(ordered) - len(shown)} more of smaller differences; --full shows them, and every answer")
    if len(begun) < len(report.tasks):
        echo(f"no rollout of {count_of(len(report.tasks) - len(begun), 'task')} has ended")
    for line in _failures(report):
        echo(line)
    if is_full:
        for task in shown:
            for line in _answers(task):
                echo(line)
    echo("")
    columns = ("", "version", "from", "mean", "rollouts", "failed", "no reward", "tokens", "seconds")
    print_table(
        columns, [_of_candidate(each) for each in report.candidates], whole=("version", "mean"), least=("from",)
    )
    for pair in report.pairs:
        echo(pair.words)


def _rollout(ran: Ran) -> TriedRollout:
    rollout, attempt = ran.episode.rollout, ran.episode.attempt
    is_good = rollout.status == "succeeded"
    return TriedRollout(
        rollout_id=rollout.rollout_id,
        status=rollout.status,
        reward=ran.episode.reward,
        tokens=sum(sum(tokens_of(span)) for span in ran.spans),
        seconds=max(0.0, attempt.finished_at - attempt.started_at) if attempt else 0.0,
        answer=_answer(ran),
        error="" if is_good else error_of(rollout, attempt),
    )


def _answer(ran: Ran) -> str:
    outputs = [span.attributes[semconv.OUTPUT] for span in ran.spans if semconv.OUTPUT in span.attributes]
    if outputs:
        return outputs[-1] if isinstance(outputs[-1], str) else to_json(outputs[-1]).decode()
    calls = [span.call for span in ran.spans if span.call is not None and span.call.dialect != "embeddings"]
    messages = call_messages(calls[-1]) if calls else []
    is_answered = bool(messages) and messages[-1].get("role") == "assistant"
    return "\n".join(text for _, text in labelled_texts(messages[-1])) if is_answered else ""


def _candidate(mark: str, version: str, origin: str, tasks: Sequence[TriedTask]) -> TriedCandidate:
    rollouts = [each for task in tasks for each in task.rollouts[mark]]
    scores = [each.score for each in rollouts if each.score is not None]
    return TriedCandidate(
        mark=mark,
        version=version,
        origin=origin,
        mean=fmean(scores) if scores else None,
        rollouts=len(rollouts),
        failed=sum(each.status != "succeeded" for each in rollouts),
        without_reward=len(rollouts) - len(scores),
        tokens=fmean(each.tokens for each in rollouts) if rollouts else None,
        seconds=fmean(each.seconds for each in rollouts) if rollouts else None,
    )


def _spread(task: TriedTask, report: TrialReport) -> float:
    means = [average for each in report.candidates if (average := task.mean(each.mark)) is not None]
    return max(means) - min(means) if len(means) > 1 else -1.0


def _row(task: TriedTask, marks: Sequence[str]) -> tuple[str, ...]:
    differences = (task.difference(mark, marks[0]) for mark in marks[1:])
    return (
        str(task.number),
        *(_cell(task, mark) for mark in marks),
        *("-" if each is None else f"{each:+.3f}" for each in differences),
        short(task.task),
    )


def _cell(task: TriedTask, mark: str) -> str:
    failed = sum(each.status != "succeeded" for each in task.rollouts[mark])
    found = task.mean(mark)
    value = "-" if found is None else f"{found:.3f}"
    return f"{value} ({failed} failed)" if failed else value


def _failures(report: TrialReport) -> Iterator[str]:
    """Describe each candidate's failed rollouts by error; errors that differ only in numbers count as one."""
    for mark in (each.mark for each in report.candidates):
        failed = [each for task in report.tasks for each in task.rollouts[mark] if each.error]
        kinds = Counter(kind_of(each.error) for each in failed)
        for kind, count in kinds.most_common(MOST_FREQUENT):
            first = next(each for each in failed if kind_of(each.error) == kind)
            yield f"failed with {mark}: {count_of(count, 'rollout')}, such as {first.rollout_id}: {first.error}"
        if more := len(failed) - sum(count for _, count in kinds.most_common(MOST_FREQUENT)):
            yield f"failed with {mark}: {count_of(more, 'rollout')} with other errors; --full shows them"


def _answers(task: TriedTask) -> Iterator[str]:
    yield f"task {task.number}: {to_json(task.task).decode()}"
    for mark, rollouts in task.rollouts.items():
        for each in rollouts:
            reward = "no reward" if each.score is None else f"reward {each.score:g}"
            yield f"  {mark}: {reward}, {each.rollout_id}"
            yield from (f"    {line}" for line in (each.error or each.answer or "(no answer)").splitlines())


def _of_candidate(each: TriedCandidate) -> tuple[str, ...]:
    return (
        *(each.mark, each.version, each.origin, "-" if each.mean is None else f"{each.mean:.3f}"),
        *(str(each.rollouts), str(each.failed), str(each.without_reward)),
        *(f"{each.tokens:.0f}" if each.tokens else "-", "-" if each.seconds is None else f"{each.seconds:.2f}"),
    )
