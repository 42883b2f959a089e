"""Model calls without a rollout: every conversation becomes one, so that it has an arm, a record and a reward.

Which conversation a call belongs to, in this order:

1. the header ``x-agl-conversation-id``;
2. ``metadata.conversation_id`` in the body;
3. a hash of how the conversation begins: its system prompt and its first user message. Two conversations that begin
   with the same words are one then.

Its rollout's id follows from that, so that every gateway finds the same one, and whoever queues it first decides its
versions. It is finished from the beginning: nobody says when a conversation ends, and none of them shall ever count as
failed because its user went away. So its calls are marked late, and its rewards come from outside.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

import msgspec

from agl.contracts import Change, RolloutQuery, Store
from agl.errors import FencedError, NotFoundError
from agl.experiment.split import CONVERSATION, placement_of
from agl.schemas import Dialect, Outcome, RetryPolicy, Rollout
from agl_gateway.problems import Problem
from agl_gateway.splitter import Splitter

HEADER = "x-agl-conversation-id"
EXPERIMENT = "served-conversations"

_FIELD = "conversation_id"
_LEASE_S = 30.0
_SWEEP = 1000
_MAX_ID = 512
_REMEMBERED = 10_000
_ATTEMPTS = 100
"""Tries to finish a conversation's rollout: one is lost when a gateway is killed between two writes."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation's rollout, as the answers' headers name it."""

    rollout_id: str
    attempt_id: str
    arm: str

    def headers(self) -> dict[str, str]:
        """What the client needs to report a reward."""
        return {"x-agl-rollout-id": self.rollout_id, "x-agl-attempt-id": self.attempt_id, "x-agl-arm": self.arm}


class Conversations:
    """Finds or makes the rollout of a conversation. What it remembers could be read from the store again."""

    def __init__(self, store: Store, splitter: Splitter) -> None:
        self._store = store
        self._splitter = splitter
        self._known: OrderedDict[str, Conversation] = OrderedDict()

    async def open(self, conversation: str) -> Conversation:
        """The rollout of a conversation, with the arm and the versions that it got at its first call."""
        rollout_id = f"conversation-{blake2b(conversation.encode(), digest_size=16).hexdigest()}"
        known = self._known.get(rollout_id)
        if known is None:
            known = self._known[rollout_id] = await self._open(rollout_id, conversation)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Follow the store's feed: a rollout that changed, or was removed and made again, is read again."""
        for change in changes:
            self._known.pop(change.key, None)

    def forget(self, rollout_id: str = "") -> None:
        """Read that rollout again at its next call, without an id every one."""
        if rollout_id:
            self._known.pop(rollout_id, None)
        else:
            self._known.clear()

    async def _open(self, rollout_id: str, conversation: str) -> Conversation:
        try:
            stored = await self._read(rollout_id)
        except NotFoundError:
            stored = await self._queue(rollout_id, conversation)
        while not stored.is_finished:
            stored = await self._finish(stored)
        placement = placement_of(stored)
        arm = placement.arm if placement is not None else ""
        return Conversation(rollout_id=rollout_id, attempt_id=stored.attempt_id or "", arm=arm)

    async def _queue(self, rollout_id: str, conversation: str) -> Rollout:
        rollout = Rollout(
            rollout_id=rollout_id,
            task={CONVERSATION: conversation},
            experiment=EXPERIMENT,
            mode="test",
            retry=RetryPolicy(max_attempts=_ATTEMPTS),
            metadata={CONVERSATION: conversation},
        )
        return (await self._splitter.enqueue([rollout]))[0]

    async def _read(self, rollout_id: str) -> Rollout:
        return (await self._store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]

    async def _finish(self, rollout: Rollout) -> Rollout:
        """Finish the rollout, whoever claimed it; what others queued meanwhile is finished with it."""
        claims = await self._store.claim(worker="gateway", limit=_SWEEP, lease_s=_LEASE_S, experiment=EXPERIMENT)
        attempts = [claim.attempt.attempt_id for claim in claims]
        if rollout.status == "running" and rollout.attempt_id is not None:
            attempts.append(rollout.attempt_id)
        for attempt_id in attempts:
            with suppress(FencedError):  # its lease lapsed; it is queued again, and claimed in the next round
                await self._store.finish([Outcome(attempt_id=attempt_id, status="succeeded")])
        return await self._read(rollout.rollout_id)


def conversation_of(headers: Mapping[str, str], body: bytes, dialect: Dialect) -> str:
    """The conversation that a call belongs to; the module's docstring has the rule.

    Raises:
        Problem: 400 where nothing says it, or the id is too long.
    """
    if given := conversation_id(headers, body):
        return given
    opening = _opening(body, dialect)
    if opening is None:
        raise Problem(
            400,
            "the call does not say which conversation it belongs to, and has no first user message to tell it by; "
            f"send the header {HEADER}, or {_FIELD} in the body's metadata",
            code="conversation_unknown",
        )
    return f"opening-{blake2b(msgspec.json.encode(opening, order='sorted'), digest_size=16).hexdigest()}"


def conversation_id(headers: Mapping[str, str], body: bytes) -> str:
    """The id that the client gives, ``""`` if it gives none; raises a 400 :class:`Problem` if it is too long."""
    given = headers.get(HEADER, "") or _in_metadata(body)
    if len(given) > _MAX_ID:
        raise Problem(400, f"the conversation's id has {len(given)} characters; {_MAX_ID} are allowed")
    return given


def _in_metadata(body: bytes) -> str:
    found = _object(_object(_decoded(body)).get("metadata")).get(_FIELD)
    return found if isinstance(found, str) else ""


def _opening(body: bytes, dialect: Dialect) -> list[Any] | None:
    """System prompt and messages up to the first of the user; ``None`` if the call has none."""
    call = _object(_decoded(body))
    if dialect not in ("chat", "messages", "responses") or call.get("previous_response_id"):
        return None
    system = call.get("instructions") if dialect == "responses" else call.get("system")
    messages = call.get("input") if dialect == "responses" else call.get("messages")
    if isinstance(messages, str):
        return [system, messages]
    for index, message in enumerate(_items(messages)):
        if _object(message).get("role") == "user":
            return [system, *_items(messages)[: index + 1]]
    return None


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # the relay says what is wrong with it


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _items(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
