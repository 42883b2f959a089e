"""Relays a client's request to the backend and the answer back, byte for byte, then passes both to the recorder.

:meth:`Relay.answer` shows the stages of a call: read, find its owner, choose the policy, translate, send, pass on and
record.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from aiohttp import web
from multidict import CIMultiDict

from agl.contracts import POLICY_KEY_ENV
from agl.dialects import Request, dialect_of
from agl.errors import CaptureError
from agl_gateway.record.exchanges import CallRecord
from agl_gateway.record.recorder import Recorder
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.relay.callers import Owner, Owners, clean
from agl_gateway.relay.pictures import Pictures
from agl_gateway.relay.routing import Router
from agl_gateway.relay.sampling import SamplingRules
from agl_gateway.relay.sender import FIRST_ERROR, Answer, NotSpokenError, Pump, Sender, reply_headers, request_headers
from agl_gateway.traffic.arms import ArmRoutes, CallRoute
from agl_gateway.wire.http.calls import CallReply, EitherRequest, begin, new_reply
from agl_gateway.wire.problems import Problem, problem_body, problem_response
from agl_gateway.wire.thoughts import restored, thoughts_of
from agl_gateway.wire.translation import Outgoing, Translation
from agl_run.access import AttemptToken

DROPPED_HEADER = "x-agl-dropped"
"""Response header that names the parts of a request that its translation dropped."""

ATTEMPT_HEADER = "x-agl-attempt-id"
"""Header that names the attempt to a server of this project, which gives every attempt its turn."""

_MAX_DROPPED = 200
_CLIENT_LEFT = "the client closed the connection before the answer ended"


@dataclass(eq=False, kw_only=True)
class Relay:
    """Relays model calls and passes them to the recorder. Used in one event loop only."""

    bodies: BodyReader
    owners: Owners
    router: Router
    arms: ArmRoutes | None
    sampling: SamplingRules
    sender: Sender
    recorder: Recorder
    pictures: Pictures | None = None

    async def answer(
        self, request: EitherRequest, endpoint: str, claim: AttemptToken, *, translation: Translation | None = None
    ) -> web.StreamResponse | CallReply:
        """Answer one model call, whose token is verified, at an endpoint of one of the dialects.

        With a ``translation`` the call is translated to a call of ``endpoint`` before it is sent and recorded.
        """
        await self.recorder.admit()
        outgoing = await self._read(request, endpoint, translation)
        async with self.owners.owner_of(request, outgoing.request, claim) as owner:
            return await self.relayed(request, outgoing, owner)

    async def relayed(self, request: EitherRequest, outgoing: Outgoing, owner: Owner) -> web.StreamResponse | CallReply:
        """Answer a call whose body has been read, and record it for ``owner``."""
        context = await self.owners.context_of(request, outgoing.request, owner)
        record = CallRecord(context=context, outgoing=outgoing)
        try:
            if self.pictures is None:
                return await self._asked(request, record, owner)
            async with self.pictures.inlined(record):
                return await self._asked(request, record, owner)
        except Problem as problem:
            body = problem_body(problem, record.outgoing.request.dialect)
            number = self._record(record, owner, [body], status=problem.status, error=str(problem))
            await self._wait_durable(number)
            reply = problem_response(problem, record.outgoing.client_api)
            reply.headers.update(_own_headers(record, owner))
            return reply
        except asyncio.CancelledError:
            self._record(record, owner, [], status=0, error=_CLIENT_LEFT, is_complete=False)
            raise

    async def _asked(self, request: EitherRequest, record: CallRecord, owner: Owner) -> web.StreamResponse | CallReply:
        """Ask the policy, and pass its answer on."""
        outgoing, route = record.outgoing, await self._choose(record, owner)
        record.route = route
        await self._translate(record, outgoing)
        async with route.target.gate.passed() as version:
            record.model_version = route.version or version
            answer, server = await self._send(request, record, outgoing)
            try:
                return await self._pass_on(request, answer, record, owner)
            finally:
                route.target.replicas.load.in_flight[server] -= 1
                answer.response.close()

    async def _read(self, request: EitherRequest, endpoint: str, translation: Translation | None) -> Outgoing:
        dialect = dialect_of(endpoint)
        assert dialect is not None  # noqa: S101  # the dispatcher knows the dialects' endpoints
        asked = Request(dialect, await self.bodies.read_call(request))
        outgoing = Outgoing(request=asked, endpoint=endpoint, translation=thoughts_of(asked))
        return outgoing if translation is None else outgoing.translated(translation)

    async def _choose(self, record: CallRecord, owner: Owner) -> CallRoute:
        """Choose the policy by the model's name, and the model version by the rollout's arm if a split assigned one."""
        asked = record.outgoing.request
        if not asked.is_object:
            raise Problem(
                400,
                "the request's body is not a JSON object, or is nested too deep; send the API's JSON",
                code="invalid_json",
            )
        target = self.router.choose(asked.model, dialect=asked.dialect, names=record.context.callers)
        if self.arms is None or not owner.is_recorded:
            return CallRoute(target=target)
        return await self.arms.route(target, owner.rollout_id)

    async def _translate(self, record: CallRecord, asked: Outgoing, *, to_chat: bool = False) -> None:
        """Translate a call to a chat completion if its policy needs that, and apply the rollout's sampling rules.

        Either way, the sealed thoughts of the policy's earlier answers are restored.
        """
        upstream = record.upstream
        if to_chat or self.sender.apis.is_translated(upstream, asked.request.dialect):
            asked = record.outgoing = self.sender.apis.translated(asked, upstream)
        else:
            asked = replace(asked, request=restored(asked.request))
        sent, notes = await self.sampling.apply(asked.request, upstream, record.context.rollout_id)
        record.outgoing = replace(asked, request=sent, notes=notes)

    async def _send(self, request: EitherRequest, record: CallRecord, asked: Outgoing) -> tuple[Answer, str]:
        """Send a call in the client's API, or as a chat completion if the policy's server lacks that API."""
        try:
            return await self._ask(request, record)
        except NotSpokenError:
            await self._translate(record, asked, to_chat=True)
            answer, server = await self._ask(request, record)
            self.sender.apis.learn(record.upstream, asked.request.dialect, answer.response.status)
            return answer, server

    async def _ask(self, request: EitherRequest, record: CallRecord) -> tuple[Answer, str]:
        route, outgoing, context = record.route, record.outgoing, record.context
        assert route is not None  # noqa: S101  # it is chosen before
        target, asked = route.target, outgoing.request
        model = route.model or target.gate.model
        headers = request_headers(request.headers, target, asked.dialect)
        headers |= await self.sampling.seed(
            asked, target.upstream, rollout_id=context.rollout_id, attempt_id=context.attempt_id
        )
        if target.upstream.api_key_env == POLICY_KEY_ENV:
            headers[ATTEMPT_HEADER] = context.attempt_id
        path = outgoing.endpoint
        if request.query_string and outgoing.client_api == asked.dialect:
            path += f"?{request.query_string}"
        servers = target.replicas.ranked(context.rollout_id)
        body = asked.prepared(want_ids=target.upstream.is_trained, model=model)
        return await self.sender.ask_policy(target, servers, path, body, headers, dialect=asked.dialect)

    async def _pass_on(
        self, request: EitherRequest, answer: Answer, record: CallRecord, owner: Owner
    ) -> web.StreamResponse | CallReply:
        """Pass an answer on and record it; the client sees the answer's end only once the call is stored."""
        headers = reply_headers(answer.response.headers)
        headers.update(_own_headers(record, owner))
        if answer.is_stream:
            return await self._pass_stream_on(request, answer, record, owner, headers)
        status, translation = answer.response.status, record.outgoing.translation
        body = answer.body
        number = self._record(record, owner, [body], status=status)
        await self._wait_stored(number, owner)
        if translation is None:
            return web.Response(body=body, status=status, headers=headers)
        body = translation.failure(body, status) if status >= FIRST_ERROR else translation.answer(body)
        return web.Response(body=body, status=status, headers=headers)

    async def _pass_stream_on(
        self, request: EitherRequest, answer: Answer, record: CallRecord, owner: Owner, headers: CIMultiDict[str]
    ) -> web.StreamResponse | CallReply:
        stream = None
        if (translation := record.outgoing.translation) is not None:
            stream, headers["content-type"] = translation.stream(), translation.content_type
        reply = new_reply(request, answer.response.status, headers)
        pump = Pump(
            response=answer.response,
            reply=reply,
            translation=stream,
            dialect=record.outgoing.request.dialect,
            max_size=self.sender.max_answer,
            holds_end=self.recorder.spool is not None,
        )
        self.recorder.stream_opened(owner.attempt_id)
        number, error = 0, _CLIENT_LEFT
        try:
            await begin(reply, request)
            error = await pump.run()
        except ConnectionError:
            return reply
        finally:
            number = self._record(
                record,
                owner,
                pump.taken(),
                status=reply.status,
                first_byte=answer.first_byte,
                error=error,
                is_complete=not error,
            )
            await self.recorder.stream_closed(owner.attempt_id)
        await self._wait_stored(number, owner)
        with suppress(ConnectionError):  # clients hang up at the last event, before the end of the body
            if pump.held:
                await reply.write(pump.held)
            if not error or pump.is_cut:
                await reply.write_eof()
        if error and not pump.is_cut and request.transport is not None:
            request.transport.abort()  # the client's connection ends before the end of the body, as the backend's did
        return reply

    def _record(
        self,
        record: CallRecord,
        owner: Owner,
        parts: Sequence[bytes],
        *,
        status: int,
        first_byte: float = 0.0,
        error: str = "",
        is_complete: bool = True,
    ) -> int:
        """Queue a finished call for the store; returns the call's number.

        The result is 0 if the call is not to be recorded, or was queued before: a cancelled stream comes here twice.
        """
        if record.number or not owner.is_recorded:
            return 0
        record.end(parts, status=status, first_byte=first_byte, error=error, is_complete=is_complete)
        return self.recorder.put(record)

    async def _wait_stored(self, number: int, owner: Owner) -> None:
        """Wait until a call is durable, or, for a conversation's call, until it is written."""
        if not owner.is_conversation:
            await self._wait_durable(number)
            return
        try:
            await self.recorder.written(number, owner.attempt_id)
        except CaptureError:  # the recorder has logged and counted it; the client still gets its answer
            self.owners.forget(owner)
            if self.arms is not None:
                self.arms.forget(owner.rollout_id)

    async def _wait_durable(self, number: int) -> None:
        if self.recorder.spool is not None:
            await self.recorder.durable(number)


def _own_headers(record: CallRecord, owner: Owner) -> dict[str, str]:
    """Return the response headers that the gateway adds to those of the backend."""
    dropped = ", ".join(record.outgoing.dropped)
    header = {DROPPED_HEADER: clean(dropped.encode("ascii", "replace").decode(), _MAX_DROPPED)} if dropped else {}
    return {**header, **owner.headers}
