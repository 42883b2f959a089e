"""The display of a run in a terminal: during the run, at its end, and after it was stopped."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

from agl_testing.plugins import PluginFolder

LEARNER = """
import asyncio
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate


class Learner:
    def __init__(self, *, steps: int = 4, hold_at: int = 0):
        self._steps, self._hold_at, self._step = steps, hold_at, 0

    async def setup(self, context):
        self._context = context

    async def step(self):
        step = self._step + 1
        collected = await self._context.collect(self._context.train, step=step, n=2)
        self._context.progress(1, 2, "update")
        if step == self._hold_at:
            self._context.say("holding [bold]on[/bold]")
            await asyncio.Event().wait()
        self._step = step
        return StepReport(step=step, is_finished=step >= self._steps, metrics={"reward": 0.1 * step})

    def state(self):
        return {"step": self._step}

    async def restore(self, state):
        self._step = state["step"]

    async def close(self):
        pass


@agl.hookimpl
def agl_algorithms():
    yield agl.AlgorithmEntry(name="learner", factory=Learner, tunes=("prompt_template",), needs_token_ids=False)
"""

AGENT = r"""
import asyncio
import logging
import sys


async def solve(task):
    await asyncio.sleep(0.15)
    if task["n"] == 0:
        print("\x1b[32mgreen\x1b[0m and [bold]\x1b]0;owned\x07")
        print("to stderr", file=sys.stderr)
        logging.getLogger("tools").warning("a log line")
        print("(Pdb) ", end="", flush=True)
        for share in ("10%", "20%\n"):
            sys.stderr.write(f"\r{share}")
            sys.stderr.flush()
        sys.stdout.reconfigure(line_buffering=True)
    if task["n"] == 3:
        raise ValueError("no")
    return float(task["n"])
"""

FILE = """
[experiment]
name = "small"
agent = "agent:solve"
train = "tasks.jsonl"
val = "tasks.jsonl"
validate_every = 2
store = "sqlite:///runs/small.db"

[runner]
concurrency = 2

[gateway]
use = "none"

[resource.prompt0]
template = "none"

[resource.prompt1]
template = "none"
"""


class Terminal:
    """A terminal of a given size with a program in it, and an emulator that holds its screen."""

    def __init__(self, command: list[str], *, folder: Path, environment: dict[str, str], columns: int, lines: int):
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        self._stream = pyte.ByteStream(self.screen)
        self._master, end = pty.openpty()
        self.resize(columns, lines)
        self.raw = b""
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=end, stdout=end, stderr=end, start_new_session=True
        )
        os.close(end)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self, until: Callable[[list[str]], bool] = lambda lines: False, *, within_s: float = 60.0) -> list[str]:
        """Read until the screen's lines meet a condition, or the program has closed the terminal; return the lines."""
        end = time.monotonic() + within_s
        while time.monotonic() < end and not until(self.shown):
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    data = os.read(self._master, 1024)  # less than a screen, so that no state is skipped
                except OSError:  # the last program that writes to it has ended
                    break
                self.raw += data
                self._stream.feed(data)
        return self.shown

    @property
    def shown(self) -> list[str]:
        """Return the lines on the screen that are not empty."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    @property
    def scrolled(self) -> list[str]:
        """Return the lines that have scrolled off the screen, and those on it."""
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        return [line.rstrip() for line in above if line.strip()] + self.shown

    def hang_up(self) -> None:
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        if self._master >= 0:
            os.close(self._master)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


Start = Callable[..., Terminal]


@pytest.fixture
def folder(tmp_path: Path, agl_plugins: PluginFolder) -> Path:
    agl_plugins.install(LEARNER, name="learner")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(4)))
    return tmp_path


def write(folder: Path, *algorithms: str, head: str = "") -> None:
    names = algorithms or ('name = "learner"',)
    blocks = [f'\n[[algorithm]]\nuse = "learner"\ntunes = "prompt{n}"\n{keys}\n' for n, keys in enumerate(names)]
    (folder / "experiment.toml").write_text(FILE + "".join(blocks) + head)


@pytest.fixture
def start(folder: Path, agl_plugins: PluginFolder) -> Iterator[Start]:
    """Return a function that starts ``agl run`` in a terminal, with further arguments and variables."""
    started: list[Terminal] = []

    def run(*words: str, columns: int = 100, lines: int = 40, **variables: str) -> Terminal:
        command = [sys.executable, "-m", "agl", "run", "experiment.toml", *words]
        environment = {**agl_plugins.environment, "TERM": "xterm-256color", **variables}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            environment.pop(name, None)
        environment |= variables
        started.append(Terminal(command, folder=folder, environment=environment, columns=columns, lines=lines))
        return started[-1]

    yield run
    for terminal in started:
        terminal.close()


def has(*patterns: str) -> Callable[[list[str]], bool]:
    return lambda lines: all(any(re.search(pattern, line) for line in lines) for pattern in patterns)


@pytest.mark.long
def test_run_shows_its_state_while_it_lasts_and_plain_text_at_its_end(folder: Path, start: Start) -> None:
    write(folder)
    terminal = start()

    algorithm = r"^learner  ━+─+  2/4  0\.200  \[-?\d+\.\d+, \d+\.\d+\]  ▁█$"
    rollouts = r"^  \d/8  (\d\.\d/s|\d+/min)  \d queued  2 running  \d failed"
    live = terminal.read(has(algorithm, rollouts, r"^validate  0\.750  best 0\.750 after step 2$"))
    assert has(algorithm, rollouts)(live), live
    terminal.read()

    lines = terminal.scrolled
    assert 0 == terminal.process.wait(), lines
    assert [] == [line for line in lines if re.search("[━─▁█]|queued", line)]
    assert [f"learner step {n} of 4: reward 0.{n}00" for n in range(1, 5)] == [
        line.partition(";")[0] for line in lines if line.startswith("learner step")
    ]
    assert r"green and [bold]\x1b]0;owned\x07" in lines
    assert {"to stderr", "WARNING: a log line", "(Pdb)", "20%"} <= set(lines)
    assert "10%" not in "".join(lines)
    assert any(line.startswith("finished small in") for line in lines)
    assert b"\x1b[?25l" not in terminal.raw  # the cursor is never hidden


@pytest.mark.long
def test_forty_columns_without_colour_have_a_line_for_each_algorithm(folder: Path, start: Start) -> None:
    write(folder, 'name = "first"', 'name = "a-name-that-is-far-too-long"', head='\n[schedule]\nmode = "alternate"\n')
    terminal = start(columns=40, NO_COLOR="1")

    live = terminal.read(has(r"^first ━+─* 2/4 0\.200", r"^a-name-that-is-… ━+─* 1/4 0\.100"))
    assert has(r"^first ━", r"^a-name-that-is-… ━")(live), live
    terminal.read()

    assert 0 == terminal.process.wait()
    assert [] == [line for line in terminal.scrolled if re.search("[━─▁█]|queued", line)]
    of_agent = terminal.raw.replace(b"\x1b[32m", b"")
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", of_agent)


@pytest.mark.long
def test_terminal_without_unicode_gets_ascii(folder: Path, start: Start) -> None:
    write(folder)
    terminal = start(PYTHONIOENCODING="iso-8859-1")

    terminal.read(has(r"^learner  #+-+  2/4  0\.200  ~\d\.\d+  _#$"))
    terminal.read()

    assert 0 == terminal.process.wait(), terminal.shown
    assert re.search(rb"#-+", terminal.raw)
    terminal.raw.decode("ascii")


@pytest.mark.long
def test_a_terminal_that_changes_its_size_ends_clean(folder: Path, start: Start) -> None:
    write(folder)
    terminal = start(columns=100)
    for columns, lines in ((38, 20), (3, 2), (120, 5), (80, 40)):
        terminal.read(has("^learner  ?━"), within_s=60.0 if columns > 3 else 1.0)
        terminal.resize(columns, lines)
    terminal.read()

    assert 0 == terminal.process.wait(), terminal.shown
    assert not re.search("━|queued", terminal.shown[-1])


@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_leaves_the_terminal_as_it_was(folder: Path, start: Start, sent: int) -> None:
    write(folder, 'name = "learner"\nparams = { hold_at = 2 }')
    terminal = start()
    terminal.read(has(r"learner: holding \[bold\]on\[/bold\]", r"^  update 1/2"))

    os.kill(terminal.process.pid, sent)
    lines = terminal.read()

    assert 130 == terminal.process.wait(), lines
    text = "".join(lines)
    assert "stopped; everything up to the last step is kept. Continue with: agl run experiment.toml --resume" in text
    assert [] == [line for line in lines if re.search("[━─]|update 1/2", line)]
    assert b"\x1b[?25l" not in terminal.raw

    again = start("--resume", "--set", "algorithm.learner.params.hold_at=0")
    again.read(has(r"^learner  ━+─+  1/4"))
    again.read()
    assert 0 == again.process.wait(), again.shown


@pytest.mark.long
def test_a_run_that_is_killed_leaves_its_block_and_a_cursor(folder: Path, start: Start) -> None:
    write(folder, 'name = "learner"\nparams = { hold_at = 2 }')
    terminal = start()
    terminal.read(has(r"learner: holding", r"^learner  ━+─+  1/4", r"^validate  0\.750", r"^  update 1/2"))

    terminal.process.kill()
    lines = terminal.read()

    assert has(r"^learner  ━+─+  1/4", r"^validate  0\.750")(lines), lines
    assert not terminal.screen.cursor.hidden


@pytest.mark.long
def test_a_run_goes_on_when_its_terminal_is_closed(folder: Path, start: Start) -> None:
    write(folder)
    terminal = start()
    terminal.read(has(r"^learner  ━+─+  1/4"))

    terminal.hang_up()

    assert 0 == terminal.process.wait(60)
    assert '"step":4' in (folder / "runs" / "small" / "metrics.jsonl").read_text().replace(" ", "")


@pytest.mark.long
@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_draw_gets_plain_lines(folder: Path, start: Start, variables: dict[str, str]) -> None:
    write(folder)
    terminal = start(**variables)

    terminal.read()

    assert 0 == terminal.process.wait()
    assert not re.search(rb"\x1b\[[^m3]*[A-Za-ln-z]|queued", terminal.raw)
    assert b"learner step 4 of 4: reward 0.400" in terminal.raw


@pytest.mark.long
@pytest.mark.parametrize("piped", ["stdout", "stderr"])
def test_output_of_which_a_part_goes_elsewhere_is_plain_lines(
    folder: Path, agl_plugins: PluginFolder, piped: str
) -> None:
    write(folder)
    master, end = pty.openpty()
    streams = {"stdout": end, "stderr": end, piped: subprocess.PIPE}
    environment = {**agl_plugins.environment, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "agl", "run", "experiment.toml"]
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:
        os.close(end)
        told = b"".join(process.communicate(timeout=60)[place] or b"" for place in (0, 1))
        shown = b""
        while select.select([master], [], [], 0.1)[0]:
            try:
                shown += os.read(master, 65536)
            except OSError:
                break
    os.close(master)

    assert 0 == process.returncode
    assert not re.search(rb"\x1b\[[0-9;]*[A-HJK]", told + shown)
    assert b"learner step 4 of 4: reward 0.400" in told + shown
