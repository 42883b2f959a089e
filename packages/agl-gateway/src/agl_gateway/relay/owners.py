"""Finds whose a model call is: an attempt's by its token, else a conversation's, and what else its headers say."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from agl import semconv
from agl.dialects import Request
from agl_gateway.processes.attempt_facts import AttemptFacts
from agl_gateway.record.exchanges import CallContext, context_of
from agl_gateway.relay.callers import HelperRules, session_of
from agl_gateway.traffic.conversation_ids import conversation_of
from agl_gateway.traffic.conversations import Conversations, rollout_id_of
from agl_gateway.traffic.kept_traffic import NOT_RECORDED, KeptTraffic
from agl_run.access import AttemptToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The attempt or the conversation that a call belongs to.

    Attributes:
        headers: Headers of the answer that name a conversation's rollout, or the reason why it is not recorded.
        is_conversation: Its calls are in the store before their answers end, because no end of an attempt waits for
            them later.
        is_recorded: False for a conversation outside the share to record.
    """

    rollout_id: str
    attempt_id: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    is_conversation: bool = False
    is_recorded: bool = True


@dataclass(eq=False, kw_only=True)
class Owners:
    """Finds the owners of calls. Used in one event loop only.

    Attributes:
        conversations: Records calls without an attempt's token; ``None`` where these are refused.
        helper_calls: Number of calls that coding agents made besides the turns of their tasks.
    """

    facts: AttemptFacts
    helpers: HelperRules
    conversations: Conversations | None = None
    traffic: KeptTraffic | None = None
    helper_calls: int = field(default=0, init=False)

    @asynccontextmanager
    async def owner_of(self, request: web.BaseRequest, asked: Request, claim: AttemptToken) -> AsyncGenerator[Owner]:
        """Yield the owner of a call with this token; a conversation does not become idle meanwhile.

        Raises:
            Problem: 400 for a call of a conversation that names none.
        """
        if claim.scope == "attempt" or self.conversations is None:
            yield Owner(rollout_id=claim.rollout_id, attempt_id=claim.attempt_id)
            return
        conversation = conversation_of(request.headers, asked, session=session_of(request.headers))
        if self.traffic is not None:
            left_out_by = await self.conversations.left_out_by(conversation, self.traffic)
            self.traffic.count(is_recorded=not left_out_by)
            if left_out_by:
                headers = {NOT_RECORDED: left_out_by}
                yield Owner(rollout_id=rollout_id_of(conversation), attempt_id="", headers=headers, is_recorded=False)
                return
        async with self.conversations.hold_open(conversation) as found:
            yield Owner(
                rollout_id=found.rollout_id,
                attempt_id=found.attempt_id,
                headers=found.headers(),
                is_conversation=True,
            )

    async def context_of(self, request: web.BaseRequest, asked: Request, owner: Owner) -> CallContext:
        """Return what a call's headers say of it; asks other processes for the first try of a repeated request."""
        requests = self.facts.requests
        if (key := requests.retry_of(owner.attempt_id, request.headers, asked.body)) is not None:
            await self.facts.find_request(key)
        context = context_of(
            owner.rollout_id,
            owner.attempt_id,
            request.headers,
            asked,
            request_ids=requests,
            helpers=self.helpers,
        )
        self.helper_calls += context.origin.role == semconv.HELPER
        return context

    def forget(self, owner: Owner) -> None:
        """Drop a conversation from the cache; its next call reads it from the store."""
        if self.conversations is not None:
            self.conversations.forget(owner.rollout_id)
