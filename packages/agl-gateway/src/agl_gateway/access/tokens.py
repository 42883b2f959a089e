"""``POST /worker-tokens``: makes a worker's token for one experiment, for the admin token."""

import time
from typing import Annotated

import msgspec
from aiohttp import web

from agl.errors import ConfigError
from agl_gateway.access.audit import Audit, Deed
from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptTokens

WORKER_TOKENS = "/worker-tokens"
LONGEST_S = 366 * 86_400.0
"""Seconds for which a worker's token is valid at most."""

_MAX_BODY = 64 * 1024


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /worker-tokens``.

    Attributes:
        experiment: The only experiment that the token reaches.
        valid_s: Seconds for which it is valid.
        name: Whom it is for, as audit lines show it.
    """

    experiment: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]
    name: Annotated[str, msgspec.Meta(max_length=256)] = ""


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the token, and the time in Unix seconds after which it is refused."""

    token: str
    expires_at: float


class TokensApi:
    """Makes tokens; used in the gateway's event loop."""

    def __init__(self, *, identities: Identities, tokens: AttemptTokens, bodies: BodyReader, audit: Audit) -> None:
        self._identities = identities
        self._tokens = tokens
        self._bodies = bodies
        self._audit = audit

    async def make(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with a new token."""
        claim = self._identities.verify(key_of(request.headers))
        require_scope(claim, ("admin",), what="making a worker's token")
        try:
            asked = msgspec.json.decode(await self._bodies.read(request, limit=_MAX_BODY), type=TokenRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(
                400, f'the body is not {{"experiment": "...", "valid_s": SECONDS, "name": "..."}} ({error})'
            ) from error
        expires_at = time.time() + asked.valid_s
        deed = Deed(action="make worker token", objects=[asked.name] if asked.name else [], experiment=asked.experiment)
        try:
            token = self._tokens.issue_for_worker(asked.experiment, expires_at=expires_at, name=asked.name)
        except ConfigError as error:
            self._audit.write(deed, claim=claim, request=request, error=error)
            raise Problem(400, str(error)) from error
        self._audit.write(deed, claim=claim, request=request)
        answer = IssuedToken(token=token, expires_at=expires_at)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
