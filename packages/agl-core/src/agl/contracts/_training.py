"""Contracts of training: rewards, credit, runners, algorithms and the context of an algorithm."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from agl.contracts._serving import Policy
from agl.contracts._store import Recording, Store
from agl.errors import ConfigError
from agl.schemas import (
    LLM,
    CallCredit,
    Claim,
    Episode,
    Json,
    Outcome,
    Record,
    Resource,
    ResourceVersion,
    Reward,
    Rollout,
    Span,
)


class RewardEmitter(Protocol):
    """Computes rewards from recorded spans; sees the task's hidden fields."""

    def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Sequence[Reward] | Reward | float | None:
        """Return the rewards of one finished attempt, or ``None`` for no opinion. May be a coroutine function."""
        ...


@runtime_checkable
class GroupRewardEmitter(RewardEmitter, Protocol):
    """A reward emitter that also compares training rollouts of one task; the process that trains calls it."""

    async def compare(self, group: Sequence[Recording]) -> Sequence[Reward]:
        """Return one reward for each rollout, in order; a reward without a value says why in its feedback.

        Called once for each group, of at least two rollouts of one request that have succeeded, after the request's
        last rollout has finished. The rewards are stored as late rewards of these rollouts, so a step that is repeated
        after a crash finds them. An exception ends the run.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RewardSetup:
    """The ``setup`` argument of a reward emitter's factory, if its entry has ``takes_setup``.

    Attributes:
        folder: The base of relative paths in the experiment.
        policies: The experiment's model servers by name, at their own addresses, so that a reward's calls are not
            recorded as calls of the agent. While an experiment is only checked, they have no endpoint.
        build: Builds another reward emitter from its name, or ``module:attribute``, and its parameters.
    """

    folder: Path
    policies: Mapping[str, LLM]
    build: Callable[[str, Mapping[str, Any]], RewardEmitter]


class Credit(Protocol):
    """Turns the rewards of a group of episodes into a number for every call that is not rejected."""

    def assign(self, group: Sequence[Episode]) -> Sequence[Sequence[CallCredit]]:
        """Return one list of credits per episode, in order.

        The episodes share a task. The function is pure and deterministic.
        """
        ...


class Runner(Protocol):
    """Executes attempts. The worker's loop claims them, renews their leases and writes their outcomes."""

    async def start(self) -> None:
        """Acquire the resources that attempts share, such as a pool of processes."""

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt to its end; failures of the agent are in the outcome. Cancelling the call stops the agent."""
        ...

    async def stop(self) -> None:
        """Stop all running attempts and release the shared resources; idempotent."""


class CallUse(Record, frozen=True, kw_only=True):
    """How a step used one recorded call; shown by ``agl why``.

    Attributes:
        span_id: The model call's span.
        row: Number of the call's branch in its episode, if the step trained on that branch's row; -1 if the step did
            not train on the call.
        credit: The credit that the call was assigned; ``None`` if it got none.
        advantage: The advantage from the estimator, averaged over the call's tokens; ``None`` for an algorithm
            without advantages.
        note: The reason why the call did not train, or a remark; may be ``""``.
        tokens: Arrays with one value for each of the R tokens that the call sampled, by name, as packed little-endian
            float16, [R]. ``entropy`` is the policy's entropy before the token, in nats. ``advantage`` is present if the
            advantages of the tokens differ. NaN marks tokens without a value.
            ``agl_inspect.rollouts.training.token_values`` unpacks the arrays.
    """

    span_id: str
    # -1 and not None, because the record is stored once per call and step, and integers pack
    # smallest.
    row: int = -1
    credit: float | None = None
    advantage: float | None = None
    note: str = ""
    # Packed, and half precision: a step of 512 rollouts with 2,000 tokens each would otherwise
    # store megabytes of numbers that people look at one call at a time.
    tokens: dict[str, bytes] = {}


class StepReport(Record, frozen=True, kw_only=True):
    """The report of one step of an algorithm.

    Attributes:
        step: Number of steps done so far, including this one and those before a restart.
        is_finished: Whether the algorithm has finished.
        metrics: Numbers to log at this step.
        trained: Ids of the rollouts that the step trained on; the driver refuses an id that an earlier step reported.
        published: ``name@version`` of the resources that the step published.
        stop_reason: The reason why the algorithm finished, as text; ``""`` until it has.
        uses: How the step used the calls of each rollout that it examined, by rollout id. The driver stores this for
            ``agl why`` and removes it from the reports that observers get.
    """

    step: int
    is_finished: bool = False
    metrics: dict[str, float] = {}
    trained: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    stop_reason: str = ""
    # Left out for observers: a webhook that sends every report would send megabytes.
    uses: dict[str, tuple[CallUse, ...]] = {}


class Collected(Record, frozen=True, kw_only=True):
    """The finished rollouts of one request, in the order of its tasks; each group is contiguous.

    Attributes:
        episodes: The rollouts as episodes. Some may have failed: look at ``rollout.status``, ``reward`` and ``rows``.
        dropped: Number of rollouts that were removed by the experiment's settings for failed rollouts and missing
            rewards, by reason.
    """

    episodes: tuple[Episode, ...] = ()
    dropped: dict[str, int] = {}

    def groups(self) -> list[list[Episode]]:
        """The episodes as one list per group, in order of first appearance."""
        return _grouped(self.episodes, lambda of: of.group_id)


class CollectFn(Protocol):
    """Runs the agent on tasks and returns the finished rollouts."""

    async def __call__(
        self,
        tasks: Sequence[Json],
        *,
        step: int,
        n: int = 1,
        mode: Literal["train", "val", "test"] = "train",
        resources: Mapping[str, str] | None = None,
        # Without a key, two requests of one step and mode would name the same rollouts.
        key: str = "",
        keeps_all: bool = False,
        greedy: bool = False,
    ) -> Collected:
        """Run every task ``n`` times; the rollouts of one task form a group.

        Rollout ids follow from (experiment, algorithm, step, mode, key, position), so a step that is repeated after a
        crash finds the rollouts that it has already paid for.

        Args:
            tasks: The tasks to run.
            step: The step that collects.
            n: Rollouts per task.
            mode: The purpose of the rollouts.
            resources: Versions to pin, by the resource's name; other resources use their live version.
            key: Distinguishes several requests of one step and mode, which may run concurrently; letters, digits,
                ``_`` and ``-``.
            keeps_all: Return failed and unrewarded training rollouts too, instead of applying the experiment's settings
                for them. Validation and test rollouts are always returned.
            greedy: Let the tuned policies answer at temperature 0, whatever the agent requests. Only for rollouts of
                mode ``test``; the experiment's settings for failed and unrewarded rollouts are then applied.
        """
        ...


class Recorded(Record, frozen=True, kw_only=True):
    """Finished training rollouts that other algorithms or experiments collected.

    Rollouts of the run's other algorithms are sorted by id; rollouts of other experiments are in the order in which
    they finished. A rollout's ``metadata`` name the ``algorithm`` and ``step`` that collected it, and its ``resources``
    name the versions that it used.

    Attributes:
        episodes: The rollouts that the experiment's settings for failed rollouts and missing rewards keep.
        dropped: Number of rollouts that were left out, by reason; ``stale`` for those older than ``max_age``.
        steps: The last finished step of every source or, for another experiment, the position in the change feed. Pass
            it as ``after`` in the next request.
        is_over: Whether no more rollouts will come: no source will take another step, and other experiments have no
            further finished rollouts.
    """

    episodes: tuple[Episode, ...] = ()
    dropped: dict[str, int] = {}
    steps: dict[str, int] = {}
    is_over: bool = False

    def groups(self) -> list[list[Episode]]:
        """The episodes as one list per collecting algorithm, step and group, in order of first appearance."""
        return _grouped(
            self.episodes, lambda of: (str(of.metadata.get("algorithm")), str(of.metadata.get("step")), of.group_id)
        )


# Not itertools.groupby: groups need not be contiguous in the rollouts of several sources.
def _grouped(episodes: Sequence[Episode], key: Callable[[Rollout], object]) -> list[list[Episode]]:
    groups: dict[object, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(key(episode.rollout), []).append(episode)
    return list(groups.values())


class RecordedFn(Protocol):
    """Reads the rollouts of the algorithms and experiments named in the setting ``source``."""

    # The age is in versions and not in seconds: importance weights drift with the number of
    # updates, however long these take.
    async def __call__(self, *, after: Mapping[str, int] | None = None, max_age: int | None = None) -> Recorded:
        """Return the rollouts of the steps that the sources finished after ``after``.

        With the schedule ``concurrent`` it waits until a source finishes such a step, or no source takes another one.
        With other schedules it returns at once.

        Args:
            after: ``steps`` of the previous answer; ``None`` to read from the beginning.
            max_age: Largest staleness: the number of versions of a tuned resource that may have been published after
                the one that a rollout ran with; ``None`` for no limit.
        """
        ...


class PublishFn(Protocol):
    """Publishes a new version of a resource that the algorithm tunes and makes it live."""

    async def __call__(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None = None
    ) -> ResourceVersion:
        """Publish a version; returns once new rollouts get it and, for weights, the policy serves it.

        The version is called ``<experiment>-<run>-<algorithm>-<step>``. A resource that the algorithm does not tune is
        refused.
        """
        ...


class ProposeFn(Protocol):
    """Stores a new version of a resource that the algorithm tunes, without making it live."""

    async def __call__(
        self,
        name: str,
        resource: Resource,
        *,
        step: int,
        key: str,
        parent: str = "",
        metadata: Mapping[str, Json] | None = None,
    ) -> ResourceVersion:
        """Store a version and return it; ``collect(resources={name: version})`` pins it.

        The version is called ``<experiment>-<run>-<algorithm>-<step>-<key>`` and has ``candidate: true`` in its
        metadata. Repeating the call with the same content is harmless. A resource that the algorithm does not tune is
        refused.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """Everything that an algorithm may use; immutable.

    Attributes:
        experiment: The experiment's name.
        name: This algorithm's name, unique within the experiment.
        tunes: Names of the resources that the algorithm tunes.
        train: Training tasks.
        val: Validation tasks.
        validation: Number of validation tasks, from the first on, that the driver itself runs before the first step and
            again after the last one.
        validated: Returns the episodes of the driver's validation before the first step, in order of the tasks; ``()``
            until then.
        seed: The experiment's seed. Derive random state from (seed, step, purpose), and keep none in globals.
        workdir: This algorithm's existing directory for checkpoints.
        folder: The base of relative paths in the experiment.
        store: The experiment's store.
        credit: The configured credit assignment.
        collect: See :class:`CollectFn`.
        sources: Names of the algorithms from whose rollouts this one learns; ``()`` if it collects its own.
        recorded: See :class:`RecordedFn`; raises without ``sources``.
        publish: See :class:`PublishFn`.
        propose: See :class:`ProposeFn`.
        kept: Returns the steps of this algorithm whose published files and saved states must stay on disk, because the
            experiment may go back to them. Algorithms that prune old files need it.
        defer: ``None`` if each step must write every file that ``state()`` names before it returns. Otherwise ``setup``
            may call ``defer(save)``, and steps need not write a checkpoint: the driver calls ``await save(must)`` after
            steps and before it releases the algorithm. ``save`` returns true once everything is written. It returns
            false if writing may wait, which is not allowed with ``must``, or if an interrupted step has changed the
            state to write. Unsaved steps are repeated after a crash, with the rollouts that they had collected, so
            serving a version that such a step published must not need any file.
        reads: Names the processor of the pictures that the algorithm can train on, before it collects. Calls with
            pictures of another processor are rejected as ``non_token_input``; all of them, if it is never called.
        agents: Regular expression for the names of agents whose calls train; ``""`` for all. Calls of other agents are
            rejected as ``not_selected``, even if they use a tuned policy.
        live: Returns the live version of every resource, tuned or not, by the resource's name.
        endpoint: Returns the address of a policy, by its name, for algorithms that call a model themselves.
        current: Returns the live version of a resource, by its name.
        policy: Returns the running policy of that name.
        progress: ``progress(done, total, text)`` updates this algorithm's progress bar within a step.
        say: Shows the user one line after the algorithm's name, such as the planned number of rollouts.
        clock: Returns the time in Unix seconds.
    """

    experiment: str
    name: str
    tunes: tuple[str, ...]
    train: Sequence[Json]
    val: Sequence[Json]
    validation: int
    validated: Callable[[], Sequence[Episode]]
    seed: int
    workdir: Path
    folder: Path
    store: Store
    credit: Credit
    collect: CollectFn
    sources: tuple[str, ...]
    recorded: RecordedFn
    publish: PublishFn
    propose: ProposeFn
    live: Callable[[], Mapping[str, str]]
    endpoint: Callable[[str], LLM]
    current: Callable[[str], ResourceVersion]
    policy: Callable[[str], Policy]
    progress: Callable[[int, int, str], None]
    say: Callable[[str], None]
    clock: Callable[[], float]
    # Asked anew each time, because rolling back or resuming changes which steps are needed.
    kept: Callable[[], frozenset[int]] = frozenset
    # None is the safe default: each step then writes every file that its state names.
    defer: Callable[[Callable[[bool], Awaitable[bool]]], None] | None = None
    reads: Callable[[str], None] = lambda _: None
    agents: str = ""


class Algorithm(Protocol):
    """Tunes resources in resumable steps. The constructor takes only the algorithm's typed, checked parameters.

    The driver calls ``setup``, then ``restore`` if there is a saved state, then ``step`` until the algorithm has
    finished, and saves ``state()`` after every step. If the process is killed, at most the step in flight is repeated.
    """

    def __new__(cls, *args: Any, **params: Any) -> Self:
        """Create an object of a subclass; raises ConfigError for ``agl.Algorithm("apo")``, which is a likely guess."""
        if cls is Algorithm:
            name = repr(args[0]) if args else "'grpo'"
            raise ConfigError(
                "agl.Algorithm is the contract that an algorithm's class fulfils. To use an algorithm by its name, "
                f"write agl.Trainer(algorithm={name}), or import agl.algorithms and pass its settings: "
                f'agl.Trainer(algorithm=agl.algorithms.algorithm({name}, tunes="...", ...)).'
            )
        return super().__new__(cls)

    async def setup(self, context: AlgorithmContext) -> None:
        """Prepare for steps, and check everything that can be checked without a rollout.

        Raises:
            ConfigError: A check failed.
        """

    async def step(self) -> StepReport:
        """Take one step: collect, update, publish. It must be repeatable from the state before the step."""
        ...

    def state(self) -> Mapping[str, Json]:
        """Return the JSON state that ``restore`` needs; checkpoint files that the state names must be complete."""
        ...

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Restore a state that ``state()`` returned, including weights and optimiser."""

    async def close(self) -> None:
        """Release memory and threads; idempotent."""


@runtime_checkable
class CheckedAlgorithm(Algorithm, Protocol):
    """An algorithm that can check its requirements before its turn comes.

    With the schedule ``sequential``, a later algorithm is set up only when its turn comes. The check finds errors of
    that later setup before the first rollout of the run.
    """

    async def check(self, context: AlgorithmContext) -> None:
        """Raise the :class:`~agl.errors.ConfigError` that ``setup`` would raise, as far as it can be foreseen.

        Called on an object that is not set up, and that is closed afterwards. The check must use little memory and show
        nothing to the user. The resources that the algorithm tunes may have other versions when its turn comes.
        """


@runtime_checkable
class ExtendableAlgorithm(Algorithm, Protocol):
    """An algorithm that can continue after its last step if its parameters now allow more steps.

    Steps that are taken in two sessions should have the same effect as the same number of steps in one session. If that
    is impossible, such as with a learning rate that falls over the steps, the algorithm documents the difference.
    """

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if further steps follow ``state``, the last state of a finished run.

        Called on an object that is not set up. If the run continues, it is set up and restored from ``state`` as usual.

        Args:
            state: The value of :meth:`Algorithm.state` after the last step.
            tasks: Number of training tasks.
            sources_go_on: Whether an algorithm from which this one learns will take further steps.
        """
        ...


@runtime_checkable
class ReversibleAlgorithm(Algorithm, Protocol):
    """An algorithm that can continue from an earlier state after a collapse.

    An algorithm without this method stops instead; see ``on_collapse`` of the experiment file.
    """

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from an earlier :meth:`Algorithm.state` with a smaller learning rate.

        The number of steps is not reset, and no rollout of the steps since ``state`` is trained on again. The versions
        that were live at ``state`` are already live again when this is called. Afterwards :meth:`Algorithm.state`
        describes the result.

        Args:
            state: A state whose step is in ``kept`` of the context; empty for the state before the first step.
            rate: Factor below 1 by which to multiply the configured learning rate, or another step size, from now on.
        """
