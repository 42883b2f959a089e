"""The store over HTTP: ``POST /store/<method>``, msgpack or JSON, for runners and trainers on other machines.

An admin token allows every method. A worker's token allows the work of its experiment (see
:mod:`agl_gateway.store_api.worker_reach`). An attempt's token only allows appending spans to its own attempt (see
:mod:`agl_gateway.record.traces`).
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from agl.contracts import Store
from agl.errors import AglError
from agl_gateway.access.audit import Deed, deed_of
from agl_gateway.access.identity import Admission, RunningAttempts, key_of, require_scope
from agl_gateway.access.quotas import Quotas
from agl_gateway.record.redaction import Redaction
from agl_gateway.record.spool import SpanCount
from agl_gateway.record.traces import spans_of_agent
from agl_gateway.store_api.contract import MAX_WAIT_S, METHODS, Fault, Method, fault_of, status_of
from agl_gateway.store_api.worker_reach import WORKER_METHODS, WorkerReach
from agl_gateway.traffic.splits import Splitter
from agl_gateway.wire.http.calls import EitherRequest
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken

MSGPACK = "application/msgpack"
JSON = "application/json"

_PREFIX = "/store/"


class _Codec:
    """The decoders and encoder for one content type, with a decoder for each method's parameters."""

    def __init__(self, decoder: Callable[[Any], Any], encode: Callable[[Any], bytes]) -> None:
        self.decoders = {name: decoder(method.params) for name, method in METHODS.items()}
        self.encode = encode


@dataclass(eq=False, kw_only=True)
class StoreApi:
    """Serves a store; used in the gateway's event loop.

    Attributes:
        settle: Waits until the answered calls of an attempt are in the store. It is called before the attempt is
            finished or its spans are read, because a remote worker cannot call the gateway itself.
        reach: Restricts the calls of workers' tokens to their experiment.
        redaction: Redacts the spans and outcomes of agents and workers.
        splitter: Assigns queued rollouts to the arms of the command line's split, if there is one.
    """

    store: Store
    admission: Admission
    stored: SpanCount
    settle: Callable[[str], Awaitable[None]]
    attempts: RunningAttempts
    quotas: Quotas
    reach: WorkerReach
    redaction: Redaction
    splitter: Splitter | None = None

    def __post_init__(self) -> None:
        self._codecs = {
            MSGPACK: _Codec(msgspec.msgpack.Decoder, msgspec.msgpack.Encoder().encode),
            JSON: _Codec(msgspec.json.Decoder, msgspec.json.Encoder().encode),
        }

    async def handle(self, request: EitherRequest) -> web.Response:
        """Answer one call of a store method."""
        content_type = JSON if request.content_type == JSON else MSGPACK
        codec = self._codecs[content_type]
        try:
            body = await self._call(request, codec)
            return web.Response(body=body, content_type=content_type)
        except Problem as problem:
            kind = "TokenError" if problem.status in (401, 403) else "StoreError"
            fault, status, headers = Fault(type=kind, message=str(problem)), problem.status, problem.headers()
        except AglError as error:
            fault, status, headers = fault_of(error), status_of(error), {}
        return web.Response(body=codec.encode(fault), status=status, content_type=content_type, headers=headers)

    async def _call(self, request: EitherRequest, codec: _Codec) -> bytes:
        claim = self.admission.identities.verify(key_of(request.headers))
        name = request.path.removeprefix(_PREFIX)
        method = METHODS.get(name)
        if method is None:
            raise Problem(404, f"the store has no method {name!r}; it has {', '.join(METHODS)}")
        _check_scope(claim, name)
        params = self._params(
            method, codec, await self.admission.bodies.read(request, limit=self.admission.bodies.max_body)
        )
        if claim.scope == "worker":
            params = await self.reach.narrowed(claim, name, params)
        elif claim.scope == "attempt":
            params["spans"] = spans_of_agent(claim, params["spans"])
            if reason := await self.attempts.refusal(claim, params["spans"]):
                raise Problem(403, reason)
            await self.quotas.add_spans(claim, len(params["spans"]))
        if name == "append_spans":
            params["spans"] = await self.redaction.of(params["spans"])
        elif name == "finish":
            params["outcomes"] = await self.redaction.of_outcomes(params["outcomes"])
        spans = len(params["spans"]) if name == "append_spans" else 0
        deed = await self._deed(name, params) if claim.scope == "admin" else None
        with self.admission.audit.of(deed, claim=claim, request=request):
            result = await self._done(method, params)
        if name == "claim" and claim.scope == "worker":
            result = self.reach.issued(claim, result)
        self.stored.total += spans
        return codec.encode(result)

    async def _done(self, method: Method, params: dict[str, Any]) -> Any:
        """Wait until the calls of the attempts concerned are in the store, then call the store's method."""
        for attempt_id in _attempts_to_settle(method.name, params):
            await self.settle(attempt_id)
        positional = [params.pop(item) for item in method.positional]
        owner = self.splitter if method.name == "enqueue" and self.splitter is not None else self.store
        called = getattr(owner, method.name)
        return await called(*positional, **params)

    async def _deed(self, name: str, params: dict[str, Any]) -> Deed | None:
        """Return the privileged action that a call performs, if any.

        Rewards of running attempts are not privileged; late rewards are.
        """
        if name == "append_spans":
            rewarded = {span.attempt_id: span.rollout_id for span in params["spans"] if span.reward is not None}
            late = [each for each, rollout in rewarded.items() if not await self.attempts.runs(rollout, each)]
            return Deed(action="late reward", objects=[each or rewarded[each] for each in late]) if late else None
        deed = deed_of(name, params)
        if deed is not None and name in ("cancel", "delete"):
            return msgspec.structs.replace(deed, experiment=await self.reach.experiment_of(deed.objects))
        return deed

    def _params(self, method: Method, codec: _Codec, body: bytes) -> dict[str, Any]:
        try:
            params = msgspec.structs.asdict(codec.decoders[method.name].decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(
                400, f"the body does not fit the parameters of {method.name!r} ({error}); /openapi.json has the schema"
            ) from error
        if method.is_waiting:
            params["wait_s"] = min(params["wait_s"], MAX_WAIT_S)
        return params


def _check_scope(claim: AttemptToken, name: str) -> None:
    """Raise a 403 :class:`Problem` if a token of this scope may not call the method ``name``."""
    allowed = {"admin": METHODS, "worker": WORKER_METHODS, "attempt": ("append_spans",)}
    if name in allowed.get(claim.scope, ()):
        return
    if claim.scope == "attempt":
        raise Problem(403, f"an attempt's token may append spans to its own attempt; {name!r} needs an admin token")
    require_scope(claim, ("admin", "worker") if name in WORKER_METHODS else ("admin",), what=f"the method {name!r}")


def _attempts_to_settle(name: str, params: dict[str, Any]) -> list[str]:
    if name == "finish":
        return [outcome.attempt_id for outcome in params["outcomes"]]
    attempt_id = params.get("attempt_id") if name == "spans" else None
    return [attempt_id] if attempt_id else []
