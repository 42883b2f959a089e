"""Dispatches requests by path, with a table and prefixes: a router's regular expressions cost more than a call."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from agl.dialects import dialect_of
from agl.errors import NotFoundError, StoreError
from agl_gateway.access.identity import Identities, RunningAttempts, key_of, require_scope
from agl_gateway.access.quotas import Quotas
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.relay.relay import Relay
from agl_gateway.relay.side_calls import COMPACT, SIDE_CALLS, SideCalls
from agl_gateway.traffic.conversations import Conversations
from agl_gateway.wire.google import COUNT_TOKENS, GOOGLE_BASE, GOOGLE_METHODS, google_endpoint
from agl_gateway.wire.problems import Problem, problem_response
from agl_gateway.wire.translation import Shape
from agl_run.access import AttemptToken

_log = logging.getLogger(__name__)

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_TOO_LARGE = 413

MODEL_ENDPOINTS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")


class Dispatcher:
    """Dispatches every request of the gateway to its handler.

    Args:
        side_calls: Answers what belongs to a model API and samples nothing.
        routes: Further routes, from ``"METHOD /path"`` to handler; a path that ends in ``/*`` is a prefix.
        conversations: Records calls without an attempt's token; ``None`` refuses them.
    """

    def __init__(
        self,
        *,
        relay: Relay,
        side_calls: SideCalls,
        bodies: BodyReader,
        identities: Identities,
        attempts: RunningAttempts,
        quotas: Quotas,
        routes: dict[str, Handle] | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        self._conversations = conversations
        self._relay = relay
        self._side_calls = side_calls
        self._bodies = bodies
        self._identities = identities
        self._attempts = attempts
        self._quotas = quotas
        self._routes = {name: handle for name, handle in (routes or {}).items() if not name.endswith("/*")}
        self._prefixes = {name[:-1]: handle for name, handle in (routes or {}).items() if name.endswith("/*")}

    @property
    def routes(self) -> tuple[str, ...]:
        """The names of all routes, ``METHOD /path``; ``*`` stands for the rest of a path, or for a model's name."""
        calls = [f"POST /v1{endpoint}" for endpoint in (*MODEL_ENDPOINTS, *SIDE_CALLS)]
        by_google = [f"POST {GOOGLE_BASE}/*:{method}" for method in GOOGLE_METHODS]
        listed = ["GET /v1/models", f"GET {GOOGLE_BASE}"]
        return (*calls, *by_google, *listed, *self._routes, *(f"{prefix}*" for prefix in self._prefixes))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; ends the connection where the body was not read or is too large."""
        try:
            reply = await self._answer(request)
        finally:
            self._bodies.release(request)
        if reply.status == _TOO_LARGE or not request.content.at_eof():
            reply.force_close()
        return reply

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; problems take the format that the client's library reads."""
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
            return await self._other(request)
        except Problem as problem:
            return problem_response(problem, _dialect_at(path))
        except NotFoundError as error:
            return problem_response(Problem(404, str(error), code="not_found"), _dialect_at(path))
        except StoreError as error:
            problem = Problem(503, f"the gateway's store does not answer: {error}", is_retryable=True)
            return problem_response(problem, _dialect_at(path))

    async def _model_api(
        self, request: web.BaseRequest, endpoint: str, key: str, expected: tuple[str, str] | None
    ) -> web.StreamResponse:
        google = google_endpoint(endpoint)
        if endpoint not in MODEL_ENDPOINTS and endpoint not in SIDE_CALLS and endpoint != "/models" and not google:
            return await self._other(request)
        claim = self._identities.verify(key)
        if endpoint == "/models":
            require_scope(claim, ("attempt", "client", "admin"), what="the list of models")
            return self._google_models() if "/v1beta/" in request.path else self._models()
        if request.method != "POST":
            raise Problem(405, f"{request.path} accepts POST, not {request.method}")
        may_converse = claim.scope in ("client", "admin") and expected is None
        is_conversation = may_converse and self._conversations is not None
        if not is_conversation:
            _check(claim, expected)
            await self._attempts.require(claim)
        if google is not None and google.method == COUNT_TOKENS:
            return await self._side_calls.count_google(request)
        if endpoint in SIDE_CALLS:
            if endpoint == COMPACT and not is_conversation:
                await self._quotas.add_call(claim)
            return await self._side_calls.answer(
                request, endpoint, rollout_id=claim.rollout_id, attempt_id=claim.attempt_id
            )
        translation = None if google is None else google.translation(request.query.get("alt", ""))
        endpoint = endpoint if google is None else "/chat/completions"
        dialect = dialect_of(endpoint)
        assert dialect is not None  # noqa: S101  # MODEL_ENDPOINTS are the dialects' endpoints
        if is_conversation and self._conversations is not None:
            return await self._relay.converse(
                request, self._conversations, dialect=dialect, endpoint=endpoint, translation=translation
            )
        await self._quotas.add_call(claim)
        return await self._relay.relay(
            request,
            dialect=dialect,
            endpoint=endpoint,
            rollout_id=claim.rollout_id,
            attempt_id=claim.attempt_id,
            translation=translation,
        )

    def _google_models(self) -> web.Response:
        methods = ["generateContent", "countTokens"]
        listed = [
            {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
            for name in self._relay.router.models()
        ]
        return web.json_response({"models": listed})

    def _models(self) -> web.Response:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in self._relay.router.models()
        ]
        return web.json_response({"object": "list", "data": listed})

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


def _dialect_at(path: str) -> Shape | None:
    """Return the API whose errors a client reads at ``path``."""
    if "/v1beta/" in path or google_endpoint(path[path.rfind("/models/") :]) is not None:
        return "google"
    for endpoint, dialect in SIDE_CALLS.items():
        if path.endswith(endpoint):
            return dialect
    return dialect_of(path)


def _split(path: str) -> tuple[str, str, str, str]:
    """Split ``/rollout/R/attempt/A/key/K/v1/...`` into rollout, attempt, key and endpoint."""
    parts = path.split("/", 8)
    if len(parts) == 9 and (parts[3], parts[5]) == ("attempt", "key") and parts[7] in ("v1", "v1beta"):
        return parts[2], parts[4], parts[6], f"/{parts[8]}"
    raise Problem(404, "the path is not /rollout/ROLLOUT/attempt/ATTEMPT/key/TOKEN/v1/...; use llm.get_base_url(...)")


def _shown(claim: AttemptToken) -> str:
    if claim.scope not in ("client", "admin"):
        return f"a {claim.scope}'s token, which calls no models"
    return (
        f"the {claim.scope} token, which may call models at /v1 only where conversations are served (agl serve with "
        "--split, or with AGL_CLIENT_TOKEN set)"
    )


def _check(claim: AttemptToken, expected: tuple[str, str] | None) -> None:
    if claim.scope != "attempt":
        raise Problem(
            401,
            f"model calls need an attempt's token, which says where to record them; this is {_shown(claim)}",
            code="invalid_api_key",
        )
    if expected is not None and expected != (claim.rollout_id, claim.attempt_id):
        raise Problem(
            401,
            f"the path names attempt {expected[1]!r} and the token belongs to another one; "
            "use the base URL of the attempt that makes the call",
            code="invalid_api_key",
        )
