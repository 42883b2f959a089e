"""Selects the rollouts that a command reads: options for rollouts and spans, and paging through a store."""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import click
import msgspec

from agl.contracts import Recording, RolloutQuery, SpanChoice, SpanQuery, Store
from agl.episodes import ScoreOptions, episode_reward
from agl.errors import ConfigError, NotFoundError
from agl.hints import closest, did_you_mean
from agl.schemas import Attempt, Rollout, RolloutStatus
from agl.stores import read_recordings
from agl_inspect.records.sources import existing
from agl_inspect.records.state import rules_of
from agl_inspect.retention import parse_duration
from agl_inspect.terminal.opening import LATEST, complete_experiment

F = TypeVar("F", bound=Callable[..., Any])

STATUSES = ("queued", "running", "succeeded", "failed", "cancelled")
PAGE = 500

_LISTED = 8
"""The most ids that the error about an ambiguous prefix lists."""

_SLIP = 0.9
"""The least similarity, from 0 to 1, of an id that is proposed for a misspelt one; ids share long prefixes."""

CONVERSATIONS = "served-conversations"
"""The experiment of conversations that a gateway serves; a rollout is ``running`` until its conversation ends."""

COUNTED: tuple[RolloutStatus, ...] = ("running", "succeeded", "failed")
"""Statuses with which a rollout counts for its versions; ``running`` counts only for conversations."""


def seconds_of(text: str) -> float:
    """Parse a duration such as ``7d``, ``12h`` or ``90`` into seconds; the type of an option."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def filter_options(command: F) -> F:
    """Add ``--experiment``, ``--status`` and ``--mode`` to a command."""
    return _with_options(
        command,
        click.option("--experiment", shell_complete=complete_experiment, help="Only rollouts of this experiment."),
        click.option("--status", type=click.Choice(STATUSES), multiple=True, help="Only this status; repeatable."),
        click.option("--mode", type=click.Choice(("train", "val", "test")), help="Only rollouts of this mode."),
    )


def span_options(command: F) -> F:
    """Add ``--span``, ``--agent`` and ``--kind`` to a command, which gets a query or ``None`` as ``chosen``."""

    @wraps(command)
    def with_query(*args: Any, span_text: str, agent: str, kind: str, **options: Any) -> Any:
        query = SpanQuery(contains=span_text, agent=agent, kind=kind)
        return command(*args, chosen=query if query != SpanQuery() else None, **options)

    return _with_options(
        cast("F", with_query),
        click.option("--span", "span_text", default="", metavar="TEXT", help="Only spans whose name contains TEXT."),
        click.option("--agent", default="", metavar="NAME", help="Only spans of this agent, node or role."),
        click.option(
            "--kind", default="", help="Only spans of this kind: call, reward, tool, agent, node, workflow, handoff."
        ),
    )


def _with_options(command: F, *options: Callable[[Any], Any]) -> F:
    decorated: Any = command
    for option in reversed(options):
        decorated = option(decorated)
    return cast("F", decorated)


def make_query(experiment: str | None, status: tuple[str, ...], mode: str | None, *, limit: int = PAGE) -> RolloutQuery:
    """Make a query from the options of :func:`filter_options`."""
    fields = {"experiment": experiment, "status": status, "mode": mode, "limit": limit}
    return msgspec.convert(fields, RolloutQuery)


async def check_experiment(store: Store, name: str | None) -> None:
    """Raise :class:`ConfigError`, which names the store's experiments, if this experiment has no rollout."""
    if name is None or await store.rollouts(RolloutQuery(experiment=name, limit=1)):
        return
    known = sorted(record.name for record in await store.experiments())
    listed = f"choose from: {', '.join(known)}" if known else "agl runs lists the records"
    raise ConfigError(
        f"no rollout of an experiment {name!r} is recorded; {did_you_mean(name, known, otherwise=listed)}"
    )


async def pages(store: Store, query: RolloutQuery) -> AsyncIterator[list[Rollout]]:
    """Yield all matching rollouts, page by page."""
    while True:
        page = await store.rollouts(query)
        if not page:
            return
        yield page
        query = query.next(page[-1])


async def rewards_of(store: Store, rollout_ids: Sequence[str]) -> AsyncIterator[tuple[Rollout, float | None]]:
    """Yield rollouts in order of id, each with the reward that the rules of its experiment give."""
    if rollout_ids:
        query = RolloutQuery(ids=tuple(rollout_ids), limit=len(rollout_ids))
        known: dict[str, ScoreOptions] = {}
        async for recording in read_recordings(store, query):
            name = recording.rollout.experiment
            known[name] = rule = known.get(name) or (await rules_of(store, name)).score
            reward = episode_reward(recording.spans, weights=rule.weights, trust_agent=rule.trust_agent)
            yield recording.rollout, reward


async def find(store: Store, rollout_id: str) -> Rollout:
    """Find a rollout by its id or a unique prefix of its id; ``latest`` finds the newest one.

    Raises:
        NotFoundError: No rollout has such an id, its record is damaged, or the store is empty.
        ConfigError: Several ids have the prefix; the message lists the first ones.
    """
    if rollout_id == LATEST:
        return await _latest(store)
    found = await find_exact(store, rollout_id)
    if found is not None:
        return found
    behind = await store.rollouts(RolloutQuery(after=rollout_id, limit=_LISTED + 1)) if rollout_id else []
    begun = [rollout for rollout in behind if rollout.rollout_id.startswith(rollout_id)]
    if not begun:
        raise NotFoundError("rollout", rollout_id, await _no_rollout(store, rollout_id))
    if len(begun) > 1:
        listed = ", ".join(rollout.rollout_id for rollout in begun[:_LISTED])
        more = " and more" if len(begun) > _LISTED else ""
        raise ConfigError(f"several rollouts begin with {rollout_id!r}: {listed}{more}; write more of the id")
    return begun[0]


async def _no_rollout(store: Store, rollout_id: str) -> str:
    """Return a hint for an unknown id: a similar id among the newest rollouts, and how to list them."""
    newest = await store.rollouts(RolloutQuery(limit=PAGE, is_newest_first=True))
    near = closest(rollout_id, [rollout.rollout_id for rollout in newest], cutoff=_SLIP)
    meant = f"did you mean {near!r}?" if near else "no id begins so;"
    return f"{meant} agl runs lists them, and latest is the newest"


async def find_exact(store: Store, rollout_id: str) -> Rollout | None:
    """Find a rollout by its whole id; ``None`` for an unknown id. Raises :class:`NotFoundError` if it is damaged."""
    try:
        return (await store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]
    except NotFoundError as error:
        if error.is_damaged:
            raise
        return None


async def find_ids(store: Store, names: Sequence[str]) -> tuple[str, ...]:
    """Return the whole ids of rollouts that are named in any way that :func:`find` accepts."""
    return tuple([(await find(store, name)).rollout_id for name in names])


async def _latest(store: Store) -> Rollout:
    """Return the newest among the rollouts that changed most recently.

    Ids sort by time within one experiment only, so the highest id counts only if the change feed names no rollout.
    """
    changes = await store.changes(after=max(0, await store.cursor() - PAGE))
    keys = tuple(dict.fromkeys(change.key for change in changes if change.kind == "rollout"))
    if changed := await existing(store, keys):
        return max(changed, key=lambda rollout: (rollout.created_at, rollout.rollout_id))
    newest = await store.rollouts(RolloutQuery(limit=1, is_newest_first=True))
    if not newest:
        raise NotFoundError("rollout", LATEST, "the store is empty")
    return newest[0]


async def read_one(store: Store, rollout_id: str, *, spans: SpanChoice = "deciding") -> Recording:
    """Read a rollout with its attempts and spans; raises :class:`~agl.errors.NotFoundError` for an unknown id."""
    query = RolloutQuery(ids=(rollout_id,))
    (found,) = [recording async for recording in read_recordings(store, query, spans=spans)]
    return found


def deciding(rollout: Rollout, attempts: list[Attempt]) -> Attempt | None:
    """Return the attempt that is running or that decided the outcome; ``None`` before the first attempt."""
    return next((attempt for attempt in attempts if attempt.attempt_id == rollout.attempt_id), None)


def is_counted(rollout: Rollout) -> bool:
    """Return true if a rollout counts for its versions: it is finished, or it is a conversation.

    The rollout's status must be in ``COUNTED``.
    """
    return rollout.is_finished or rollout.experiment == CONVERSATIONS
