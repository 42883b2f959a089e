"""Records model calls without a rollout: each conversation becomes a rollout, with versions, a record and a reward.

The rollout's id is derived from the conversation's id, so all gateways find the same rollout; the first gateway that
queues it decides its versions. The attempt runs until a client ends the conversation, or until ``idle_s`` seconds pass
without a call. It then counts as succeeded: a user who leaves has not made it fail. Later calls are answered and marked
late.

Each call renews the attempt's lease for ``LEASE_S`` seconds, so that its expiry also tells the time of the last call.
The lease is long enough to outlast any downtime of the gateways. So every gateway can tell which conversations are
over, and a restart changes nothing.

A call names its conversation in one of these ways, of which the first present one counts:

1. the header ``x-agl-conversation-id``;
2. ``metadata.conversation_id`` in the body;
3. the session that a coding agent names in a header of its own;
4. a hash of the conversation's opening: its system prompt and everything up to its first user message. Conversations
   with the same opening are treated as one. Claude Code's billing line, which changes from call to call, is not part of
   the opening. With a user's name, it is part of the hash.

The first call of a conversation also names its user, who is recorded with the rollout: in the header ``x-agl-user-id``,
else in the body as ``metadata.user_id``, ``safety_identifier`` or ``user``. The session that Claude Code adds to its
user's id is cut off. The header ``x-agl-agent`` names the application's agent, which may have a variant of its own.
"""

import asyncio
import logging
import math
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from agl.contracts import Change, RolloutQuery, Store
from agl.dialects import Request
from agl.errors import CaptureError, ConflictError, FencedError, NotFoundError, StoreError
from agl.schemas import Outcome, RetryPolicy, Reward, Rollout
from agl.tracing import make_reward_span
from agl_gateway.recent import Recent
from agl_gateway.record.outage import Outage
from agl_gateway.record.redaction import Redaction
from agl_gateway.traffic.kept_traffic import KeptTraffic
from agl_gateway.traffic.splits import arm_of
from agl_gateway.wire.problems import Problem, store_away
from agl_gateway.wire.translation import as_object, opening_of
from agl_inspect.records.splits import AGENT, CONVERSATION, USER
from agl_inspect.terminal.query import CONVERSATIONS

_log = logging.getLogger(__name__)

LEASE_S = 366 * 86_400.0
"""Seconds of a conversation's lease, the same in every gateway."""

CHECKS = 4
"""How often per ``idle_s`` leases are renewed and idle conversations are looked for."""

_PAGE = 1000
_REMEMBERED = 10_000
_LAPSES = 100
"""How many leases a conversation may lose; each loss begins a new attempt."""

Enqueue = Callable[[Sequence[Rollout]], Awaitable[list[Rollout]]]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The rollout, attempt and arm of a conversation; ``is_over`` is true once the rollout is finished."""

    rollout_id: str
    attempt_id: str
    arm: str
    is_over: bool = False

    def headers(self) -> dict[str, str]:
        """Return the response headers with which the client can report a reward."""
        arm = {"x-agl-arm": self.arm} if self.arm else {}
        return {"x-agl-rollout-id": self.rollout_id, "x-agl-attempt-id": self.attempt_id, **arm}


@dataclass(eq=False, kw_only=True)
class Conversations:
    """Finds or creates the rollout of a conversation, and ends it. Its only state is a cache of the store.

    Attributes:
        enqueue: Queues a rollout and pins its versions.
        settle: Waits until the calls of an attempt are in the store.
        idle_s: Seconds without a call after which a conversation is over.
        clock: Returns Unix seconds, like the store's clock.
        outage: During an outage, known conversations continue, and no other can begin.
        redaction: Redacts the feedback of ratings.
        traffic: Decides whether a new conversation is recorded; ``None`` to record all.
        is_split: Returns true while a split is served, which needs all conversations.
    """

    store: Store
    enqueue: Enqueue
    settle: Callable[[str], Awaitable[None]]
    idle_s: float
    outage: Outage
    redaction: Redaction = field(default_factory=Redaction)
    traffic: KeptTraffic | None = None
    is_split: Callable[[], Awaitable[bool]] | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._known: Recent[str, Conversation] = Recent(_REMEMBERED)
        self._renewed: Recent[str, float] = Recent(_REMEMBERED)
        self._in_flight: Counter[str] = Counter()
        self._has_warned = False

    async def left_out_by(self, conversation: str, traffic: KeptTraffic) -> str:
        """Return the setting that excludes a conversation from recording; ``""`` if the conversation is recorded.

        A conversation with recorded calls stays recorded to its end, whatever the limit per minute.
        """
        rollout_id = rollout_id_of(conversation)
        reason = traffic.left_out_by(rollout_id, is_known=rollout_id in self._known)
        return "" if reason and (await self._is_recorded(rollout_id) or await self._needs_all()) else reason

    async def open(self, conversation: str, *, user: str = "", agent: str = "") -> Conversation:
        """Return the conversation with this id, and renew its lease; a new one is created for the user and agent."""
        rollout_id = rollout_id_of(conversation)
        while True:
            known = self._known.get(rollout_id)
            if known is None:
                known = self._known[rollout_id] = await self._open(rollout_id, conversation, user, agent)
            if await self._renew(known):
                return known
            self.forget(rollout_id)

    @asynccontextmanager
    async def hold_open(self, conversation: str, *, user: str = "", agent: str = "") -> AsyncGenerator[Conversation]:
        """Open a conversation for a call; while the block runs, the conversation does not become idle."""
        rollout_id = rollout_id_of(conversation)
        self._in_flight[rollout_id] += 1
        try:
            found = await self.open(conversation, user=user, agent=agent)
            yield found
            with suppress(StoreError):  # the client has its answer, and the next call renews the lease
                await self._renew(found)
        finally:
            self._in_flight[rollout_id] -= 1
            if not self._in_flight[rollout_id]:
                del self._in_flight[rollout_id]

    async def end(self, conversation: str) -> Conversation:
        """End a conversation; idempotent.

        Raises:
            NotFoundError: The conversation never began.
        """
        rollout = await self._read(rollout_id_of(conversation))
        while not rollout.is_finished:
            if rollout.attempt_id is None:
                await self._claim()
            else:
                await self._finish(rollout.attempt_id)
            rollout = await self._read(rollout.rollout_id)
        self.forget(rollout.rollout_id)
        return _conversation(rollout)

    async def rate(self, conversation: str, reward: Reward) -> Conversation:
        """Add a reward to a conversation, running or over.

        Raises:
            NotFoundError: The conversation never began.
        """
        found = _conversation(await self._read(rollout_id_of(conversation)))
        rating = make_reward_span(found.rollout_id, found.attempt_id, reward)
        await self.store.append_spans(await self.redaction.of([rating]))
        return found

    async def end_idle(self) -> int:
        """End the conversations that had no call for ``idle_s`` seconds; returns how many.

        Conversations with a call in flight here are renewed, so that no other gateway considers them idle.
        """
        await self._renew_in_flight()
        query = RolloutQuery(experiment=CONVERSATIONS, status=("running",), limit=_PAGE)
        count = 0
        while page := await self.store.rollouts(query):
            idle = [attempt_id for rollout in page if (attempt_id := await self._idle_attempt(rollout))]
            for attempt_id in idle:
                await self._finish(attempt_id)
            count += len(idle)
            query = query.next(page[-1])
        return count

    async def end_idle_ones(self) -> None:
        """End idle conversations periodically, until the task is cancelled."""
        while True:
            await asyncio.sleep(self.idle_s / CHECKS)
            try:
                await self.end_idle()
            except StoreError as error:
                _log.warning("idle conversations could not be ended; trying again: %s", error)

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Drop changed rollouts from the cache, except those that run the cached attempt, as after their creation."""
        for rollout_id, change in {change.key: change for change in changes if change.kind == "rollout"}.items():
            known = self._known.get(rollout_id)
            if known is not None and (change.status, change.attempt_id) != ("running", known.attempt_id):
                del self._known[rollout_id]

    def forget(self, rollout_id: str = "") -> None:
        """Drop a rollout from the cache; without an id, drop all rollouts, but only if the store answers."""
        if rollout_id:
            self._known.pop(rollout_id, None)
            self._renewed.pop(rollout_id, None)
        elif not self.outage.is_on:
            self._known.clear()
            self._renewed.clear()

    async def _open(self, rollout_id: str, conversation: str, user: str, agent: str) -> Conversation:
        """Return the conversation as stored; raises a 503 :class:`Problem` during an outage of the store."""
        found = await self.outage.unless(
            lambda: self._find_or_create(rollout_id, conversation, user, agent), lambda: None
        )
        if found is None:
            raise store_away("a conversation that this gateway does not know yet cannot begin or continue")
        return found

    async def _find_or_create(self, rollout_id: str, conversation: str, user: str, agent: str) -> Conversation:
        try:
            stored = await self._read(rollout_id)
        except NotFoundError:
            stored = await self._queue(rollout_id, conversation, user, agent)
        while stored.status == "queued":
            await self._claim()
            stored = await self._read(rollout_id)
        return _conversation(stored)

    async def _is_recorded(self, rollout_id: str) -> bool:
        try:
            return bool(await self.outage.unless(lambda: self._read(rollout_id), lambda: None))
        except NotFoundError:
            return False

    async def _needs_all(self) -> bool:
        is_split = self.is_split
        if is_split is None or not await self.outage.unless(is_split, lambda: False):
            return False
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "agl learn serves a split in this store, which needs all conversations: all of them are recorded, "
                "whatever --base-rate, --reward-threshold and --max-spans-per-minute say"
            )
        return True

    async def _queue(self, rollout_id: str, conversation: str, user: str, agent: str) -> Rollout:
        named = {key: name for key, name in ((CONVERSATION, conversation), (USER, user), (AGENT, agent)) if name}
        rollout = Rollout(
            rollout_id=rollout_id,
            task={CONVERSATION: conversation},
            experiment=CONVERSATIONS,
            group_id=rollout_id,
            retry=RetryPolicy(max_losses=_LAPSES),
            metadata={**named, **(self.traffic.marks(rollout_id) if self.traffic else {})},
        )
        try:
            return (await self.enqueue([rollout]))[0]
        except ConflictError:  # a first call that names another user arrived at the same time
            return await self._read(rollout_id)

    async def _read(self, rollout_id: str) -> Rollout:
        return (await self.store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]

    async def _claim(self) -> None:
        """Start the attempts of all queued conversations, including those that a killed gateway left queued."""
        await self.store.claim(worker="gateway", limit=_PAGE, lease_s=LEASE_S, experiment=CONVERSATIONS)

    async def _renew(self, known: Conversation) -> bool:
        """Renew the lease of a conversation; returns false if its attempt has ended or is unknown to the store.

        At most one renewal per ``idle_s / CHECKS`` is sent; further calls return true.
        """
        now = self.clock()
        if known.is_over or now - self._renewed.get(known.rollout_id, -math.inf) < self.idle_s / CHECKS:
            return True
        try:
            renewed = await self.outage.unless(
                lambda: self.store.renew([known.attempt_id], lease_s=LEASE_S), lambda: None
            )
        except NotFoundError:
            renewed = []
        if renewed is None:
            return True
        is_running = bool(renewed)
        if is_running:
            self._renewed[known.rollout_id] = now
        return is_running

    async def _renew_in_flight(self) -> None:
        for rollout_id in list(self._in_flight):
            known = self._known.get(rollout_id)
            if known is not None and not known.is_over:
                self._renewed.pop(rollout_id, None)
                await self._renew(known)

    async def _idle_attempt(self, rollout: Rollout) -> str:
        """Return the id of the rollout's attempt if the conversation is idle, else ``""``."""
        rollout_id, now = rollout.rollout_id, self.clock()
        if self._in_flight[rollout_id] or now - self._renewed.get(rollout_id, -math.inf) < self.idle_s:
            return ""
        attempts = await self.store.attempts(rollout_id)
        since = next((a.lease_until - LEASE_S for a in attempts if a.attempt_id == rollout.attempt_id), math.inf)
        is_idle = now - since >= self.idle_s * (1 + 1 / CHECKS) and not self._in_flight[rollout_id]
        return (rollout.attempt_id or "") if is_idle else ""

    async def _finish(self, attempt_id: str) -> None:
        with suppress(CaptureError):  # a call that the store refused; the recorder has logged and counted it
            await self.settle(attempt_id)
        with suppress(FencedError):  # its lease lapsed
            await self.store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])


def rollout_id_of(conversation: str) -> str:
    """Return the id of the rollout that records the conversation."""
    return f"conversation-{blake2b(conversation.encode(), digest_size=16).hexdigest()}"


def _conversation(stored: Rollout) -> Conversation:
    return Conversation(
        rollout_id=stored.rollout_id,
        attempt_id=stored.attempt_id or "",
        arm=arm_of(stored),
        is_over=stored.is_finished,
    )


HEADER = "x-agl-conversation-id"
USER_HEADER = "x-agl-user-id"
AGENT_HEADER = "x-agl-agent"

_FIELD = "conversation_id"
_MAX_ID = 512
_SESSION = re.compile(r'_session_[\w-]+$|, *"session_id": *"[^"]*"')
"""The session in the user's id of Claude Code: ``user_X_account_X_session_X``, later an object as JSON."""


def conversation_of(headers: Mapping[str, str], call: Request, *, session: str = "", user: str = "") -> str:
    """Return the id of a call's conversation, by the rules in the module's docstring.

    Args:
        session: The coding agent's session; ``""`` for other clients.
        user: The user whom the call names.

    Raises:
        Problem: 400 if the call has neither an id nor an opening, or the id is invalid.
    """
    if given := conversation_id(headers, call.get("metadata")):
        return given
    if session:
        return f"session-{session}"
    opening = opening_of(call)
    if opening is None:
        raise Problem(
            400,
            "the call names no conversation, and has no first user message to derive one from; "
            f"send the header {HEADER}, or {_FIELD} in the body's metadata",
            code="conversation_unknown",
        )
    text = msgspec.json.encode([user, opening] if user else opening, order="sorted")
    return f"opening-{blake2b(text, digest_size=16).hexdigest()}"


def user_of(headers: Mapping[str, str], call: Request | None = None) -> str:
    """Return the id of the user whom a call names, by the rules in the module's docstring; ``""`` without one.

    Raises:
        Problem: 400 if the id is too long, or not UTF-8 text.
    """
    found: list[object] = [headers.get(USER_HEADER)]
    if call is not None:
        found += [as_object(call.get("metadata")).get("user_id"), call.get("safety_identifier"), call.get("user")]
    given = next((each for each in found if isinstance(each, str) and each), "")
    return _checked(_SESSION.sub("", given), what="user")


def agent_of(headers: Mapping[str, str]) -> str:
    """Return the name of the application's agent that a request names; ``""`` without one.

    Raises:
        Problem: 400 if the name is too long, or not UTF-8 text.
    """
    return _checked(headers.get(AGENT_HEADER, ""), what="agent")


def conversation_id(headers: Mapping[str, str], metadata: object = None) -> str:
    """Return the id that the client sent in a header or in the body's ``metadata``; ``""`` if it sent none.

    Raises:
        Problem: 400 if the id is too long, or not UTF-8 text.
    """
    found = as_object(metadata).get(_FIELD)
    return _checked(headers.get(HEADER, "") or (found if isinstance(found, str) else ""), what="conversation")


def _checked(given: str, *, what: str) -> str:
    if len(given) > _MAX_ID:
        raise Problem(400, f"the {what}'s id has {len(given)} characters; {_MAX_ID} are allowed")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise Problem(400, f"the {what}'s id {given!a} is not UTF-8 text; send letters and digits") from error
    return given
