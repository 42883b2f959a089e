"""Grouping the parts of traces into runs."""

from pathlib import Path

from agl_data.importing.traces import Part, runs_of


def test_part_without_an_id_replaces_no_span_whose_id_is_its_number() -> None:
    span, other = ("t", Part(id="1", name="kept")), ("t", Part(lost=["a note without its span"]))
    (alone,) = runs_of(Path("traces.jsonl"), [span])
    (both,) = runs_of(Path("traces.jsonl"), [span, other])
    assert alone.contents() == both.contents()
