"""Contracts of training: rewards, credit, runners, algorithms and the context that an algorithm receives."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from agl.contracts._serving import Policy
from agl.contracts._store import Store
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
        """Rewards of one finished attempt; ``None`` for no opinion. May be a coroutine function."""
        ...


@dataclass(frozen=True, kw_only=True)
class RewardSetup:
    """Given to a reward emitter besides its parameters, if its entry says ``takes_setup``.

    Attributes:
        folder: The base of relative paths in the experiment.
        policies: The experiment's model servers by name, at their own addresses: a call to one is not recorded as
            an agent's. They have no endpoint while an experiment is only checked.
        build: Makes another reward emitter from its name, or ``module:attribute``, and its parameters.
    """

    folder: Path
    policies: Mapping[str, LLM]
    build: Callable[[str, Mapping[str, Any]], RewardEmitter]


class Credit(Protocol):
    """Turns the rewards of a group of episodes into a number for every call that is not rejected."""

    def assign(self, group: Sequence[Episode]) -> Sequence[Sequence[CallCredit]]:
        """One list per episode, in order; episodes of one group share a task. Pure and deterministic."""
        ...


class Runner(Protocol):
    """Executes attempts. The worker loop around it claims, renews leases and writes outcomes."""

    async def start(self) -> None:
        """Acquire the resources that attempts share, such as a pool of processes."""

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt to its end; never raises for the agent's failures. Cancelling it stops the agent."""
        ...

    async def stop(self) -> None:
        """Stop running attempts and release everything; idempotent."""


class CallUse(Record, frozen=True, kw_only=True):
    """The use that a step made of one recorded call, for ``agl why``.

    Attributes:
        span_id: The model call's span.
        row: The call's branch in its episode, whose row the step trained on; -1 if it did not train on the call.
        credit: The number that the credit assignment gave the call, ``None`` for none.
        advantage: The advantage after the estimator, averaged over the call's tokens; ``None`` for an algorithm
            without advantages.
        note: The reason why the call did not train, or a remark; ``""`` if there is nothing to say.
        tokens: Numbers of the R tokens that the call sampled, by name, each as packed little-endian float16, [R]:
            ``entropy`` of the policy before the token in nats, and ``advantage`` where the tokens differ in it; NaN for
            tokens without one. The driver does not read them;
            ``agl_inspect.rollouts.training.token_values`` unpacks them.
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
        step: From 1; equals the number of steps done, over restarts too.
        is_finished: Nothing is left to do.
        metrics: Numbers to log at this step.
        trained: Ids of the rollouts that the update consumed; the driver refuses one that it was given before.
        published: ``name@version`` of resources that the step published.
        stop_reason: The reason why it finished, in words; ``""`` while it has not.
        uses: The use of every call of the rollouts that the step looked at, by rollout id. The driver stores them for
            ``agl why``; observers get the report without them.
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
    """Finished rollouts of one request, in its order: groups are contiguous.

    Attributes:
        episodes: All of them, failed ones included: look at ``rollout.status``, ``reward`` and ``rows``.
        dropped: Number that the experiment's policies for failed rollouts and missing rewards removed, per reason.
    """

    episodes: tuple[Episode, ...] = ()
    dropped: dict[str, int] = {}

    def groups(self) -> list[list[Episode]]:
        """The episodes by group id, in order of first appearance."""
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
        """Run every task ``n`` times as one group each.

        Rollout ids follow from (experiment, algorithm, step, mode, key, position), so that a step repeated after a
        crash finds the rollouts that it had already paid for.

        Args:
            tasks: The tasks to run.
            step: The step that collects.
            n: Rollouts per task.
            mode: The purpose of the rollouts.
            resources: Versions to pin by name; other resources use their live version.
            key: Separates requests of one step and mode, which may then run at once; letters, digits, ``_``, ``-``.
            keeps_all: Return failed and unrewarded training rollouts as they are, instead of applying the
                experiment's policies for them; validation and test rollouts always come as they are.
            greedy: Have the tuned policies answer at temperature 0, whatever the agent asks; for rollouts of mode
                ``test``, to which the experiment's policies for failed and unrewarded ones are then applied.
        """
        ...


class Recorded(Record, frozen=True, kw_only=True):
    """Finished training rollouts that other algorithms or experiments collected.

    Those of other algorithms of the run are in order of their ids, those of other experiments in the order in which
    they finished.

    A rollout's ``metadata`` name its collector (``algorithm`` and ``step``), its ``resources`` the versions it used.

    Attributes:
        episodes: The rollouts that the experiment's policies for failed rollouts and missing rewards keep.
        dropped: Number of rollouts left out per reason; ``stale`` for those older than ``max_age``.
        steps: The last finished step of every source, or the position in the feed of another experiment, for the next
            request's ``after``.
        is_over: No source will take another step; other experiments have no further finished rollouts.
    """

    episodes: tuple[Episode, ...] = ()
    dropped: dict[str, int] = {}
    steps: dict[str, int] = {}
    is_over: bool = False

    def groups(self) -> list[list[Episode]]:
        """The episodes by collecting algorithm, step and group id, in order of first appearance."""
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
    """Reads the rollouts of the algorithms named in ``source``, so that another learns from them."""

    # In versions and not in seconds: importance weights drift with the number of updates, however
    # long they take.
    async def __call__(self, *, after: Mapping[str, int] | None = None, max_age: int | None = None) -> Recorded:
        """The rollouts of the sources' finished steps above ``after``, a step by source.

        With the schedule ``concurrent`` it waits until there is such a step or no source takes another one; where
        algorithms take turns it returns at once.

        Args:
            after: ``steps`` of the previous answer; ``None`` to read from the beginning.
            max_age: Staleness: how many versions of a tuned resource may have followed the one that a rollout
                ran with; ``None`` for any number.
        """
        ...


class PublishFn(Protocol):
    """Publishes a new version of a resource that the algorithm tunes and makes it live."""

    async def __call__(
        self, name: str, resource: Resource, *, step: int, metadata: Mapping[str, Json] | None = None
    ) -> ResourceVersion:
        """Publish; returns once new rollouts get this version and, for weights, the policy serves it.

        The version is ``<experiment>-<run>-<algorithm>-<step>``. Refuses a name that the algorithm does not tune.
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
        """Store the version and return it; ``collect(resources={name: version})`` can pin it.

        The version is ``<experiment>-<run>-<algorithm>-<step>-<key>``, and its metadata say ``candidate: true``.
        The same content again is harmless. Refuses a name that the algorithm does not tune.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AlgorithmContext:
    """Everything that an algorithm may use; immutable.

    Attributes:
        experiment: The experiment's name.
        name: This algorithm's name, unique within the experiment.
        tunes: Names of the resources that it tunes.
        train: Training tasks; ``val`` validation tasks.
        validation: Number of the first validation tasks that the driver itself runs before the first step, and again
            after the last one.
        validated: Returns the episodes of the first of these passes, in order of the tasks; ``()`` before it.
        seed: The experiment's seed; derive random state from (seed, step, purpose), keep none in globals.
        workdir: This algorithm's directory for checkpoints; exists.
        folder: The base of relative paths in the experiment.
        store: The experiment's store.
        credit: The configured credit assignment.
        collect: See :class:`CollectFn`.
        sources: Names of the algorithms whose rollouts it learns from; ``()`` for its own.
        recorded: See :class:`RecordedFn`; refuses without ``sources``.
        publish: See :class:`PublishFn`.
        propose: See :class:`ProposeFn`.
        kept: Returns the steps of this algorithm whose published files and saved states must stay on disk, because the
            experiment may go back to them; for those that prune old ones.
        defer: ``defer(save)`` in ``setup`` lets steps wait to be saved, so that a step need not write its checkpoint;
            ``None`` where each step must have written all that ``state()`` names before it returns. The driver then
            calls ``await save(must)`` after steps and before it releases the algorithm. It returns true once everything
            is written, false if that may wait, which it may not with ``must``, or if a step that was interrupted has
            changed what would be written. Steps that are not saved are repeated after a crash, with the rollouts that
            they had collected; no file of a version that they published may be needed to serve it.
        agents: Regular expression over the names of agents whose calls train, and ``""`` for all: calls of the others
            are rejected as ``not_selected``, also where they share a policy that is tuned.
        live: Name and live version of every resource, tuned or not.
        endpoint: The address of a policy of the experiment by name, for algorithms that call a model themselves.
        current: The live version of a resource by name.
        policy: The running policy by name.
        progress: ``progress(done, total, text)``: drives this algorithm's progress bar within a step.
        say: Shows the user one line, such as the planned number of rollouts.
        clock: Unix seconds.
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
    # None is the safe default: each step then writes all that its state names before it returns.
    defer: Callable[[Callable[[bool], Awaitable[bool]]], None] | None = None
    agents: str = ""


class Algorithm(Protocol):
    """Tunes resources in resumable steps. Construct it with its parameters only; they are typed and checked.

    The driver calls ``setup``, then ``restore`` when there is a saved state, then ``step`` until it is finished,
    and saves ``state()`` after every step. Kill the process anywhere: at most the step in flight is repeated.
    """

    async def setup(self, context: AlgorithmContext) -> None:
        """Check everything that can be checked before the first rollout; raise :class:`~agl.errors.ConfigError`."""

    async def step(self) -> StepReport:
        """Do one step: collect, update, publish. Must be repeatable from the state before it."""
        ...

    def state(self) -> Mapping[str, Json]:
        """The state that ``restore`` needs: JSON, with paths of checkpoint files that are already complete."""
        ...

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from ``state()``; weights and optimiser included."""

    async def close(self) -> None:
        """Release memory and threads; idempotent."""


@runtime_checkable
class CheckedAlgorithm(Algorithm, Protocol):
    """An algorithm that can check its needs while another one still has its turn.

    Where algorithms follow each other, a later one is set up when its turn comes. The check finds before the first
    rollout what would fail then.
    """

    async def check(self, context: AlgorithmContext) -> None:
        """Raise the :class:`~agl.errors.ConfigError` that ``setup`` would raise, as far as that is known by now.

        Called on an object that is not set up and is closed afterwards. Takes little memory and shows nothing to the
        user; the resources that it tunes may have other versions when its turn comes.
        """


@runtime_checkable
class ExtendableAlgorithm(Algorithm, Protocol):
    """An algorithm that can continue beyond its last step when its parameters allow more steps.

    Steps taken in two sessions have the same effect as the same number in one. Where they cannot, such as with a
    learning rate that falls over the steps, the algorithm's documentation describes the difference.
    """

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """True if steps are left after those of ``state``, the last state of a run that had finished.

        Called on an object that is not set up. A run that continues is set up and restored from that state as usual.

        Args:
            state: The value of :meth:`Algorithm.state` after the last step.
            tasks: Number of training tasks.
            sources_go_on: Whether an algorithm that this one learns from takes further steps.
        """
        ...


@runtime_checkable
class ReversibleAlgorithm(Algorithm, Protocol):
    """An algorithm that can continue from an earlier state when training has lost what it had learned.

    One without this stops instead; see ``on_collapse`` of the experiment file.
    """

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from an earlier :meth:`Algorithm.state` with smaller steps; the next step keeps its number.

        Steps are counted on, and no rollout of the steps in between is trained again. The versions that were live at
        ``state`` are live again when this is called, and :meth:`Algorithm.state` describes the result afterwards.

        Args:
            state: A state whose step is in ``kept`` of the context; empty for the one before the first step.
            rate: Factor of the configured learning rate, or of another size of the steps, from now on; below 1.
        """
