"""Candidates: one text for each tuned resource, with their origin and their status.

A candidate is a value; its rewards are stored separately, in `measurement/scores.py`. Its id is derived from its texts,
so the same texts are the same candidate, whoever proposes them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from agl.errors import ConfigError
from agl.schemas import Json, JsonResource, PromptTemplate, Record, Resource, to_json
from agl_algo_apo.texts.demonstrations import Demonstration
from agl_algo_apo.texts.messages import document_of, messages_of, read_document

Status = Literal["pool", "proposed", "rejected", "beaten"]
"""The status of a candidate.

``pool``: may be a parent; ``proposed``: not decided yet; ``rejected``: by the static checks; ``beaten``: by a rival.
"""


class PromptCandidate(Record, frozen=True, kw_only=True):
    """A candidate: one text for each tuned resource, with its origin and status.

    Attributes:
        id: 10 hex digits of the texts' digest.
        texts: Text by resource name, for all tuned resources, as agents read it.
        versions: Version by resource name, which rollouts pin; empty until the texts are in the store.
        parents: Ids of the candidates from which this one was made.
        operator: The operation that made it, such as ``edit``, ``merge`` or ``delete``; ``seed`` for the first.
        step: The step that made it.
        status: The candidate's status so far.
        reason: The reason for the status, as text.
        critique: The critic's answer from which the candidate was made.
        tries: How often it was proposed and tried.
        gain: Mean reward difference to its parent on training tasks; ``None`` if it has not run on them.
        demonstrations: Demonstrations by resource name; they are part of ``texts``.
        bare: The texts without demonstrations, for the resources that have some.
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
    gain: float | None = None
    demonstrations: dict[str, tuple[Demonstration, ...]] = {}
    bare: dict[str, str] = {}

    @property
    def instructions(self) -> dict[str, str]:
        """The texts without their demonstrations, by resource name, as editors see and change them."""
        return {**self.texts, **self.bare}

    def replace(self, **changes: object) -> "PromptCandidate":
        """Return a copy of the candidate with some attributes changed."""
        return msgspec.structs.replace(self, **changes)


def candidate_id(texts: Mapping[str, str]) -> str:
    """Return the id of a candidate with these texts."""
    return hashlib.blake2b(to_json(dict(sorted(texts.items()))), digest_size=5).hexdigest()


def text_of(resource: Resource, *, name: str) -> str:
    """Return the text of a resource that is tuned: a template, messages, a JSON string, or other JSON pretty-printed.

    Raises:
        ConfigError: The resource holds no text.
    """
    if isinstance(resource, PromptTemplate):
        return resource.template
    if messages := messages_of(resource):
        return document_of(messages)
    if isinstance(resource, JsonResource):
        if isinstance(resource.value, str):
            return resource.value
        return msgspec.json.format(msgspec.json.encode(resource.value), indent=2).decode()
    raise ConfigError(
        f"{name!r} is a {type(resource).__name__}, which holds no text to tune; "
        'name a [resource.NAME] with template = "..." or value = ... in tunes'
    )


def resource_of(text: str, like: Resource) -> Resource:
    """Return a resource of the kind of ``like`` with this text; raises :class:`ValueError` if the text does not fit."""
    if isinstance(like, PromptTemplate):
        return msgspec.structs.replace(like, template=text)
    if isinstance(like, JsonResource) and isinstance(like.value, str):
        return JsonResource(value=text)
    if messages_of(like):
        return read_document(text)
    try:
        return JsonResource(value=msgspec.json.decode(text))
    except msgspec.DecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None


class Lineage:
    """Holds all candidates, in the order in which they were made.

    Args:
        candidates: The candidates of a saved state.
    """

    def __init__(self, candidates: Iterable[PromptCandidate] = ()) -> None:
        self._all = {candidate.id: candidate for candidate in candidates}

    def __contains__(self, candidate_id: str) -> bool:
        return candidate_id in self._all

    def __getitem__(self, candidate_id: str) -> PromptCandidate:
        return self._all[candidate_id]

    def get(self, candidate_id: str) -> PromptCandidate | None:
        """Return the candidate with this id; ``None`` if it is unknown."""
        return self._all.get(candidate_id)

    def put(self, candidate: PromptCandidate) -> PromptCandidate:
        """Add a candidate, or replace the candidate with the same id at its position; returns the candidate."""
        self._all[candidate.id] = candidate
        return candidate

    def all(self) -> list[PromptCandidate]:
        """Return every candidate, oldest first."""
        return list(self._all.values())

    def pool(self) -> list[PromptCandidate]:
        """Return the candidates that may be parents, oldest first."""
        return [candidate for candidate in self._all.values() if candidate.status == "pool"]

    def dump(self) -> Json:
        """Return all candidates as JSON, for :meth:`load`."""
        return msgspec.json.decode(msgspec.json.encode(list(self._all.values())))

    @classmethod
    def load(cls, data: Json) -> "Lineage":
        """Restore a lineage from the output of :meth:`dump`."""
        return cls(msgspec.convert(data, list[PromptCandidate]))
