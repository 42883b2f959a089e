"""Turns rollouts and changes into rows of SQL tables and back.

A rollout has a number (``seq``, never reused). Its attempts are ``seq << 14 | number``, with number 0 for spans of no
attempt, so that all attempts and spans of a rollout are in one range of numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, get_args

from msgspec.structs import force_setattr, replace

from agl import semconv
from agl.contracts import Change, RolloutQuery
from agl.errors import NotFoundError
from agl.schemas import (
    MAX_ATTEMPTS,
    Attempt,
    AttemptStatus,
    ErrorInfo,
    Mode,
    Rollout,
    RolloutStatus,
    attempt_id_of,
    decode,
)
from agl.stores import DAMAGE, MAX_SEQUENCE, is_wanted, note_damage, start_of

R = TypeVar("R")

Row: TypeAlias = tuple[Any, ...]
"""One row of a table, as a database driver returns it."""

MODES: tuple[Mode, ...] = get_args(Mode)
STATUSES: tuple[RolloutStatus, ...] = get_args(RolloutStatus)
"""All modes, and all statuses of rollouts, in the order of their declaration."""

ATTEMPT_BITS = MAX_ATTEMPTS.bit_length()
NUMBER_MASK = (1 << ATTEMPT_BITS) - 1

SEQUENCE_BITS = MAX_SEQUENCE.bit_length()

ROLLOUT = (
    "r.seq, r.rollout_id, r.status, r.attempts, r.failures, r.losses, r.attempt, r.started_at, r.finished_at, r.data"
)
"""The columns that :func:`read_rollout` reads; ``data`` is the record with which the rollout was queued."""


def read_rollout(row: Row) -> Rollout:
    """Read a rollout from the columns of :data:`ROLLOUT`.

    Raises:
        NotFoundError: The record is damaged; it counts as removed.
    """
    _, rollout_id, status, attempts, failures, losses, attempt, started_at, finished_at, data = row
    try:
        rollout = decode(data, Rollout)
        started_at, finished_at = float(started_at), float(finished_at)
        if rollout.rollout_id != rollout_id or status not in STATUSES:
            raise ValueError(f"it has the id {rollout.rollout_id[:80]!a} and the status {status!r}")
    except DAMAGE as error:
        note_damage(f"rollout {rollout_id!r}", str(error))
        hint = "agl runs rm removes it, and --resume runs it again"
        raise NotFoundError("rollout", rollout_id, hint, is_damaged=True) from error
    force_setattr(rollout, "status", status)
    force_setattr(rollout, "attempts", attempts)
    force_setattr(rollout, "failures", failures)
    force_setattr(rollout, "losses", losses)
    force_setattr(rollout, "attempt_id", attempt and attempt_id_of(rollout.rollout_id, attempt & NUMBER_MASK))
    force_setattr(rollout, "started_at", started_at)
    force_setattr(rollout, "finished_at", finished_at)
    return rollout


def read_rollouts(rows: Iterable[R], read: Callable[[R], Rollout]) -> Iterator[Rollout]:
    """Yield the rollouts that can be read, so that a damaged one does not hide the others."""
    for row in rows:
        try:
            yield read(row)
        except NotFoundError:
            continue


def readable_page(fetch: Callable[[int], Sequence[R]], read: Callable[[R], Rollout], limit: int) -> list[Rollout]:
    """Read a page of ``limit`` rollouts; ``fetch`` returns the first rows, of which some may be damaged."""
    wanted = limit
    while True:
        rows = fetch(wanted)
        found = list(read_rollouts(rows, read))
        if len(found) >= limit or len(rows) < wanted:
            return found[:limit]
        wanted *= 2


def read_attempt(data: bytes, rollout_id: str, *, number: int, status: AttemptStatus) -> Attempt:
    """Read an attempt; one with the error ``agl.unreadable`` and the given status stands for a damaged one."""
    try:
        return decode(data, Attempt)
    except DAMAGE as error:
        attempt_id = attempt_id_of(rollout_id, number)
        note_damage(f"attempt {attempt_id!r}", str(error))
        why = ErrorInfo(type=semconv.UNREADABLE, message=f"the stored attempt cannot be read: {error}")
        return Attempt(
            attempt_id=attempt_id, rollout_id=rollout_id, number=number, worker="unknown", status=status, error=why
        )


def progress_row(rollout: Rollout, seq: int) -> Row:
    """Return a rollout's status, attempts, failures, losses, attempt, start, end and stage, and its number.

    The stage is ``open`` while the rollout is queued or running, and its status after that.
    """
    attempt = rollout.attempt_id and seq << ATTEMPT_BITS | rollout.attempts  # the newest attempt
    stage = rollout.status if rollout.is_finished else "open"
    counts = rollout.attempts, rollout.failures, rollout.losses
    return rollout.status, *counts, attempt, rollout.started_at, rollout.finished_at, stage, seq


def conditions(query: RolloutQuery, mark: str) -> tuple[str, list[str]]:
    """Return an SQL condition for a query's filters (except ids), and the values of its placeholders ``mark``."""
    fields = {"experiment": query.experiment, "mode": query.mode, "group_id": query.group_id}
    given = [(f"r.{name} = {mark}", [value]) for name, value in fields.items() if value is not None]
    if query.status:
        given.append((f"r.status IN ({', '.join([mark] * len(query.status))})", list(query.status)))
    where = " AND ".join(condition for condition, _ in given) or "1 = 1"
    return where, [value for _, values in given for value in values]


def order_of(query: RolloutQuery, mark: str) -> tuple[str, str, tuple[Any, ...]]:
    """Return the SQL of a query's page: the condition, the ``ORDER BY`` terms, and the values of the placeholders."""
    columns = list(dict.fromkeys((query.sort, "rollout_id")))
    compare, direction = ("<", "DESC") if query.is_newest_first else (">", "ASC")
    order = ", ".join(f"r.{column} {direction}" for column in columns)
    if not query.after:
        return "1 = 1", order, ()
    names, marks = ", ".join(f"r.{column}" for column in columns), ", ".join([mark] * len(columns))
    return f"({names}) {compare} ({marks})", order, start_of(query)[-len(columns) :]


def by_status(read: Callable[[RolloutQuery], list[Rollout]], query: RolloutQuery) -> list[Rollout]:
    """Return a page of a query sorted by status: the rollouts of one status by id, then those of the next one."""
    found: list[Rollout] = []
    for status in sorted(query.status or STATUSES, reverse=query.is_newest_first):
        start = str(query.after_value) if query.after else status
        if status == start or (start < status) != query.is_newest_first:
            after, left = query.after if status == start else "", query.limit - len(found)
            found += read(replace(query, status=(status,), sort="rollout_id", after=after, limit=left))
    return found


def containing(read: Callable[[RolloutQuery], list[Rollout]], query: RolloutQuery) -> Iterator[Rollout]:
    """Yield the rollouts that match a query with ``contains``; reads all pages, with one page in memory at a time."""
    every = replace(query, contains="", limit=500)
    while page := read(every):
        yield from (rollout for rollout in page if is_wanted(rollout, query))
        every = every.next(page[-1])


def read_change(row: Row) -> Change:
    """Read a change from the columns cursor, kind, status, name, attempt, rollout id and experiment."""
    cursor, kind, status, name, attempt, rollout_id, experiment = row
    if kind == "resource":
        return Change(cursor=cursor, kind=kind, key=name, status=status)
    number = attempt & NUMBER_MASK
    attempt_id = attempt_id_of(rollout_id, number) if number else ""
    return Change(cursor=cursor, kind=kind, key=rollout_id, attempt_id=attempt_id, status=status, experiment=experiment)


def number_of(attempt_id: str) -> int:
    """Return the number in an attempt's id; 0 for ids that no attempt can have."""
    digits = attempt_id.rpartition(".")[2]
    number = int(digits) if digits.isdecimal() and len(digits) <= len(str(NUMBER_MASK)) else 0
    return number if number <= NUMBER_MASK and str(number) == digits else 0
