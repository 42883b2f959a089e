"""Lists the gateways of a store, with their spools, in the store itself.

A spool lies on one machine's disk. If that machine is gone for good, only this record shows that calls are missing, and
how many there were at the last sign of life.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from agl.contracts import Presence, Store
from agl.errors import StoreError
from agl.schemas import Record, new_trace_id, to_builtins
from agl_gateway.record.recorder import Recorder
from agl_inspect.presence import is_gone, renew

_log = logging.getLogger(__name__)

GATEWAYS = "agl-gateways"
"""The experiment under whose name gateways announce themselves."""

BEAT_S = 10.0
LEASE_S = 60.0
"""Seconds without a renewal until a gateway counts as gone; long, because attempts then end without its calls."""


class AnnouncedGateway(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A gateway's last announcement, as the store's presence record holds it.

    Attributes:
        member: The id of the gateway process, which is also the id of its spool.
        group: The id of the whole gateway that the process belongs to; ``member`` if it is the only process.
        calls: The number of calls that the process held and that were not in the store.
        seen_at: Unix seconds of the last sign of life, by the store's clock.
        is_ended: The process shut down in good order, and left ``calls`` calls in its spool.
        is_gone: No gateway serves from this spool any more.
        is_shared: The gateway answers calls of any attempt of the store, as with ``agl serve``.
        start: The id of the gateway's newest start.
    """

    member: str = ""
    group: str = ""
    url: str = ""
    machine: str = ""
    spool: str = ""
    calls: int = 0
    size: int = 0
    is_ended: bool = False
    is_gone: bool = False
    is_shared: bool = False
    start: str = ""
    seen_at: float = 0.0

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.seen_at))
        held = f"held {self.calls} calls ({self.size} bytes)" if self.calls else "held no calls then"
        how = "ended" if self.is_ended else "was last heard of"
        return f"the gateway {self.url or self.member} on {self.machine} {how} at {when} and {held} in {self.spool}"


async def gateways_of(store: Store, *, now: float = 0.0) -> list[AnnouncedGateway]:
    """Return the gateways with spools that announced themselves in a store.

    Args:
        now: Unix seconds by the store's clock. The default, the newest sign of life of all gateways, is right for a
            gateway that announces itself, whatever its own clock says.
    """
    found = await store.presences(GATEWAYS)
    now = max((now, *(one.seen_at for one in found)))
    records = [msgspec.convert(one.details, AnnouncedGateway) for one in found]
    return [
        replace(record, member=one.member, seen_at=one.seen_at, is_gone=record.is_ended or is_gone(one, now=now))
        for one, record in zip(found, records, strict=True)
    ]


@dataclass(eq=False, kw_only=True)
class GatewayPresence:
    """Announces a gateway that has a spool in the store, until the gateway ends. Used in one event loop only.

    Attributes:
        url: Returns the address at which other gateways reach this one.
        start: Returns the id of this gateway's newest start.
        is_shared: See :class:`AnnouncedGateway`.
        group: See :class:`AnnouncedGateway`.
    """

    store: Store
    recorder: Recorder
    url: Callable[[], str]
    start: Callable[[], str]
    is_shared: bool
    group: str = ""

    def __post_init__(self) -> None:
        self._session, self._since = new_trace_id(), time.time()

    async def leave(self, left: int) -> None:
        """Withdraw the presence of a gateway that ends; with ``left`` calls in its spool, mark it as ended instead."""
        if self.recorder.spool is None:
            return
        try:
            async with asyncio.timeout(BEAT_S / 5):
                if left:
                    await self._announce(is_ended=True)
                else:
                    await self.store.withdraw(GATEWAYS, [self.recorder.spool.gateway_id])
        except (StoreError, TimeoutError):
            _log.warning("the store did not take the news that this gateway ends; it will be listed as gone")

    async def run(self) -> None:
        """Announce the gateway every ten seconds, and warn once of gateways gone with calls in their spools."""
        if self.recorder.spool is None:
            return
        try:
            await self._announce()
            for gone in await gone_gateways(self.store, own=self.recorder.spool.gateway_id):
                _log.warning("%s; start a gateway on that machine to have them stored", gone)
        except StoreError as error:
            _log.debug("the gateway could not announce itself: %s", error)
        await renew(self._announce, every_s=BEAT_S, title=f"the gateway {self.url()}")

    async def _announce(self, *, is_ended: bool = False) -> None:
        spool = self.recorder.spool
        assert spool is not None  # noqa: S101  # callers look
        own = AnnouncedGateway(
            member=spool.gateway_id,
            group=self.group or spool.gateway_id,
            url=self.url(),
            machine=socket.gethostname(),
            spool=str(spool.file.path),
            calls=self.recorder.pending,
            size=self.recorder.pending_bytes,
            is_ended=is_ended,
            is_shared=self.is_shared,
            start=self.start(),
        )
        await self.store.announce(
            Presence(
                experiment=GATEWAYS,
                member=own.member,
                session=self._session,
                since=self._since,
                lease_s=LEASE_S,
                details=to_builtins(own),
            )
        )


async def gone_gateways(store: Store, *, own: str = "") -> list[AnnouncedGateway]:
    """Return the gateways other than ``own`` that are gone and left calls in their spools; see :func:`gateways_of`."""
    found = await gateways_of(store)
    return [each for each in found if each.is_gone and each.calls and each.member != own]
