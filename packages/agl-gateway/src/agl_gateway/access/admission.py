"""Admits requests: verifies who sends them, and reads their bodies."""

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from agl_gateway.access.audit import Audit
from agl_gateway.access.identity import Identities, key_of, require_scope
from agl_gateway.relay.bodies import BodyReader
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken, TokenScope

T = TypeVar("T")

_MAX_BODY = 64 * 1024
"""Bytes of the small JSON bodies of the gateway's own endpoints."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Admission:
    """Stands before the gateway's endpoints: it knows the tokens, reads bodies and keeps the audit log."""

    identities: Identities
    bodies: BodyReader
    audit: Audit

    def caller(self, request: web.BaseRequest, *allowed: TokenScope, what: str) -> AttemptToken:
        """Return the claim of a request's token, which must have one of these scopes.

        Raises:
            Problem: 401 for an invalid token, 403 for one of another scope; ``what`` begins the message.
        """
        claim = self.identities.verify(key_of(request.headers))
        require_scope(claim, allowed, what=what)
        return claim

    async def read(self, request: web.BaseRequest, kind: type[T], *, form: str) -> T:
        """Return a request's JSON body; raises a 400 :class:`Problem` that shows the ``form`` it should have."""
        try:
            return msgspec.json.decode(await self.bodies.read(request, limit=_MAX_BODY), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, f"the body is not {form} ({error})") from error
