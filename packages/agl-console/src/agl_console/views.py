"""The addresses of the console, and the view at each: as a page for people, and the same data as JSON for programs."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_origin
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from agl.contracts import Store
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Record
from agl_console.agents import AgentsFilter, agents_view
from agl_console.group import GroupFilter, group_view
from agl_console.learners import LearnerFilter, candidate_view, learner_view, learners_view
from agl_console.learning import LearningFilter, learning_view
from agl_console.rollout import RolloutFilter, SpanView, rollout_tokens_view, rollout_view, span_view
from agl_console.rollouts import RolloutsFilter, rollouts_view
from agl_console.runs import RunsFilter, runs_view
from agl_console.tokens import TokensFilter, TokensView
from agl_console.versions import NoFilter, VersionsFilter, resources_view, versions_view
from agl_console.vocabulary import Vocabularies

F = TypeVar("F", bound=Record)

Query = Mapping[str, Sequence[str]]
"""The parameters of an address, each with its values."""


class View(NamedTuple):
    """A view: the name of the template, and the data."""

    template: str
    data: Record


async def read_view(store: Store, path: str, query: Query, vocabularies: Vocabularies) -> View:
    """Read the view at an address.

    Args:
        store: The store.
        path: The path, percent-encoded, such as ``/runs/sql``.
        query: The parameters.
        vocabularies: The texts of tokens.

    Raises:
        NotFoundError: No view, run, rollout or span has this address.
        ConfigError: A parameter is unknown or has an impossible value.
    """
    for pattern, template, view, form in _VIEWS:
        if match := re.fullmatch(pattern, path):
            data = await view(store, *map(unquote, match.groups()), parsed(query, form))
            return View(template, _with_texts(data, vocabularies))
    raise NotFoundError(
        "page", path, "the console has /, /runs/NAME, /rollouts, /rollouts/ID, /versions, /versions/NAME and /learners"
    )


def _with_texts(data: Record, vocabularies: Vocabularies) -> Record:
    """Add the texts of tokens to a view's data."""
    vocabulary = vocabularies.of(data.weights) if isinstance(data, SpanView | TokensView) else None
    if vocabulary is None or not isinstance(data, SpanView | TokensView):
        return data
    texts = vocabulary.texts(cell.id for cell in data.cells)
    return replace(data, cells=[replace(cell, text=text) for cell, text in zip(data.cells, texts, strict=True)])


_VIEWS: tuple[tuple[str, str, Callable[..., Awaitable[Record]], type[Record]], ...] = (
    ("/", "runs.html", runs_view, RunsFilter),
    ("/runs/([^/]+)", "learning.html", learning_view, LearningFilter),
    ("/runs/([^/]+)/agents", "agents.html", agents_view, AgentsFilter),
    ("/rollouts", "rollouts.html", rollouts_view, RolloutsFilter),
    ("/rollouts/([^/]+)", "rollout.html", rollout_view, RolloutFilter),
    ("/rollouts/([^/]+)/tokens", "tokens.html", rollout_tokens_view, TokensFilter),
    ("/rollouts/([^/]+)/spans/([0-9]{1,12})", "span.html", span_view, RolloutFilter),
    ("/group", "group.html", group_view, GroupFilter),
    ("/versions", "resources.html", resources_view, NoFilter),
    ("/versions/([^/]+)", "versions.html", versions_view, VersionsFilter),
    ("/learners", "learners.html", learners_view, NoFilter),
    ("/learners/([^/]+)", "learner.html", learner_view, LearnerFilter),
    ("/learners/([^/]+)/([^/]+)", "candidate.html", candidate_view, NoFilter),
)
"""For each address: the pattern, the template, the view's function, and the type of the function's last argument."""


def parsed(query: Query, kind: type[F]) -> F:
    """Convert the parameters of an address or a form to ``kind``; empty ones, as forms send them, count as absent.

    Raises:
        ConfigError: A parameter is unknown or has an impossible value.
    """
    several = {field.name for field in msgspec.structs.fields(kind) if get_origin(field.type) is tuple}
    given: dict[str, Any] = {}
    for name, values in query.items():
        found = [value for value in values if value]
        if found:
            given[name] = found if name in several else found[-1]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        advice = f"it may have: {known}" if known else "this page has none"
        raise ConfigError(f"the address has a wrong parameter: {error}; {advice}") from error
