"""Endpoints for workers on other machines: the gateway's id, and a wait for an attempt's calls.

``GET /identity`` and ``POST /settle`` both answer with the gateway's id and the id of its newest start. Without a spool
the gateway's id changes at every start too. With one, no answered call is lost, so the id lasts; all ``agl serve``
gateways with spools on one store share it, and each may answer in place of another. A worker that sees the id change
during an attempt knows that calls may be missing. If only the start changes, of any process, calls may have been cut
off.
"""

import asyncio
import time
from dataclasses import dataclass
from importlib.metadata import version

import msgspec
from aiohttp import web

from agl.errors import CaptureError, NotFoundError, StoreError
from agl.schemas import rollout_id_of
from agl_gateway.access.identity import Admission
from agl_gateway.processes.peers import PEER_HEADER, SIBLING, Peers
from agl_gateway.record.recorder import Recorder
from agl_gateway.store_api.worker_reach import WorkerReach
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken

_VERSION = version("agl-gateway")
_SETTLE_S = 5.0
"""Seconds after which ``/settle`` answers 202 and the caller asks again; so the caller knows that the gateway runs."""


class SettleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of ``POST /settle``."""

    attempt_id: str


@dataclass(frozen=True, eq=False, kw_only=True)
class WorkersApi:
    """Answers workers; used in the gateway's event loop.

    Attributes:
        gateway_id: The gateway's id.
        reach: Checks that an attempt belongs to a worker's token.
    """

    admission: Admission
    recorder: Recorder
    peers: Peers
    gateway_id: str
    reach: WorkerReach

    async def identity(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the gateway's id."""
        self.admission.caller(request, "attempt", "client", "admin", "worker", what="the gateway's id")
        return await self._answer()

    async def settle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer once every answered call of the attempt is in the store; after 5 seconds, answer 202 instead.

        Raises:
            Problem: 403 if the token does not cover the attempt, 409 if the store refused some of the calls.
        """
        claim = self.admission.caller(request, "attempt", "admin", "worker", what="waiting for an attempt's calls")
        asked = await self.admission.read(request, SettleRequest, form='{"attempt_id": "..."}')
        await self._require(claim, asked.attempt_id)
        asked_by = request.headers.get(PEER_HEADER, "")
        settle = self.peers.settle_here if asked_by else self.peers.settle
        if asked_by == SIBLING:
            settle = self.recorder.settle
        try:
            async with asyncio.timeout(None if self.recorder.spool is None else _SETTLE_S):
                await settle(asked.attempt_id)
        except CaptureError as error:
            raise Problem(409, str(error), code="calls_lost") from error
        except TimeoutError:
            return await self._answer(status=202)
        return await self._answer()

    async def _require(self, claim: AttemptToken, attempt_id: str) -> None:
        """Raise a 403 :class:`Problem` unless the token may wait for the attempt's calls.

        While the store does not answer, any worker's token may wait, because the answer reveals nothing.
        """
        if claim.scope == "attempt" and claim.attempt_id != attempt_id:
            raise Problem(403, f"the token is another attempt's; use the token of {attempt_id!r}, or an admin token")
        if claim.scope == "worker":
            try:
                await self.reach.require(claim, [rollout_id_of(attempt_id)])
            except NotFoundError as error:
                raise Problem(403, str(error)) from None
            except StoreError:
                return

    async def _answer(self, *, status: int = 200) -> web.Response:
        start = await self.peers.start()
        about = {"gateway": self.gateway_id, "start": start, "version": _VERSION, "time": time.time()}
        return web.json_response(about, status=status)
