"""Lets the rewards that compare rollouts see every group of a request, and stores what they give as late rewards.

A comparison costs calls of a model, so a group whose rewards are in the store is not compared again.
"""

import asyncio
import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from agl.contracts import GroupRewardEmitter, Recording, Store
from agl.schemas import Span
from agl.tracing import make_reward_span
from agl_inspect.records.names import group_id_of
from agl_run.runners.judging import compared

NamedGroupRewards = Sequence[tuple[str, GroupRewardEmitter]]
"""Emitters that compare rollouts, by name."""


async def with_group_rewards(
    store: Store, emitters: NamedGroupRewards, recordings: Sequence[Recording]
) -> list[Recording]:
    """Return finished rollouts with the rewards that compare those of one task; raises :class:`RewardError`.

    Rollouts without success, and the only successful one of its task, get none.
    """
    groups: dict[str, list[Recording]] = {}
    for one in recordings:
        if one.rollout.status == "succeeded":
            groups.setdefault(group_id_of(one.rollout.task), []).append(one)  # a group_key may join several tasks
    wanted = [
        _rewarded(store, emitter, group, index=index, name=name)
        for index, (name, emitter) in enumerate(emitters)
        for group in groups.values()
        if len(group) > 1
    ]
    added: dict[str, list[Span]] = {}
    for spans in await asyncio.gather(*wanted, return_exceptions=True):  # every answer that was paid for is stored
        if isinstance(spans, BaseException):
            raise spans
        for span in spans:
            added.setdefault(span.rollout_id, []).append(span)
    return [replace(one, spans=[*one.spans, *added.get(one.rollout.rollout_id, ())]) for one in recordings]


async def _rewarded(
    store: Store, emitter: GroupRewardEmitter, group: Sequence[Recording], *, index: int, name: str
) -> list[Span]:
    """Compare a group and store the rewards; return their spans, none if the group has them already."""
    ids = [_span_id(one.rollout.rollout_id, index, name) for one in group]
    if all(any(span.span_id == own for span in one.spans) for own, one in zip(ids, group, strict=True)):
        return []
    rewards = await compared(name, emitter, group)
    spans = [
        replace(make_reward_span(one.rollout.rollout_id, one.rollout.attempt_id or "", reward), span_id=own)
        for own, one, reward in zip(ids, group, rewards, strict=True)
    ]
    await store.append_spans(spans)
    return [replace(span, is_late=True) for span in spans]


def _span_id(rollout_id: str, index: int, name: str) -> str:
    """Return the id of a reward's span, which is how a repeated step finds the reward."""
    # With the index, because an experiment may list one emitter twice with different parameters.
    return hashlib.blake2b(f"{rollout_id}/{index}/{name}".encode(), digest_size=8).hexdigest()
