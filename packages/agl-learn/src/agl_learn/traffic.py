"""Reads served conversations from the store, rates them, and records their rewards.

A conversation is read once its settling time is over, and its reward is then written to its rollout, where metrics, the
console and algorithms see it. Feedback that arrives later still counts wherever the conversation is read again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from agl.contracts import Recording, RewardEmitter, RolloutQuery, Store
from agl.errors import ConfigError
from agl.schemas import Json, Reward, Rollout, Span
from agl.stores import is_readable, read_recordings
from agl_inspect.records.splits import placement_of
from agl_inspect.retention import parse_duration
from agl_inspect.terminal.query import CONVERSATIONS, COUNTED, PAGE, pages
from agl_learn.contracts import Conversation, SettledPage
from agl_learn.feedback.evidence import Evidence, evidence_of
from agl_learn.feedback.rating import EXPLICIT, Feedback, record, said_of
from agl_learn.settings import LearnerFile
from agl_replay.rescoring import build_emitters, rewards_plan
from agl_run import LearnSettings, import_attribute

_log = logging.getLogger(__name__)

_AT_ONCE = 8
"""How many conversations are in memory, and are judged, at the same time."""

_LOOK_BACK = 20
"""How many conversations are read at most for one with a reward, in :meth:`StoreTraffic.recent`."""

_FIRST_ID = "0"


class StoreTraffic:
    """The conversations in a store; fulfils :class:`~agl_learn.contracts.Traffic`.

    Args:
        store: The store.
        settings: The learner's settings.
        folder: The experiment's folder, from which ``task`` and ``kind`` are imported.
        emitters: The rewards of the experiment by their ``use``.

    Raises:
        ConfigError: A signal is unknown, or ``task`` or ``kind`` cannot be imported.
    """

    def __init__(
        self,
        store: Store,
        settings: LearnSettings,
        *,
        folder: str = "",
        emitters: Mapping[str, RewardEmitter] | None = None,
    ) -> None:
        self._store = store
        self._feedback = Feedback(settings.feedback, emitters)
        self._settle = parse_duration(settings.settle)
        self._task = _function(settings.task, folder, "task function") or _default_task
        self._kind = _function(settings.kind, folder, "kind function") or _no_kind

    async def settled(self, *, after: str, after_value: float, now: float, limit: int) -> SettledPage:
        """Return up to ``limit`` conversations, from the one after ``after`` on.

        Their rewards are recorded. Conversations without a call, and damaged ones, are left out.
        """
        query = RolloutQuery(sort="created_at", after=after, after_value=after_value)
        page = [rollout async for rollout in self._began(query, until=now - self._settle, limit=limit)]
        if page:
            after, after_value = page[-1].rollout_id, page[-1].created_at
        found = await self._read(page, now=now, is_first=True) if page else []
        return SettledPage(conversations=found[::-1], after=after, after_value=after_value, is_last=len(page) < limit)

    async def recent(self, *, now: float, limit: int) -> Sequence[Conversation]:
        """Return the newest settled conversations with a reward, newest first.

        Where rewards are rare, the search ends after a number of conversations that grows with ``limit``.
        """
        query = RolloutQuery(
            experiment=CONVERSATIONS,
            status=COUNTED,
            sort="created_at",
            is_newest_first=True,
            after=_FIRST_ID,
            after_value=now - self._settle,
            limit=min(limit, PAGE),
        )
        rated: list[Conversation] = []
        read = 0
        async for page in pages(self._store, query):
            found = await self._read(page[::-1], now=now, is_first=False)
            rated += [each for each in found if each.reward is not None]
            read += len(page)
            if len(rated) >= limit or read >= _LOOK_BACK * limit:
                break
        return rated[:limit]

    async def _began(self, query: RolloutQuery, *, until: float, limit: int | None = None) -> AsyncIterator[Rollout]:
        """Yield up to ``limit`` conversations that began after the query's start and by ``until``, oldest first."""
        count = 0
        fields = {"experiment": CONVERSATIONS, "status": COUNTED, "limit": min(limit or PAGE, PAGE)}
        async for page in pages(self._store, msgspec.structs.replace(query, **fields)):
            for rollout in page:
                if rollout.created_at > until:
                    return
                yield rollout
                count += 1
                if count == limit:
                    return

    async def _read(self, rollouts: Sequence[Rollout], *, now: float, is_first: bool) -> list[Conversation]:
        """Read and rate conversations, given oldest first; return them newest first."""
        questions: dict[str, str] = {}  # the first question of each conversation
        following = await self._following(rollouts, questions)
        rated: list[Conversation] = []
        waiting: list[Evidence] = []
        async for recording in self._recordings([rollout.rollout_id for rollout in rollouts]):
            # Newest first, so that the user's next conversation has been read already.
            asked_next = questions.get(following.get(recording.rollout.rollout_id, ""), "")
            evidence = evidence_of(recording, until=now - self._settle, asked_next=asked_next)
            if not is_readable(recording):
                _log.warning("conversation %s is left out: its record is damaged", evidence.rollout.rollout_id)
            elif evidence.calls:
                questions[evidence.rollout.rollout_id] = next(iter(evidence.questions), "")
                waiting.append(evidence)
            if len(waiting) == _AT_ONCE:
                rated += await self._rate(waiting, is_first=is_first)
                waiting = []
        return rated + await self._rate(waiting, is_first=is_first)

    async def _following(self, rollouts: Sequence[Rollout], questions: dict[str, str]) -> dict[str, str]:
        """Return the id of the user's next conversation for each that has one, and read those that are newer.

        Only a conversation that began within the settling time counts. The first questions of newer conversations
        than ``rollouts`` are added to ``questions``.
        """
        if "repeated-question" not in self._feedback:
            return {}
        newer = RolloutQuery(sort="created_at").next(rollouts[-1])
        until = rollouts[-1].created_at + self._settle
        following: dict[str, str] = {}
        last: dict[str, Rollout] = {}
        for rollout in [*rollouts, *[each async for each in self._began(newer, until=until)]]:
            user = _user(rollout)
            before = last.get(user)
            if before and user and rollout.created_at <= before.created_at + self._settle:
                following[before.rollout_id] = rollout.rollout_id
            last[user] = rollout
        unread = set(following.values()) - {rollout.rollout_id for rollout in rollouts}
        async for recording in self._recordings(sorted(unread)):
            evidence = evidence_of(recording, until=0.0)
            questions[evidence.rollout.rollout_id] = next(iter(evidence.questions), "")
        return following

    async def _recordings(self, rollout_ids: Sequence[str]) -> AsyncIterator[Recording]:
        """Yield the recordings of rollouts, newest first."""
        if rollout_ids:
            query = RolloutQuery(
                ids=tuple(rollout_ids), sort="created_at", is_newest_first=True, limit=len(rollout_ids)
            )
            async for recording in read_recordings(self._store, query):
                yield recording

    async def _rate(self, waiting: Sequence[Evidence], *, is_first: bool) -> list[Conversation]:
        """Rate conversations at once; if they are read for the first time, record their rewards."""
        rated = await asyncio.gather(*(self._conversation(evidence, is_first=is_first) for evidence in waiting))
        if spans := [span for _, own in rated for span in own]:
            await self._store.append_spans(spans)
        return [conversation for conversation, _ in rated if conversation is not None]

    async def _conversation(self, evidence: Evidence, *, is_first: bool) -> tuple[Conversation | None, list[Span]]:
        """Make a conversation, and the spans that record its reward; ``None`` if it cannot become a task."""
        rollout, found = evidence.rollout, self._feedback.read(evidence)
        plain = _plain(evidence, said=said_of(evidence, found))
        try:
            task = self._task(plain)
            kind = self._kind(task) or ""
            if not isinstance(kind, str):
                raise ConfigError(f"the kind of a task is {kind!r}; return a text")
        except Exception:  # noqa: BLE001  # a text that the function does not expect must not stop the learner
            _log.warning("conversation %s is left out: it cannot become a task", rollout.rollout_id, exc_info=True)
            return None, []
        spans: list[Span] = []
        if is_first and EXPLICIT not in found:
            judged = msgspec.structs.replace(rollout, task=task)
            spans = await self._feedback.judge(judged, [span for span in evidence.spans if not span.is_late], found)
        reward = self._feedback.reward(found)
        if is_first and reward is not None and not _is_rated(evidence):
            spans.append(record(rollout, Reward(value=reward, feedback=plain.said)))
        rated = msgspec.structs.replace(plain, task=task, kind=kind, reward=reward, is_explicit=EXPLICIT in found)
        return rated, spans


async def traffic_of(file: LearnerFile) -> StoreTraffic:
    """Return the traffic of a learner, with the rewards of its experiment that are signals."""
    signals = {each if isinstance(each, str) else each.use for each in file.settings.feedback}
    rewards = tuple(each for each in file.config.reward if each.use in signals)
    config = msgspec.structs.replace(file.config, reward=rewards)
    emitters = await build_emitters(rewards_plan(config, folder=file.folder, manager=file.manager))
    return StoreTraffic(file.store, file.settings, folder=str(file.folder), emitters=dict(emitters))


def _plain(evidence: Evidence, *, said: str) -> Conversation:
    """Return the conversation before it has a task and a reward."""
    rollout = evidence.rollout
    placement = placement_of(rollout)
    return Conversation(
        rollout_id=rollout.rollout_id,
        user=_user(rollout),
        started_at=rollout.created_at,
        salt=placement.salt if placement else "",
        arm=placement.arm if placement else "",
        share=placement.shares.get(placement.arm, 1.0) if placement else 1.0,
        versions=dict(rollout.resources),
        question=next(iter(evidence.questions), ""),
        answer=evidence.answer,
        said=said,
        numbers=evidence.numbers(),
    )


def _user(rollout: Rollout) -> str:
    user = rollout.metadata.get("user")
    return user if isinstance(user, str) else ""


def _is_rated(evidence: Evidence) -> bool:
    return any(span.reward is not None and span.reward.source == "human" for span in evidence.spans)


def _function(path: str, folder: str, kind: str) -> Callable[[Any], Any] | None:
    return import_attribute(path, folder, kind=kind) if path else None


def _default_task(conversation: Conversation) -> Json:
    return {"question": conversation.question, "said": conversation.said}


def _no_kind(_task: Json) -> str:
    return ""
