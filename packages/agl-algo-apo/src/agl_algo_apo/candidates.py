"""Candidates: one text per tuned resource, with where they came from and what became of them.

A candidate is a value; what was measured of it is kept apart, in `evaluate.py`. Its id follows from its texts, so the
same texts are the same candidate whoever proposes them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, Record, Resource, to_json

Status = Literal["pool", "proposed", "rejected", "beaten"]
"""In the pool; not tried to the end; refused by the static gate; tried and not better than its parent."""


class PromptCandidate(Record, frozen=True, kw_only=True):
    """One proposal.

    Attributes:
        id: 10 hex digits of the texts' digest.
        texts: Text by resource name, all tuned resources included.
        versions: Resource version by name that agents get; empty until it was proposed to the store.
        parents: Ids of the candidates that it was made from.
        operator: What made it, such as ``edit``, ``merge`` or ``delete``; ``seed`` for the first.
        step: The step that made it.
        status: What became of it.
        reason: Why it was rejected or beaten, in words.
        critique: What the critic said.
        tries: How often it was proposed and tried.
        gate: Mean reward difference to its parent on the gate's tasks, ``None`` without one.
    """

    id: str
    texts: dict[str, str]
    versions: dict[str, str] = {}
    parents: tuple[str, ...] = ()
    operator: str = "seed"
    step: int = 0
    status: Status = "proposed"
    reason: str = ""
    critique: str = ""
    tries: int = 1
    gate: float | None = None

    def replace(self, **changes: object) -> "PromptCandidate":
        """The same candidate with some attributes changed."""
        return msgspec.structs.replace(self, **changes)


def candidate_id(texts: Mapping[str, str]) -> str:
    """The id of a candidate with these texts."""
    return hashlib.blake2b(to_json(dict(sorted(texts.items()))), digest_size=5).hexdigest()


def text_of(resource: Resource, *, name: str) -> str:
    """The text that is tuned: a template, or a JSON value that is a string or pretty-printed.

    Raises:
        ConfigError: The resource holds no text.
    """
    if isinstance(resource, PromptTemplate):
        return resource.template
    if isinstance(resource, JsonResource):
        if isinstance(resource.value, str):
            return resource.value
        return msgspec.json.format(msgspec.json.encode(resource.value), indent=2).decode()
    raise ConfigError(
        f"{name!r} is a {type(resource).__name__}, which holds no text to tune; "
        'name a [resource.NAME] with template = "..." or value = ... in tunes'
    )


def resource_of(text: str, like: Resource) -> Resource:
    """A resource with this text, of the same kind as ``like``; raises :class:`ValueError` for text that is no JSON."""
    if isinstance(like, PromptTemplate):
        return msgspec.structs.replace(like, template=text)
    if isinstance(like, JsonResource) and isinstance(like.value, str):
        return JsonResource(value=text)
    try:
        return JsonResource(value=msgspec.json.decode(text))
    except msgspec.DecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


class Lineage:
    """All candidates in order of their making.

    Args:
        candidates: From a saved state.
    """

    def __init__(self, candidates: Iterable[PromptCandidate] = ()) -> None:
        self._all = {candidate.id: candidate for candidate in candidates}

    def __contains__(self, candidate_id: str) -> bool:
        return candidate_id in self._all

    def __getitem__(self, candidate_id: str) -> PromptCandidate:
        return self._all[candidate_id]

    def get(self, candidate_id: str) -> PromptCandidate | None:
        """The candidate of that id, ``None`` if there is none."""
        return self._all.get(candidate_id)

    def put(self, candidate: PromptCandidate) -> PromptCandidate:
        """Add a candidate, or replace the one of that id in its place."""
        self._all[candidate.id] = candidate
        return candidate

    def all(self) -> list[PromptCandidate]:
        """Every candidate."""
        return list(self._all.values())

    def pool(self) -> list[PromptCandidate]:
        """The candidates that may be parents, oldest first."""
        return [candidate for candidate in self._all.values() if candidate.status == "pool"]

    def dump(self) -> Json:
        """What :meth:`load` reads."""
        return msgspec.json.decode(msgspec.json.encode(list(self._all.values())))

    @classmethod
    def load(cls, data: Json) -> "Lineage":
        """The lineage from :meth:`dump`."""
        return cls(msgspec.convert(data, list[PromptCandidate]))
