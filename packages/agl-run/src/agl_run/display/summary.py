"""Shows a run in a terminal: a small block below all other output, which is redrawn as the run proceeds.

The display never ends or delays a run: a thread of its own draws the block from numbers that the trainer records, and
after a failed write to the terminal nothing more is written. The cursor stays visible, because a killed process could
not bring it back.
"""

import io
import logging
import os
import re
import shutil
import sys
import threading
from contextlib import suppress
from io import StringIO
from typing import Any, TextIO, cast

from agl_inspect.text import visible
from agl_run.display.run_view import RunView
from agl_run.display.terminal_block import draw

EVERY_S = 0.25
"""Seconds between two redraws of the block."""

_WIDEST = 100
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")


class LiveSummary:
    """Shows the progress of a run in a terminal; before ``watch`` and after ``close`` it prints plain lines.

    Attributes:
        lock: Held while something is written to the terminal.
    """

    def __init__(self) -> None:
        # Reentrant: a warning may be logged while a line is being printed.
        self.lock = threading.RLock()
        self._closing = threading.Event()
        self._terminal: _Terminal | None = None
        self._view = RunView()
        # The lines of the block and their widths in columns, which say how many rows to erase after
        # a resize.
        self._drawn: list[tuple[str, int]] = []
        self._size = os.terminal_size((0, 0))
        self._redirected: list[tuple[logging.Handler | str, TextIO]] = []
        self._thread = threading.Thread(target=self._follow, name="agl-summary", daemon=True)

    def say(self, text: str) -> None:
        """Print a line above the block."""
        self._print(visible(text))

    def update(self, name: str, done: int, total: int, text: str = "") -> None:
        """Do nothing: the block shows the progress of the watched run."""

    def watch(self, view: RunView) -> None:
        """Start to draw a run's block; from now on this process's other output is printed above the block."""
        if self._terminal is not None or isinstance(sys.stdout, _Above):
            return  # another run of this process has the terminal
        self._view, self._terminal = view, _Terminal(sys.stdout)
        self._redirect()
        self._thread.start()

    def close(self) -> None:
        """Remove the block; idempotent."""
        if self._terminal is None or self._closing.is_set():
            return
        self._closing.set()
        # Joined before the lock is taken: the thread takes it to draw.
        self._thread.join()
        with self.lock:
            self._restore()
            self._terminal.write(self._erased())
            self._drawn = []

    def print_above(self, line: str) -> None:
        """Print a program's line with its colours; other control characters are shown as visible text."""
        # Of a bar that was drawn over itself only the last state stays.
        pieces = _COLOUR.split(line.rstrip("\r").rpartition("\r")[2])
        tamed = "".join(piece if place % 2 else visible(piece) for place, piece in enumerate(pieces))
        # A colour that the program left on must not run into the block.
        self._print(f"{tamed}\x1b[0m" if len(pieces) > 1 else tamed)

    def _print(self, text: str) -> None:
        with self.lock:
            if self._terminal is None:
                print(text, flush=True)
                return
            erased = self._erased()
            self._terminal.write(f"{erased}{text}\n{'' if self._closing.is_set() else self._latest_block()}")

    def _follow(self) -> None:
        while not self._closing.wait(EVERY_S):
            with self.lock:
                before, erased = self._drawn, self._erased()
                block = self._block()
                # Nothing is written while nothing changes, so a person can select text.
                if self._drawn != before and self._terminal is not None:
                    self._terminal.write(erased + block)

    def _latest_block(self) -> str:
        """Return the last drawn block, or draw it again if the terminal's size has changed; drawing is slow."""
        if not self._drawn or self._size != shutil.get_terminal_size():
            return self._block()
        return "\n".join(line for line, _ in self._drawn)

    def _block(self) -> str:
        """Draw and return the block, and remember its lines with their widths so that it can be erased."""
        from rich.console import Console

        self._size = size = shutil.get_terminal_size()
        # One column stays free, because a full row wraps on some terminals.
        width = min(_WIDEST, size.columns - 1)
        is_ascii = self._terminal is not None and not self._terminal.is_unicode
        lines = draw(self._view, width=width, height=size.lines - 1, is_ascii=is_ascii)
        console = Console(file=StringIO(), force_terminal=True, width=max(1, width), legacy_windows=False)
        self._drawn = []
        for line in lines:
            with console.capture() as drawn:
                console.print(line, end="", no_wrap=True, crop=False, markup=False, highlight=False, soft_wrap=True)
            self._drawn.append((drawn.get(), line.cell_len))
        return "\n".join(line for line, _ in self._drawn)

    def _erased(self) -> str:
        """Return the control sequence that erases the block at the terminal's current width."""
        # The current width counts: a terminal that became narrower has wrapped the drawn lines.
        columns = max(1, shutil.get_terminal_size().columns)
        rows = sum(max(1, -(-width // columns)) for _, width in self._drawn)
        up = f"\x1b[{rows - 1}A" if rows > 1 else ""
        return f"\r{up}\x1b[J" if self._drawn else ""

    def _redirect(self) -> None:
        """Redirect this process's printed and logged output so that it appears above the block."""
        for name in ("stdout", "stderr"):
            real = getattr(sys, name)
            above = _Above(self, real)
            for handler in logging.getLogger().handlers:
                # Logging handlers hold the stream from their creation, so replacing sys.stderr does
                # not reach them.
                if getattr(handler, "stream", None) is real:
                    cast("logging.StreamHandler[TextIO]", handler).setStream(cast("TextIO", above))
                    self._redirected.append((handler, real))
            setattr(sys, name, above)
            self._redirected.append((name, real))

    def _restore(self) -> None:
        for place, real in self._redirected:
            if isinstance(place, logging.Handler):
                cast("logging.StreamHandler[TextIO]", place).setStream(real)
            # Other code may have replaced the stream again; its replacement stays.
            elif isinstance(getattr(sys, place), _Above):
                getattr(sys, place).end_line()
                setattr(sys, place, real)


class _Terminal:
    """Writes to a terminal that may be closed at any time and whose encoding may lack characters."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._encoding = file.encoding or "ascii"
        self._is_gone = False

    @property
    def is_unicode(self) -> bool:
        """True if the terminal's encoding is a Unicode encoding."""
        return self._encoding.lower().replace("-", "").startswith("utf")

    def write(self, text: str) -> None:
        """Write the text; do nothing if the terminal has been closed."""
        if self._is_gone or not text:
            return
        try:
            # A character that the terminal lacks must not raise in the thread that draws.
            self._file.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self._file.flush()
        except (OSError, ValueError):  # hung up, or closed
            self._is_gone = True


class _Above(io.TextIOBase):
    """A replacement of ``sys.stdout`` or ``sys.stderr`` that prints whole lines above the block."""

    def __init__(self, summary: LiveSummary, real: TextIO) -> None:
        self._summary, self._real, self._rest, self._pid = summary, real, "", os.getpid()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # read only here
        return self._real.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def isatty(self) -> bool:
        return self._real.isatty()

    def fileno(self) -> int:
        return self._real.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Print the complete lines above the block; in a forked process, write straight to the real stream."""
        if os.getpid() != self._pid:
            return self._real.write(text)
        with self._summary.lock:
            # Only whole lines are printed above the block; the rest waits for its end.
            *lines, self._rest = f"{self._rest}{text}".split("\n")
            for line in lines:
                self._summary.print_above(line)
        return len(text)

    def flush(self) -> None:
        """Print an unfinished line, such as a question; a line with a carriage return, a progress bar, is held back."""
        with self._summary.lock:
            # A prompt is flushed without a line's end and has to be seen.
            if self._rest and "\r" not in self._rest:
                line, self._rest = self._rest, ""
                self._summary.print_above(line)

    def end_line(self) -> None:
        """Write an unfinished line to the real stream."""
        rest, self._rest = self._rest, ""
        if rest:
            with suppress(OSError, ValueError):
                self._real.write(f"{rest}\n")
