"""Waits for an attempt's calls at every gateway that may have answered some of them.

Behind a balancer, the gateway that ends an attempt need not be the one that answered its calls, and only that one knows
what waits in its memory and spool. So it asks the others on the same store, which it finds by their signs of life.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Callable

import aiohttp

from agl.contracts import Store
from agl.errors import CaptureError, ConfigError, StoreError
from agl_gateway.gateway_presence import BEAT_S, GatewayRecord, gateways_of
from agl_gateway.recorder import Recorder
from agl_run import client_context, refusal_of

_log = logging.getLogger(__name__)

PEER_HEADER = "x-agl-peer"
"""Marks a question of another gateway, which is answered without asking further ones."""

_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
_PATIENCE_S = 30.0
_RETRY_S = 0.5


class Peers:
    """The other gateways on a store. Used in one event loop only.

    Args:
        admin_key: Returns a key that all gateways with the same secret accept.
        is_shared: Whether other gateways may answer calls of the same attempts: those of ``agl serve`` do.
    """

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        session: aiohttp.ClientSession,
        *,
        admin_key: Callable[[], str],
        is_shared: bool,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._session = session
        self._admin_key = admin_key
        self._is_shared = is_shared
        self._known: list[GatewayRecord] = []
        self._looked_at = float("-inf")
        self._context: ssl.SSLContext | None = None

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store, whichever gateway answered it.

        Raises:
            CaptureError: The store refused some of the calls, or a gateway that lives cannot be asked.
        """
        await self._recorder.settle(attempt_id)
        if self._recorder.spool is None or not self._is_shared:
            return
        for peer in await self._others(self._recorder.spool.gateway_id):
            await self._settle_at(peer, attempt_id)

    async def _others(self, own: str) -> list[GatewayRecord]:
        """Return the gateways that live, read from the store twice as often as they announce themselves."""
        while time.monotonic() - self._looked_at > BEAT_S / 2:
            try:
                self._known = await gateways_of(self._store)
                self._looked_at = time.monotonic()
            except StoreError:  # nothing can end before it answers
                await asyncio.sleep(_RETRY_S)
        return [found for found in self._known if found.is_shared and not found.is_gone and found.member != own]

    async def _settle_at(self, peer: GatewayRecord, attempt_id: str) -> None:
        """Ask until the peer has stored its calls, or is gone by its signs of life."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            status, text = await self._ask(peer, attempt_id)
            if status == 200:
                return
            if status == 409:
                raise CaptureError(text)
            if status == 202:
                deadline = time.monotonic() + _PATIENCE_S
                continue
            if peer.member not in {found.member for found in await self._others("")}:
                _log.warning("%s; attempt %s ends without asking it for calls", peer, attempt_id)
                return
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"the gateway {peer.url} on {peer.machine} may hold calls of attempt {attempt_id!r} and cannot be "
                    f"asked from here ({text}): let the gateways of one store reach each other, and give each the "
                    "name by which the others do with --advertise"
                )
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, peer: GatewayRecord, attempt_id: str) -> tuple[int, str]:
        headers = {"authorization": f"Bearer {self._admin_key()}", PEER_HEADER: "1"}
        body = {"attempt_id": attempt_id}
        try:
            async with self._session.post(
                f"{peer.url}/settle", json=body, headers=headers, timeout=_TIMEOUT, ssl=self._trust(peer.url)
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ConfigError) as error:
            return 0, refusal_of(error) or str(error) or type(error).__name__

    def _trust(self, url: str) -> ssl.SSLContext | bool:
        """Return what checks the certificate of another gateway, made once it is needed."""
        if url.startswith("https:") and self._context is None:
            self._context = client_context()
        return self._context or True
