"""The worker: claims rollouts, passes them to a runner, renews their leases, and writes their outcomes.

A worker has one runner, which alone decides how an attempt is run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from agl.contracts import Runner
from agl.episodes import find_disagreement
from agl.errors import FencedError, GatewayLostError, NoModelCallsError, NotFoundError, StoreError
from agl.schemas import Claim, Outcome, Rollout, Span, decode, encode, new_trace_id
from agl.stores import all_spans
from agl.tracing import make_reward_span
from agl_inspect.presence import worker_name
from agl_run.runners.judging import judged
from agl_run.runners.repeats import RepeatedWarnings
from agl_run.runners.result import describe_error
from agl_run.runners.setup import LastingRunner, LostError, RunContext
from agl_run.runners.storable import UNFIT, storable_outcome
from agl_run.tracers.module_tracer import cache_advice
from agl_run.worker.slots import Slots, adapt

_LOG = logging.getLogger("agl_run.runners")

LEASE_S = 30.0
"""Seconds after which a silent worker's attempt is lost; the worker renews the lease three times in this time."""

CLAIM_WAIT_S = 20.0
"""Longest time in seconds that the store holds a claim open; a new rollout is returned at once."""

GIVE_BACK_S = 5.0
"""Longest time in seconds that a stopping worker waits for the answer to its last claim."""


def _ignore(*_: object) -> None:
    """Do nothing."""


class Worker:
    """Runs attempts until it is stopped: ``async with Worker(context, runner):``.

    Args:
        context: The context of the run.
        runner: Executes attempts; started and stopped by the worker.
        finished: Called with every rollout that reaches its final status in this worker.
        is_adaptive: Whether the number of agents at once follows the load of the model servers; see :func:`adapt`.
        cache: Called with rollout id, attempt id and spans of an attempt whose spans were read to judge it; code that
            waits for the rollout need not read them again.

    Attributes:
        slots: Counts the running agents.
        failure: A future that gets the error with which the worker gave up; ``None`` before the start.
    """

    def __init__(
        self,
        context: RunContext,
        runner: Runner,
        *,
        is_adaptive: bool = False,
        finished: Callable[[Rollout], None] = _ignore,
        cache: Callable[[str, str, list[Span]], None] = _ignore,
    ) -> None:
        self._context, self._runner, self._finished, self._cache = context, runner, finished, cache
        self._is_adaptive, self._name = is_adaptive, worker_name()
        self._lasting = runner if isinstance(runner, LastingRunner) else None
        self._running: dict[str, asyncio.Task[None]] = {}
        self.slots = Slots(context.concurrency, is_adaptive=is_adaptive)
        self._is_careful = False
        self._free = asyncio.Event()
        self._warnings = RepeatedWarnings()
        self._loops: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[None] | None = None

    async def __aenter__(self) -> "Worker":
        """Start the runner and begin to claim."""
        # The runner starts before the first claim, so that an agent which cannot be imported costs
        # no attempt.
        await self._runner.start()
        # A future, not an exception of the loops below, because waiters for rollouts wait for both
        # at once.
        self.failure = asyncio.get_running_loop().create_future()
        self._loops = [self._spawn(self._claim_loop), self._spawn(self._renew_loop)]
        if self._is_adaptive:
            work = partial(adapt, self.slots, self._context.upstreams, changed=self._free.set)
            self._loops.append(self._spawn(work))
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop claiming, give unfinished attempts back to the queue, and stop the runner."""
        # Claiming stops before attempts are given back; otherwise this worker would claim them
        # again.
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        # A copy, because every task removes itself when it ends.
        running = list(self._running.items())
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        # Last: attempts that were cancelled still need it to clean up.
        await self._runner.stop()
        self._warnings.conclude()
        if self.failure is not None and not self.failure.cancel() and not self.failure.cancelled():
            self.failure.exception()  # retrieved, so that asyncio does not log it again

    @property
    def held(self) -> int:
        """The number of attempts that this worker holds."""
        return len(self._running)

    def _spawn(self, work: Callable[[], Awaitable[None]]) -> "asyncio.Task[None]":
        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  # raised for the waiters of rollouts
                self.fail(error)

        return asyncio.create_task(guarded())

    def fail(self, error: BaseException) -> None:
        """Set an error on ``failure``, which waiters for rollouts observe; calls after the first have no effect."""
        if self.failure is not None and not self.failure.done():
            self.failure.set_exception(error)

    async def _claim_loop(self) -> None:
        while True:
            # Capacity first: a claim that nothing can run would only hold a lease.
            claims = await self._claim(limit=await self._wait_for_capacity())
            # A suspect may end the whole process, so it runs alone; the state of the previous claim
            # decides whether this worker was ready for one.
            was_careful, self._is_careful = self._is_careful, any(_is_suspect(claim.rollout) for claim in claims)
            for claim in claims:
                self._launch(claim, is_declined=_is_suspect(claim.rollout) and not was_careful)

    async def _claim(self, *, limit: int) -> list[Claim]:
        """Wait for rollouts and claim them; when cancelled, give back rollouts that the store may have handed out."""
        claim = partial(
            self._context.store.claim,
            worker=self._name,
            lease_s=LEASE_S,
            experiment=self._context.experiment,
            # The same id in a repeated claim returns the same rollouts, so an answer that was lost
            # is not a lost rollout.
            claim_id=new_trace_id(),
        )
        try:
            return await claim(limit=limit, wait_s=CLAIM_WAIT_S)
        except asyncio.CancelledError:
            # Best effort while stopping: a rollout that is not given back returns to the queue when
            # its lease ends.
            with suppress(StoreError, TimeoutError):  # the leases lapse
                async with asyncio.timeout(GIVE_BACK_S):
                    for taken in await claim(limit=1):
                        await self._give_back(taken)
            raise

    async def _wait_for_capacity(self) -> int:
        """Return how many attempts may start now; with a suspect rollout, wait until nothing else runs and return 1."""
        # The suspect starts once nothing is left that it could take down.
        while self._is_careful and self._running:
            await asyncio.wait(list(self._running.values()))
        # The loop is needed: an attempt may start between the event and this check.
        while not self._is_careful and self.slots.free <= 0:
            self._free.clear()
            await self._free.wait()
        return 1 if self._is_careful else self.slots.free

    def _launch(self, claim: Claim, *, is_declined: bool) -> None:
        key = claim.attempt.attempt_id
        if not is_declined:
            self.slots.take()
        # A declined suspect keeps its place in the table, so that its lease is renewed until it is
        # given back.
        task = asyncio.create_task(self._decline(claim) if is_declined else self._run(claim))
        self._running[key] = task
        task.add_done_callback(lambda ended: self._ended(key, ended))

    async def _decline(self, claim: Claim) -> None:
        """Give back a suspect rollout, to be claimed again when nothing else runs."""
        try:
            await self._give_back(claim)
        except asyncio.CancelledError:
            await self._give_back(claim)
            raise

    def _ended(self, key: str, task: "asyncio.Task[None]") -> None:
        """Remove an ended attempt's task; if the outcome could not be written, the worker fails."""
        self._running.pop(key, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    async def _renew_loop(self) -> None:
        while True:
            # Two renewals may fail before a lease lapses.
            await asyncio.sleep(LEASE_S / 3)
            held = list(self._running)
            if not held:
                continue
            kept = set(await self._renew(held))
            for attempt_id in held:
                task = self._running.get(attempt_id)
                # Another worker has it by now; two agents on one attempt would mix their spans.
                if attempt_id not in kept and task is not None:
                    _LOG.info("attempt %s was taken from this worker; stopping it", attempt_id)
                    task.cancel()

    async def _renew(self, held: Sequence[str]) -> list[str]:
        """Renew the attempts' leases, and return the attempts that still belong to this worker.

        Attempts that were removed from the store are left out.
        """
        try:
            # One request for all leases, which is what keeps hundreds of attempts cheap.
            return await self._context.store.renew(held, lease_s=LEASE_S)
        except NotFoundError:
            # The store refuses the whole request for one removed attempt, so it is found by asking
            # one by one.
            if len(held) == 1:
                return []
        return [kept for own in await asyncio.gather(*(self._renew([each]) for each in held)) for kept in own]

    async def _run(self, claim: Claim) -> None:
        try:
            outcome = await self._outcome(claim)
        except asyncio.CancelledError:
            await self._release(claim, None)
            await self._give_back(claim)
            raise
        # Not the agent's fault, so the attempt is repeated and counts among the losses.
        except (GatewayLostError, LostError) as error:
            _LOG.info("attempt %s is given back: %s", claim.attempt.attempt_id, error)
            await self._release(claim, None)
            await self._give_back(claim, error)
            return
        await self._release(claim, outcome)
        await self._finish(outcome)

    async def _outcome(self, claim: Claim) -> Outcome:
        """Run an attempt and judge it; errors are raised only if the attempt must be given back."""
        context = self._context
        # What is reported if even the runner raises.
        outcome = Outcome(attempt_id=claim.attempt.attempt_id, status="failed")
        try:
            outcome = await self._execute(claim)
            if context.gateway is not None:
                # The gateway stores calls after it has answered them; an earlier outcome would lack
                # the last rows.
                await context.gateway.settle(claim.attempt.attempt_id)
            return await self._judge(claim.rollout, outcome)
        except (GatewayLostError, LostError):
            raise
        except Exception as error:  # noqa: BLE001  # the attempt boundary: what breaks here harms one attempt only
            self._warnings.add(claim.attempt.attempt_id, error)
            return msgspec.structs.replace(outcome, status="failed", error=describe_error(error))

    async def _release(self, claim: Claim, outcome: Outcome | None) -> None:
        """Let the runner remove what it kept for the rewards; an error is logged and changes nothing."""
        if self._lasting is None:
            return
        try:
            await self._lasting.release(claim, outcome)
        except Exception as error:  # noqa: BLE001  # the attempt boundary: its outcome is decided already
            self._warnings.add(claim.attempt.attempt_id, error)

    async def _execute(self, claim: Claim) -> Outcome:
        """Run the agent, and free its slot as soon as the agent has ended."""
        try:
            return await self._runner.execute(claim)
        finally:
            # Freed before the outcome is judged and written, so that slow rewards do not idle a
            # slot.
            self.slots.leave()
            self._free.set()

    async def _finish(self, outcome: Outcome) -> None:
        try:
            rollouts = await self._write(outcome)
        # Another worker has taken the attempt over, or a person removed the rollout: there is
        # nothing to report.
        except (FencedError, NotFoundError) as error:
            _LOG.info("the outcome of attempt %s is dropped: %s", outcome.attempt_id, error)
            return
        for rollout in rollouts:
            if rollout.is_finished:
                self._finished(rollout)

    async def _write(self, outcome: Outcome) -> list[Rollout]:
        """Write an outcome; if the store refuses its contents, write a failure in its place."""
        try:
            return await self._context.store.finish([outcome])
        except (FencedError, NotFoundError):
            raise
        except (StoreError, *UNFIT) as error:
            # An odd value of one agent must not end a run of thousands of rollouts.
            fitting = storable_outcome(outcome, error)
            # Nothing in the outcome is at fault, so the store is; that ends the worker.
            if fitting is None:
                raise
            self._warnings.add(outcome.attempt_id, error)
        return await self._context.store.finish([fitting])

    async def _give_back(self, claim: Claim, error: Exception | None = None) -> None:
        described = None if error is None else describe_error(error)
        try:
            await self._context.store.finish(
                [Outcome(attempt_id=claim.attempt.attempt_id, status="lost", error=described)]
            )
        except StoreError as error:
            _LOG.debug("attempt %s was not given back: %s", claim.attempt.attempt_id, error)

    async def _judge(self, rollout: Rollout, outcome: Outcome) -> Outcome:
        """Add the emitters' rewards to a success; if calls are required and there are none, return a failure."""
        context = self._context
        # Reading the spans costs a request per attempt, which most experiments without rewards
        # never need.
        if outcome.status != "succeeded" or not (context.rewards or context.requires_calls):
            return outcome
        recorded = await all_spans(context.store, rollout.rollout_id, outcome.attempt_id)
        # Emitters see the attempt as the store will have it, although its last spans are not
        # written yet.
        spans = [*recorded, *outcome.spans]
        if context.requires_calls and not any(span.call is not None for span in spans):
            error = describe_error(NoModelCallsError(_no_calls(spans, outcome.attempt_id)))
            return msgspec.structs.replace(outcome, status="failed", error=error)
        rewards = [
            make_reward_span(rollout.rollout_id, outcome.attempt_id, reward)
            for name, emitter in context.rewards
            for reward in await judged(name, emitter, rollout, spans)
        ]
        # The rewards travel with the outcome: one write makes both visible, so no reader sees a
        # judged rollout without them.
        outcome = msgspec.structs.replace(outcome, spans=(*outcome.spans, *rewards))
        # The collector of this process can skip reading them again.
        self._cache(rollout.rollout_id, outcome.attempt_id, _as_stored(recorded, outcome.spans))
        return outcome


def _is_suspect(rollout: Rollout) -> bool:
    """Return true if the rollout has lost so many workers that it must run alone to protect other attempts."""
    # Half of the losses that are allowed: early enough to protect others, late enough to spare the
    # innocent.
    return rollout.losses > 0 and 2 * rollout.losses >= rollout.retry.max_losses


def _as_stored(recorded: Sequence[Span], added: Sequence[Span]) -> list[Span]:
    """Return an attempt's spans in the form and order in which the store will return them: recorded ones first."""
    spans = list(recorded)
    known = {span.span_id for span in recorded}
    for span in added:
        if span.span_id not in known:
            known.add(span.span_id)
            # The store numbers spans in the order of their arrival.
            sequence = max(span.sequence, spans[-1].sequence + 1 if spans else 1)
            # A round trip makes the copy equal to what a store returns, tuples as lists included.
            spans.append(decode(encode(msgspec.structs.replace(span, sequence=sequence, is_late=False)), Span))
    return spans


_NO_CALLS = (
    "Expected at least one call to a configured policy. Check that the agent's client uses the model name of a "
    "[policy.*] section or OPENAI_BASE_URL, and that it calls the model through httpx (the openai and anthropic "
    "clients do). Other clients, and programs that the agent starts, need base_url and api_key of the agent's argument "
    "llm; with a gateway, the environment of the 'process' and 'command' runners has both"
)


def _no_calls(spans: Sequence[Span], attempt_id: str) -> str:
    """Explain why an attempt has no recorded model call, and name clients whose calls were noticed."""
    clients = dict.fromkeys(call.client for call in find_disagreement(spans, attempt_id=attempt_id).unseen)
    if not clients:
        return f"the agent finished and no model call was seen.{cache_advice()} {_NO_CALLS}"
    return (
        f"the agent finished and none of its model calls was recorded: they are by {', '.join(clients)}. Point these "
        "clients at the gateway, with the base URL and key from resources or from the environment, or let them call "
        "through httpx"
    )
