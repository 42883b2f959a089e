"""Relays a client's request to the backend and the answer back, byte for byte, then hands both to the recorder."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from agl import semconv
from agl.contracts import Upstream
from agl.dialects import Exchange, Request
from agl.errors import CaptureError
from agl.schemas import Dialect, Json
from agl_gateway.processes.attempt_facts import AttemptFacts
from agl_gateway.record.exchanges import CallContext, RecordedExchange, context_of
from agl_gateway.record.recorder import Recorder
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.relay.callers import HelperRules, clean, session_of
from agl_gateway.relay.draws import DrawSeeds
from agl_gateway.relay.gate import Gate
from agl_gateway.relay.inflating import plain_bytes
from agl_gateway.relay.json_values import check_values
from agl_gateway.relay.routing import Router, UpstreamTarget
from agl_gateway.relay.sampling import SamplingRules
from agl_gateway.relay.stream_end import StreamEnd
from agl_gateway.relay.upstream_client import CONNECT_TRIES, open_upstream, problem_of, reply_headers, request_headers
from agl_gateway.traffic.arms import ArmRoutes, policy_of
from agl_gateway.traffic.conversation_ids import conversation_of
from agl_gateway.traffic.conversations import Conversation, Conversations, rollout_id_of
from agl_gateway.traffic.kept_traffic import NOT_RECORDED, KeptTraffic
from agl_gateway.wire.client_apis import CHAT, ClientApis, NotSpokenError, translation_of
from agl_gateway.wire.compaction import CompactionTranslation
from agl_gateway.wire.problems import Problem, problem_body, problem_response
from agl_gateway.wire.thoughts import restored, thoughts_of
from agl_gateway.wire.translation import Shape, StreamTranslation, Translation

_log = logging.getLogger(__name__)

_NO_ANSWER_CODES = ("upstream_unreachable", "upstream_failed")
"""Problems of a server that has not answered; another server may be asked, because sampling has no side effects."""

_NOT_FOUND = 404
_MAX_TOLD = 1000
_FIRST_ERROR = 400

_END_OF_BODY_S = 1.0
"""Seconds in which the body of a stream ends after its last event."""

DROPPED_HEADER = "x-agl-dropped"
"""Response header that names what a translated request asked for in vain."""

_MAX_DROPPED = 200
_CLIENT_LEFT = "the client closed the connection before the answer ended"


@dataclass(slots=True, kw_only=True)
class _Call:
    """One call in flight: its request and context, and the results so far."""

    asked: Request
    endpoint: str
    context: CallContext
    start_ns: int
    started: float
    target: UpstreamTarget | None = None
    model_version: str = ""
    status: int = 0
    headers: Mapping[str, str] | None = None
    first_byte: float = 0.0
    is_streamed: bool = False
    is_recorded: bool = False
    arm: str = ""
    model: str = ""
    conversation: Conversation | None = None
    number: int = 0
    is_lost: bool = False
    left_out_by: str = ""
    translation: Translation | None = None
    notes: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def gateway_headers(self) -> dict[str, str]:
        """Return the headers that the gateway adds to the backend's."""
        dropped = "" if self.translation is None else ", ".join(self.translation.dropped)
        told = {DROPPED_HEADER: clean(dropped.encode("ascii", "replace").decode(), _MAX_DROPPED)} if dropped else {}
        if self.left_out_by:
            return {**told, NOT_RECORDED: self.left_out_by}
        return told | ({} if self.conversation is None else self.conversation.headers())

    def translate(self, translation: Translation) -> None:
        """Make the call a chat completion; raises a :class:`Problem` where that cannot be."""
        self.asked, self.translation, self.endpoint = translation.asked(self.asked), translation, CHAT

    @property
    def shape(self) -> Shape:
        """The API whose errors the client reads."""
        return self.asked.dialect if self.translation is None else self.translation.shape


def _call(asked: Request, endpoint: str, context: CallContext, translation: Translation | None) -> _Call:
    return _Call(
        asked=asked,
        translation=translation,
        endpoint=endpoint,
        context=context,
        start_ns=time.time_ns(),
        started=time.perf_counter(),
    )


class Relay:
    """Relays model calls and passes them to the recorder. Used in one event loop only.

    Attributes:
        helper_calls: Number of calls that coding agents made beside the turns of their tasks.
    """

    def __init__(
        self,
        *,
        router: Router,
        recorder: Recorder,
        session: aiohttp.ClientSession,
        bodies: BodyReader,
        max_body: int,
        sampling: SamplingRules,
        seeds: DrawSeeds,
        facts: AttemptFacts,
        arms: ArmRoutes | None = None,
        helpers: HelperRules | None = None,
        traffic: KeptTraffic | None = None,
        apis: ClientApis | None = None,
    ) -> None:
        self.router = router
        self._traffic = traffic
        self._apis = apis or ClientApis()
        self._helpers = helpers or HelperRules()
        self.helper_calls = 0
        self._arms = arms
        self.gates = {
            name: Gate(model=target.upstream.model, model_version=target.upstream.model_version)
            for name, target in router.targets.items()
        }
        self._recorder = recorder
        self._session = session
        self._bodies = bodies
        self._max_body = max_body
        self._sampling = sampling
        self._seeds = seeds
        self._facts = facts
        self._told: set[tuple[str, str]] = set()

    async def relay(
        self,
        request: web.BaseRequest,
        *,
        dialect: Dialect,
        endpoint: str,
        rollout_id: str,
        attempt_id: str,
        translation: Translation | None = None,
    ) -> web.StreamResponse:
        """Answer one model call of an attempt; the caller has verified its token.

        A ``translation`` makes the call one of ``dialect``, which is what its policy's server gets and what is
        recorded.
        """
        await self._recorder.admit()
        asked, translation = await self._read(request, dialect, translation)
        context = await self._context(rollout_id, attempt_id, request, asked)
        return await self._answer(request, _call(asked, endpoint, context, translation))

    def speaks(self, upstream: Upstream, dialect: Dialect) -> bool:
        """Return true if a policy's server is asked in this API."""
        return not self._apis.is_translated(upstream, dialect)

    async def compact(
        self, request: web.BaseRequest, asked: Request, *, rollout_id: str, attempt_id: str
    ) -> web.StreamResponse:
        """Answer a request for a compaction with a summary by the policy, as a call of an attempt."""
        await self._recorder.admit()
        translation = CompactionTranslation()
        chat = translation.asked(asked)
        context = await self._context(rollout_id, attempt_id, request, chat)
        return await self._answer(request, _call(chat, CHAT, context, translation))

    async def converse(
        self,
        request: web.BaseRequest,
        conversations: Conversations,
        *,
        dialect: Dialect,
        endpoint: str,
        translation: Translation | None = None,
    ) -> web.StreamResponse:
        """Answer one model call of a conversation; the call is in the store before the answer ends, or left out."""
        await self._recorder.admit()
        asked, translation = await self._read(request, dialect, translation)
        conversation = conversation_of(request.headers, asked, session=session_of(request.headers))
        if self._traffic is not None:
            left_out_by = await conversations.left_out_by(conversation, self._traffic)
            if left_out_by:
                self._traffic.calls += 1
                context = await self._context(rollout_id_of(conversation), "", request, asked)
                call = _call(asked, endpoint, context, translation)
                call.is_recorded, call.left_out_by = True, left_out_by
                return await self._answer(request, call)
            self._traffic.count()
        async with conversations.hold_open(conversation) as found:
            context = await self._context(found.rollout_id, found.attempt_id, request, asked)
            call = _call(asked, endpoint, context, translation)
            call.conversation = found
            reply = await self._answer(request, call)
        if call.is_lost:
            conversations.forget(found.rollout_id)
            if self._arms is not None:
                self._arms.forget(found.rollout_id)
        return reply

    async def _context(self, rollout_id: str, attempt_id: str, request: web.BaseRequest, asked: Request) -> CallContext:
        requests = self._facts.requests
        if (key := requests.retry_of(attempt_id, request.headers, asked.body)) is not None:
            await self._facts.find_request(key)
        context = context_of(
            rollout_id, attempt_id, request.headers, asked, request_ids=requests, helpers=self._helpers
        )
        self.helper_calls += context.origin.role == semconv.HELPER
        return context

    async def _read(
        self, request: web.BaseRequest, dialect: Dialect, translation: Translation | None
    ) -> tuple[Request, Translation | None]:
        """Return the request as its policy's server gets it, and what translates the answer."""
        body = await self._bodies.read(request, limit=self._max_body)
        await check_values(body)
        asked = Request(dialect, body)
        if translation is not None:
            return translation.asked(asked), translation
        whole = restored(asked)
        if whole is not asked:
            await check_values(whole.body)
        return whole, thoughts_of(asked)

    async def _answer(self, request: web.BaseRequest, call: _Call) -> web.StreamResponse:
        try:
            return await self._route(request, call)
        except Problem as problem:
            self._record(call, problem_body(problem, call.asked.dialect), status=problem.status, error=str(problem))
            await self._wait_durable(call)
            reply = problem_response(problem, call.shape)
            reply.headers.update(call.gateway_headers())
            return reply

    async def _route(self, request: web.BaseRequest, call: _Call) -> web.StreamResponse:
        asked = call.asked
        if not asked.is_object:
            raise Problem(
                400,
                "the request's body is not a JSON object, or is nested too deep; send the API's JSON",
                code="invalid_json",
            )
        chosen = self.router.choose(asked.model, dialect=asked.dialect, names=call.context.callers)
        target = call.target = await self._target(call, chosen)
        if self._apis.is_translated(target.upstream, asked.dialect):
            self._translate(call, target.upstream)
        gate = self.gates[target.upstream.name]
        version = await gate.enter()
        call.model_version = call.model_version or version
        try:
            return await self._send_or_translate(request, call, target)
        except asyncio.CancelledError:
            self._record(call, b"", status=call.status, error=_CLIENT_LEFT, is_complete=False)
            raise
        finally:
            gate.leave()

    async def _target(self, call: _Call, target: UpstreamTarget) -> UpstreamTarget:
        """Return the upstream of the rollout's arm; ``target`` if no split placed the rollout."""
        if self._arms is None or call.left_out_by:
            return target
        routed = await self._arms.route(target, call.context.rollout_id)
        call.arm, call.model, call.model_version = routed.arm, routed.model, routed.version
        return routed.target

    def _translate(self, call: _Call, upstream: Upstream) -> None:
        """Make a call a chat completion; says once per policy what is dropped for it."""
        translation = translation_of(call.asked.dialect)
        if translation is None:
            return
        call.translate(translation)
        for name in translation.dropped:
            told = (upstream.name, name)
            if told not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add(told)
                _log.warning(
                    "a request offers the tool %r to policy %r, whose server cannot run it; the policy is not told of "
                    "it. Switch it off in the client, or let the client run it",
                    clean(name, _MAX_DROPPED),
                    upstream.name,
                )

    async def _send_or_translate(
        self, request: web.BaseRequest, call: _Call, target: UpstreamTarget
    ) -> web.StreamResponse:
        """Ask the policy as the client asks; by a chat completion where its server has nothing else."""
        asked = call.asked
        try:
            return await self._send(request, call, target)
        except NotSpokenError:
            call.asked = asked
            self._translate(call, target.upstream)
            reply = await self._send(request, call, target)
            self._apis.learn(target.upstream, asked.dialect, reply.status)
            return reply

    async def _send(self, request: web.BaseRequest, call: _Call, target: UpstreamTarget) -> web.StreamResponse:
        """Ask the rollout's own server, then the policy's others until one answers."""
        upstream = target.upstream
        model = call.model or self.gates[upstream.name].model
        call.asked, call.notes = await self._sampling.apply(call.asked, upstream, call.context.rollout_id)
        body = call.asked.prepared(want_ids=upstream.is_trained, model=model)
        headers = request_headers(request.headers, target, call.asked.dialect)
        ids = {"rollout_id": call.context.rollout_id, "attempt_id": call.context.attempt_id}
        headers |= await self._seeds.headers(call.asked, upstream, **ids)
        query = request.query_string if call.shape == call.asked.dialect else ""
        *firsts, last = target.urls(call.context.rollout_id, call.endpoint, query)
        for url in firsts:
            try:
                with target.replicas.under_way(url):
                    return await self._ask(request, call, url=url, body=body, headers=headers, connect_tries=1)
            except Problem as problem:
                if problem.code not in _NO_ANSWER_CODES:
                    raise
                target.replicas.failed(url)
                target.replicas.rerouted += 1
        with target.replicas.under_way(last):
            return await self._ask(request, call, url=last, body=body, headers=headers, connect_tries=CONNECT_TRIES)

    async def _ask(
        self,
        request: web.BaseRequest,
        call: _Call,
        *,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        connect_tries: int,
    ) -> web.StreamResponse:
        response = await open_upstream(self._session, "POST", url, body, headers, connect_tries=connect_tries)
        try:
            call.status, call.headers = response.status, response.headers
            call.first_byte = time.perf_counter()
            self._apis.check(call.asked.dialect, response.status)
            if response.content_type == "text/event-stream":
                return await self._relay_stream(request, call, response)
            return await self._relay_body(call, response, url)
        finally:
            response.close()

    async def _relay_body(self, call: _Call, response: aiohttp.ClientResponse, url: str) -> web.StreamResponse:
        try:
            body = await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise problem_of(error, url) from error
        if response.status == _NOT_FOUND and call.target is not None:
            self._tell_missing_path(call.target.upstream, url)
        self._record(call, body, status=response.status)
        await self._wait_stored(call)
        headers = self._reply_headers(call, response)
        if call.translation is not None:
            is_error = response.status >= _FIRST_ERROR
            translation = call.translation
            body = plain_bytes(body, headers.pop("content-encoding", ""))
            body = translation.failure(body, response.status) if is_error else translation.answer(body)
        return web.Response(body=body, status=response.status, headers=headers)

    def _tell_missing_path(self, upstream: Upstream, url: str) -> None:
        """Say once per policy that an address without a path, at which a server has nothing, may lack ``/v1``."""
        if urlsplit(upstream.base_url).path.strip("/") or (upstream.name, "") in self._told:
            return
        self._told.add((upstream.name, ""))
        address = upstream.base_url.rstrip("/")
        _log.warning(
            "%s answered 404. The address of policy %r has no path, and most APIs are below /v1: try %s/v1",
            url.split("?", 1)[0],
            upstream.name,
            address,
        )

    async def _relay_stream(
        self, request: web.BaseRequest, call: _Call, response: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        call.is_streamed = True
        reply = web.StreamResponse(status=response.status, headers=self._reply_headers(call, response))
        stream = None
        if call.translation is not None:
            stream, reply.content_type = call.translation.stream(), call.translation.content_type
        attempt_id = call.context.attempt_id
        chunks: list[bytes] = []
        pump = _Pump(response, reply, chunks, stream=stream, holds_end=self._recorder.spool is not None)
        self._recorder.stream_opened(attempt_id)
        error = _CLIENT_LEFT
        try:
            await reply.prepare(request)
            error = await pump.run()
        except ConnectionError:
            return reply
        finally:
            self._record(call, b"".join(chunks), status=response.status, error=error, is_complete=not error)
            await self._recorder.stream_closed(attempt_id)
        await self._wait_stored(call)
        with suppress(ConnectionError):  # clients hang up at the last event, before the end of the body
            if pump.held:
                await reply.write(pump.held)
            if not error:
                await reply.write_eof()
        if error:
            _hang_up(request)
        return reply

    def _reply_headers(self, call: _Call, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        headers = reply_headers(response.headers)
        headers.update(call.gateway_headers())
        return headers

    async def _wait_stored(self, call: _Call) -> None:
        """Wait until the call is durable where the gateway has a spool, and until it is stored in a conversation.

        No end of an attempt waits for a conversation's call later.
        """
        if call.conversation is None:
            await self._wait_durable(call)
            return
        try:
            await self._recorder.written(call.number, call.context.attempt_id)
        except CaptureError:
            call.is_lost = True  # the recorder has logged and counted it; the client still gets its answer

    async def _wait_durable(self, call: _Call) -> None:
        if self._recorder.spool is not None:
            await self._recorder.durable(call.number)

    def _record(self, call: _Call, body: bytes, *, status: int, error: str = "", is_complete: bool = True) -> None:
        """Queue the call for the store, once: a cancelled stream gets here twice, and what is left out never."""
        if call.is_recorded:
            return
        call.is_recorded = True
        now = time.perf_counter()
        headers = call.headers or {}
        encoding = headers.get("content-encoding", "")
        latency_s = now - call.started
        exchange = Exchange(
            request=call.asked,
            request_id=call.context.request_id,
            status=status,
            headers={},
            response=plain_bytes(body, encoding) if encoding else body,
            is_streamed=call.is_streamed,
            is_complete=is_complete,
            latency_s=latency_s,
            first_token_s=call.first_byte - call.started if call.is_streamed else latency_s,
            retry_count=call.context.retry_count,
            error=error,
        )
        upstream = call.target.upstream if call.target else _NO_UPSTREAM
        call.number = self._recorder.put(
            RecordedExchange(
                context=call.context,
                exchange=exchange,
                start_ns=call.start_ns,
                end_ns=call.start_ns + int(latency_s * 1e9),
                policy=policy_of(upstream),
                model_version=call.model_version,
                want_ids=upstream.is_trained,
                arm=call.arm,
                notes=call.notes,
            )
        )


_NO_UPSTREAM = Upstream(name="", base_url="")


class _Pump:
    """Passes a body on as it arrives.

    Args:
        stream: Translates the body for the client; ``None`` where the client speaks the backend's API.
        holds_end: Keep the last event back, for the caller to send once the call is durable: clients take it for the
            end, and what they have seen the end of must not get lost.

    Attributes:
        held: The bytes that were kept back.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        reply: web.StreamResponse,
        chunks: list[bytes],
        *,
        stream: StreamTranslation | None,
        holds_end: bool,
    ) -> None:
        self._response = response
        self._reply = reply
        self._chunks = chunks
        self._stream = stream
        self._holds_end = holds_end
        self._end = StreamEnd()
        self.held = b""

    async def run(self) -> str:
        """Return the error that cut the body short, ``""`` if it is complete.

        Raises :class:`ConnectionError` when the client is gone.
        """
        body = self._response.content
        while True:
            try:
                if self._end.is_here:
                    async with asyncio.timeout(_END_OF_BODY_S):
                        chunk = await body.readany()
                else:
                    chunk = await body.readany()
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                if not self._end.is_here:
                    return f"the backend's stream broke off: {error or type(error).__name__}"
                chunk = b""  # the last event is here, whatever becomes of the connection
            if not chunk:
                await self._pass(b"" if self._stream is None else self._stream.end())
                return ""
            self._chunks.append(chunk)
            if self._holds_end:
                self._end.feed(chunk)
            await self._pass(chunk if self._stream is None else self._stream.feed(chunk))

    async def _pass(self, passed: bytes) -> None:
        if self._end.has_begun:
            self.held += passed
        elif passed:
            await self._reply.write(passed)


def _hang_up(request: web.BaseRequest) -> None:
    """Close the client's connection before the end of the body, as the backend did."""
    if request.transport is not None:
        request.transport.abort()
