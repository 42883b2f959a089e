"""A remote worker: joins the running experiment in its store, and follows it through stops and restarts.

While the experiment runs, a :class:`~agl_run.worker.worker.Worker` claims rollouts as in the experiment's own process,
but with a remote gateway. When the experiment stops, or restarts at another address, the worker gives its running
attempts back and waits. The store wakes waiters for new rollouts but not for presences, so the experiment's record is
read every two seconds.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

import msgspec

from agl.contracts import Presence, Store
from agl.errors import ConfigError, GatewayLostError, StoreError, TokenError
from agl.schemas import Rollout
from agl_inspect.presence import BEAT_S, renew, worker_name
from agl_inspect.records.state import load_experiment
from agl_run.access.secret import signing_keys
from agl_run.access.tokens import AdminKey
from agl_run.access.worker_token import worker_key
from agl_run.plan import Plan
from agl_run.worker.admission import JoinProblem, check_direct_calls, differences, try_gateway, unreachable_policies
from agl_run.worker.current import PinnedResources
from agl_run.worker.invitation import Announcement, load_running
from agl_run.worker.remote_gateway import PATIENCE_S, GuardedRunner, RemoteGateway
from agl_run.worker.setup import ca_of, make_runner, make_tracers, run_context
from agl_run.worker.worker import Worker

_LOG = logging.getLogger("agl_run.run")

LOOK_S = 2.0
"""Seconds between two reads of the experiment's record."""

SUMMARY_S = 10.0
"""Seconds between two summaries of the finished rollouts."""

Tell = Callable[..., None]
"""A function ``tell(event, text, **values)`` that reports an event to a person or a program; returns at once."""


class RemoteWorker:
    """Runs an experiment's attempts in this process until the experiment is finished.

    Args:
        plan: The plan of this worker; see :func:`~agl_run.worker.admission.make_worker_plan`.
        store: The experiment's store; the worker does not close it.
        tell: Reports events to the user.
        gateway_url: The gateway's URL as seen from this machine; by default the advertised one.
        concurrency: Attempts at once, at least 1.
        stays: Whether to wait for the next run when the experiment is finished.

    Attributes:
        finished: The number of rollouts that finished here, by status.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        tell: Tell,
        concurrency: int,
        gateway_url: str = "",
        stays: bool = False,
    ) -> None:
        self._plan = plan
        self._store = store
        self._tell = tell
        self._concurrency = concurrency
        self._gateway_url = gateway_url.rstrip("/").removesuffix("/v1")
        self._stays = stays
        self._name = worker_name()
        # Before the first join a problem is a mistake of the setup; afterwards it may pass, and the
        # worker waits.
        self._has_joined = False
        self._is_over = False
        self._said = ""
        self._worker: Worker | None = None
        self.finished: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """The number of attempts that this worker holds."""
        return self._worker.held if self._worker is not None else 0

    async def run(self) -> dict[str, int]:
        """Run attempts until the experiment is finished, and return the number of finished rollouts by status.

        Raises:
            ConfigError: The experiment is running and this machine cannot join it; the message has the reason and the
                next step.
        """
        # One round for each start of the experiment.
        while not self._is_over:
            found = await self._wait()
            if found is not None:
                await self._take_part(*found)
        text = f"experiment {self._plan.name!r} is finished; {self._counts()} here"
        self._tell("finished", text, finished=dict(self.finished))
        return dict(self.finished)

    def _counts(self) -> str:
        parts = ", ".join(f"{count} {status}" for status, count in sorted(self.finished.items()))
        return f"rollouts finished: {self.finished.total()}" + (f" ({parts})" if parts else "")

    async def _wait(self) -> tuple[Announcement, RemoteGateway | None] | None:
        """Wait until the experiment can be joined, and return its record and gateway; ``None`` once it is finished."""
        # The first read record; see below.
        seen: Announcement | None = None
        while True:
            try:
                serving = await load_running(self._store, self._plan.name)
                if serving is None and await self._check_finished():
                    return None
            # A token that is refused now is refused later too, unlike a store that does not answer.
            except TokenError as error:
                raise ConfigError(str(error)) from error
            except StoreError as error:
                self._say_once(f"the store does not answer; waiting: {error}")
                await asyncio.sleep(LOOK_S)
                continue
            if serving is None:
                self._say_once(f"experiment {self._plan.name!r} does not run; waiting for it to start")
            else:
                gateway = self._gateway_of(serving)
                problem = await self._join_problem(serving, gateway)
                if problem is None:
                    return serving, gateway
                # A killed experiment leaves its record; only a renewal between two reads proves that
                # it runs.
                if seen is None or seen.session != serving.session:
                    seen = serving
                self._refuse(serving, problem, runs=seen.seen_at != serving.seen_at)
            await asyncio.sleep(LOOK_S)

    async def _check_finished(self) -> bool:
        """Return true if the experiment is finished and the worker need not stay for its next run."""
        state = await load_experiment(self._store, self._plan.name)
        # A record that says ``running`` without a renewed lease is a stopped experiment, which may be
        # resumed.
        self._is_over = state is not None and state.status == "finished" and not self._stays
        return self._is_over

    def _gateway_of(self, serving: Announcement) -> RemoteGateway | None:
        # The option replaces the advertised address; it cannot add a gateway that the experiment
        # does not have.
        url = (self._gateway_url or serving.gateway_url) if serving.gateway_url else ""
        if not url:
            return None
        return RemoteGateway(url, key=worker_key() or AdminKey(signing_keys()), ca=ca_of(self._plan))

    async def _join_problem(self, serving: Announcement, gateway: RemoteGateway | None) -> JoinProblem | None:
        # The checks that cost nothing come first.
        found = differences(serving, self._plan) or check_direct_calls(serving)
        if found is None and gateway is not None:
            found = await try_gateway(serving, gateway, is_given=bool(self._gateway_url))
        return found

    def _refuse(self, serving: Announcement, problem: JoinProblem, *, runs: bool) -> None:
        """Raise the problem if the experiment is running and cannot be joined; else report that the worker waits."""
        if runs and (problem.kind == "settings" or not self._has_joined):
            raise ConfigError(problem.text)
        self._say_once(f"waiting for experiment {self._plan.name!r} on {serving.host!r}: {problem.text}")

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell("waiting", text, experiment=self._plan.name)

    async def _take_part(self, serving: Announcement, gateway: RemoteGateway | None) -> None:
        """Run attempts until this session of the experiment ends, and give unfinished attempts back."""
        member = Presence(experiment=self._plan.name, member=self._name, session=serving.session, since=time.time())
        self._said = ""
        announce = partial(self._store.announce, member)
        renewing = asyncio.create_task(renew(announce, every_s=BEAT_S, title=f"worker {self._name!r}"))
        with ExitStack() as stack:
            try:
                await announce()
                async with self._make_worker(serving, gateway, stack) as worker:
                    self._worker = worker
                    self._announce(serving, gateway)
                    self._has_joined = True
                    await self._until_over(serving, gateway, worker)
            except StoreError as error:
                self._tell("lost", f"the store does not answer: {error}")
                await asyncio.sleep(LOOK_S)
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
                await self._sign_off()

    async def _sign_off(self) -> None:
        try:
            await self._store.withdraw(self._plan.name, [self._name])
        except StoreError as error:
            _LOG.debug("the worker could not sign off: %s", error)

    def _announce(self, serving: Announcement, gateway: RemoteGateway | None) -> None:
        calls = f"model calls go to {gateway.url}" if gateway is not None else "model calls are recorded here"
        self._tell(
            "joined",
            f"joined experiment {self._plan.name!r} (run {serving.run}) on {serving.host!r}; {calls}; "
            f"runner {self._plan.config.runner.use}, {self._concurrency} at once",
            experiment=self._plan.name,
            run=serving.run,
            worker=self._name,
        )

    def _make_worker(self, serving: Announcement, gateway: RemoteGateway | None, stack: ExitStack) -> Worker:
        url = gateway.url if gateway is not None else ""
        # Agents here reach the gateway by this machine's address of it, not by the experiment's
        # own.
        endpoints = {
            name: msgspec.structs.replace(llm, endpoint=f"{url}/v1") if url else llm
            for name, llm in serving.endpoints.items()
        }
        context = run_context(
            self._plan,
            make_tracers(self._plan, stack),
            unreachable=unreachable_policies(serving),
            store=self._store,
            # A worker's token cannot sign; its claims come with a token for each attempt.
            secret=None if worker_key() else signing_keys(),
            resources=PinnedResources(self._store, endpoints, live=self._live).for_rollout,
            gateway_url=url,
            gateway=gateway,
            upstreams=serving.upstreams,
            requires_calls=serving.requires_calls,
            concurrency=self._concurrency,
        )
        runner = make_runner(self._plan, context)
        # A failure while the gateway was silent says nothing about the agent, and the guard repeats
        # it.
        return Worker(context, runner if gateway is None else GuardedRunner(runner, gateway), finished=self._count)

    def _count(self, rollout: Rollout) -> None:
        self.finished[rollout.status] += 1

    async def _live(self) -> Mapping[str, str]:
        serving = await load_running(self._store, self._plan.name)
        return serving.live if serving is not None else {}

    async def _until_over(self, serving: Announcement, gateway: RemoteGateway | None, worker: Worker) -> None:
        if worker.failure is None:
            raise RuntimeError("the worker is not running")
        # The loss of the gateway wakes the loop at once, instead of at the next look.
        lost = asyncio.ensure_future((gateway.lost if gateway is not None else asyncio.Event()).wait())
        summary_at, shown = time.monotonic() + SUMMARY_S, self.finished.total()
        try:
            while not (reason := await self._end_reason(serving, gateway)):
                await asyncio.wait({worker.failure, lost}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                # Raised here, so that ``agl worker`` ends with the reason.
                if worker.failure.done():
                    worker.failure.result()
                if time.monotonic() >= summary_at and self.finished.total() != shown:
                    summary_at, shown = time.monotonic() + SUMMARY_S, self.finished.total()
                    self._tell("progress", self._counts(), finished=dict(self.finished))
        finally:
            lost.cancel()
        if not self._is_over:
            self._tell("left", reason)

    async def _end_reason(self, serving: Announcement, gateway: RemoteGateway | None) -> str:
        """Return the reason why this session of the experiment has ended; ``""`` if it is still running."""
        current = await load_running(self._store, self._plan.name)
        if current is None:
            is_finished = await self._check_finished()
            return f"experiment {self._plan.name!r} " + ("is finished" if is_finished else "ended or was stopped")
        # A restart has other tokens and another gateway, so everything is set up again.
        if current.session != serving.session:
            return f"experiment {self._plan.name!r} was started again"
        if gateway is None:
            return ""
        try:
            problem = await gateway.look()
        except GatewayLostError as error:
            return str(error)
        # A short silence is a restart of the gateway or a slow network; attempts continue during
        # it.
        is_gone = gateway.lost.is_set() or gateway.silence_s() > PATIENCE_S
        return f"the gateway {gateway.url} {problem or 'went away'}" if is_gone else ""
