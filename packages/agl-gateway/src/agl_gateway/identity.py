"""Who calls: the attempt's token as API key or in the path, and whether that attempt still runs."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping

from agl.capture.token import AttemptToken, AttemptTokens
from agl.contracts import Store
from agl.errors import NotFoundError, StoreError, TokenError
from agl_gateway.problems import Problem

_log = logging.getLogger(__name__)

_CACHE_SIZE = 10_000
_FEED_WAIT_S = 20.0
_FEED_PAUSE_S = 0.2


def key_of(headers: Mapping[str, str]) -> str:
    """The API key that a request carries: ``Authorization: Bearer`` or ``x-api-key``; ``""`` if none."""
    authorization = headers.get("authorization", "")
    if authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return headers.get("x-api-key", "")


class Identities:
    """Verifies tokens; remembers the ones that were good, because a signature costs more than a lookup."""

    def __init__(self, tokens: AttemptTokens) -> None:
        self._tokens = tokens
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
        self._task: asyncio.Task[None] | None = None

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

    async def start(self) -> None:
        """Follow the change feed."""
        cursor = await self._store.cursor()
        self._task = asyncio.create_task(self._follow(cursor))

    async def stop(self) -> None:
        """Stop following; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _follow(self, cursor: int) -> None:
        while True:
            try:
                changes = await self._store.changes(after=cursor, limit=10_000, wait_s=_FEED_WAIT_S)
            except StoreError:
                _log.warning("the store's change feed failed; asking the store for every attempt", exc_info=True)
                self._running.clear()
                await asyncio.sleep(1.0)
                continue
            for change in changes:
                cursor = change.cursor
                if change.kind == "rollout":
                    self._running.pop(change.key, None)
            await asyncio.sleep(_FEED_PAUSE_S)
