"""``GET /split``: the rewards of the arms. ``GET /split/resources/NAME``: a resource's version in the caller's arm."""

import msgspec
from aiohttp import web

from agl.contracts import RolloutQuery, Store
from agl.schemas import Rollout
from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.traffic.conversation_ids import HEADER, conversation_id
from agl_gateway.traffic.conversations import Conversation, Conversations
from agl_gateway.traffic.split_report import split_report
from agl_gateway.traffic.splits import placement_of
from agl_gateway.traffic.splitter import Splitter
from agl_gateway.wire.problems import Problem

RESOURCES = "/split/resources/"


class SplitApi:
    """Reports on the split, and serves resources by arm."""

    def __init__(
        self, *, store: Store, splitter: Splitter, conversations: Conversations, identities: Identities
    ) -> None:
        self._store = store
        self._split = splitter.split
        self._conversations = conversations
        self._identities = identities

    async def report(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the report of ``agl resources split`` as JSON; it reads every placed rollout, which is slow."""
        require_scope(self._identities.verify(key_of(request.headers)), ("admin",), what="the report of the split")
        report = await split_report(self._store, list(self._split.shares))
        answer = {"shares": self._split.shares, **msgspec.structs.asdict(report)}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def resource(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the version of a resource that the caller's rollout or conversation is pinned to."""
        name = request.path.removeprefix(RESOURCES)
        rollout, headers = await self._caller(request)
        version = rollout.resources.get(name)
        if version is None:
            raise Problem(
                404,
                f"rollout {rollout.rollout_id!r} has no version of {name!r}; it has {rollout.resources or 'none'}: "
                f"give {name!r} the label {self._split.baseline!r}, and start a new rollout or conversation",
            )
        found = await self._store.resource(name, version)
        return web.Response(body=msgspec.json.encode(found), content_type="application/json", headers=headers)

    async def _caller(self, request: web.BaseRequest) -> tuple[Rollout, dict[str, str]]:
        claim = self._identities.verify(key_of(request.headers))
        require_scope(claim, ("attempt", "client", "admin"), what="the version of an arm")
        if claim.scope == "attempt":
            rollout = await self._rollout(claim.rollout_id)
            placement = placement_of(rollout)
            arm = placement.arm if placement is not None else ""
            caller = Conversation(rollout_id=claim.rollout_id, attempt_id=claim.attempt_id, arm=arm)
            return rollout, caller.headers()
        conversation = conversation_id(request.headers)
        if not conversation:
            raise Problem(
                400, f"the caller is unknown; send an attempt's token, or the conversation's id in the header {HEADER}"
            )
        caller = await self._conversations.open(conversation)
        return await self._rollout(caller.rollout_id), caller.headers()

    async def _rollout(self, rollout_id: str) -> Rollout:
        return (await self._store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]
