"""Admits requests: verifies the token that callers send as API key or in the path, and that its attempt still runs."""

import hmac
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from agl.contracts import Change, Store
from agl.errors import NotFoundError, TokenError
from agl.schemas import Span
from agl_gateway.access.audit import Audit
from agl_gateway.recent import Recent
from agl_gateway.record.outage import Outage
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.wire.problems import Problem
from agl_inspect.keys import Keys
from agl_run import KEY_ADVICE
from agl_run.access import PLACEHOLDER_KEY, AttemptToken, AttemptTokens, TokenScope

_log = logging.getLogger(__name__)

_CACHE_SIZE = 10_000

_LOOK_S = 1.0
"""Seconds for which a verified token is accepted before the key files are checked again."""

_FROM_PYTHON = f"Where agl runs the agent from Python: {KEY_ADVICE}"
_PLACEHOLDER = (
    f"the API key is the placeholder {PLACEHOLDER_KEY!r}, which the environment has where one process runs many "
    f"attempts at once, and which names none of them; {KEY_ADVICE}"
)

_ADMIN = AttemptToken(rollout_id="", attempt_id="", expires_at=float("inf"), scope="admin")
_CLIENT = AttemptToken(rollout_id="", attempt_id="", expires_at=float("inf"), scope="client")


_SHOWN: dict[TokenScope, str] = {
    "attempt": "an attempt's token",
    "admin": "the admin token",
    "client": "AGL_CLIENT_TOKEN",
    "worker": "a worker's token",
}


def require_scope(claim: AttemptToken, allowed: Collection[TokenScope], *, what: str) -> None:
    """Raise a 403 :class:`Problem` unless the token has one of the scopes; the message begins with ``what``."""
    if claim.scope not in allowed:
        names = " or ".join(_SHOWN[scope] for scope in allowed)
        raise Problem(403, f"{what} needs {names}; this is {_SHOWN[claim.scope]}")


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key from ``Authorization: Bearer``, ``x-api-key`` or ``x-goog-api-key``; ``""`` if none is sent."""
    authorization = headers.get("authorization", "")
    if authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return headers.get("x-api-key", "") or headers.get("x-goog-api-key", "")


class Identities:
    """Verifies tokens and caches valid ones, because a signature check costs more than a lookup.

    When keys change, the cache is emptied within a second.

    Args:
        tokens: Verifies signed tokens.
        admin_key: Additional keys with the rights of an admin token; ``""`` for none.
        client_key: Keys that allow conversations and nothing else; ``""`` for none.
    """

    def __init__(self, tokens: AttemptTokens, *, admin_key: str | Keys = "", client_key: str | Keys = "") -> None:
        self._tokens = tokens
        self._keys = {_ADMIN: _keys_of(admin_key), _CLIENT: _keys_of(client_key)}
        self._known: Recent[str, AttemptToken] = Recent(_CACHE_SIZE)
        self._has_warned = False
        self._seen: object = None
        self._look_at = 0.0

    def verify(self, key: str) -> AttemptToken:
        """Return the claim of the token ``key``; raises a 401 :class:`Problem` that says why the token is invalid."""
        now = time.time()
        if time.monotonic() >= self._look_at:
            self._look()
        claim = self._known.get(key)
        if claim is not None and now < claim.expires_at:
            return claim
        if not key:
            raise Problem(
                401,
                "no API key was sent; use the attempt's token as the client's API key (OPENAI_API_KEY), "
                "or the base URL that carries it",
                code="invalid_api_key",
            )
        try:
            claim = self._whose(key) or self._tokens.verify(key, now=now)
        except TokenError as error:
            self._known.pop(key, None)
            raise self._refusal(key, error) from None
        self._known[key] = claim
        return claim

    def _whose(self, key: str) -> AttemptToken | None:
        given = key.encode("utf-8", "replace")
        for claim, keys in self._keys.items():
            for number, known in enumerate(keys().splitlines(), 1):
                if hmac.compare_digest(given, known):
                    return msgspec.structs.replace(claim, name=f"{claim.scope} token {number}")
        return None

    def _look(self) -> None:
        """Empty the cache of verified tokens if any signing, admin or client key has changed since the last check."""
        self._look_at = time.monotonic() + _LOOK_S
        found = (self._tokens.changes(), *(keys() for keys in self._keys.values()))
        if found != self._seen:
            self._known.clear()
        self._seen = found

    def _refusal(self, key: str, error: TokenError) -> Problem:
        """Return the 401 for an invalid API key.

        The first request with the placeholder key is also logged, because few agents show the body of an error
        response.
        """
        if key != PLACEHOLDER_KEY:
            is_foreign = not key.startswith("agl_")
            return Problem(401, f"{error} {_FROM_PYTHON}" if is_foreign else str(error), code="invalid_api_key")
        if not self._has_warned:
            self._has_warned = True
            _log.warning("An agent's model call was refused: %s", _PLACEHOLDER)
        return Problem(401, _PLACEHOLDER, code="invalid_api_key")


def _keys_of(given: str | Keys) -> Keys:
    """Return ``given`` if it is a function already; else a function that always returns ``given`` as bytes."""
    if callable(given):
        return given
    fixed = given.encode()
    return lambda: fixed


class RunningAttempts:
    """Knows which attempts still run: asks the store once per attempt and follows the change feed from then on.

    The end of an attempt is noticed within a fraction of a second. Calls in between do no harm, because the store marks
    records after the end of an attempt as late. While the store does not answer, a valid token is enough.
    """

    def __init__(self, store: Store, *, outage: Outage) -> None:
        self._store = store
        self._outage = outage
        self._running: dict[str, set[str]] = {}

    async def require(self, claim: AttemptToken) -> None:
        """Raise a :class:`Problem` unless the attempt runs: 409 if it has ended, 401 if the store does not know it."""
        status = await self._status(claim.rollout_id, claim.attempt_id)
        if not status:
            raise Problem(
                401,
                f"the store does not know attempt {claim.attempt_id!r}; check that the token was made for this store",
                code="invalid_api_key",
            )
        if status != "running":
            raise Problem(
                409,
                f"attempt {claim.attempt_id!r} has ended ({status}); its token no longer allows model calls. "
                "Stop the process that still runs, or start a new rollout",
                code="attempt_ended",
            )

    async def refusal(self, claim: AttemptToken, spans: Sequence[Span]) -> str:
        """Return the reason why the attempt's own token may not append ``spans``; ``""`` if it may.

        After the attempt has ended, other spans are stored as late, but rewards and model calls are refused, because
        they count.
        """
        found = next((span for span in spans if span.reward is not None or span.call is not None), None)
        if found is None or await self._status(claim.rollout_id, claim.attempt_id) in ("", "running"):
            return ""
        kind = "reward" if found.reward is not None else "model call"
        return (
            f"span {found.span_id!r} is a {kind}, and attempt {claim.attempt_id!r} has ended; its token still appends "
            "spans, but no rewards and no model calls. Add late rewards with the admin token"
        )

    async def runs(self, rollout_id: str, attempt_id: str) -> bool:
        """Return true if the attempt is running, or if the store does not answer."""
        return await self._status(rollout_id, attempt_id) == "running"

    async def _status(self, rollout_id: str, attempt_id: str) -> str:
        """Return an attempt's status: ``""`` if the store does not know it, ``running`` if the store does not
        answer.
        """
        if attempt_id in self._running.get(rollout_id, ()):
            return "running"
        try:
            attempts = await self._outage.unless(lambda: self._store.attempts(rollout_id), lambda: None)
        except NotFoundError:
            return ""
        if attempts is None:
            return "running"
        status = next((attempt.status for attempt in attempts if attempt.attempt_id == attempt_id), "")
        if status == "running":
            self._running.setdefault(rollout_id, set()).add(attempt_id)
        return status

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Drop the rollouts in ``changes`` from the cache, so that the next call reads their attempts from the
        store.
        """
        for change in changes:
            if change.kind == "rollout":
                self._running.pop(change.key, None)

    def forget(self) -> None:
        """Empty the cache of running attempts, so that the next calls read their attempts from the store."""
        self._running.clear()


T = TypeVar("T")

_MAX_BODY = 64 * 1024
"""The maximum size, in bytes, of a JSON request body at the gateway's own endpoints."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Admission:
    """Checks every request to the gateway's own endpoints: verifies tokens, reads bodies and writes the audit log."""

    identities: Identities
    bodies: BodyReader
    audit: Audit

    def caller(self, request: web.BaseRequest, *allowed: TokenScope, what: str) -> AttemptToken:
        """Return the claim of a request's token, which must have one of the ``allowed`` scopes.

        Raises:
            Problem: 401 for an invalid token, 403 for a token of another scope; the message begins with ``what``.
        """
        claim = self.identities.verify(key_of(request.headers))
        require_scope(claim, allowed, what=what)
        return claim

    async def read(self, request: web.BaseRequest, kind: type[T], *, form: str) -> T:
        """Return a request's JSON body as ``kind``; raises a 400 :class:`Problem` that shows the expected ``form``."""
        try:
            return msgspec.json.decode(await self.bodies.read(request, limit=_MAX_BODY), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, f"the body is not {form} ({error})") from error
