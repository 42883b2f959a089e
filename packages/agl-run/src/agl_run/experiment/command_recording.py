"""Records one run of a program without an experiment, for ``agl exec``."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from agl import PluginManager, semconv
from agl.contracts import Gateway, Store, Upstream
from agl.episodes import Agreement, find_disagreement
from agl.errors import RunError, UnknownComponentError
from agl.schemas import (
    AttemptStatus,
    Claim,
    ErrorInfo,
    Outcome,
    Record,
    RetryPolicy,
    Rollout,
    Span,
    new_rollout_id,
    new_span_id,
    new_trace_id,
)
from agl.stores import all_spans
from agl.tracing import AttemptTokens, load_secret
from agl_run.runners.liveness import worker_name
from agl_run.runners.setup import client_environment
from agl_run.runners.spool import Spool
from agl_run.runners.tokens import issue_token

LEASE_S = 60.0


class RecordedRun(Record, frozen=True, kw_only=True):
    """The recording of a program.

    Attributes:
        rollout_id: The rollout's id.
        calls: Number of recorded model calls.
        agreement: The model calls that only the program's framework, or only the recording, saw.
        exit_code: The program's exit status.
    """

    rollout_id: str
    calls: int
    agreement: Agreement
    exit_code: int


async def record_command(
    command: Sequence[str],
    *,
    manager: PluginManager,
    store_url: str,
    upstream: str = "",
    timeout_s: float | None = None,
) -> RecordedRun:
    """Run a program once, pass its output through, and record its model calls.

    Raises:
        RunError: The program cannot be started; no rollout is kept then.
    """
    _require_program(command[0])
    async with AsyncExitStack() as stack:
        store: Store = manager.build(manager.store_entry(store_url.partition("://")[0]), url=store_url)
        stack.push_async_callback(store.close)
        claim = await _claim(store, command, timeout_s)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-")))
        root = _root(claim)
        spool = Spool(folder / "spool", root)
        try:
            gateway, environment = await _capture(stack, manager, store, claim, upstream, spool)
            process = await _start(command, {**os.environ, **environment})
        except BaseException:
            await _discard(store, claim.rollout.rollout_id)
            raise
        renewing = asyncio.create_task(_renew(store, claim.attempt.attempt_id))
        stack.callback(renewing.cancel)
        status, code = await _end_of(process, timeout_s)
        if gateway is not None:
            await gateway.settle(claim.attempt.attempt_id)
        error = None if status == "succeeded" else ErrorInfo(type="ProcessExit", message=f"exit status {code}")
        closed = msgspec.structs.replace(root, end_ns=time.time_ns(), status="ok" if code == 0 else "error")
        outcome = Outcome(
            attempt_id=claim.attempt.attempt_id, status=status, error=error, spans=(closed, *spool.read())
        )
        await store.finish([outcome])
        spans = await all_spans(store, claim.rollout.rollout_id)
        return RecordedRun(
            rollout_id=claim.rollout.rollout_id,
            calls=sum(span.call is not None for span in spans),
            agreement=find_disagreement(spans, attempt_id=claim.attempt.attempt_id),
            exit_code=code,
        )


def _require_program(name: str) -> None:
    """Refuse a program that cannot be found, before anything is recorded."""
    if shutil.which(name) is None:
        found = "it may not be executed (chmod +x)" if Path(name).is_file() else "no such program was found"
        raise RunError(f"cannot start {name!r}: {found}; the command goes after --, as in a shell")


async def _discard(store: Store, rollout_id: str) -> None:
    """Remove a rollout whose program never ran."""
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
                retry=RetryPolicy(timeout_s=timeout_s, max_losses=0),
                created_at=time.time(),
            )
        ]
    )
    return (await store.claim(worker=worker_name(), experiment=experiment, lease_s=LEASE_S))[0]


async def _renew(store: Store, attempt_id: str) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 3)
        await store.renew([attempt_id], lease_s=LEASE_S)


def _root(claim: Claim) -> Span:
    return Span(
        rollout_id=claim.rollout.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name=semconv.ROOT_SPAN_NAME,
        start_ns=time.time_ns(),
    )


async def _capture(
    stack: AsyncExitStack, manager: PluginManager, store: Store, claim: Claim, upstream: str, spool: Spool
) -> tuple[Gateway | None, dict[str, str]]:
    """Make the program record itself, and start a gateway if one is installed and an upstream is given.

    The gateway records every program that reads the environment. A Python program records its calls to other URLs
    itself.
    """
    try:
        entry = manager.gateway("gateway") if upstream else None
    except UnknownComponentError:
        entry = None
    if entry is None:
        return None, spool.environment()
    gateway: Gateway = manager.build(entry)
    stack.push_async_callback(gateway.stop)
    secret = load_secret()
    key = "OPENAI_API_KEY" if os.environ.get("OPENAI_API_KEY") else ""
    target = Upstream(name="upstream", base_url=upstream, aliases=("*",), api_key_env=key)
    url = await gateway.start(store=store, upstreams=[target], secret=secret)
    token = issue_token(AttemptTokens(secret), claim.rollout, claim.attempt)
    return gateway, {**spool.environment(gateway_url=url, token=token), **client_environment(f"{url}/v1", token)}


async def _start(command: Sequence[str], environment: dict[str, str]) -> Process:
    try:
        return await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        raise RunError(f"cannot start {command[0]!r}: {error}") from error


async def _end_of(process: Process, timeout_s: float | None) -> tuple[AttemptStatus, int]:
    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        await _end(process)
        print(f"agl: stopped after {timeout_s:g} s", file=sys.stderr)
        return "timeout", 124
    except asyncio.CancelledError:
        await _end(process)
        raise
    return ("succeeded" if code == 0 else "failed"), code


async def _end(process: Process) -> None:
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 2.0)
    except TimeoutError:
        process.kill()
        await process.wait()
