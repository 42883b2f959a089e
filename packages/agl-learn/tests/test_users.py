"""Users who contradict the others are named, whoever they are and however much they rate."""

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agl_learn.contracts import Conversation
from agl_learn.users import contradicting, limit_per_user

RATES = {"refund": 0.3, "invoice": 0.45, "address": 0.6, "password": 0.75, "hours": 0.9}
"""The share of honest users who are content, by kind of task."""


def rated(number: int, user: str, kind: str, reward: float | None, *, is_explicit: bool = True) -> Conversation:
    return Conversation(
        rollout_id=f"c{number:05d}",
        user=user,
        started_at=float(number),
        kind=kind,
        versions={"prompt": "v1"},
        reward=reward,
        is_explicit=is_explicit,
    )


def ratings(
    users: Sequence[str], *, bad: set[str], seed: int, rates: Mapping[str, float] | None = None, spoiled: str = ""
) -> list[Conversation]:
    """One rating for each entry of ``users``, shuffled; bad users contradict, or only about the kind ``spoiled``."""
    draw = random.Random(seed)
    found: list[Conversation] = []
    for number, user in enumerate(draw.sample(users, len(users))):
        kind, rate = draw.choice(list((rates or RATES).items()))
        is_content = draw.random() < rate
        if user in bad and spoiled in ("", kind):
            is_content = not is_content
        found.append(rated(number, user, kind, float(is_content)))
    return found


def precision_and_recall(named: set[str], bad: set[str]) -> tuple[float, float]:
    return len(named & bad) / max(1, len(named)), len(named & bad) / len(bad)


HUNDRED = [f"u{number}" for number in range(100)]
BAD = set(HUNDRED[:30])


@pytest.mark.parametrize("seed", range(3))
def test_a_third_of_the_users_who_contradict_are_named(seed: int) -> None:
    precision, recall = precision_and_recall(set(contradicting(ratings(HUNDRED * 20, bad=BAD, seed=seed))), BAD)

    assert precision >= 0.9
    assert recall >= 0.9


@pytest.mark.parametrize(("seed", "others"), [(1, (0.3, 0.6)), (2, (0.3, 0.6)), (1, (0.9, 0.9))])
def test_users_who_contradict_about_one_kind_only_are_named(seed: int, others: tuple[float, float]) -> None:
    rates = {"refund": others[0], "address": others[1], "hours": 0.9}
    found = ratings(HUNDRED * 20, bad=BAD, seed=seed, rates=rates, spoiled="hours")

    named = contradicting(found)

    precision, recall = precision_and_recall(set(named), BAD)
    assert precision >= 0.9
    assert recall >= 0.9


@pytest.mark.parametrize("seed", range(3))
def test_three_users_who_give_a_third_of_the_ratings_are_named(seed: int) -> None:
    bad = {"x", "y", "z"}
    users = [*HUNDRED * 20, *sorted(bad) * 285]

    assert bad == set(contradicting(ratings(users, bad=bad, seed=seed)))


@pytest.mark.parametrize("bad", [BAD, {"u0", "u1", "u2"}])
def test_few_users_who_give_most_ratings_of_a_kind_do_not_outvote_the_others(bad: set[str]) -> None:
    rates = {"refund": 0.9, "address": 0.9, "hours": 0.9, "invoice": 0.9}
    honest = ratings(sorted(set(HUNDRED) - bad) * 20, bad=set(), seed=1, rates=rates)
    spoiling = ratings(sorted(bad) * (600 // len(bad)), bad=bad, seed=2, rates={"hours": 0.9})
    mixed = random.Random(3).sample([*honest, *spoiling], len(honest) + len(spoiling))

    named = set(contradicting([rated(at, each.user, each.kind, each.reward) for at, each in enumerate(mixed)]))

    precision, recall = precision_and_recall(named, bad)
    assert precision >= 0.9
    assert recall >= 0.9


@pytest.mark.parametrize(("rate", "seed"), [(0.3, 1), (0.5, 7), (0.5, 8), (0.6, 1), (0.9, 1)])
def test_nobody_is_named_if_all_are_honest(rate: float, seed: int) -> None:
    assert {} == contradicting(ratings(HUNDRED * 20, bad=set(), seed=seed, rates={"": rate}))


def test_nobody_is_named_where_honest_users_agree_too_little() -> None:
    named = contradicting(ratings(HUNDRED * 20, bad=BAD, seed=1, rates={"": 0.5}))

    assert {} == named


def test_named_user_has_a_reason_with_the_evidence() -> None:
    users = [*HUNDRED * 6, *["x"] * 40]

    named = contradicting(ratings(users, bad={"x"}, seed=1, rates={"": 0.9}))

    assert ["x"] == list(named)
    assert named["x"].startswith("ratings in 40 conversations contradict those of the other users, evidence ")
    assert named["x"].endswith(" to 1")


def test_reason_names_the_kind_that_a_user_spoils() -> None:
    users = [*HUNDRED * 12, *["x"] * 80]
    rates = {"refund": 0.9, "address": 0.9, "hours": 0.9}

    named = contradicting(ratings(users, bad={"x"}, seed=1, rates=rates, spoiled="hours"))

    assert ["x"] == list(named)
    assert "conversations about 'hours' contradict" in named["x"]


def test_wish_that_changes_for_everyone_names_nobody() -> None:
    before = ratings(HUNDRED * 10, bad=set(), seed=1, rates={"": 0.9})
    after = ratings(HUNDRED * 10, bad=set(), seed=2, rates={"": 0.1})
    later = [rated(1_000 + number, each.user, each.kind, each.reward) for number, each in enumerate(after)]

    assert {} == contradicting([*before, *later])


def test_thousand_users_are_compared_whatever_their_order() -> None:
    users = [f"u{number}" for number in range(1_000)]
    found = ratings(users * 5, bad=set(users[:200]), seed=1, rates={"": 0.95})

    named = contradicting(found)

    assert named == contradicting(found[::-1])
    precision, recall = precision_and_recall(set(named), set(users[:200]))
    assert precision >= 0.9
    assert recall >= 0.8


def with_dissenters(bad: set[str], *, seed: int) -> list[Conversation]:
    """Five of a hundred users dislike most answers about one of two kinds, which the others like."""
    draw = random.Random(seed)
    found: list[Conversation] = []
    for number, user in enumerate(draw.sample(HUNDRED * 20, 2_000)):
        kind = draw.choice(("refund", "hours"))
        is_content = draw.random() < (0.3 if kind == "hours" and user in HUNDRED[95:] else 0.85)
        found.append(rated(number, user, kind, float(is_content != (user in bad))))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_users_with_another_taste_about_one_kind_are_rarely_named(seed: int) -> None:
    assert len(contradicting(with_dissenters(set(), seed=seed))) <= 1
    precision, recall = precision_and_recall(set(contradicting(with_dissenters(BAD, seed=seed))), BAD)
    assert precision >= 0.9
    assert recall >= 0.9


def test_users_whom_a_tried_version_harms_are_not_named() -> None:
    before = ratings(HUNDRED * 10, bad=set(), seed=1, rates={"": 0.85})
    harmed = [
        replace(each, rollout_id=f"d{each.rollout_id}", started_at=each.started_at + 1_000, versions={"prompt": "v2"})
        for each in ratings(HUNDRED * 10, bad=BAD, seed=2, rates={"": 0.95})
    ]

    assert len(contradicting([*before, *harmed])) > 3 * len(contradicting([*before, *harmed], [{"prompt": "v2"}]))


def test_only_ratings_by_known_users_count() -> None:
    good = ratings(HUNDRED * 5, bad=set(), seed=1, rates={"": 0.9})
    guessed = [rated(1_000 + number, "x", "", 0.0, is_explicit=False) for number in range(50)]
    unknown = [rated(2_000 + number, "", "", 0.0) for number in range(50)]
    unrated = [rated(3_000 + number, "y", "", None) for number in range(50)]

    assert {} == contradicting([*good, *guessed, *unknown, *unrated])
    assert {} == contradicting([])


CONVERSATIONS = st.lists(
    st.builds(rated, st.integers(0, 500), st.sampled_from(["", "ann", "bob"]), st.just(""), st.floats(0, 1)),
    unique_by=lambda each: each.rollout_id,
)


@given(CONVERSATIONS, st.integers(1, 5))
def test_limit_keeps_the_newest_of_each_user_in_order(found: list[Conversation], limit: int) -> None:
    chosen = limit_per_user(found, limit)

    assert chosen == [each for each in found if each in chosen]
    for user in ("ann", "bob"):
        own = sorted((each for each in found if each.user == user), key=lambda each: each.started_at)
        assert set(map(id, own[-limit:])) == {id(each) for each in chosen if each.user == user}
    assert sum(not each.user for each in found) == sum(not each.user for each in chosen)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("kl"), st.floats(0, 1)), max_size=60))
def test_any_ratings_can_be_compared(given_: list[tuple[str, str, float]]) -> None:
    found = [rated(number, user, kind, reward) for number, (user, kind, reward) in enumerate(given_)]

    assert set(contradicting(found)) <= {each.user for each in found}
