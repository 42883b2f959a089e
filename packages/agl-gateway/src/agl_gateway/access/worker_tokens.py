"""``POST /worker-tokens``: lets the admin token make a worker's token for one experiment."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web

from agl.errors import ConfigError
from agl_gateway.access.audit import Deed
from agl_gateway.access.identity import Admission
from agl_gateway.wire.problems import Problem
from agl_inspect.keys import KeyFile, Keys, joined_keys
from agl_run.access import AttemptTokens

WORKER_TOKENS = "/worker-tokens"
LONGEST_S = 366 * 86_400.0
"""The longest validity of a worker's token, in seconds."""


ADMIN_ENV = "AGL_TOKEN"


def named_keys(variable: str, *, purpose: str) -> Keys | None:
    """Return the keys in an environment variable, else those in the file that ``{variable}_FILE`` names.

    The file is read again when it changes. The result is ``None`` if neither variable is set.

    Raises:
        ConfigError: A key is too short, or the file cannot be read.
    """
    if given := os.environ.get(variable, ""):
        keys = joined_keys(given.encode(), source=f"the {purpose} in {variable}")
        return lambda: keys
    named = os.environ.get(f"{variable}_FILE", "")
    try:
        return KeyFile(Path(named), purpose=purpose) if named else None
    except OSError as error:
        raise ConfigError(
            f"the {purpose}'s file {named}, from {variable}_FILE, cannot be read: {error}; write a token into it, or "
            f"unset {variable}_FILE"
        ) from error


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /worker-tokens``.

    Attributes:
        experiment: The only experiment that the token can reach.
        valid_s: Seconds for which the token is valid.
        name: The holder of the token, shown in the audit log.
    """

    experiment: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    valid_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]
    name: Annotated[str, msgspec.Meta(max_length=256)] = ""


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True):
    """The response of ``POST /worker-tokens``: the token, and its expiry as a Unix time in seconds."""

    token: str
    expires_at: float


@dataclass(frozen=True, eq=False, kw_only=True)
class TokensApi:
    """Serves ``POST /worker-tokens``; used in the gateway's event loop."""

    admission: Admission
    tokens: AttemptTokens

    async def make(self, request: web.BaseRequest) -> web.StreamResponse:
        """Make a worker's token and send it as the response."""
        claim = self.admission.caller(request, "admin", what="making a worker's token")
        form = '{"experiment": "...", "valid_s": SECONDS, "name": "..."}'
        asked = await self.admission.read(request, TokenRequest, form=form)
        expires_at = time.time() + asked.valid_s
        deed = Deed(action="make worker token", objects=[asked.name] if asked.name else [], experiment=asked.experiment)
        try:
            with self.admission.audit.of(deed, claim=claim, request=request):
                token = self.tokens.issue_for_worker(asked.experiment, expires_at=expires_at, name=asked.name)
        except ConfigError as error:
            raise Problem(400, str(error)) from error
        answer = IssuedToken(token=token, expires_at=expires_at)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
