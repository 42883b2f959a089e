"""Names users whose ratings contradict those of the others, and limits how much one user counts.

The expected rating m of a conversation is the mean of what other users gave to the same kind of task and the same
versions at about the same time. In this mean all users count alike, however much they rate.

A user who rates like the others says 1 with probability m; one who contradicts them says 1 with probability 1 - m.
Expectation-maximisation (Dempster, Laird and Rubin 1977) finds both the users who contradict and m, to which their
ratings then count the other way round: first for all ratings, then for those about each kind of task, because users may
agree to spoil one kind only.

As many users are named as leave a small expected share of honest ones among them, so the number of users is accounted
for. In doubt m is moved towards 1/2, because otherwise chance alone would divide honest users into two camps.

Users can be told apart only where most users agree. At a rate near 1/2 both kinds of users say the same. With 20
conversations for each user, a share of 0.7 that say 1 is the least that suffices. Where most users of a kind contradict
the truth, the honest ones are named.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agl.acceptance import odds_text
from agl.hints import count_of
from agl_learn.contracts import Conversation

_NEAR = 50
"""How many earlier and how many later ratings are compared with a rating."""

_CLIP = 0.1
"""The least probability of a rating: a single one is never overwhelming."""

_PRIOR = 0.05
"""The share of contradicting users that is assumed at first."""

_FALSE = 0.05
"""The largest expected share of honest users among the named ones."""

_OVERWHELMING = math.log(1e9)
"""The log of the greatest odds that are shown."""

_ROUNDS = 20
_UNCHANGED = 0.02
_ROUNDING = 1e-12
"""Sums below this are rounding errors of an empty window."""


class _Fit(NamedTuple):
    """For each user, the logarithms of the probability of the ratings from a user who agrees, and who contradicts."""

    agrees: Mapping[str, float]
    contradicts: Mapping[str, float]

    def doubt(self, share: float) -> dict[str, float]:
        """Return the probability that each user contradicts, if a share of all users does."""
        return {user: 1 / (1 + math.exp(min(700.0, -self.odds(user) - _logit(share)))) for user in self.agrees}

    def odds(self, user: str) -> float:
        """Return the log of the odds that a user contradicts."""
        return self.contradicts[user] - self.agrees[user]


def contradicting(conversations: Iterable[Conversation]) -> dict[str, str]:
    """Map each user whose ratings contradict the other users' ratings to the reason, in words.

    Only ratings by the users themselves are compared, and only with those of other users.
    """
    rated = [each for each in conversations if each.user and each.is_explicit and each.reward is not None]
    rated.sort(key=lambda each: (each.started_at, each.rollout_id))
    kinds = sorted({each.kind for each in rated})
    named = _contradicting(rated, about="")
    for kind in kinds if len(kinds) > 1 else ():
        own = [each for each in rated if each.kind == kind and each.user not in named]
        named |= _contradicting(own, about=f" about {kind!r}")
    return named


def limit_per_user(conversations: Sequence[Conversation], limit: int) -> list[Conversation]:
    """Return the newest ``limit`` conversations of each user, in the given order; those without a user all stay."""
    newest: defaultdict[str, list[str]] = defaultdict(list)
    for each in sorted(conversations, key=lambda each: (each.started_at, each.rollout_id), reverse=True):
        newest[each.user].append(each.rollout_id)
    chosen = {rollout_id for user, own in newest.items() for rollout_id in (own[:limit] if user else own)}
    return [each for each in conversations if each.rollout_id in chosen]


def _contradicting(rated: Sequence[Conversation], *, about: str) -> dict[str, str]:
    """Return the contradicting users among those of the ratings, which are sorted by time."""
    if not rated:
        return {}
    groups: defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[Conversation]] = defaultdict(list)
    for each in rated:
        groups[each.kind, tuple(sorted(each.versions.items()))].append(each)
    doubt: dict[str, float] = {}
    fit = _fit(groups.values(), doubt)
    share = _PRIOR
    for _ in range(_ROUNDS):
        before, doubt = doubt, fit.doubt(share)
        share = min(0.5, (sum(doubt.values()) + _PRIOR) / (len(doubt) + 1))
        fit = _fit(groups.values(), doubt)
        if all(abs(doubt[user] - before.get(user, 0.0)) < _UNCHANGED for user in doubt):
            break
    named = _doubtful(fit.doubt(share))
    return {user: _reason(rated, user, about=about, odds=fit.odds(user)) for user in named}


def _fit(groups: Iterable[Sequence[Conversation]], doubt: Mapping[str, float]) -> _Fit:
    """Compare the ratings of each group, sorted by time, with those of other users, given the doubt in each user."""
    agrees: defaultdict[str, float] = defaultdict(float)
    contradicts: defaultdict[str, float] = defaultdict(float)
    for group in groups:
        for each, expected in zip(group, _expected(group, doubt), strict=True):
            reward = each.reward or 0.0
            agrees[each.user] += reward * math.log(expected) + (1 - reward) * math.log(1 - expected)
            contradicts[each.user] += reward * math.log(1 - expected) + (1 - reward) * math.log(expected)
    return _Fit(agrees, contradicts)


def _expected(group: Sequence[Conversation], doubt: Mapping[str, float]) -> Iterable[float]:
    """Yield the expected rating for each conversation of a group, from those near it in time."""
    often = Counter(each.user for each in group)
    window = _Window()
    first = last = 0
    for at, each in enumerate(group):
        start, end = max(0, at - _NEAR), min(len(group), at + _NEAR + 1)
        for near, sign in (*((one, 1) for one in group[last:end]), *((one, -1) for one in group[first:start])):
            value = _turned(near.reward or 0.0, doubt.get(near.user, 0.0))
            window.add(near.user, value, weight=1 / often[near.user], sign=sign)
        first, last = start, end
        yield window.expected(each.user)


class _Window:
    """Sums over ratings, of all users and of each: the weights, the weighted ratings, and the squares of the weights.

    The ratings of one user together weigh as much as those of any other, so that a few busy users decide nothing.
    """

    def __init__(self) -> None:
        self._all = [0.0, 0.0, 0.0]
        self._own: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(self, user: str, value: float, *, weight: float, sign: int) -> None:
        """Add a rating, or take it out if ``sign`` is -1."""
        for sums in (self._all, self._own[user]):
            for at, amount in enumerate((weight, weight * value, weight * weight)):
                sums[at] += sign * amount

    def expected(self, user: str) -> float:
        """Return the mean of the others' ratings, moved by half a standard error towards 1/2."""
        weights, values, squares = (one - other for one, other in zip(self._all, self._own[user], strict=True))
        if squares < _ROUNDING:
            return 0.5
        count = weights * weights / squares  # as many ratings of equal weight have the same standard error
        mean = (values / weights * count + 1) / (count + 2)
        off = max(0.0, abs(mean - 0.5) - 0.25 / math.sqrt(count + 2))
        return 0.5 + math.copysign(min(off, 0.5 - _CLIP), mean - 0.5)


def _turned(reward: float, doubt: float) -> float:
    """Return the rating that an honest user would have given, if the user contradicts with probability ``doubt``."""
    return (1 - doubt) * reward + doubt * (1 - reward)


def _doubtful(doubt: Mapping[str, float]) -> list[str]:
    """Return the most doubtful users, as many as leave an expected share of `_FALSE` honest ones among them."""
    named: list[str] = []
    honest = 0.0
    for user in sorted(doubt, key=lambda user: (-doubt[user], user)):
        honest += 1 - doubt[user]
        if honest > _FALSE * (len(named) + 1):
            break
        named.append(user)
    return named


def _reason(rated: Sequence[Conversation], user: str, *, about: str, odds: float) -> str:
    count = sum(each.user == user for each in rated)
    conversations = count_of(count, "conversation")
    evidence = odds_text(math.exp(min(odds, _OVERWHELMING)))
    return f"ratings in {conversations}{about} contradict those of the other users, evidence {evidence}"


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
