"""Converts what older layouts of the durable stores kept elsewhere: states into documents, metrics of no run."""

import re
from collections.abc import Iterable, Mapping

import msgspec

from agl.contracts import ExperimentRecord, LabelMove, Trained, VersionScore
from agl.schemas import decode
from agl.stores import documents_of


def older_documents(states: Mapping[str, bytes], versions: Iterable[tuple[str, str]]) -> dict[bytes, bytes]:
    """Convert states to documents, by key; ``versions`` are the names and versions of all resources.

    Members of running experiments are left out: none runs while its store is migrated.
    """
    found: dict[bytes, bytes] = {}
    for key, value in sorted(states.items()):
        if key.startswith("label/"):
            found |= documents_of(msgspec.json.decode(value, type=LabelMove))
        elif match := re.fullmatch(r"experiment/(.+)/experiment", key):
            found |= documents_of(msgspec.convert({**msgspec.json.decode(value), "name": match[1]}, ExperimentRecord))
        elif match := re.fullmatch(r"experiment/(.+)/(\d+)/trained/(.+)/(\d+)", key):
            name, run, algorithm, step = match.groups()
            ids = msgspec.json.decode(value, type=tuple[str, ...])
            entry = Trained(experiment=name, run=int(run), algorithm=algorithm, step=int(step), rollout_ids=ids)
            found |= documents_of(entry)
        elif not re.match(r"score/|experiment/.+/(serving$|worker/)", key):
            found |= documents_of({key: value})
    for name, version in versions:
        if score := states.get(f"score/{name}/{version}"):
            found |= documents_of(
                msgspec.convert({**msgspec.json.decode(score), "name": name, "version": version}, VersionScore)
            )
    return found


def record_key(experiment: str) -> bytes:
    """Return the key of the document with an experiment's record."""
    (key,) = documents_of(ExperimentRecord(name=experiment))
    return key


def run_of(record: bytes | None) -> int:
    """Return the run to which the metrics of layout 5 belong: the last one of the experiment's record, or 1."""
    return 1 if record is None else decode(record, ExperimentRecord).run
