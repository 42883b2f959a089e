"""Texts are merged, and requests are data."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.errors import ConfigError
from agl_algo_apo.proposals.requests import Requests, merge3, merge_texts

LINES = st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), max_size=6).map("\n".join)


@given(base=LINES, changed=LINES)
def test_merge_with_an_unchanged_side_gives_the_other(base: str, changed: str) -> None:
    assert changed.splitlines() == (merge3(base, base, changed) or "").splitlines()
    assert changed.splitlines() == (merge3(base, changed, base) or "").splitlines()
    assert changed.splitlines() == (merge3(base, changed, changed) or "").splitlines()


@given(base=LINES, ours=LINES, theirs=LINES)
def test_merge_holds_only_lines_of_its_sides_and_loses_no_common_one(base: str, ours: str, theirs: str) -> None:
    merged = merge3(base, ours, theirs)
    if merged is not None:
        assert set(merged.splitlines()) <= {*base.splitlines(), *ours.splitlines(), *theirs.splitlines()}
        assert set(base.splitlines()) & set(ours.splitlines()) & set(theirs.splitlines()) <= set(merged.splitlines())


def test_merge_keeps_both_insertions_and_refuses_two_changes_of_one_line() -> None:
    assert "head\none\ntwo\ntail" == merge3("head\ntail", "head\none\ntail", "head\ntwo\ntail")
    assert "HEAD\nx\nTAIL" == merge3("head\nx\ntail", "HEAD\nx\ntail", "head\nx\nTAIL")
    assert merge3("head\ntail", "HEAD\ntail", "Head\ntail") is None


def test_merge_refuses_two_changes_that_together_lose_a_line_which_both_keep() -> None:
    assert merge3("b\na\nb", "b", "a\nb") is None


def test_texts_of_several_resources_are_merged_each_on_its_own() -> None:
    base = {"a": "1\n2", "b": "x"}
    assert {"a": "1\nnew\n2", "b": "y"} == merge_texts(base, [{"a": "1\nnew\n2", "b": "x"}, {"a": "1\n2", "b": "y"}])
    assert merge_texts(base, [{"a": "1\n2", "b": "z"}, {"a": "1\n2", "b": "y"}]) is None


def test_requests_can_be_replaced_by_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("Improve $component for $$5:\n$text\n$constraints", encoding="utf-8")
    requests = Requests({"rewrite": "mine.txt"}, folder=tmp_path)
    assert "Improve p for $5:\nT\n- C" == requests.text("rewrite", component="p", text="T", constraints="- C")
    assert "$" not in requests.text("critique", component="p", text="T", evidence="E")


def test_request_with_an_unknown_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("$text $evidence $poem", encoding="utf-8")
    with pytest.raises(ConfigError, match="poem"):
        Requests({"critique": "mine.txt"}, folder=tmp_path)
