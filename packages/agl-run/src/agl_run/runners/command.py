"""The `command` runner: an attempt is a program in any language.

The program finds the model through ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` (or Anthropic's two variables), and its
task as JSON on standard input and in the file that ``AGL_TASK_FILE`` names. It may print its answer. If the last line
that it prints is a JSON object with the key ``reward``, its value is the reward: a number, a dict of numbers, or
``null`` for no reward. Any other value fails the attempt, and so does an object in a last line longer than 1 MiB.
"""

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from agl import semconv
from agl.errors import CaptureError, ConfigError, RunError
from agl.schemas import (
    AttemptStatus,
    Claim,
    ErrorInfo,
    Outcome,
    Span,
    to_json,
)
from agl.tracing import make_reward_span, redact
from agl_run.runners.attempt import upstreams_of
from agl_run.runners.bound_process import BoundProcess
from agl_run.runners.folders import own_folder, remove_abandoned
from agl_run.runners.result import describe_error, read_result
from agl_run.runners.setup import ADMIN_TOKEN_ENV, RunContext, environment_for_agents
from agl_run.runners.span_file import SpanFile, root_of

HEAD = 16_000
"""Number of bytes that are kept from the start of a program's output."""

TAIL = 64_000
"""Number of bytes that are kept from the end of a program's output."""

LINE = 1 << 20
"""Number of bytes that are kept of the last line of a program's output."""

_CHUNK = 64 * 1024


class PrintedText:
    """A program's output of any length; only its first ``HEAD`` and last ``TAIL`` bytes and its last line are kept."""

    def __init__(self) -> None:
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._in_tail = 0
        self._total = 0
        self._line = b""
        # The beginning of a line that has not ended; bounded like everything here.
        self._open = bytearray()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Add the bytes of a stream until it ends."""
        while chunk := await stream.read(_CHUNK):
            self.add(chunk)

    def add(self, data: bytes) -> None:
        """Append output of the program."""
        self._total += len(data)
        self._follow(data)
        # The head keeps what failed first, the tail what failed last; both say more than the
        # middle.
        room = HEAD - len(self._head)
        self._head += data[:room]
        if data := data[room:]:
            self._tail.append(data)
            self._in_tail += len(data)
        # Whole chunks are dropped, so a byte is copied once however much is printed.
        while self._tail and self._in_tail - len(self._tail[0]) >= TAIL:
            self._in_tail -= len(self._tail.popleft())

    def _follow(self, data: bytes) -> None:
        """Update the last complete line that is not blank, and the current incomplete line."""
        # Progress bars end their lines with a carriage return.
        ended, separator, rest = data.replace(b"\r", b"\n").rpartition(b"\n")
        if separator:
            lines = bytes(self._open + ended).rstrip()
            self._line = lines[lines.rfind(b"\n") + 1 :][: LINE + 1] or self._line
            self._open.clear()
        self._open += rest[: LINE + 1 - len(self._open)]

    @property
    def last_line(self) -> bytes:
        """The last line that is not blank, stripped of white space, or its first ``LINE + 1`` bytes if it is longer.

        Lines end at a line feed or a carriage return, neither of which occurs inside a JSON text.
        """
        return bytes(self._open).strip() or self._line.strip()

    def text(self) -> str:
        """Return the kept output as text; a line with the number of missing bytes replaces the bytes left out."""
        tail = b"".join(self._tail)[-TAIL:]
        left_out = self._total - len(self._head) - len(tail)
        if not left_out:
            return (self._head + tail).decode(errors="replace")
        gap = f"\n[{left_out} bytes left out]\n"
        return self._head.decode(errors="replace") + gap + tail.decode(errors="replace")


class CommandRunner:
    """Runs each attempt as a new process of a command; see the module."""

    def __init__(self, setup: RunContext) -> None:
        if not setup.agent.command:
            raise ConfigError(
                'the \'command\' runner needs the agent as a list of words, such as agent = ["node", "agent.js"]'
            )
        self._setup = setup
        self._running: set[BoundProcess] = set()

    async def start(self) -> None:
        """Remove the folders that killed runners left behind."""
        # Here and not at the end: a runner that was killed had no end.
        remove_abandoned()

    async def execute(self, claim: Claim) -> Outcome:
        """Run the command for one attempt, in a temporary folder."""
        with own_folder() as folder:
            return await self._execute(claim, folder)

    async def _execute(self, claim: Claim, folder: Path) -> Outcome:
        rollout, attempt = claim.rollout, claim.attempt
        task = to_json(rollout.visible_task)
        # A file as well as standard input: languages differ in what is easy to read.
        (folder / "task.json").write_bytes(task)
        root = root_of(claim)
        # Without a gateway a Python program records itself into this file, which outlives the
        # program.
        span_file = SpanFile(folder / "span_file", root)
        environment = self._environment(claim, folder, root, span_file)
        try:
            kept = await self._spawn(folder, environment)
        except OSError as error:
            return Outcome(
                attempt_id=attempt.attempt_id,
                status="failed",
                error=describe_error(RunError(f"cannot start {self._setup.agent.command[0]!r}: {error}")),
            )
        self._running.add(kept)
        try:
            status, error, printed = await self._watch(kept.process, task, rollout.retry.timeout_s)
        finally:
            await kept.stop()
            self._running.discard(kept)
        return _outcome(root, status, error, printed, span_file.read())

    def _environment(self, claim: Claim, folder: Path, root: Span, span_file: SpanFile) -> dict[str, str]:
        setup, rollout = self._setup, claim.rollout
        token = setup.token_of(claim)
        return {
            **environment_for_agents(setup),
            **setup.environment(token),
            # With a gateway the calls are recorded there; recording them twice would double the
            # rows.
            **({} if setup.gateway_url else span_file.environment(upstreams_of(rollout, setup.upstreams))),
            "AGL_ROLLOUT_ID": rollout.rollout_id,
            "AGL_ATTEMPT_ID": claim.attempt.attempt_id,
            ADMIN_TOKEN_ENV: token,
            "AGL_GATEWAY_URL": setup.gateway_url,
            "AGL_TASK_FILE": str(folder / "task.json"),
            # The standard header of W3C: programs with OpenTelemetry place their spans below the
            # attempt.
            "TRACEPARENT": f"00-{root.trace_id}-{root.span_id}-01",
        }

    async def _spawn(self, folder: Path, environment: dict[str, str]) -> BoundProcess:
        words = [word.replace("{task}", str(folder / "task.json")) for word in self._setup.agent.command]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        # Everything that the program starts ends with the attempt.
        return await BoundProcess.start(words, environment=environment, cwd=self._setup.agent.folder or None, **pipes)

    async def _watch(
        self, process: asyncio.subprocess.Process, task: bytes, limit: float | None
    ) -> tuple[AttemptStatus, ErrorInfo | None, PrintedText]:
        # Bounded: a program that prints without end must not fill the memory.
        printed, complaints = PrintedText(), PrintedText()
        try:
            async with asyncio.timeout(limit):
                await _converse(process, task, printed, complaints)
        except TimeoutError:
            text = f"the command ran longer than {limit:g} s and was stopped"
            return "timeout", ErrorInfo(type="TimeoutError", message=text), printed
        if process.returncode == 0:
            return "succeeded", None, printed
        # Programs like to print their environment when they fail, keys included.
        tail = redact(complaints.text())
        last = tail.strip().splitlines()[-1] if tail.strip() else "it printed nothing on standard error"
        text = f"the command ended with exit code {process.returncode}: {last}"
        return "failed", ErrorInfo(type="ProcessExit", message=text, traceback=tail), printed

    async def stop(self) -> None:
        """Stop every running program."""
        await asyncio.gather(*(kept.stop() for kept in list(self._running)))


async def _converse(
    process: asyncio.subprocess.Process, task: bytes, printed: PrintedText, complaints: PrintedText
) -> None:
    """Send a program its task, read both of its output streams, and wait until it ends."""
    assert process.stdout is not None and process.stderr is not None  # noqa: S101, PT018  # spawned with pipes
    async with asyncio.TaskGroup() as group:
        # All at once: a program that prints before it reads would fill a pipe and wait for ever.
        group.create_task(_feed(process, task))
        group.create_task(printed.read(process.stdout))
        group.create_task(complaints.read(process.stderr))
    await process.wait()


async def _feed(process: asyncio.subprocess.Process, task: bytes) -> None:
    stdin = process.stdin
    assert stdin is not None  # noqa: S101  # spawned with pipes
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its task
        stdin.write(task)
        await stdin.drain()
    stdin.close()


def _outcome(
    root: Span, status: AttemptStatus, error: ErrorInfo | None, printed: PrintedText, recorded: list[Span]
) -> Outcome:
    rewards: list[Span] = []
    if status == "succeeded":
        try:
            rewards = _printed_rewards(root, printed)
        except (CaptureError, RunError) as wrong:
            status, error = "failed", describe_error(wrong)
    closed = msgspec.structs.replace(
        root,
        end_ns=time.time_ns(),
        status="ok" if status == "succeeded" else "error",
        status_message="" if error is None else error.message,
        attributes={semconv.OUTPUT: redact(printed.text())},
    )
    return Outcome(attempt_id=root.attempt_id, status=status, error=error, spans=(closed, *recorded, *rewards))


def _printed_rewards(root: Span, printed: PrintedText) -> list[Span]:
    line = printed.last_line
    # A reward that was cut off must not count as no reward.
    if len(line) > LINE and line.startswith(b"{") and printed.text().rstrip().endswith("}"):
        raise RunError(
            f"the last line that the command printed is longer than {LINE} bytes, so that no reward in it is read; "
            'print the reward on a line of its own behind it, as in {"reward": 1.0}'
        )
    try:
        # The standard library reads NaN, which is then refused by name, where a strict parser would
        # see no JSON.
        last: Any = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return []
    if not isinstance(last, dict):
        return []
    given = cast("dict[str, Any]", last).get("reward")
    if given is None:
        return []
    reward = read_result(given).reward
    if reward is None:
        raise RunError(
            f"the command printed the reward {str(given)[:80]!a} ({type(given).__name__}); print a number, a dict of "
            "numbers, or null for no reward"
        )
    return [make_reward_span(root.rollout_id, root.attempt_id, reward, trace_id=root.trace_id, parent_id=root.span_id)]
