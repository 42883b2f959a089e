"""Files that a person reads: the best texts so far, the lineage, and the result. Each appears whole or not at all."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from agl.schemas import Json, to_json


def write_best(workdir: Path, texts: Mapping[str, str]) -> None:
    """Write ``best/<name>.txt`` for every tuned resource."""
    for name, text in texts.items():
        _write(workdir / "best" / f"{name}.txt", text.encode())


def write_lineage(workdir: Path, rows: Iterable[Json]) -> None:
    """Write ``lineage.jsonl``: one candidate a line, in the order in which they were made."""
    _write(workdir / "lineage.jsonl", b"".join(to_json(row) + b"\n" for row in rows))


def write_result(workdir: Path, result: Json) -> None:
    """Write ``result.json``."""
    _write(workdir / "result.json", msgspec.json.format(to_json(result), indent=2) + b"\n")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
