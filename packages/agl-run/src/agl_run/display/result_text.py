"""Formats results as tables: aligned text for a terminal, or HTML for a notebook."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from agl.hints import count_of
from agl.schemas import Episode
from agl_inspect.records.names import error_of
from agl_inspect.text import visible
from agl_run.agents.importing import place_in

Rows = Sequence[Sequence[str]]

SHOWN = 20
"""The most rollouts that a table shows."""


def reward_text(before: float | None, after: float | None, others: Iterable[tuple[float | None, str]]) -> str:
    """Return one line of validation rewards, such as ``0.400 before; 0.600 after``; ``none`` if no value is known.

    Args:
        before: The reward before training.
        after: The reward after training.
        others: Further rewards, each with the text that says when it was measured.
    """
    values = [(before, "before"), (after, "after"), *others]
    return "; ".join(f"{value:.3f} {when}" for value, when in values if value is not None) or "none"


def pairs(values: Mapping[str, object]) -> str:
    """Return ``name value`` pairs on one line, sorted by name; ``none`` if the mapping is empty."""
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items())) or "none"


def episode_rows(episodes: Iterable[Episode]) -> Rows:
    """Return a header and one row per rollout, at most :data:`SHOWN` rollouts.

    The column of errors is left out if no rollout has an error.
    """
    every = list(episodes)
    rows = [("rollout", "status", "reward", "calls", "rows", "error"), *map(_row, every[:SHOWN])]
    if len(every) > SHOWN:
        rows.append((f"and {len(every) - SHOWN} more", "", "", "", "", ""))
    # A column of blanks would only push the others aside.
    has_errors = any(row[-1] for row in rows[1:])
    return rows if has_errors else [row[:-1] for row in rows]


def _row(episode: Episode) -> tuple[str, ...]:
    reward = "none" if episode.reward is None else f"{episode.reward:g}"
    counts = (len(episode.transitions), len(episode.rows))
    rollout = episode.rollout
    error = "" if rollout.status == "succeeded" else error_of(rollout, episode.attempt)
    return (rollout.rollout_id, rollout.status, reward, *map(str, counts), error)


def as_text(title: str, rows: Rows) -> str:
    """Return a title, and below it the rows in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([title, *lines])


def as_html(title: str, rows: Rows, *, has_head: bool) -> str:
    """Return the rows as an HTML table with a caption.

    With ``has_head``, the first row is a header; otherwise the first column holds the names.
    """
    shown = "".join(
        "<tr>" + "".join(_cell(cell, is_name=(number if has_head else column) == 0) for column, cell in enumerate(row))
        for number, row in enumerate(rows)
    )
    return f"<table><caption>{escape(title)}</caption>{shown}</table>"


def _cell(text: str, *, is_name: bool) -> str:
    kind = "th" if is_name else "td"
    return f'<{kind} style="text-align: left">{escape(text)}</{kind}>'


def describe_episode(episode: Episode, *, is_trained: bool = True, folder: Path = Path()) -> str:
    """Describe a rollout in a few lines: its status, its reward, and its calls with the reject reasons.

    An error is followed by the line of a file in ``folder`` that raised it, or that called what raised it.
    """
    rollout = episode.rollout
    reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
    lines = [f"{rollout.rollout_id}: {rollout.status}, {reward}, {count_of(len(episode.rows), 'row')}"]
    if episode.attempt and (error := episode.attempt.error):
        lines.append(f"  {error.type}: {error.message}")
        lines += [f"  at {place}" for place in [place_in(error.traceback, folder)] if place]
    for call in episode.transitions:
        who = call.agent or "agent"
        # Token ids are packed as four bytes each.
        prompt, response = len(call.prompt_ids) // 4, len(call.response_ids) // 4
        tokens = f"{prompt} + {response} tokens" if prompt or response else "no token ids"
        fate = f"rejected: {call.reject} {call.detail}".rstrip() if call.reject else f"row {call.branch}"
        if call.reject == "missing_token_ids" and not is_trained:
            fate = "recorded"
        lines.append(f"  {who} turn {call.turn}: {tokens}, {fate}")
    return visible("\n".join(lines))
