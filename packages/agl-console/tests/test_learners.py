"""The views of learning while serving, over the records that a learner leaves."""

import html
from typing import Any

import pytest

from agl.stores import MemoryStore

from .conftest import Open
from .records import HOSTILE, learn
from .test_views import data_of, text_of


def line(data: Any, figure: str, name: str) -> dict[str, Any]:
    """Return one line of a figure."""
    (found,) = [each for each in data["figures"] if each["name"] == figure]
    (drawn,) = [each for each in found["series"] if each["algorithm"] == name]
    return drawn


async def test_a_store_without_a_learner_says_how_to_begin(opened: Open) -> None:
    async with opened(MemoryStore()) as client:
        page = await text_of(client, "/learners")
    assert "[learn.NAME]" in page
    assert "agl learn" in page.replace('</span> <span class="word">', " ")


async def test_a_learner_shows_what_it_spent_of_its_error_and_whose_feedback_does_not_count(opened: Open) -> None:
    async with opened() as client:
        data, page = await data_of(client, "/learners/support"), await text_of(client, "/learners/support")
    assert 0.05 == data["learner"]["error"]
    assert 0.038 == round(data["learner"]["error_spent"], 4)  # 0.05 * 6 / pi^2 * (1 + 1/4)
    assert ["c2", "c1"] == [each["id"] for each in data["candidates"]]
    assert "error spent: 3.8 % of 5 %" in page
    assert "mallory" in page
    assert HOSTILE not in page


async def test_evidence_grows_with_the_replayed_pairs_until_the_verdict(opened: Open) -> None:
    async with opened() as client:
        data, page = await data_of(client, "/learners/support/c1"), await text_of(client, "/learners/support/c1")
    better, needed = (line(data, "evidence in replay", name)["values"] for name in ("better", "needed"))
    crossed = next(place for place, value in enumerate(better) if value >= needed[0])
    assert sorted(better[: crossed + 1]) == better[: crossed + 1]
    assert [better[crossed]] * (len(better) - crossed) == better[crossed:]  # later pairs change no verdict
    (verdict,) = data["verdicts"]
    assert pytest.approx(verdict["decision"]["evidence"]) == 10 ** better[-1]
    assert verdict["words"].startswith("better, ")
    assert html.escape(verdict["words"]) in page


async def test_each_stage_has_its_own_units(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/learners/support/c1")
    assert 40 == len(line(data, "evidence in canary", "worse")["values"])
    assert 20 == len(line(data, "evidence in watch", "worse")["values"])


async def test_share_over_time_changes_at_the_moves(opened: Open) -> None:
    async with opened() as client:
        share = line(await data_of(client, "/learners/support/c1"), "share of the traffic", "share")
    assert [(0, 0.0), (59, 0.0), (60, 0.2), (119, 0.2), (120, 0.5), (179, 0.5), (180, 0.9)] == list(
        zip(share["places"], share["values"], strict=True)
    )


async def test_exposure_counts_users_conversations_and_rewards_of_both_sides(opened: Open) -> None:
    async with opened() as client:
        data = await data_of(client, "/learners/support/c1")
    assert {"users": 45, "conversations": 90, "reward": 1.0} == data["new"]
    assert {"users": 15, "conversations": 30, "reward": 0.25} == data["old"]


async def test_a_candidate_shows_the_difference_of_its_text_and_links_to_rollouts(opened: Open) -> None:
    async with opened() as client:
        page = await text_of(client, "/learners/support/c1")
    assert "/versions/style?version=sums-1-grpo-2&amp;against=first" in page
    assert 'class="added"' in page
    assert "/rollouts/sums-1-grpo-train" in page


async def test_an_unknown_learner_or_candidate_says_where_to_look(opened: Open) -> None:
    async with opened() as client:
        for address in ("/learners/none", "/learners/support/c9"):
            answer = await client.get(address)
            assert 404 == answer.status
            assert "/learners" in await answer.text()


async def test_a_candidate_whose_text_is_not_in_the_store_still_has_its_story(opened: Open) -> None:
    store = MemoryStore()
    await learn(store)
    async with opened(store) as client:
        data, page = await data_of(client, "/learners/support/c1"), await text_of(client, "/learners/support/c1")
    assert [None] == [change["diff"] for change in data["changes"]]
    assert "first or sums-1-grpo-2 is not in the store" in page
    assert "better in the replay" in page


async def test_a_parameter_of_a_page_without_parameters_is_answered_with_that(opened: Open) -> None:
    async with opened() as client:
        answer = await client.get("/learners?x=1")
        assert 400 == answer.status
        assert "this page has none" in await answer.text()
