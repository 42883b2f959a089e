"""``POST /conversations/end``: ends a conversation at the client's request."""

from aiohttp import web

from agl.errors import NotFoundError
from agl_gateway.access.audit import Audit, Deed
from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.traffic.conversation_ids import HEADER, conversation_id
from agl_gateway.traffic.conversations import Conversations
from agl_gateway.traffic.kept_traffic import NOT_RECORDED, KeptTraffic
from agl_gateway.wire.problems import Problem

END = "/conversations/end"


class ConversationsApi:
    """Ends conversations, for the client's token and the admin token."""

    def __init__(
        self,
        *,
        conversations: Conversations,
        identities: Identities,
        audit: Audit,
        traffic: KeptTraffic | None = None,
    ) -> None:
        self._audit = audit
        self._traffic = traffic
        self._conversations = conversations
        self._identities = identities

    async def end(self, request: web.BaseRequest) -> web.StreamResponse:
        """End the conversation that the header names; idempotent. The answer's headers name its rollout.

        One that is not recorded has nothing to end.
        """
        claim = self._identities.verify(key_of(request.headers))
        require_scope(claim, ("client", "admin"), what="ending a conversation")
        conversation = conversation_id(request.headers)
        if not conversation:
            raise Problem(400, f"no conversation was named; send its id in the header {HEADER}")
        try:
            ended = await self._conversations.end(conversation)
        except NotFoundError:
            reason = await self._conversations.left_out_by(conversation, self._traffic) if self._traffic else ""
            if reason:
                return web.json_response({"status": "not recorded"}, headers={NOT_RECORDED: reason})
            raise Problem(
                404, f"conversation {conversation!r} has no calls; send the id of its calls in the header {HEADER}"
            ) from None
        if claim.scope == "admin":
            self._audit.write(
                Deed(action="end conversation", objects=[conversation, ended.rollout_id]), claim=claim, request=request
            )
        return web.json_response({"rollout_id": ended.rollout_id, "status": "ended"}, headers=ended.headers())
