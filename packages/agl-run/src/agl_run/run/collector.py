"""Collects rollouts: enqueues them, waits for the change feed, reads the spans, builds the episodes."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import (
    REPLAY,
    Collected,
    CounterfactualCredit,
    Credit,
    ForkPlan,
    Recording,
    RolloutQuery,
    SpanChoice,
    Store,
)
from agl.episodes import EpisodeOptions, ScoreOptions, build_episode
from agl.errors import ConfigError, ConflictError, MissingTokenIdsError, NotFoundError, RunError
from agl.schemas import TERMINAL_ROLLOUT, Episode, Json, Record, RetryPolicy, Rollout, Span
from agl.stores import read_recordings
from agl_inspect.records import NAME, group_id_of, id_prefix, step_name
from agl_inspect.rollouts import Observed, StepTallies, TrainingRecord, save_training
from agl_inspect.stores import proposal
from agl_run.config.records import ExperimentSection
from agl_run.display.run_view import RunView
from agl_run.parts.counterfactual import Replays, as_fork
from agl_run.plan import Plan
from agl_run.run.greedy import as_greedy
from agl_run.watch.agent_patterns import AgentPatternCheck, PatternReport
from agl_run.watch.agreement import UNATTRIBUTED, UNSEEN, AgreementPolicy, describe
from agl_run.watch.failures import Ended, FailureReport, RolloutCounts
from agl_run.watch.sampling import SamplingReport
from agl_run.watch.step_shares import StepShares

T = TypeVar("T")

WAIT_S = 20.0
"""Longest single wait for the change feed, in seconds; every change ends the wait early."""

PAUSE_S = 0.005
"""Seconds between two reads of the change feed, so that one read brings the changes of several rollouts."""

GRACE_S = 90.0
"""Seconds that a worker may take to start an agent's process and to stop an agent after its time limit."""

READ_BATCH = 64
"""Finished rollouts that are read in one batch."""


class WatchedRollouts:
    """The rollouts of one request, handed out as they finish."""

    def __init__(self, rollout_ids: Iterable[str], *, on_change: Callable[[str, str], None]) -> None:
        self._open = set(rollout_ids)
        self._finished: list[str] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._on_change = on_change

    def changed(self, rollout_id: str, status: str) -> None:
        """Note a rollout's status; a terminal one finishes it, once."""
        if rollout_id not in self._open:
            return
        if status in TERMINAL_ROLLOUT:
            self._open.remove(rollout_id)
            self._finished.append(rollout_id)
            self._news.set()
        self._on_change(rollout_id, status)

    def fail(self, error: Exception) -> None:
        """End all waits with ``error``."""
        self._error = error
        self._news.set()

    async def take(self, count: int) -> list[str]:
        """Return newly finished rollouts, once there are ``count`` or all are finished; empty at the end."""
        while self._error is None and self._open and len(self._finished) < count:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        taken, self._finished = self._finished, []
        return taken


class FinishFeed:
    """Wakes waiters through one shared reader of the change feed, and caches spans that a worker has just read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._requests: dict[str, WatchedRollouts] = {}
        self._kept: dict[str, tuple[str, list[Span]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> "FinishFeed":
        """Start reading at the end of the feed."""
        self._reader = asyncio.create_task(self._read(await self._store.cursor()))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    @contextmanager
    def watch(
        self, rollout_ids: Sequence[str], *, on_change: Callable[[str, str], None] = lambda rollout_id, status: None
    ) -> Generator[WatchedRollouts]:
        """Watch rollouts; must begin before they are enqueued. Raises the error that ended the reader, if one did.

        ``on_change`` is called with a rollout's id and its new status, with a terminal one once.
        """
        if self._error is not None:
            raise self._error
        request = WatchedRollouts(rollout_ids, on_change=on_change)
        self._requests |= dict.fromkeys(rollout_ids, request)
        try:
            yield request
        finally:
            for rollout_id in rollout_ids:
                self._requests.pop(rollout_id, None)
                self._kept.pop(rollout_id, None)

    def keep(self, rollout_id: str, attempt_id: str, spans: list[Span]) -> None:
        """Cache the spans of an ending attempt if its rollout is watched."""
        if rollout_id in self._requests:
            self._kept[rollout_id] = (attempt_id, spans)

    def kept(self, rollout_id: str) -> tuple[str, list[Span]] | None:
        """Remove and return the cached attempt id and spans of a rollout, ``None`` if there are none."""
        return self._kept.pop(rollout_id, None)

    async def _read(self, cursor: int) -> None:
        try:
            while True:
                for change in await self._store.changes(after=cursor, wait_s=WAIT_S):
                    cursor = change.cursor
                    if change.kind == "rollout" and change.key in self._requests:
                        self._requests[change.key].changed(change.key, change.status)
                await asyncio.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001  # raised in every present and later wait
            self._error = error
            for request in set(self._requests.values()):
                request.fail(error)


@dataclass(frozen=True, kw_only=True)
class RunReports:
    """The reports on a run's rollouts, shared by all its collectors.

    Attributes:
        failures: Counts the rollouts that failed.
        agreement: Reports the model calls that are missing from the records.
        sampling: Counts the training calls that ask for less than the policy's full distribution.
        patterns: Reports names of agents that matched none.
        view: Keeps the run's numbers for a display.
        steps: Adds up the rollouts of steps.
        shares: Measures of steps what algorithms do not see.
        store_url: Where the rollouts are stored, for the commands in messages.
    """

    failures: FailureReport
    agreement: AgreementPolicy
    sampling: SamplingReport
    patterns: PatternReport
    view: RunView
    steps: StepTallies
    shares: StepShares
    store_url: str = ""


class Collector:
    """Runs the agent on tasks for one algorithm, or for validation.

    Args:
        plan: The experiment.
        run: Number of the fresh start.
        caller: Name of the algorithm, or of another caller; part of the rollouts' ids.
        store: Where rollouts are queued.
        feed: Signals finished rollouts.
        live: Returns the live versions, to which rollouts are pinned.
        progress: Called with (done, total, text).
        algorithm: Selects the agents and the policy whose calls train; ``None`` selects all.
        failure: Completes with the worker's error when the worker fails.
        reports: The reports on the run's rollouts.
        credit: Prepares training episodes if it is a counterfactual one.
        log: Called with (step, metrics) of the replays.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        run: int,
        caller: str,
        store: Store,
        feed: FinishFeed,
        live: Callable[[], Mapping[str, str]],
        progress: Callable[[int, int, str], None],
        algorithm: AlgorithmConfig | None,
        failure: "asyncio.Future[None]",
        reports: RunReports,
        credit: Credit | None = None,
        log: Callable[[int, Mapping[str, float]], Awaitable[None]] | None = None,
    ) -> None:
        self._plan = plan
        self._run = run
        self._caller = caller
        self._store = store
        self._feed = feed
        self._live = live
        self._progress = progress
        self._failure = failure
        self._failures = reports.failures
        self._agreement = reports.agreement
        self._sampling = reports.sampling
        self._steps = reports.steps
        self._shares = reports.shares
        self._store_url = reports.store_url
        self._credit = credit if isinstance(credit, CounterfactualCredit) else None
        self._log = log
        self._tally = reports.view.tally(caller)
        self._shown = reports.view.algorithms.get(caller)
        self._selection = selection_of(plan, algorithm)
        self._tunes = algorithm.tunes if algorithm else ()
        self._names = AgentPatternCheck(plan, algorithm, report=reports.patterns)
        self._needs_ids = algorithm is not None and plan.entry(algorithm).needs_token_ids

    async def __call__(
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
        """See :class:`agl.contracts.CollectFn`."""
        if key and not NAME.fullmatch(key):
            raise ConfigError(f"the key {key!r} may hold letters, digits, '_' and '-' only, for it is part of ids")
        prefix = f"{step_name(step)}-{key}-" if key else f"{step_name(step)}-"
        # The request of a step that was interrupted keeps its versions, though other algorithms have gone on since.
        before = await self._pinned(f"{self._ids(mode)}{prefix}{0:05d}-{0:03d}")
        pinned = {**self._live(), **(before or {}), **(resources or {})}
        rollouts = [
            self._rollout(task, (step, f"{prefix}{position:05d}-{sample:03d}"), mode, pinned)
            for position, task in enumerate(tasks)
            for sample in range(n)
        ]
        if greedy:
            _check_gateway(self._plan)
            rollouts = [as_greedy(rollout, self._tunes) for rollout in rollouts]
        observed = Observed()
        with self._shares.collecting(self._caller):
            episodes = await self.run(rollouts, observed=observed)
        self._shares.add(self._caller, episodes)
        self._steps.add(self._caller, episodes, observed, step=step, mode=mode)
        self._failures.add(_ended(episodes), is_validation=mode == "val")
        trains = mode == "train" and not keeps_all
        if mode != "val":
            self._names.check(episodes, trains=trains)
        self._agreement.report(episodes, trains=trains)
        if greedy:
            found, left_out = await self._apply_policies(episodes, step=step)
            return Collected(episodes=tuple(found), dropped=left_out)
        if not trains:
            return Collected(episodes=tuple(episodes))
        kept, dropped = await self._apply_policies(episodes, step=step)
        if self._shown is not None:
            self._shown.collected(kept)
        if episodes and not kept:
            raise RunError(_nothing_left(episodes, dropped, store_url=self._store_url))
        if self._needs_ids:
            _check_trainable(episodes)
        if self._credit is not None:
            kept = await self._prepare(self._credit, kept, step=step, key=key)
        return Collected(episodes=tuple(kept), dropped=dropped)

    async def _prepare(
        self, credit: CounterfactualCredit, episodes: Sequence[Episode], *, step: int, key: str
    ) -> list[Episode]:
        """Let the credit run its replays, and log their metrics."""
        place = f"{step_name(step)}-{key}-" if key else f"{step_name(step)}-"
        prefix = f"{self._plan.name}-{self._run}-{self._caller}-{REPLAY}-{place}"
        replays = Replays(episodes, prefix=prefix, run_all=self.run, store=self._store)
        prepared = list(await credit.prepare(episodes, step=step, replay=replays))
        if replays.count and self._log is not None:
            await self._log(step, replays.metrics())
        return prepared

    async def read(self, rollouts: Sequence[Rollout]) -> tuple[list[Episode], dict[str, int]]:
        """Read the episodes of finished rollouts that other algorithms collected; counts the dropped ones by reason."""
        episodes = await read_episodes(self._store, [r.rollout_id for r in rollouts], selection=self._selection)
        self._names.check(episodes, trains=False)
        self._agreement.report(episodes, trains=True)
        return await self._apply_policies(episodes, step=0)

    async def pinned_before(self, *, step: int, mode: Literal["train", "val", "test"]) -> dict[str, str] | None:
        """Return the versions to which an earlier, equal request pinned its rollouts, ``None`` without one.

        The live versions may have changed since; an existing rollout keeps its pinned versions.
        """
        return await self._pinned(f"{self._ids(mode)}{step_name(step)}-{0:05d}-{0:03d}")

    async def collected_before(
        self, count: int, *, step: int, mode: Literal["train", "val", "test"]
    ) -> tuple[Episode, ...]:
        """Return the episodes of an earlier request with one rollout for each of ``count`` tasks.

        Empty if its rollouts were removed.
        """
        ids = [f"{self._ids(mode)}{step_name(step)}-{position:05d}-{0:03d}" for position in range(count)]
        try:
            return tuple(await read_episodes(self._store, ids, selection=self._selection))
        except NotFoundError:
            return ()

    async def _pinned(self, rollout_id: str) -> dict[str, str] | None:
        """Return the versions to which a rollout is pinned, ``None`` if there is no such rollout."""
        try:
            found = await self._store.rollouts(RolloutQuery(ids=(rollout_id,)))
        except NotFoundError:
            return None
        return found[0].resources

    def episode(self, recording: Recording) -> Episode:
        """Build the episode of a finished rollout, with the rewards and calls that count here."""
        return episode_of(recording, self._selection)

    def side_by_side(
        self, tasks: Sequence[Json], arms: Sequence[Mapping[str, str]], *, n: int, mode: Literal["train", "val", "test"]
    ) -> list[Rollout]:
        """Make ``n`` rollouts of each task for each of several sets of pinned versions, to be :meth:`run` together.

        The arms take turns, and each begins as often as the others, so that a server that gets slower or worse
        meanwhile does so for all of them. The samples of one number have the same seed in all arms.
        """
        live = self._live()
        pairs = [(task, position, sample) for position, task in enumerate(tasks) for sample in range(n)]
        found: list[Rollout] = []
        for number, (task, position, sample) in enumerate(pairs):
            seed = self._seed(f"{mode}-{step_name(0)}-{position:05d}-{sample:03d}")
            for arm in (*range(number % len(arms), len(arms)), *range(number % len(arms))):
                place = 0, f"{step_name(0)}-{position:05d}-{sample:03d}-{arm:02d}"
                rollout = self._rollout(task, place, mode, {**live, **arms[arm]})
                found.append(msgspec.structs.replace(rollout, metadata={**rollout.metadata, "seed": seed}))
        return found

    def forks(self, recorded: Rollout, plan: ForkPlan, *, n: int) -> list[Rollout]:
        """Make ``n`` rollouts that fork a recorded one by a plan, with draws of their own, to be :meth:`run`."""
        found: list[Rollout] = []
        for sample in range(n):
            place = 0, f"{step_name(0)}-00000-{sample:03d}"
            rollout = self._rollout(recorded.task, place, "test", {**self._live()})
            rollout = msgspec.structs.replace(rollout, group_id=recorded.group_id)
            fork = msgspec.structs.replace(plan, sample=sample)
            found.append(as_fork(rollout, fork, of=recorded, metadata=rollout.metadata))
        return found

    def _rollout(self, task: Json, place: tuple[int, str], mode: Any, pinned: dict[str, str]) -> Rollout:
        section, runner = self._plan.config.experiment, self._plan.config.runner
        step, position = place
        return Rollout(
            rollout_id=f"{self._ids(mode)}{position}",
            task=task,
            experiment=section.name,
            group_id=group_id_of(task, section.group_key),
            mode=mode,
            resources=pinned,
            retry=RetryPolicy(
                max_attempts=runner.max_attempts,
                max_losses=runner.max_losses,
                timeout_s=runner.timeout_s,
                grace_s=GRACE_S,
                retry_on=runner.retry_on,
            ),
            hidden=section.hidden,
            metadata={"algorithm": self._caller, "step": step, "seed": self._seed(f"{mode}-{position}")},
        )

    def _ids(self, mode: Any) -> str:
        """Return the beginning of the ids of rollouts."""
        return id_prefix(self._plan.config.experiment.name, self._run, self._caller, mode)

    def _seed(self, place: str) -> int:
        """Return the seed of a rollout's draws: the same in every run with the experiment's seed, under any name."""
        words = f"{self._plan.config.experiment.seed}/{self._caller}/{place}"
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest())

    async def run(self, rollouts: Sequence[Rollout], *, observed: Observed | None = None) -> list[Episode]:
        """Enqueue rollouts, wait for all of them, and return their episodes in the given order.

        ``observed`` looks at the recordings of all.
        """
        ids = [rollout.rollout_id for rollout in rollouts]
        episodes: dict[str, Episode] = {}
        with self._counted(ids), self._feed.watch(ids, on_change=self._count) as watched:
            for rollout in await self._enqueue(rollouts):
                if rollout.is_finished:
                    watched.changed(rollout.rollout_id, rollout.status)
            while taken := await self._unless_broken(watched.take(READ_BATCH)):
                kept = {rollout_id: self._feed.kept(rollout_id) for rollout_id in taken}
                found = await read_finished(self._store, taken, kept=kept)
                for recording in found:
                    self._sampling.add(self._caller, recording.spans)
                    if observed is not None:
                        observed.add(recording)
                    episodes[recording.rollout.rollout_id] = episode_of(recording, self._selection)
        return [episodes[rollout_id] for rollout_id in ids]

    async def _enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Enqueue rollouts; raises ConfigError if a step that was interrupted asked for others under their ids."""
        try:
            return await self._store.enqueue(rollouts)
        except ConflictError as error:
            for rollout in rollouts:
                if differing := await self._differing(rollout):
                    raise ConfigError(
                        f"a step that was interrupted asked for the rollout {rollout.rollout_id} with other "
                        f"{differing}, and the step goes on with the rollouts that it had. Change that back until the "
                        "step is done, or start anew with --fresh"
                    ) from error
            raise

    async def _differing(self, rollout: Rollout) -> str:
        """Return the settings in which a rollout differs from the stored one of its id, ``""`` for none."""
        try:
            (stored,) = await self._store.rollouts(RolloutQuery(ids=(rollout.rollout_id,)))
        except NotFoundError:
            return ""
        if stored.task != rollout.task:
            return "tasks"
        names = {"hidden": "`hidden`", "group_id": "`group_key`", "resources": "versions of its resources"}
        differing = [words for name, words in names.items() if getattr(stored, name) != getattr(rollout, name)]
        return " and ".join(differing)

    async def _unless_broken(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Await ``waiting``; raises the worker's error if the worker fails first."""
        task = asyncio.create_task(waiting)
        try:
            await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done() and not task.done():
                self._failure.result()
            return await task
        finally:
            task.cancel()

    @contextmanager
    def _counted(self, rollout_ids: Sequence[str]) -> Generator[None]:
        """Count the rollouts of a request while it lasts, and show the joint progress of all running requests."""
        self._tally.ask(rollout_ids)
        self._progress(self._tally.done, self._tally.asked, "")
        try:
            yield
        finally:
            self._tally.drop(rollout_ids)

    def _count(self, rollout_id: str, status: str) -> None:
        self._tally.note(rollout_id, status)
        if status in TERMINAL_ROLLOUT:
            self._progress(self._tally.done, self._tally.asked, "")

    async def _apply_policies(self, episodes: Sequence[Episode], *, step: int) -> tuple[list[Episode], dict[str, int]]:
        """Return the episodes that are kept and the number of others by reason; keeps the reasons for ``agl why``."""
        kept: list[Episode] = []
        dropped: dict[str, str] = {}
        for episode in episodes:
            reward, reason = training_reward(episode, self._plan.config.experiment, self._agreement)
            if reward is None:
                dropped[episode.rollout.rollout_id] = reason
            else:
                kept.append(_with_reward(episode, reward))
        if dropped and self._needs_ids:
            await save_training(self._store, {name: self._left_out(why, step) for name, why in dropped.items()})
        return kept, dict(Counter(dropped.values()))

    def _left_out(self, reason: str, step: int) -> TrainingRecord:
        name = self._plan.name
        return TrainingRecord(experiment=name, run=self._run, algorithm=self._caller, step=step, note=reason)


def training_reward(
    episode: Episode, section: ExperimentSection, agreement: AgreementPolicy
) -> tuple[float | None, str]:
    """Return the reward with which a rollout trains, or ``None`` and the reason for which it is left out."""
    is_failed = episode.rollout.status != "succeeded"
    refusal = agreement.refusal(episode)
    if refusal:
        return None, refusal
    if not is_failed and episode.reward is not None:
        return episode.reward, ""
    if (section.failed if is_failed else section.missing_reward) == "penalise":
        return section.penalty, ""
    return None, f"{episode.rollout.status}" if is_failed else "no reward"


class EpisodeSelection(Record, frozen=True, kw_only=True):
    """The selection of the calls that train and the rewards that count.

    Attributes:
        agents: Regular expression over agent names; ``None`` for all.
        policy: The policy whose calls train; ``None`` for any.
        options: How the episode is built.
    """

    agents: str | None = None
    policy: str | None = None
    options: EpisodeOptions = EpisodeOptions()


def score_options(section: ExperimentSection) -> ScoreOptions:
    """Return the selection of the rewards that train."""
    return ScoreOptions(weights=section.reward_weights, trust_agent=section.trust_agent_rewards)


def selection_of(plan: Plan, algorithm: AlgorithmConfig | None) -> EpisodeSelection:
    """Return the calls and rewards that count for an algorithm; all calls for ``None``."""
    section = plan.config.experiment
    score = score_options(section)
    agreement = AgreementPolicy(section)
    policies = [name for name in algorithm.tunes if name in plan.config.policy] if algorithm else []
    return EpisodeSelection(
        agents=(algorithm.agents or None) if algorithm else None,
        policy=policies[0] if len(policies) == 1 else None,
        options=EpisodeOptions(
            score=score, unseen=agreement.verdict(UNSEEN), unattributed=agreement.verdict(UNATTRIBUTED)
        ),
    )


async def read_episodes(store: Store, rollout_ids: Sequence[str], *, selection: EpisodeSelection) -> list[Episode]:
    """Read the episodes of finished rollouts in the given order; ``selection`` chooses calls and rewards."""
    return [episode_of(recording, selection) for recording in await read_finished(store, rollout_ids)]


async def read_finished(
    store: Store, rollout_ids: Sequence[str], *, kept: Mapping[str, tuple[str, list[Span]] | None] | None = None
) -> list[Recording]:
    """Read finished rollouts with the spans that decided them in the given order, with as few requests as possible.

    Args:
        store: The store that has them.
        rollout_ids: Distinct ids.
        kept: Attempt id and spans by rollout, where they are known already.
    """
    known = {rollout_id: found for rollout_id in rollout_ids if (found := (kept or {}).get(rollout_id)) is not None}
    recordings = await _recordings(store, list(known), spans="none")
    for recording in recordings.values():
        attempt_id, spans = known[recording.rollout.rollout_id]
        if recording.rollout.attempt_id == attempt_id:  # another attempt may have decided the rollout
            recordings[recording.rollout.rollout_id] = msgspec.structs.replace(recording, spans=spans)
        else:
            del known[recording.rollout.rollout_id]
    recordings |= await _recordings(store, [each for each in rollout_ids if each not in known], spans="deciding")
    return [recordings[rollout_id] for rollout_id in rollout_ids]


async def _recordings(store: Store, rollout_ids: Sequence[str], *, spans: SpanChoice) -> dict[str, Recording]:
    query = RolloutQuery(ids=tuple(rollout_ids), limit=len(rollout_ids))
    found = [recording async for recording in read_recordings(store, query, spans=spans)] if rollout_ids else []
    return {recording.rollout.rollout_id: recording for recording in found}


def episode_of(recording: Recording, selection: EpisodeSelection) -> Episode:
    """Build the episode of a finished rollout from the spans of its deciding attempt."""
    rollout = recording.rollout
    deciding = [attempt for attempt in recording.attempts if attempt.attempt_id == rollout.attempt_id]
    return build_episode(
        rollout,
        deciding[0] if deciding else None,
        recording.spans,
        agent_match=selection.agents,
        policy=selection.policy,
        options=selection.options,
    )


async def cancel_unfinished(store: Store, experiment: str) -> None:
    """Cancel the queued and running rollouts of a stopped run, so that a fresh start does not pay for them."""
    after = ""
    while True:
        query = RolloutQuery(experiment=experiment, status=("queued", "running"), after=after)
        page = await store.rollouts(query)
        if not page:
            return
        after = page[-1].rollout_id
        await store.cancel([rollout.rollout_id for rollout in page])


def _check_gateway(plan: Plan) -> None:
    if plan.config.gateway.use == "none":
        raise ConfigError(
            "the algorithm asks for greedy rollouts, and only the gateway gives their calls temperature 0; remove "
            '[gateway] use = "none", or use an algorithm without them'
        )


def _with_reward(episode: Episode, reward: float) -> Episode:
    return episode if episode.reward == reward else msgspec.structs.replace(episode, reward=reward)


def _nothing_left(episodes: Sequence[Episode], dropped: Mapping[str, int], *, store_url: str) -> str:
    first = episodes[0]
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    errors = RolloutCounts(_ended(episodes))
    why = f"The errors: {errors.errors}" if errors.failed else _without_reward(episodes)
    disagreed = next((kind for kind in (UNSEEN, UNATTRIBUTED) if kind in dropped), "")
    if disagreed:
        why = f"There are {describe(episodes, disagreed)}"
    look = proposal("Look at one with", "show", errors.example or first.rollout.rollout_id, store_url=store_url)
    return f"none of {len(episodes)} rollouts can be used: {counts}. {why}.{look}"


def _without_reward(episodes: Iterable[Episode]) -> str:
    names = sorted({name for episode in episodes for reward in episode.rewards for name in reward.dimensions})
    if not names:
        return "No reward was returned, emitted or computed"
    return (
        f"Their rewards are the dimensions {', '.join(names)} without a value; give one: "
        "agl.Reward(value=..., dimensions=...), agl.emit_reward(..., primary=NAME), or reward_weights of [experiment]"
    )


def _check_trainable(episodes: Sequence[Episode]) -> None:
    """Raise when no call of any episode can be trained on for lack of token ids."""
    calls = [transition for episode in episodes for transition in episode.transitions]
    missing = [call for call in calls if call.reject == "missing_token_ids"]
    if missing and len(missing) == len([call for call in calls if call.reject != "not_selected"]):
        raise MissingTokenIdsError(
            f"the backend returned no token ids for any of {len(missing)} calls ({missing[0].detail}); training on "
            "tokens needs them. Serve the model with agl's torch policy, vLLM or SGLang, which return them when asked"
        )


def _ended(episodes: Iterable[Episode]) -> list[Ended]:
    return [(episode.rollout, episode.attempt) for episode in episodes]
