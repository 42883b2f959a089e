"""Who calls: the attempt's token as API key or in the path, and whether that attempt still runs."""

import hmac
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from agl.contracts import Change, Store
from agl.errors import NotFoundError, TokenError
from agl.tracing import AttemptToken, AttemptTokens
from agl_gateway.problems import Problem

_CACHE_SIZE = 10_000


_ADMIN = AttemptToken(rollout_id="", attempt_id="", expires_at=float("inf"), scope="admin")
_CLIENT = AttemptToken(rollout_id="", attempt_id="", expires_at=float("inf"), scope="client")


def key_of(headers: Mapping[str, str]) -> str:
    """The API key that a request carries: ``Authorization: Bearer`` or ``x-api-key``; ``""`` if none."""
    authorization = headers.get("authorization", "")
    if authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return headers.get("x-api-key", "")


class Identities:
    """Verifies tokens; remembers the ones that were good, because a signature costs more than a lookup.

    ``admin_key`` is a key of any form that counts as an admin token, ``client_key`` one that may take part in
    conversations of a split and nothing else; ``""`` for none.
    """

    def __init__(self, tokens: AttemptTokens, *, admin_key: str = "", client_key: str = "") -> None:
        self._tokens = tokens
        self._keys = {_ADMIN: admin_key.encode(), _CLIENT: client_key.encode()}
        self._known: OrderedDict[str, AttemptToken] = OrderedDict()

    def verify(self, key: str) -> AttemptToken:
        """The claim of ``key``; raises a 401 :class:`Problem` that says what is wrong with it."""
        now = time.time()
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
        for claim, known in self._keys.items():
            if known and hmac.compare_digest(key.encode(), known):
                return claim
        try:
            claim = self._tokens.verify(key, now=now)
        except TokenError as error:
            self._known.pop(key, None)
            raise Problem(401, str(error), code="invalid_api_key") from None
        self._known[key] = claim
        if len(self._known) > _CACHE_SIZE:
            self._known.popitem(last=False)
        return claim


class RunningAttempts:
    """Which attempts still run, from the store once and from its change feed after that.

    An attempt that ended is noticed within a fraction of a second, which is enough: what it records after its end
    is marked late by the store anyway.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: dict[str, set[str]] = {}

    async def require(self, claim: AttemptToken) -> None:
        """Raise a 409 :class:`Problem` if the attempt ended, a 401 one if the store does not know it."""
        if claim.attempt_id in self._running.get(claim.rollout_id, ()):
            return
        try:
            attempts = await self._store.attempts(claim.rollout_id)
        except NotFoundError:
            attempts = []
        found = next((attempt for attempt in attempts if attempt.attempt_id == claim.attempt_id), None)
        if found is None:
            raise Problem(
                401,
                f"the store does not know attempt {claim.attempt_id!r}; was the token made for another store?",
                code="invalid_api_key",
            )
        if found.status != "running":
            raise Problem(
                409,
                f"attempt {claim.attempt_id!r} has ended ({found.status}); its token makes no more model calls. "
                "Stop the process that still runs, or start a new rollout",
                code="attempt_ended",
            )
        self._running.setdefault(claim.rollout_id, set()).add(claim.attempt_id)

    def on_changes(self, changes: Sequence[Change]) -> None:
        """Follow the feed: a rollout that changed is looked up again at its next call."""
        for change in changes:
            if change.kind == "rollout":
                self._running.pop(change.key, None)

    def forget(self) -> None:
        """Look every attempt up again."""
        self._running.clear()
