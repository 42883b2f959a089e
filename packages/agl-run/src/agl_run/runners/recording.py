"""Records one run of a program without an experiment, for ``agl exec``."""

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from agl import PluginManager
from agl.contracts import Gateway, Store, Upstream
from agl.episodes import Agreement, find_disagreement
from agl.errors import RunError, StoreError, UnknownComponentError
from agl.schemas import (
    AttemptStatus,
    Claim,
    ErrorInfo,
    Outcome,
    Record,
    RetryPolicy,
    Rollout,
    new_rollout_id,
)
from agl.stores import all_spans
from agl_inspect.presence import worker_name
from agl_inspect.stores import build_store
from agl_run.access.secret import signing_keys
from agl_run.access.tokens import AttemptTokens, issue_token
from agl_run.runners.bound_process import BoundProcess
from agl_run.runners.folders import own_folder, remove_abandoned
from agl_run.runners.setup import client_environment
from agl_run.runners.span_file import SpanFile, root_of

_LOG = logging.getLogger("agl_run.run")

LEASE_S = 60.0


class RecordedRun(Record, frozen=True, kw_only=True):
    """The result of recording a program.

    Attributes:
        rollout_id: The rollout's id.
        calls: Number of recorded model calls.
        agreement: The model calls that only the program's framework, or only the recording, noticed.
        exit_code: The program's exit status; 124 if it exceeded its time limit, 128 plus the signal's number if a
            signal ended it.
        stopped_by: Name of the signal by which this process was asked to stop the program; ``""`` without a signal.
    """

    rollout_id: str
    calls: int
    agreement: Agreement
    exit_code: int
    stopped_by: str = ""


class StopRequest:
    """Cancels the current task on SIGINT, SIGTERM or SIGHUP, and remembers the signal.

    Attributes:
        number: The first signal that arrived; ``None`` before.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._task: asyncio.Task[Any] | None = None

    def listen(self) -> None:
        """Install the signal handlers; on Windows, which has none for asyncio, only Ctrl-C stops the program."""
        self._task = asyncio.current_task()
        with suppress(NotImplementedError, RuntimeError, ValueError):
            for number in _STOPPING:
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)

    def end(self) -> None:
        """Remove the signal handlers, so that the next signal ends this process."""
        with suppress(NotImplementedError, RuntimeError, ValueError):
            for number in _STOPPING:
                asyncio.get_running_loop().remove_signal_handler(number)

    def is_answered(self) -> bool:
        """Return true if a signal has cancelled the current task, and then withdraw that cancellation."""
        if self.number is None or self._task is None:
            return False
        # The cancellation was only the messenger; with its count left, every later timeout would
        # misfire.
        self._task.uncancel()
        return True

    def _stop(self, number: signal.Signals) -> None:
        if self.number is None and self._task is not None:
            self.number = number
            self._task.cancel()


_STOPPING = tuple(signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


async def record_command(
    command: Sequence[str],
    *,
    manager: PluginManager,
    store_url: str,
    upstream: str = "",
    tracers: Sequence[str] = (),
    timeout_s: float | None = None,
    request: StopRequest | None = None,
) -> RecordedRun:
    """Run a program once, pass its output through, and record its model calls.

    A signal to stop ends the program with all its descendants; its recording up to then is saved.

    Raises:
        RunError: The program cannot be started; no rollout is recorded.
        asyncio.CancelledError: A signal arrived before the program started; no rollout is recorded.
    """
    # Before the store is opened, so that a typing mistake leaves no trace.
    _require_program(command[0])
    request = request or StopRequest()
    # From here on a signal cancels this task, and the record is completed instead of lost.
    request.listen()
    async with AsyncExitStack() as stack:
        store = build_store(manager, store_url)
        stack.push_async_callback(store.close)
        # An experiment of its own per program keeps workers of other experiments from claiming it.
        claim = await _claim(store, command, timeout_s)
        remove_abandoned()
        folder = stack.enter_context(own_folder())
        root = root_of(claim)
        span_file = SpanFile(folder / "span_file", root, tracers=tracers)
        try:
            gateway, environment = await _capture(stack, manager, store, claim, upstream, span_file)
            process = await _start(command, {**os.environ, **environment})
        except BaseException:
            # A rollout without a program would look like one that failed.
            await _discard(store, claim.rollout.rollout_id)
            raise
        # A program may run for days; without renewals the store would declare its attempt lost.
        renewing = asyncio.create_task(_renew(store, claim.attempt.attempt_id))
        stack.callback(renewing.cancel)
        status, code, error = await _end_of(process, timeout_s, request)
        # The program has ended; a further Ctrl-C may now end the writing too.
        request.end()
        if gateway is not None:
            # The last calls may still have to be stored, because answers do not wait for this.
            await gateway.settle(claim.attempt.attempt_id)
        closed = msgspec.structs.replace(root, end_ns=time.time_ns(), status="ok" if code == 0 else "error")
        outcome = Outcome(
            attempt_id=claim.attempt.attempt_id, status=status, error=error, spans=(closed, *span_file.read())
        )
        await store.finish([outcome])
        # Read back from the store, since the gateway's spans never passed through this process.
        spans = await all_spans(store, claim.rollout.rollout_id)
        return RecordedRun(
            rollout_id=claim.rollout.rollout_id,
            calls=sum(span.call is not None for span in spans),
            agreement=find_disagreement(spans, attempt_id=claim.attempt.attempt_id),
            exit_code=code,
            stopped_by="" if request.number is None else request.number.name,
        )


def _require_program(name: str) -> None:
    """Refuse a program that cannot be found or executed, before anything is recorded."""
    if shutil.which(name) is None:
        found = "it may not be executed (chmod +x)" if Path(name).is_file() else "no such program was found"
        raise RunError(f"cannot start {name!r}: {found}; the command goes after --, as in a shell")


async def _discard(store: Store, rollout_id: str) -> None:
    """Remove the rollout of a program that could not be started."""
    await store.cancel([rollout_id])
    await store.delete([rollout_id])


async def _claim(store: Store, command: Sequence[str], timeout_s: float | None) -> Claim:
    rollout_id = new_rollout_id()
    experiment = f"exec-{rollout_id}"
    await store.enqueue(
        [
            Rollout(
                rollout_id=rollout_id,
                task={"command": list(command)},
                experiment=experiment,
                mode="test",
                # A program must not be repeated unnoticed by the person who started it.
                retry=RetryPolicy(timeout_s=timeout_s, grace_s=LEASE_S, max_losses=0),  # this process decides
                created_at=time.time(),
            )
        ]
    )
    return (await store.claim(worker=worker_name(), experiment=experiment, lease_s=LEASE_S))[0]


async def _renew(store: Store, attempt_id: str) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 3)
        try:
            await store.renew([attempt_id], lease_s=LEASE_S)
        except StoreError as error:  # the next try comes before the lease lapses
            _LOG.warning("the store could not record that the program still runs: %s", error)


async def _capture(
    stack: AsyncExitStack, manager: PluginManager, store: Store, claim: Claim, upstream: str, span_file: SpanFile
) -> tuple[Gateway | None, dict[str, str]]:
    """Make the program record itself, and start a gateway if one is installed and an upstream is given.

    The gateway records any program that reads its URL from the environment. A Python program records its calls to other
    URLs itself.
    """
    try:
        entry = manager.gateway("gateway") if upstream else None
    except UnknownComponentError:
        entry = None
    if entry is None:
        return None, span_file.environment()
    gateway: Gateway = manager.build(entry)
    stack.push_async_callback(gateway.stop)
    secret = signing_keys()
    # The gateway takes over the program's key, which gets a token in its place.
    key = "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else ""
    target = Upstream(name="upstream", base_url=upstream, aliases=("*",), api_key_env=key)
    url = await gateway.start(store=store, upstreams=[target], secret=secret)
    token = issue_token(AttemptTokens(secret), claim.rollout, claim.attempt)
    return gateway, {**span_file.environment(gateway_url=url, token=token), **client_environment(f"{url}/v1", token)}


async def _start(command: Sequence[str], environment: dict[str, str]) -> BoundProcess:
    try:
        # In the terminal's session, so that an interactive program keeps its keyboard, and servers
        # that it leaves behind stay.
        return await BoundProcess.start(command, environment=environment, stops_rest=False, has_session=False)
    except OSError as error:
        raise RunError(f"cannot start {command[0]!r}: {error}") from error


async def _end_of(
    process: BoundProcess, timeout_s: float | None, request: StopRequest
) -> tuple[AttemptStatus, int, ErrorInfo | None]:
    """Wait until the program ends, or stop it at the time limit or on a signal; return status, exit code and error."""
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        print(f"agl: stopped after {timeout_s:g} s", file=sys.stderr)
        return "timeout", 124, ErrorInfo(type="TimeoutError", message="exit status 124")
    except asyncio.CancelledError:
        # A cancellation without a signal was not meant for the program.
        if not request.is_answered() or request.number is None:
            raise
        text = f"stopped by {request.number.name}"
        return "failed", 128 + request.number, ErrorInfo(type="Interrupted", message=text)
    finally:
        await process.stop()
    # As a shell reports a program that a signal ended.
    code = code if code >= 0 else 128 - code
    if code == 0:
        return "succeeded", 0, None
    return "failed", code, ErrorInfo(type="ProcessExit", message=f"exit status {code}")
