"""The addresses of the console, and the view behind each: a page for people, the same data as JSON for programs."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from agl.contracts import Store
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Record
from agl_console.agents import AgentsFilter, agents_view
from agl_console.group import GroupFilter, group_view
from agl_console.learning import LearningFilter, learning_view
from agl_console.rollout import RolloutFilter, SpanView, rollout_tokens_view, rollout_view, span_view
from agl_console.rollouts import RolloutsFilter, rollouts_view
from agl_console.runs import RunsFilter, runs_view
from agl_console.system import SystemFilter, system_view
from agl_console.tokens import TokensFilter, TokensView
from agl_console.versions import ResourcesFilter, VersionsFilter, resources_view, versions_view
from agl_console.vocabulary import Vocabulary

F = TypeVar("F", bound=Record)

Query = Mapping[str, Sequence[str]]
"""The parameters of an address, each with its values."""


class View(NamedTuple):
    """A view that was read: the name of its template, and its data."""

    template: str
    data: Record


async def read_view(store: Store, path: str, query: Query, vocabulary: Vocabulary | None = None) -> View:
    """Read the view of an address.

    Args:
        store: The store.
        path: The path, percent-encoded, such as ``/runs/sql``.
        query: The parameters.
        vocabulary: The texts of tokens, ``None`` to show ids only.

    Raises:
        NotFoundError: No view, run, rollout or span has this address.
        ConfigError: A parameter is unknown or has an impossible value.
    """
    for pattern, template, read in _VIEWS:
        if match := pattern.fullmatch(path):
            data = await read(store, [unquote(part) for part in match.groups()], query)
            return View(template, data if vocabulary is None else _with_texts(data, vocabulary))
    raise NotFoundError(
        "page", path, "the console has /, /runs/NAME, /rollouts, /rollouts/ID, /versions and /versions/NAME"
    )


def _with_texts(data: Record, vocabulary: Vocabulary) -> Record:
    """Give the tokens of a view their texts."""
    if not isinstance(data, SpanView | TokensView):
        return data
    texts = vocabulary.texts(cell.id for cell in data.cells)
    return replace(data, cells=[replace(cell, text=text) for cell, text in zip(data.cells, texts, strict=True)])


async def _runs(store: Store, _names: Sequence[str], query: Query) -> Record:
    return await runs_view(store, parsed(query, RunsFilter, several=("compare",)))


async def _learning(store: Store, names: Sequence[str], query: Query) -> Record:
    return await learning_view(store, names[0], parsed(query, LearningFilter))


async def _agents(store: Store, names: Sequence[str], query: Query) -> Record:
    return await agents_view(store, names[0], parsed(query, AgentsFilter))


async def _system(store: Store, names: Sequence[str], query: Query) -> Record:
    return await system_view(store, names[0], parsed(query, SystemFilter))


async def _rollouts(store: Store, _names: Sequence[str], query: Query) -> Record:
    return await rollouts_view(store, parsed(query, RolloutsFilter))


async def _rollout(store: Store, names: Sequence[str], query: Query) -> Record:
    return await rollout_view(store, names[0], parsed(query, RolloutFilter))


async def _tokens(store: Store, names: Sequence[str], query: Query) -> Record:
    return await rollout_tokens_view(store, names[0], parsed(query, TokensFilter))


async def _span(store: Store, names: Sequence[str], query: Query) -> Record:
    return await span_view(store, names[0], int(names[1]), parsed(query, RolloutFilter))


async def _group(store: Store, _names: Sequence[str], query: Query) -> Record:
    return await group_view(store, parsed(query, GroupFilter))


async def _resources(store: Store, _names: Sequence[str], query: Query) -> Record:
    return await resources_view(store, parsed(query, ResourcesFilter))


async def _versions(store: Store, names: Sequence[str], query: Query) -> Record:
    return await versions_view(store, names[0], parsed(query, VersionsFilter))


_VIEWS: tuple[tuple[re.Pattern[str], str, Callable[[Store, Sequence[str], Query], Awaitable[Record]]], ...] = (
    (re.compile("/"), "runs.html", _runs),
    (re.compile("/runs/([^/]+)"), "learning.html", _learning),
    (re.compile("/runs/([^/]+)/agents"), "agents.html", _agents),
    (re.compile("/runs/([^/]+)/system"), "system.html", _system),
    (re.compile("/rollouts"), "rollouts.html", _rollouts),
    (re.compile("/rollouts/([^/]+)"), "rollout.html", _rollout),
    (re.compile("/rollouts/([^/]+)/tokens"), "tokens.html", _tokens),
    (re.compile("/rollouts/([^/]+)/spans/([0-9]{1,12})"), "span.html", _span),
    (re.compile("/group"), "group.html", _group),
    (re.compile("/versions"), "resources.html", _resources),
    (re.compile("/versions/([^/]+)"), "versions.html", _versions),
)


def parsed(query: Query, kind: type[F], *, several: Sequence[str] = ()) -> F:
    """Convert the parameters of an address or a form; empty ones, as forms send them, count as absent.

    Raises:
        ConfigError: A parameter is unknown or has an impossible value.
    """
    given: dict[str, Any] = {}
    for name, values in query.items():
        found = [value for value in values if value]
        if found:
            given[name] = found if name in several else found[-1]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigError(f"the address has a wrong parameter: {error}; it may have: {known}") from error
