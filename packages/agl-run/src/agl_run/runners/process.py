"""The `process` runner: each attempt runs in a child process, which is killed if it does not stop in time.

Children are started fresh (no fork), keep their agent loaded, and run one attempt after another. A child that exits,
crashes or is killed fails only its own attempt. Programs that an agent started end with its child, and children end
with this process, however it ends.
"""

import asyncio
import sys

from agl.errors import ConfigError, RunError
from agl.schemas import Claim, ErrorInfo, Outcome
from agl_run.messages import resource_for_child
from agl_run.replay.script import load_script
from agl_run.runners.bound_process import BoundProcess
from agl_run.runners.pipe import ChildDone, ChildReady, ChildRun, ChildSpans, ChildStart, frame, read_from_child
from agl_run.runners.setup import RunContext, environment_for_agents

START_S = 60.0
"""Seconds that a child may take to start and to import its agent."""

START_TRIES = 3
"""How often a child is started if an outside signal, such as the out-of-memory killer's, ends it before it is ready."""

KILL_GRACE_S = 3.0
"""Seconds after the time limit within which the child may stop its agent; after that the child is killed."""


class ProcessRunner:
    """Runs each attempt in a child process; see the module."""

    def __init__(self, setup: RunContext) -> None:
        if setup.agent.command:
            raise ConfigError("a command runs with the 'command' runner; set [runner] use = \"command\"")
        if not setup.agent.path:
            raise ConfigError(
                "the 'process' runner imports the agent in child processes, so it must be importable: move it to a "
                "module and pass 'module:attribute'; functions of the main script or within functions are not"
            )
        self._setup = setup
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()

    async def start(self) -> None:
        """Start one child now, so that an agent that cannot be imported is reported before the first attempt."""
        # The child is used by the first attempt, so the check costs nothing.
        self._idle.append(await self._new_child())

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt in an idle child, or in a new one."""
        setup = self._setup
        run = ChildRun(
            # Hidden fields of the task never leave this process.
            rollout=claim.rollout.for_agent,
            attempt=claim.attempt,
            resources={n: resource_for_child(r) for n, r in (await setup.resources(claim.rollout)).items()},
            token=setup.token_of(claim),
            replay=await load_script(setup.store, claim.rollout),
        )
        # The number of children follows the number of attempts at once, which the worker bounds.
        child = await self._idle_child() or await self._new_child()
        try:
            outcome = await self._converse(child, run)
        except BaseException:
            await self._discard(child)
            raise
        # A child whose agent failed may hold broken state; a fresh one is cheap compared with a
        # wrong result.
        if child.is_alive and outcome.status == "succeeded":
            self._idle.append(child)
        else:
            await self._discard(child)
        return outcome

    async def _idle_child(self) -> "_Child | None":
        """Return an idle child, or ``None``; idle children that have ended are discarded."""
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await self._discard(child)
        return None

    async def _converse(self, child: "_Child", run: ChildRun) -> Outcome:
        limit = run.rollout.retry.timeout_s
        attempt_id = run.attempt.attempt_id
        try:
            # The child stops its agent at the limit by itself; killing is for what does not stop.
            async with asyncio.timeout(None if limit is None else limit + KILL_GRACE_S):
                await child.send(frame(run))
                while True:
                    message = await child.receive()
                    if isinstance(message, ChildDone):
                        return message.outcome
                    if isinstance(message, ChildSpans):
                        # Written as they come, so that a crash of the agent loses at most a second
                        # of its record.
                        await self._setup.store.append_spans(message.spans)
        except TimeoutError:
            if limit is None:
                raise
            await child.kept.kill()
            text = f"the agent ran longer than {limit:g} s and its process was killed"
            return Outcome(attempt_id=attempt_id, status="timeout", error=ErrorInfo(type="TimeoutError", message=text))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await child.kept.wait()
            text = f"the agent's process ended with {_describe_exit(code)} in the middle of the attempt"
            return Outcome(attempt_id=attempt_id, status="failed", error=ErrorInfo(type="ProcessExit", message=text))

    async def _new_child(self) -> "_Child":
        # The out-of-memory killer may take a child while others shrink; an agent that cannot start
        # fails every time.
        for _ in range(START_TRIES - 1):
            try:
                return await self._try_child()
            except _KilledAtStartError:
                continue
        return await self._try_child()

    async def _try_child(self) -> "_Child":
        child = await _Child.spawn(self._setup)
        # Before the greeting: ``stop`` must find children that still start.
        self._all.add(child)
        try:
            await child.greet(self._setup)
        except BaseException:
            await self._discard(child)
            raise
        return child

    async def _discard(self, child: "_Child") -> None:
        self._all.discard(child)
        await child.kept.kill()

    async def stop(self) -> None:
        """Kill every child."""
        self._idle.clear()
        await asyncio.gather(*(self._discard(child) for child in list(self._all)))


class _KilledAtStartError(RunError):
    """A signal ended the child before it was ready for attempts."""


class _Child:
    """One child process and its pipes."""

    def __init__(self, kept: BoundProcess) -> None:
        self.kept = kept
        self._process = kept.process

    @classmethod
    async def spawn(cls, setup: RunContext) -> "_Child":
        environment = {**environment_for_agents(setup), **setup.plugins, **setup.environment()}
        kept = await BoundProcess.start(
            [sys.executable, "-m", "agl_run.runners.child"],
            environment=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # The buffer of the stream: 64 MiB for the spans of one second.
            limit=2**26,
        )
        return cls(kept)

    async def greet(self, setup: RunContext) -> None:
        start = ChildStart(
            agent_path=setup.agent.path,
            folder=setup.agent.folder,
            # The child starts with ``-m`` and would not know the folder of the script.
            sys_path=tuple(sys.path),
            gateway_url=setup.gateway_url,
            upstreams=tuple(setup.upstreams),
            tracers=tuple(name for name, _ in setup.tracers),
        )
        await self.send(frame(start))
        try:
            async with asyncio.timeout(START_S):
                message = await self.receive()
        except TimeoutError:
            raise RunError(
                f"a worker process did not start within {START_S:g} s; is the agent's import slow?"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.kept.wait()
            kind = RunError if code >= 0 else _KilledAtStartError
            raise kind(f"a worker process ended with {_describe_exit(code)} while it imported the agent") from None
        if isinstance(message, ChildReady) and message.error:
            raise RunError(f"a worker process could not load the agent: {message.error}")

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def send(self, data: bytes) -> None:
        if self._process.stdin is None:
            raise ConnectionError("the child has no standard input")
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def receive(self) -> ChildReady | ChildSpans | ChildDone:
        return await read_from_child(self._process.stdout)


def _describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
