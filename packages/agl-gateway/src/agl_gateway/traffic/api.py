"""The endpoints for served traffic: the end and the rating of a conversation, a split's report, a resource by arm.

Their paths are ``POST /conversations/end``, ``POST /conversations/rate``, ``GET /split`` and
``GET /split/resources/NAME``.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from agl.contracts import RolloutQuery, Store
from agl.errors import NotFoundError
from agl.schemas import Reward, Rollout
from agl_gateway.access.audit import Deed
from agl_gateway.access.identity import Admission
from agl_gateway.traffic.conversations import (
    HEADER,
    Conversation,
    Conversations,
    agent_of,
    conversation_id,
    user_of,
)
from agl_gateway.traffic.kept_traffic import NOT_RECORDED, KeptTraffic
from agl_gateway.traffic.splits import Splitter, arm_of, split_report
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken

END = "/conversations/end"
RATE = "/conversations/rate"
RESOURCES = "/split/resources/"

_MAX_END = 1024
"""The most bytes of the body with which a client ends a conversation, such as ``{}``."""


class Rating(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a rating: the reward, and its reason as text."""

    value: float
    feedback: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class ConversationsApi:
    """Ends and rates conversations, for client tokens and the admin token.

    The request header names the conversation. The response headers name its rollout; if the conversation is not
    recorded, the response says so.
    """

    admission: Admission
    conversations: Conversations
    traffic: KeptTraffic | None = None

    async def end(self, request: web.BaseRequest) -> web.StreamResponse:
        """End the conversation; idempotent."""
        claim = self.admission.caller(request, "client", "admin", what="ending a conversation")
        await self.admission.bodies.read(request, limit=_MAX_END)  # bytes left unread would end the connection
        return await self._answer(request, claim, self.conversations.end, action="end conversation", status="ended")

    async def rate(self, request: web.BaseRequest) -> web.StreamResponse:
        """Add a person's reward to the conversation; of several, the newest counts."""
        claim = self.admission.caller(request, "client", "admin", what="rating a conversation")
        rating = await self.admission.read(request, Rating, form='{"value": 1.0, "feedback": "why"}')
        reward = Reward(value=rating.value, source="human", feedback=rating.feedback)
        rate = partial(self.conversations.rate, reward=reward)
        return await self._answer(request, claim, rate, action="rate conversation", status="rated")

    async def _answer(
        self,
        request: web.BaseRequest,
        claim: AttemptToken,
        act: Callable[[str], Awaitable[Conversation]],
        *,
        action: str,
        status: str,
    ) -> web.StreamResponse:
        """Apply ``act`` to the conversation that the request names, and answer with ``status``."""
        conversation = conversation_id(request.headers)
        if not conversation:
            raise Problem(400, f"no conversation was named; send its id in the header {HEADER}")
        try:
            found = await act(conversation)
        except NotFoundError:
            reason = await self.conversations.left_out_by(conversation, self.traffic) if self.traffic else ""
            if reason:
                return web.json_response({"status": "not recorded"}, headers={NOT_RECORDED: reason})
            raise Problem(
                404, f"conversation {conversation!r} has no calls; send the id of its calls in the header {HEADER}"
            ) from None
        if claim.scope == "admin":
            deed = Deed(action=action, objects=[conversation, found.rollout_id])
            self.admission.audit.write(deed, claim=claim, request=request)
        return web.json_response({"rollout_id": found.rollout_id, "status": status}, headers=found.headers())


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitApi:
    """Reports on the split, and serves resources by arm."""

    admission: Admission
    store: Store
    splitter: Splitter
    conversations: Conversations

    async def report(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send the report of ``agl resources split`` as JSON. Slow, because it reads every rollout of the split."""
        self.admission.caller(request, "admin", what="the report of the split")
        split = await self.splitter.current()
        if split is None:
            raise Problem(404, "no split is served; start agl learn, or give the gateway --split")
        report = await split_report(self.store, split.versions)
        answer = {"shares": split.shares, **msgspec.structs.asdict(report)}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def resource(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the version of a resource to which the caller's rollout or conversation is pinned."""
        name = request.path.removeprefix(RESOURCES)
        rollout, headers = await self._caller(request)
        version = rollout.resources.get(name)
        if version is None:
            raise Problem(
                404,
                f"rollout {rollout.rollout_id!r} has no version of {name!r}; it has {rollout.resources or 'none'}: "
                f"give {name!r} the label of the split's first arm, or add it to tunes of agl learn, and start a new "
                "rollout or conversation",
            )
        found = await self.store.resource(name, version)
        return web.Response(body=msgspec.json.encode(found), content_type="application/json", headers=headers)

    async def _caller(self, request: web.BaseRequest) -> tuple[Rollout, dict[str, str]]:
        claim = self.admission.caller(request, "attempt", "client", "admin", what="the version of an arm")
        if claim.scope == "attempt":
            rollout = await self._rollout(claim.rollout_id)
            caller = Conversation(rollout_id=claim.rollout_id, attempt_id=claim.attempt_id, arm=arm_of(rollout))
            return rollout, caller.headers()
        conversation = conversation_id(request.headers)
        if not conversation:
            raise Problem(
                400, f"the caller is unknown; send an attempt's token, or the conversation's id in the header {HEADER}"
            )
        user, agent = user_of(request.headers), agent_of(request.headers)
        caller = await self.conversations.open(conversation, user=user, agent=agent)
        return await self._rollout(caller.rollout_id), caller.headers()

    async def _rollout(self, rollout_id: str) -> Rollout:
        return (await self.store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]
