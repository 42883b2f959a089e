"""Collects rollouts: enqueues them, waits for the change feed, reads the spans, builds the episodes."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import (
    REPLAY,
    TRAINED_POLICIES,
    Collected,
    CounterfactualCredit,
    Credit,
    ForkPlan,
    Recording,
    RolloutQuery,
    Store,
)
from agl.errors import AglError, ConfigError, ConflictError, NotFoundError, RunError
from agl.schemas import TERMINAL_ROLLOUT, Episode, Json, Mode, RetryPolicy, Rollout
from agl_inspect.records.names import NAME, group_id_of, id_prefix, step_name
from agl_inspect.rollouts.step_tallies import Observed
from agl_inspect.rollouts.training import TrainingRecord, save_training
from agl_run.display.run_view import Tally
from agl_run.parts.counterfactual import Replays, as_fork
from agl_run.plan import Plan
from agl_run.run.greedy import as_greedy
from agl_run.run.group_rewards import with_group_rewards
from agl_run.run.running_experiment import RunningExperiment
from agl_run.run.training_episodes import (
    check_trainable,
    episode_of,
    nothing_left,
    read_episodes,
    read_finished,
    selection_of,
    training_reward,
    with_reward,
)
from agl_run.watch.observers import Batch, Observer

T = TypeVar("T")

GRACE_S = 90.0
"""Seconds allowed on top of the time limit, for starting an agent's process and stopping the agent."""

READ_BATCH = 64
"""Finished rollouts are read in batches of this size."""


class Collector:
    """Runs the agent on tasks for one algorithm, or for validation.

    Args:
        running: The running experiment.
        run: The number of the run.
        caller: Name of the algorithm or other part of the run; it becomes part of the rollouts' ids.
        algorithm: The algorithm whose agents and tuned policies decide which calls train; ``None`` selects all calls.
        observers: Watch the rollouts.
        tally: Counts the rollouts for a display.
        progress: Called with (done, total, text).
        credit: If it is a counterfactual credit, it prepares the training episodes with replays.
        log: Called with (step, metrics) to log the metrics of replays.
    """

    def __init__(
        self,
        running: RunningExperiment,
        *,
        run: int,
        caller: str,
        algorithm: AlgorithmConfig | None,
        observers: Sequence[Observer],
        tally: Tally,
        progress: Callable[[int, int, str], None],
        credit: Credit | None = None,
        log: Callable[[int, Mapping[str, float]], Awaitable[None]] | None = None,
    ) -> None:
        plan = running.plan
        self._running, self._plan, self._store, self._feed = running, plan, running.store, running.feed
        self._run, self._caller, self._algorithm = run, caller, algorithm
        self._observers, self._tally, self._progress = observers, tally, progress
        self._credit = credit if isinstance(credit, CounterfactualCredit) else None
        self._log = log
        self._selection = selection_of(plan, algorithm)
        self._tunes = algorithm.tunes if algorithm else ()
        self._trains: Mapping[str, Json] = {TRAINED_POLICIES: plan.policies_trained_on(algorithm)} if algorithm else {}
        self._needs_ids = algorithm is not None and plan.entry(algorithm).needs_token_ids

    async def __call__(
        self,
        tasks: Sequence[Json],
        *,
        step: int,
        n: int = 1,
        mode: Mode = "train",
        resources: Mapping[str, str] | None = None,
        key: str = "",
        keeps_all: bool = False,
        greedy: bool = False,
    ) -> Collected:
        """Collect rollouts of tasks; see :class:`agl.contracts.CollectFn`."""
        # A trial runs training rollouts too, and keeps those that training would drop.
        trains = mode == "train" and not keeps_all
        rollouts = await self._request(tasks, step=step, n=n, mode=mode, resources=resources, key=key)
        if greedy:
            _check_gateway(self._plan)
            rollouts = [as_greedy(rollout, self._tunes) for rollout in rollouts]
        # Two readings of the same clock, so that idle slots are measured over exactly this request.
        observed, slots = Observed(), self._running.worker.slots
        offered_before, taken_before = slots.totals()
        episodes = await self.run(rollouts, observed=observed, compares=mode == "train")
        offered_after, taken_after = slots.totals()
        # Validation counts every rollout: one that failed is a zero, and dropping it would flatter
        # the policy.
        kept, dropped = await self._select(episodes, step=step) if trains or greedy else (episodes, {})
        batch = Batch(
            caller=self._caller,
            algorithm=self._algorithm,
            step=step,
            mode=mode,
            trains=trains,
            episodes=episodes,
            kept=kept,
            observed=observed,
            slot_s=offered_after - offered_before,
            taken_s=taken_after - taken_before,
        )
        for observer in self._observers:
            observer.batch(batch)
        if trains and not greedy:
            kept = await self._prepare(episodes, kept, dropped, step=step, key=key)
        return Collected(episodes=tuple(kept), dropped=dropped)

    async def _request(
        self, tasks: Sequence[Json], *, step: int, n: int, mode: Mode, resources: Mapping[str, str] | None, key: str
    ) -> list[Rollout]:
        """Make a request's rollouts, pinned to the live versions.

        A request that repeats an interrupted one keeps the versions of the interrupted request.
        """
        if key and not NAME.fullmatch(key):
            raise ConfigError(f"the key {key!r} may hold letters, digits, '_' and '-' only, because it is part of ids")
        prefix = _prefix(step, key)
        # The request of a step that was interrupted keeps its versions, though other algorithms have gone on since.
        # The first rollout stands for the whole request: all of them are enqueued with the same
        # versions.
        before = await self._pinned(f"{self._ids(mode)}{prefix}{0:05d}-{0:03d}")
        # What the caller asks for wins over an earlier request, and that over the live versions.
        pinned = {**self._running.live.versions(), **(before or {}), **(resources or {})}
        return [
            self._rollout(task, (step, f"{prefix}{position:05d}-{sample:03d}"), mode, pinned)
            for position, task in enumerate(tasks)
            for sample in range(n)
        ]

    async def _prepare(
        self, episodes: Sequence[Episode], kept: Sequence[Episode], dropped: Mapping[str, int], *, step: int, key: str
    ) -> Sequence[Episode]:
        """Let the credit run its replays, and log their metrics; return the episodes to train on.

        Raises:
            RunError: No rollout is left to train on.
        """
        # A step without any rollout would pass unnoticed as one without a gradient.
        if episodes and not kept:
            raise RunError(nothing_left(episodes, dropped, store_url=self._running.store_url))
        if self._needs_ids:
            check_trainable(episodes)
        if self._credit is None:
            return kept
        # The ids are derived from the step, so a repeated step finds its replays and does not pay
        # again.
        prefix = f"{self._plan.name}-{self._run}-{self._caller}-{REPLAY}-{_prefix(step, key)}"
        replays = Replays(kept, prefix=prefix, run_all=self.run, store=self._store)
        prepared = list(await self._credit.prepare(kept, step=step, replay=replays))
        if replays.count and self._log is not None:
            await self._log(step, replays.metrics())
        return prepared

    def read_pictures(self, processor: str) -> None:
        """Select calls with pictures too, if ``processor`` made their tokens."""
        options = msgspec.structs.replace(self._selection.options, processor=processor)
        self._selection = msgspec.structs.replace(self._selection, options=options)

    async def read(self, rollouts: Sequence[Rollout]) -> tuple[list[Episode], dict[str, int]]:
        """Read finished rollouts that other algorithms collected.

        Returns the kept episodes, and the number of dropped episodes for each reason.
        """
        episodes = await read_episodes(self._store, [r.rollout_id for r in rollouts], selection=self._selection)
        batch = Batch(
            caller=self._caller, algorithm=self._algorithm, episodes=episodes, trains=True, is_own=False, kept=()
        )
        for observer in self._observers:
            observer.batch(batch)
        return await self._select(episodes, step=0)

    async def validated_versions(self, *, step: int) -> dict[str, str] | None:
        """Return the versions to which an earlier validation pinned its rollouts; ``None`` without such a validation.

        The live versions may have changed since then, but existing rollouts keep their pinned versions.
        """
        return await self._pinned(f"{self._ids('val')}{step_name(step)}-{0:05d}-{0:03d}")

    async def first_validation(self, count: int) -> tuple[Episode, ...]:
        """Return the episodes of the first validation, which ran each of ``count`` tasks once.

        The result is empty if the rollouts were removed.
        """
        ids = [f"{self._ids('val')}{step_name(0)}-{position:05d}-{0:03d}" for position in range(count)]
        try:
            return tuple(await read_episodes(self._store, ids, selection=self._selection))
        except NotFoundError:
            return ()

    async def _pinned(self, rollout_id: str) -> dict[str, str] | None:
        """Return the versions to which a rollout is pinned; ``None`` if the rollout does not exist."""
        try:
            found = await self._store.rollouts(RolloutQuery(ids=(rollout_id,)))
        except NotFoundError:
            return None
        return found[0].resources

    def episode(self, recording: Recording) -> Episode:
        """Build the episode of a finished rollout from the rewards and calls that the collector's algorithm uses."""
        return episode_of(recording, self._selection)

    def side_by_side(self, tasks: Sequence[Json], arms: Sequence[Mapping[str, str]], *, n: int) -> list[Rollout]:
        """Make ``n`` test rollouts of each task for each arm, to be passed to :meth:`run` together.

        An arm is a set of pinned versions. The arms alternate, and each comes first equally often, so that a server
        that becomes slower or worse affects all arms alike. The same sample of a task has the same seed in all arms.
        """
        live = self._running.live.versions()
        # Interleaved, not arm by arm: see the docstring for the drift that this cancels.
        pairs = [(task, position, sample) for position, task in enumerate(tasks) for sample in range(n)]
        found: list[Rollout] = []
        for number, (task, position, sample) in enumerate(pairs):
            seed = self._seed(f"test-{step_name(0)}-{position:05d}-{sample:03d}")
            for arm in (*range(number % len(arms), len(arms)), *range(number % len(arms))):
                # The arm is part of the id but not of the seed, because arms must differ only in
                # their versions.
                place = 0, f"{step_name(0)}-{position:05d}-{sample:03d}-{arm:02d}"
                rollout = self._rollout(task, place, "test", {**live, **arms[arm]})
                found.append(msgspec.structs.replace(rollout, metadata={**rollout.metadata, "seed": seed}))
        return found

    def forks(self, recorded: Rollout, plan: ForkPlan, *, n: int) -> list[Rollout]:
        """Make ``n`` forks of a recorded rollout, each with its own seed, to be passed to :meth:`run`."""
        found: list[Rollout] = []
        for sample in range(n):
            place = 0, f"{step_name(0)}-00000-{sample:03d}"
            rollout = self._rollout(recorded.task, place, "test", self._running.live.versions())
            rollout = msgspec.structs.replace(rollout, group_id=recorded.group_id)
            fork = msgspec.structs.replace(plan, sample=sample)
            found.append(as_fork(rollout, fork, of=recorded, metadata=rollout.metadata))
        return found

    def _rollout(self, task: Json, place: tuple[int, str], mode: Any, pinned: dict[str, str]) -> Rollout:
        section, runner = self._plan.config.experiment, self._plan.config.runner
        step, position = place
        return Rollout(
            # The id is the key of idempotence: enqueueing the same request again returns the stored
            # rollouts.
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
            metadata={
                "algorithm": self._caller,
                "step": step,
                "seed": self._seed(f"{mode}-{position}"),
                **(self._trains if mode == "train" else {}),
            },
        )

    def _ids(self, mode: Any) -> str:
        """Return the prefix of the ids of this caller's rollouts in the given mode."""
        return id_prefix(self._plan.config.experiment.name, self._run, self._caller, mode)

    def _seed(self, place: str) -> int:
        """Return the seed of a rollout; it depends on the experiment's seed, but not on the experiment's name."""
        # The experiment's name is left out on purpose: two settings under two names are asked the
        # same draws.
        words = f"{self._plan.config.experiment.seed}/{self._caller}/{place}"
        # 48 bits, which JSON and every store carry exactly.
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=6).digest())

    async def run(
        self, rollouts: Sequence[Rollout], *, observed: Observed | None = None, compares: bool = False
    ) -> list[Episode]:
        """Enqueue rollouts, wait for all of them, and return their episodes in the given order.

        If given, ``observed`` adds up the seconds, tokens and errors of the rollouts' calls. With ``compares``, the
        rewards that compare rollouts of one task are added.
        """
        ids = [rollout.rollout_id for rollout in rollouts]
        episodes: dict[str, Episode] = {}
        rewards = self._running.group_rewards if compares else ()
        waiting: list[Recording] = []
        # The watch begins before the rollouts exist, so that one which ends at once is seen.
        with self._counted(ids), self._feed.watch(ids, on_change=self._count) as watched:
            # A repeated request finds rollouts that finished before; the feed has no change for
            # these.
            for rollout in await self._enqueue(rollouts):
                if rollout.is_finished:
                    watched.changed(rollout.rollout_id, rollout.status)
            # Batches keep the number of requests low for fast agents, and the last batch is as
            # small as it happens to be.
            while taken := await self._unless_broken(watched.take(READ_BATCH)):
                # The worker in this process has just read these spans to judge them, which saves a
                # second read.
                cached = {rollout_id: self._feed.take_cached(rollout_id) for rollout_id in taken}
                found = await read_finished(self._store, taken, cached=cached)
                for recording in found:
                    for observer in self._observers:
                        observer.rollout(self._caller, recording)
                    if observed is not None:
                        observed.add(recording)
                    if rewards:
                        waiting.append(recording)
                    else:
                        episodes[recording.rollout.rollout_id] = episode_of(recording, self._selection)
        for recording in await with_group_rewards(self._store, rewards, waiting):
            episodes[recording.rollout.rollout_id] = episode_of(recording, self._selection)
        # In the order of the request: algorithms zip episodes with tasks.
        return [episodes[rollout_id] for rollout_id in ids]

    async def _enqueue(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Enqueue rollouts; raises :class:`ConfigError` if the store has different rollouts under the same ids."""
        try:
            return await self._store.enqueue(rollouts)
        except ConflictError as error:
            # The store reports only that an id is taken, so the rollout that differs is searched
            # for here.
            for rollout in rollouts:
                if differing := await self._differing(rollout):
                    raise ConfigError(
                        f"a step that was interrupted asked for the rollout {rollout.rollout_id} with other "
                        f"{differing}, and the step goes on with the rollouts that it had. Change that back until the "
                        "step is done, or start anew with --fresh"
                    ) from error
            raise

    async def _differing(self, rollout: Rollout) -> str:
        """Name the settings in which a rollout differs from the stored rollout of the same id; ``""`` if in none."""
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
        """Return the result of ``waiting``; raises the worker's error if the worker fails first."""
        # Without this a worker that gave up would leave its waiters waiting forever.
        failure, task = self._running.worker.failure, asyncio.create_task(waiting)
        if failure is None:
            raise AglError("the worker is not running")
        try:
            await asyncio.wait({task, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done() and not task.done():
                # Raises the worker's error here, where a person reads it.
                failure.result()
            return await task
        finally:
            task.cancel()

    @contextmanager
    def _counted(self, rollout_ids: Sequence[str]) -> Generator[None]:
        """Count the rollouts of a request during the block, and show the joint progress of all running requests."""
        self._tally.ask(rollout_ids)
        self._progress(self._tally.done, self._tally.asked, "")
        try:
            yield
        finally:
            # A cancelled request must not be displayed as running forever.
            self._tally.drop(rollout_ids)

    def _count(self, rollout_id: str, status: str) -> None:
        self._tally.note(rollout_id, status)
        if status in TERMINAL_ROLLOUT:
            self._progress(self._tally.done, self._tally.asked, "")

    async def _select(self, episodes: Sequence[Episode], *, step: int) -> tuple[list[Episode], dict[str, int]]:
        """Return the kept episodes, and the number of dropped episodes for each reason.

        The reasons are also stored, for ``agl why``.
        """
        kept: list[Episode] = []
        dropped: dict[str, str] = {}
        rewards = [e.reward for e in episodes if e.rollout.status == "succeeded" and e.reward is not None]
        lowest = min(rewards, default=None)
        for episode in episodes:
            reward, reason = training_reward(episode, self._plan.config.experiment, lowest=lowest)
            if reward is None:
                dropped[episode.rollout.rollout_id] = reason
            else:
                kept.append(with_reward(episode, reward))
        # Only algorithms on weights have rows whose absence ``agl why`` explains.
        if dropped and self._needs_ids:
            await save_training(self._store, {name: self._left_out(why, step) for name, why in dropped.items()})
        return kept, dict(Counter(dropped.values()))

    def _left_out(self, reason: str, step: int) -> TrainingRecord:
        name = self._plan.name
        return TrainingRecord(experiment=name, run=self._run, algorithm=self._caller, step=step, note=reason)


def _prefix(step: int, key: str) -> str:
    return f"{step_name(step)}-{key}-" if key else f"{step_name(step)}-"


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
