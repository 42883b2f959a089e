"""Prints the conversation of a rollout and its time line, in the order in which the console draws them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from msgspec.structs import replace

from agl.schemas import ErrorInfo, Reward
from agl_inspect.rollouts.conversations import MediaPart
from agl_inspect.rollouts.explanations import reward_text
from agl_inspect.rollouts.tree import AXIS, Contents, Node, Text
from agl_inspect.rollouts.turns import Said, ToolUse, Turn
from agl_inspect.terminal.pictures import Medium
from agl_inspect.text import visible

CUT = 200
"""The most characters of a text that are shown without ``--full``."""

TRACEBACK_LINES = 8
"""The most lines of a traceback that are shown without ``--full``; they are its last ones, with the error."""

_BAR = 20
"""The width of the time axis in characters."""

_COLOURS = {"system": "magenta", "user": "green", "assistant": "cyan"}


class Talk:
    """Prints parts of a rollout; a terminal shows them in colour.

    Args:
        is_full: True to print every text whole.

    Attributes:
        is_full: Whether every text is printed whole.
        is_cut: Whether anything was shortened so far.
    """

    def __init__(self, *, is_full: bool) -> None:
        self.is_full = is_full
        self.is_cut = False

    @property
    def limit(self) -> int | None:
        """The most characters of a text that are needed."""
        return None if self.is_full else 2 * CUT

    def turn(self, turn: Turn, media: Mapping[str, Medium]) -> None:
        """Print what was said in a turn with its media, and what rewards and training made of it."""
        node = turn.node
        who = " / ".join(node.path) or ("model" if node.kind == "call" else node.name)
        name = node.name if node.path and node.kind != "call" else ""
        parts: list[_Styled] = [(who, {"bold": True}), (name, {}), (", ".join(turn.facts), {"dim": True})]
        _line(0, *(part for part in parts if part[0]), *_state(node))
        if turn.repeated:
            _line(1, (f"continues {turn.repeated} earlier message{'' if turn.repeated == 1 else 's'}", {"dim": True}))
        for said in turn.messages:
            self._said(said, media)
        if turn.message:
            _line(1, (turn.message if self.is_full else turn.message[:CUT], {"fg": "red"}))
        for reward in turn.rewards:
            self._reward(reward)
        for text in turn.texts:
            if text.role != "error":
                self.text(1, text)
            elif self.is_full:
                self._lines(1, text.text.splitlines())
        if turn.training:
            colour = "bright_blue" if (turn.tone or 0) > 0 else "yellow" if turn.tone else None
            _line(1, (turn.training, {"fg": colour, "dim": colour is None}))

    def _said(self, said: Said, media: Mapping[str, Medium]) -> None:
        colour = _COLOURS.get(said.role)
        if said.thinking:
            self.text(1, replace(said.thinking, label=f"{said.role} thinks"), dim=True)
        if said.text or not (said.thinking or said.tools):
            self.text(1, said.text or Text(label=said.role, text="(empty)", length=7), fg=colour)
        self._media(2, said.media, media)
        for use in said.tools:
            self._tool(said.role, use, media)

    def _tool(self, role: str, use: ToolUse, media: Mapping[str, Medium]) -> None:
        self.text(1, replace(use.arguments, label=f"{role} calls {use.name}"), fg="yellow")
        if use.result:
            self.text(2, replace(use.result, label="failed" if use.is_error else "result"), fg=_bad(use.is_error))
            self._media(3, use.media, media)
        elif use.is_error:
            _line(2, ("failed", {"fg": "red"}))

    def _media(self, depth: int, parts: Sequence[MediaPart], media: Mapping[str, Medium]) -> None:
        for part in parts:
            line, drawing = media[part.reference]
            _line(depth, (line, {"dim": True}))
            if drawing:
                click.echo("  " * depth + drawing)

    def _reward(self, reward: Reward) -> None:
        _line(1, ("reward", {"fg": "green", "bold": True}), (reward_text(replace(reward, feedback="")), {"bold": True}))
        if reward.feedback:
            self.text(2, Contents(limit=self.limit).text("feedback", reward.feedback))

    def text(self, depth: int, text: Text, **style: Any) -> None:
        """Print a text after its label: all lines of it if ``is_full``, else its beginning on one line."""
        first, *rest = (text.text.splitlines() or [""]) if self.is_full else [" ".join(text.text.split())]
        if not self.is_full and (len(first) > CUT or text.is_cut):
            self.is_cut = True
            first = f"{first[:CUT]}… ({text.length} characters)"
        _line(depth, (f"{text.label}:", style), (first, {"dim": bool(style.get("dim"))}))
        self._lines(depth + 1, rest)

    def error(self, error: ErrorInfo) -> None:
        """Print the traceback of an attempt's error and, if ``is_full``, a long message."""
        lines = error.traceback.rstrip().splitlines()
        left_out = 0 if self.is_full else max(0, len(lines) - TRACEBACK_LINES)
        kept = lines if self.is_full else [line if len(line) <= CUT else f"{line[:CUT]}…" for line in lines[left_out:]]
        self.is_cut = self.is_cut or kept != lines
        self._lines(2, [f"… ({left_out} lines before)", *kept] if left_out else kept)
        if self.is_full and len(error.message) > CUT:
            self._lines(2, [f"message: {error.message}"])

    def time_line(self, nodes: Sequence[Node], seconds: float) -> None:
        """Print the spans as a tree along a time axis."""
        click.echo()
        _line(0, ("time line", {"bold": True}), (_seconds(seconds), {"dim": True}))
        for node in nodes:
            start, width = node.start * _BAR // AXIS, max(1, round(node.width * _BAR / AXIS))
            bar = f"{' ' * start}{'█' * width}"[:_BAR].ljust(_BAR)
            _line(
                0, (bar, {"fg": "red" if node.is_error else "blue"}), ("  " * node.depth + node.name, {}), *_state(node)
            )

    def _lines(self, depth: int, lines: Sequence[str]) -> None:
        for line in lines:
            _line(depth, (line, {}))


_Styled = tuple[str, dict[str, Any]]


def _line(depth: int, *parts: _Styled) -> None:
    click.echo("  " * depth + " ".join(click.style(visible(text), **style) for text, style in parts))


def _state(node: Node) -> Iterator[_Styled]:
    if node.seconds >= 0.0005:
        yield _seconds(node.seconds), {"dim": True}
    if node.is_error:
        yield "ERROR", {"fg": "red"}
    if node.is_late:
        yield "late", {"fg": "yellow"}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _bad(is_error: bool) -> str | None:
    return "red" if is_error else None
