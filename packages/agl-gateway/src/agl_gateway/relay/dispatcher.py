"""Dispatches requests by path.

Paths are looked up in a table and by prefix, because a router's regular expressions cost more than a call.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from agl.dialects import dialect_of
from agl.errors import NotFoundError, StoreError
from agl_gateway.access.identity import Admission, RunningAttempts, key_of, require_scope
from agl_gateway.access.quotas import Quotas
from agl_gateway.relay.relay import Relay
from agl_gateway.relay.side_calls import COMPACT, SIDE_CALLS, SideCalls
from agl_gateway.wire.google import COUNT_TOKENS, GOOGLE_BASE, GOOGLE_METHODS, google_endpoint
from agl_gateway.wire.http.calls import CallReply, CallRequest, EitherRequest
from agl_gateway.wire.problems import Problem, problem_response
from agl_gateway.wire.translation import CHAT, ClientApi
from agl_run.access import AttemptToken

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_TOO_LARGE = 413

STORE = "/store/"
MODEL_ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")


class Dispatcher:
    """Dispatches every request of the gateway to its handler.

    Args:
        store: Answers calls of the store.
        routes: Handlers of further routes, by ``"METHOD /path"``; a path that ends in ``/*`` is a prefix.
    """

    def __init__(
        self,
        relay: Relay,
        *,
        admission: Admission,
        attempts: RunningAttempts,
        quotas: Quotas,
        store: Callable[[EitherRequest], Awaitable[web.Response]],
        routes: dict[str, Handle],
    ) -> None:
        self._relay = relay
        self._side_calls = SideCalls(relay)
        self._admission = admission
        self._attempts = attempts
        self._quotas = quotas
        self._store = store
        self._routes = {name: handle for name, handle in routes.items() if not name.endswith("/*")}
        self._prefixes = {name[:-1]: handle for name, handle in routes.items() if name.endswith("/*")}

    @property
    def routes(self) -> tuple[str, ...]:
        """The names of all routes as ``METHOD /path``; ``*`` stands for the rest of a path, or for a model's name."""
        calls = [f"POST /v1{endpoint}" for endpoint in (*MODEL_ENDPOINTS, *SIDE_CALLS)]
        by_google = [f"POST {GOOGLE_BASE}/*:{method}" for method in GOOGLE_METHODS]
        others = ["GET /v1/models", f"GET {GOOGLE_BASE}", f"POST {STORE}*"]
        return (*calls, *by_google, *others, *self._routes, *(f"{prefix}*" for prefix in self._prefixes))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; closes the connection if the body is too large or was not read to its end."""
        try:
            reply = _aiohttps(await self.answer(request))
        finally:
            self._admission.bodies.release(request)
        if reply.status == _TOO_LARGE or not request.content.at_eof():
            reply.force_close()
        return reply

    async def answer(self, request: EitherRequest) -> web.StreamResponse | CallReply:
        """Answer one request; an error gets the format that the client's library expects."""
        path = request.path
        try:
            if path.startswith("/v1/"):
                return await self._model_api(request, path[3:], key_of(request.headers), None)
            if path.startswith(GOOGLE_BASE):
                key = key_of(request.headers) or request.query.get("key", "")
                return await self._model_api(request, path.removeprefix("/v1beta"), key, None)
            if path.startswith("/rollout/"):
                rollout_id, attempt_id, key, endpoint = _split(path)
                return await self._model_api(request, endpoint, key, (rollout_id, attempt_id))
            if path.startswith(STORE) and request.method == "POST":
                return await self._store(request)
            return await self._other(_aiohttps(request))
        except Problem as problem:
            return problem_response(problem, _dialect_at(path))
        except NotFoundError as error:
            return problem_response(Problem(404, str(error), code="not_found"), _dialect_at(path))
        except StoreError as error:
            problem = Problem(503, f"the gateway's store does not answer: {error}", is_retryable=True)
            return problem_response(problem, _dialect_at(path))

    async def _model_api(
        self, request: EitherRequest, endpoint: str, key: str, expected: tuple[str, str] | None
    ) -> web.StreamResponse | CallReply:
        google = google_endpoint(endpoint)
        if endpoint not in MODEL_ENDPOINTS and endpoint not in SIDE_CALLS and endpoint != "/models" and not google:
            return await self._other(_aiohttps(request))
        claim = self._admission.identities.verify(key)
        if endpoint == "/models":
            require_scope(claim, ("attempt", "client", "admin"), what="the list of models")
            return self._models(is_google="/v1beta/" in request.path)
        if request.method != "POST":
            raise Problem(405, f"{request.path} accepts POST, not {request.method}")
        has_conversations = self._relay.owners.conversations is not None
        is_conversation = has_conversations and claim.scope in ("client", "admin") and expected is None
        if not is_conversation:
            _check(claim, expected)
            await self._attempts.require(claim)
        if google is not None and google.method == COUNT_TOKENS:
            return await self._side_calls.count_google(_aiohttps(request))
        is_side_call = endpoint in SIDE_CALLS
        if not is_conversation and (endpoint == COMPACT or not is_side_call):
            await self._quotas.add_call(claim)
        if is_side_call:
            return await self._side_calls.answer(_aiohttps(request), endpoint, claim)
        if google is None:
            return await self._relay.answer(request, endpoint, claim)
        translation = google.translation(request.query.get("alt", ""))
        return await self._relay.answer(request, CHAT, claim, translation=translation)

    def _models(self, *, is_google: bool) -> web.Response:
        names = self._relay.router.models()
        if not is_google:
            listed = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in names]
            return web.json_response({"object": "list", "data": listed})
        methods = ["generateContent", "countTokens"]
        found = [
            {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods} for name in names
        ]
        return web.json_response({"models": found})

    async def _other(self, request: web.BaseRequest) -> web.StreamResponse:
        name = f"{request.method} {request.path}"
        handle = self._routes.get(name)
        if handle is None:
            handle = next((found for prefix, found in self._prefixes.items() if name.startswith(prefix)), None)
        if handle is None:
            known = ", ".join(f"/v1{endpoint}" for endpoint in MODEL_ENDPOINTS)
            raise Problem(
                404,
                f"the gateway has no {name}; model calls go to {known}, /v1/models, and "
                f"{GOOGLE_BASE}/MODEL:generateContent or :streamGenerateContent",
            )
        return await handle(request)


T = TypeVar("T")


def _aiohttps(of_either: T | CallRequest | CallReply) -> T:
    """Return a request or an answer of aiohttp's server, which alone serves what is not a plain call."""
    if isinstance(of_either, CallRequest | CallReply):
        raise AssertionError("a plain call is answered by the relay or the store, over its own connection")
    return of_either


def _dialect_at(path: str) -> ClientApi | None:
    """Return the API whose error format the clients of ``path`` expect."""
    if "/v1beta/" in path or google_endpoint(path[path.rfind("/models/") :]) is not None:
        return "google"
    for endpoint, dialect in SIDE_CALLS.items():
        if path.endswith(endpoint):
            return dialect
    return dialect_of(path)


def _split(path: str) -> tuple[str, str, str, str]:
    """Split the path ``/rollout/R/attempt/A/key/K/v1/...`` into rollout, attempt, key and endpoint."""
    parts = path.split("/", 8)
    if len(parts) == 9 and (parts[3], parts[5]) == ("attempt", "key") and parts[7] in ("v1", "v1beta"):
        return parts[2], parts[4], parts[6], f"/{parts[8]}"
    raise Problem(404, "the path is not /rollout/ROLLOUT/attempt/ATTEMPT/key/TOKEN/v1/...; use llm.get_base_url(...)")


def _check(claim: AttemptToken, expected: tuple[str, str] | None) -> None:
    if claim.scope != "attempt":
        shown = f"a {claim.scope}'s token, which calls no models"
        if claim.scope in ("client", "admin"):
            shown = (
                f"the {claim.scope} token, which may call models at /v1 only where conversations are served (agl serve "
                "with --split, or with AGL_CLIENT_TOKEN set)"
            )
        raise Problem(
            401,
            f"model calls need an attempt's token, which says where to record them; this is {shown}",
            code="invalid_api_key",
        )
    if expected is not None and expected != (claim.rollout_id, claim.attempt_id):
        raise Problem(
            401,
            f"the path names attempt {expected[1]!r} and the token belongs to another one; "
            "use the base URL of the attempt that makes the call",
            code="invalid_api_key",
        )
