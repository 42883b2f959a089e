"""Names users whose ratings contradict those of the others, and limits how much one user counts.

The ratings of each kind of task and versions, sorted by time, are divided into blocks. In a block, the probability m of
a 1 has the beta distribution that follows from the other users' ratings. All users count alike there, however much they
rate. A user is one of three:

    agrees         says 1 with probability m
    contradicts    says 1 with probability 1 - m
    differs        says 1 with a probability of the user's own, uniform from 0 to 1, in each block

Users with a taste of their own differ. Expectation-maximisation (Dawid and Skene 1979) finds the probability of each of
the three for every user, and m, to which the ratings of those who contradict count the other way round: first for all
ratings, then for those about each kind of task, because users may agree to spoil one kind only.

As many users are named as leave a small expected share of honest ones among them, so the number of users is accounted
for. In doubt m is moved towards 1/2, because otherwise chance alone would divide honest users into two camps.

Users can be told apart only where most users agree. At a rate near 1/2 all of them say the same. With 20 conversations
for each user, a share of 0.7 that say 1 is the least that suffices. Where most users of a kind contradict the truth,
the honest ones are named, and a user who dislikes what all others like looks much like one who contradicts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from agl.acceptance import odds_text
from agl.hints import count_of
from agl_learn.contracts import Conversation
from agl_learn.way import serves

_BLOCK = 60
"""About how many ratings are compared with each other."""

_CLIP = 0.1
"""The least probability of a rating: a single one is never overwhelming."""

_PRIOR = 0.05
"""The share of contradicting users that is assumed at first."""

_DIFFER = 0.04
"""The share of users who differ. A few ratings of each user say too little about it."""

_FALSE = 0.1
"""The largest expected share of honest users among the named ones."""

_AGREEING = math.log(3)
"""The log of the odds from which a user agrees; at most one of three who contradict reaches them by chance."""

_OVERWHELMING = math.log(1e9)
"""The log of the greatest odds that are shown."""

_ROUNDS = 20
_UNCHANGED = 0.02
_ROUNDING = 1e-12
"""Sums below this are rounding errors where nobody else rated."""


class _Own(NamedTuple):
    """The sum and the number of a user's ratings in a block, and the weight of each."""

    total: float
    seen: int
    weight: float


class _Fit(NamedTuple):
    """The logarithms of the probability of a user's ratings if the user agrees, contradicts or differs."""

    agrees: float
    contradicts: float
    differs: float

    def belief(self, share: float) -> "_Belief":
        """Return the probability of each, if a share of all users contradicts."""
        most, priors = max(self), (1 - share - _DIFFER, share, _DIFFER)
        each = [prior * math.exp(max(-700.0, log - most)) for prior, log in zip(priors, self, strict=True)]
        return _Belief(each[0] / sum(each), each[1] / sum(each))


class _Belief(NamedTuple):
    """The probability that a user agrees, and that the user contradicts; the rest is that the user differs."""

    agrees: float = 1.0
    contradicts: float = 0.0


_Block = Mapping[str, _Own]
"""The ratings of each user in a block."""


def contradicting(conversations: Iterable[Conversation], tried: Sequence[Mapping[str, str]] = ()) -> dict[str, str]:
    """Map each user whose ratings contradict the other users' ratings to the reason, as text.

    Only ratings by the users themselves are compared, and only with those of other users. Users whom a candidate harms
    contradict those whom it does not harm, so users who agree with the others about all versions but those in
    ``tried`` are not named.
    """
    rated = [each for each in conversations if each.user and each.is_explicit and each.reward is not None]
    rated.sort(key=lambda each: (each.started_at, each.rollout_id))
    kinds = sorted({each.kind for each in rated})
    named = _contradicting(rated, tried, about="")
    for kind in kinds if len(kinds) > 1 else ():
        own = [each for each in rated if each.kind == kind and each.user not in named]
        named |= _contradicting(own, tried, about=f" about {kind!r}")
    return named


def limit_per_user(conversations: Sequence[Conversation], limit: int) -> list[Conversation]:
    """Return the newest ``limit`` conversations of each user, in the given order; those without a user all stay."""
    newest: defaultdict[str, list[str]] = defaultdict(list)
    for each in sorted(conversations, key=lambda each: (each.started_at, each.rollout_id), reverse=True):
        newest[each.user].append(each.rollout_id)
    chosen = {rollout_id for user, own in newest.items() for rollout_id in (own[:limit] if user else own)}
    return [each for each in conversations if each.rollout_id in chosen]


def _contradicting(rated: Sequence[Conversation], tried: Sequence[Mapping[str, str]], *, about: str) -> dict[str, str]:
    """Return the contradicting users among those of the ratings, which are sorted by time."""
    groups: defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[Conversation]] = defaultdict(list)
    for each in rated:
        groups[each.kind, tuple(sorted(each.versions.items()))].append(each)
    accepted = [group for group in groups.values() if not any(serves(group[0], each) for each in tried)]
    agreeing = {user for user, fit in _fitted(accepted)[0].items() if fit.agrees - fit.contradicts > _AGREEING}
    fits, share = _fitted(groups.values())
    named = _doubtful({user: fit.belief(share).contradicts for user, fit in fits.items() if user not in agreeing})
    return {user: _reason(rated, user, about=about, fit=fits[user]) for user in named}


def _fitted(groups: Iterable[Sequence[Conversation]]) -> tuple[dict[str, _Fit], float]:
    """Return the fit of each user, and the share of those who contradict."""
    blocks = [block for group in groups for block in _blocks(group)]
    share, belief = _PRIOR, dict[str, _Belief]()
    for _ in range(_ROUNDS):
        before = belief
        belief = {user: fit.belief(share) for user, fit in _fits(blocks, belief, caution=0.5).items()}
        share = min(0.5, (sum(each.contradicts for each in belief.values()) + _PRIOR) / (len(belief) + 1))
        if all(abs(each.contradicts - before.get(user, _Belief())[1]) < _UNCHANGED for user, each in belief.items()):
            break
    return _fits(blocks, belief, caution=0.25), share


def _blocks(group: Sequence[Conversation]) -> Iterable[_Block]:
    """Divide ratings into blocks of about the same size; all of a user weigh as much as those of any other."""
    often = Counter(each.user for each in group)
    count = max(1, round(len(group) / _BLOCK))
    for number in range(count):
        block: dict[str, _Own] = {}
        for each in group[len(group) * number // count : len(group) * (number + 1) // count]:
            total, seen, weight = block.get(each.user, (0.0, 0, 1 / often[each.user]))
            block[each.user] = _Own(total + (each.reward or 0.0), seen + 1, weight)
        yield block


def _fits(blocks: Iterable[_Block], belief: Mapping[str, _Belief], *, caution: float) -> dict[str, _Fit]:
    """Compare each user's ratings with those of the others, of whom each 1 or 0 has a beta distribution."""
    logs: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for block in blocks:
        for user, yes, no in _others(block, belief, caution):
            (total, count, _), own, before = block[user], logs[user], _log_beta(yes, no)
            own[0] += _log_beta(yes + total, no + count - total) - before
            own[1] += _log_beta(no + total, yes + count - total) - before
            own[2] += _log_beta(1 + total, 1 + count - total)
    return {user: _Fit(*own) for user, own in logs.items()}


def _others(block: _Block, belief: Mapping[str, _Belief], caution: float) -> Iterable[tuple[str, float, float]]:
    """Yield each user and how many of the others say 1 and 0, moved by ``caution`` standard errors towards 1/2."""
    users: list[str] = []
    sums: list[tuple[float, float, float]] = []
    for user, (total, count, weight) in block.items():
        agrees, contradicts = belief.get(user, _Belief())
        heard = weight * (agrees + contradicts)
        turned = weight * (agrees * total + contradicts * (count - total))
        users.append(user)
        sums.append((heard * count, turned, heard * heard * count))
    all_weights, all_values, all_squares = map(math.fsum, zip(*sums, strict=True))
    for user, (weight, value, square) in zip(users, sums, strict=True):
        weights, values, squares = all_weights - weight, all_values - value, all_squares - square
        # As many ratings of equal weight have the same standard error; two more say 1 and 0.
        count = weights * weights / squares if squares > _ROUNDING else 0.0
        mean = (values / weights * count + 1) / (count + 2) if count else 0.5
        off = min(0.5 - _CLIP, max(0.0, abs(mean - 0.5) - caution * 0.5 / math.sqrt(count + 2)))
        yes = (count + 2) * (0.5 + math.copysign(off, mean - 0.5))
        yield user, yes, count + 2 - yes


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


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


def _reason(rated: Sequence[Conversation], user: str, *, about: str, fit: _Fit) -> str:
    count = sum(each.user == user for each in rated)
    conversations = count_of(count, "conversation")
    odds = fit.contradicts - max(fit.agrees, fit.differs)
    evidence = odds_text(math.exp(min(odds, _OVERWHELMING)))
    return f"ratings in {conversations}{about} contradict those of the other users, evidence {evidence}"
