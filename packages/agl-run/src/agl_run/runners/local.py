"""The `async` runner: many attempts at once in this process.

Coroutine agents share the event loop, and plain functions get a thread each. If such threads run event loops of their
own, each loop gets its own connections in a shared ``httpx`` client. At its time limit a coroutine is cancelled, and a
thread gets an exception raised in it. Code that swallows these, or that blocks in C, keeps running, but its model calls
are refused: use the `process` runner for such agents.
"""

import asyncio
import logging
import os

import msgspec

from agl.errors import ConfigError, StoreError
from agl.schemas import Claim, Outcome
from agl.tracing import SpanRecorder, Undo
from agl_run.agents.importing import install_tracers
from agl_run.replay.script import load_script
from agl_run.runners.attempt import new_attempt, run_attempt
from agl_run.runners.connections import separate_loops
from agl_run.runners.setup import RunContext

_LOG = logging.getLogger("agl_run.runners")

FLUSH_S = 1.0
"""Seconds between two writes of running attempts' spans; a crash of this process loses only newer spans."""


class AsyncRunner:
    """Runs attempts in this process: coroutines on its event loop, plain functions in a thread each.

    At its time limit a coroutine is cancelled, and a thread gets an exception raised in it. Code that swallows these,
    or that blocks in C, keeps running, but its model calls are refused.
    """

    def __init__(self, setup: RunContext) -> None:
        if setup.agent.command:
            raise ConfigError("a command runs with the 'command' runner; set [runner] use = \"command\"")
        self._setup = setup
        self._agent = setup.agent.load()
        # One for each running attempt, which the flusher drains.
        self._recorders: dict[str, SpanRecorder] = {}
        self._flushing = asyncio.Lock()
        self._environment: list[str] = []
        self._flusher: asyncio.Task[None] | None = None
        self._unpatch: Undo | None = None

    async def start(self) -> None:
        """Install the tracers, and start to write spans to the store."""
        self._set_environment()
        install_tracers(self._setup.tracers)
        self._unpatch = separate_loops()
        self._flusher = asyncio.create_task(self._flush_loop())

    def _set_environment(self) -> None:
        """Set environment variables that clients need to be created; a variable that is already set is not changed."""
        for name, value in self._setup.environment().items():
            # What a person has set wins; agents get their key from the wire hook anyway.
            if name not in os.environ:
                os.environ[name] = value
                self._environment.append(name)

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt in this process, and return its outcome."""
        setup = self._setup
        recorder = SpanRecorder()
        attempt_id = claim.attempt.attempt_id
        # Read per attempt and not per run: versions change while the run goes on.
        resources = await setup.resources(claim.rollout)
        active = new_attempt(
            claim.rollout,
            attempt_id,
            recorder,
            token=setup.token_of(claim),
            gateway_url=setup.gateway_url,
            upstreams=setup.upstreams,
            tracers=(tracer for _, tracer in setup.tracers),
            replay=await load_script(setup.store, claim.rollout),
        )
        self._recorders[attempt_id] = recorder
        try:
            outcome = await run_attempt(self._agent, claim.rollout, active, resources=resources, recorder=recorder)
        finally:
            del self._recorders[attempt_id]
        async with self._flushing:  # a write in progress finishes before the attempt ends
            # Spans that the store refused while the attempt ran were put back by the flusher.
            rest = recorder.drain()
        return msgspec.structs.replace(outcome, spans=(*outcome.spans, *rest)) if rest else outcome

    async def _flush_loop(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            async with self._flushing:
                await self._flush()

    async def _flush(self) -> None:
        """Write the pending spans; spans that the store refuses are kept until their attempt ends."""
        # One write for all attempts: a thousand agents cost one request a second.
        drained = [(recorder, recorder.drain()) for recorder in list(self._recorders.values())]
        spans = [span for _, own in drained for span in own]
        if not spans:
            return
        try:
            await self._setup.store.append_spans(spans)
        except StoreError as error:
            _LOG.warning("%d spans could not be written and are kept: %s", len(spans), error)
            for recorder, own in drained:
                for span in own:
                    # Put back: the end of the attempt tries once more, and then says what was
                    # wrong.
                    recorder.record(span)

    async def stop(self) -> None:
        """Stop writing spans, uninstall the tracers, and undo the other changes to the process."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        for _, tracer in self._setup.tracers:
            tracer.uninstall()
        if self._unpatch is not None:
            # Patches outlive a runner otherwise, and a notebook runs many.
            self._unpatch()
            self._unpatch = None
        for name in self._environment:
            os.environ.pop(name, None)
        self._environment.clear()
