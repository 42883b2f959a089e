"""Asks the other gateways on a store, and the other processes of this gateway, for their data on an attempt.

Behind a balancer, the gateway that ends an attempt need not be the one that answered its calls, and only the one that
answered knows which calls still wait in its memory and spool. So the gateway asks all others on the same store, which
it finds by the leases that they renew there. A gateway of several processes is asked once; the process that gets the
question asks its siblings.

The processes of one ``agl serve --workers N`` share a port and ask each other over separate sockets. Each process has a
number, from 0, and listens on a socket in a folder that only this user can enter. Shared memory holds each process's
number of calls that are not stored yet, so that a process asks only siblings that have some.
"""

import asyncio
import json
import logging
import mmap
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from agl.contracts import Store
from agl.errors import CaptureError, ConfigError, StoreError
from agl.schemas import new_trace_id
from agl_gateway.processes.announcement import BEAT_S, AnnouncedGateway, gateways_of
from agl_gateway.record.outage import Outage
from agl_gateway.record.recorder import Recorder
from agl_run import client_context, refusal_of

_log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
_PATIENCE_S = 30.0
_RETRY_S = 0.5
_SIBLING_RETRY_S = 0.05


PEER_HEADER = "x-agl-peer"
"""Header that marks a question from another gateway, which is answered for all processes of this gateway.

With the value :data:`SIBLING`, another process of this gateway asks, and only this process answers.
"""

SIBLING = "sibling"

UNKNOWN = -1
"""Stands for the number of held calls of a process that has not started yet or has ended."""

_WIDTH = 8
_FIELDS = 2


class Board:
    """Shared memory of a gateway's processes: the number of calls that each holds, and the number of starts.

    The parent creates it before it starts the processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._numbers = memoryview(mmap.mmap(-1, _WIDTH * (_FIELDS + count))).cast("q")
        for number in range(count):
            self.hold(number, UNKNOWN)  # until it has looked into its spool

    @property
    def starts(self) -> int:
        """The number of processes started so far, restarts included."""
        return self._numbers[0]

    @starts.setter
    def starts(self, starts: int) -> None:
        self._numbers[0] = starts

    def held(self, number: int) -> int:
        """Return the number of calls that process ``number`` holds and has not stored; below 0 if it is not running."""
        return self._numbers[_FIELDS + number]

    def hold(self, number: int, calls: int) -> None:
        """Record that process ``number`` holds ``calls`` calls that are not in the store."""
        self._numbers[_FIELDS + number] = calls


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one gateway, from the point of view of one of them.

    Attributes:
        number: The number of this process.
        folder: The folder with the sockets of all processes.
        board: The shared memory of all processes.
        group_id: The same id in all processes; the gateway gets a new one whenever it starts as a whole.
        taken: Spool files of the other processes.
    """

    number: int
    folder: Path
    board: Board
    group_id: str = field(default_factory=new_trace_id)
    taken: frozenset[Path] = frozenset()

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.board.count

    @property
    def start(self) -> str:
        """An id that changes whenever any process of the gateway is started or restarted."""
        return f"{self.group_id}-{self.board.starts}"

    def socket(self, number: int) -> Path:
        """Return the path of the socket of process ``number``."""
        return self.folder / f"{number}.sock"

    def keeper_of(self, key: str) -> int:
        """Return the number of the process that counts positions for ``key``; the same in every process."""
        return max(range(self.count), key=lambda number: blake2b(f"{key}\n{number}".encode(), digest_size=8).digest())


class Siblings:
    """Asks the other processes of a gateway. Used in one event loop only.

    Args:
        group: The processes; ``None`` for a gateway with one process.
        admin_key: Returns a key that all processes accept.
    """

    def __init__(self, group: Group | None, *, admin_key: Callable[[], str]) -> None:
        self.group = group
        self._admin_key = admin_key
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @property
    def count(self) -> int:
        """The number of processes, this one included."""
        return 1 if self.group is None else self.group.count

    @property
    def others(self) -> Sequence[int]:
        """The numbers of the gateway's other processes."""
        if self.group is None:
            return ()
        return [number for number in range(self.group.count) if number != self.group.number]

    def holding(self) -> list[int]:
        """Return the numbers of the other processes that hold, or may hold, calls that are not in the store."""
        return [number for number in self.others if self.group is not None and self.group.board.held(number)]

    def is_away(self, number: int) -> bool:
        """Return true if process ``number`` has ended and is not running again yet, or has not started."""
        return self.group is not None and self.group.board.held(number) < 0

    def held(self, calls: int) -> None:
        """Report to the other processes that this process holds ``calls`` calls."""
        if self.group is not None:
            self.group.board.hold(self.group.number, calls)

    async def ask(self, number: int, path: str, body: Any) -> tuple[int, Any]:
        """Send a request to process ``number``; returns the status and the JSON body of its response.

        If the process does not answer, the result is 0 and the reason.
        """
        headers = {"authorization": f"Bearer {self._admin_key()}", PEER_HEADER: SIBLING}
        try:
            async with self._session(number).post(f"http://localhost{path}", json=body, headers=headers) as reply:
                return reply.status, json.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return 0, str(error) or type(error).__name__

    async def ask_all(self, path: str, body: Any) -> dict[int, Any]:
        """Send a request to all other processes at once; returns the responses with status 200, by process number."""
        others = self.others
        answers = await asyncio.gather(*(self.ask(number, path, body) for number in others))
        return {number: found for number, (status, found) in zip(others, answers, strict=True) if status == 200}

    async def close(self) -> None:
        """Close the connections; idempotent."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    def _session(self, number: int) -> aiohttp.ClientSession:
        if self.group is None:
            raise LookupError(f"this gateway has no process {number}")
        if number not in self._sessions:
            connector = aiohttp.UnixConnector(str(self.group.socket(number)))
            self._sessions[number] = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        return self._sessions[number]


@dataclass(eq=False, kw_only=True)
class Peers:
    """The other gateways on a store. Used in one event loop only.

    Attributes:
        siblings: The other processes of this gateway.
        outage: During an outage, the gateways that were known last are asked.
        newest_start: Returns the id of this gateway's newest start.
        admin_key: Returns a key that all gateways with the same secret accept.
        is_shared: True if other gateways may answer calls of the same attempts, as with ``agl serve``.
    """

    store: Store
    recorder: Recorder
    session: aiohttp.ClientSession
    siblings: Siblings
    outage: Outage
    newest_start: Callable[[], str]
    admin_key: Callable[[], str]
    is_shared: bool

    def __post_init__(self) -> None:
        self._known: list[AnnouncedGateway] = []
        self._looked_at = float("-inf")
        self._context: ssl.SSLContext | None = None

    async def settle(self, attempt_id: str) -> None:
        """Return once every answered call of the attempt is in the store, whichever gateway answered it.

        Raises:
            CaptureError: The store refused some of the calls, or a running gateway cannot be asked.
        """
        await self.settle_here(attempt_id)
        if self._has_peers:
            await self._look()
        for peer in self._others():
            await self._settle_at(peer, attempt_id)

    async def settle_here(self, attempt_id: str) -> None:
        """Return once every call of the attempt that this gateway's processes answered is in the store.

        Raises:
            CaptureError: The store refused some of the calls, or a process does not come back.
        """
        await self.recorder.settle(attempt_id)
        for number in self.siblings.holding():
            await self._settle_sibling(number, attempt_id)

    async def gateways(self) -> list[AnnouncedGateway]:
        """Return one record for each other running gateway.

        If the store does not answer, the records are those of the last successful read.
        """
        if self._has_peers:
            await self.outage.unless(self._read, lambda: None)
        return self._others()

    async def start(self) -> str:
        """Return a digest that changes whenever a gateway on this store, this one included, starts or is restarted."""
        others = sorted(f"{each.group} {each.start}" for each in await self.gateways())
        found = [f"{self.own_id} {self.newest_start()}", *others]
        return blake2b("\n".join(sorted(found)).encode(), digest_size=16).hexdigest()

    async def ask(self, peer: AnnouncedGateway, path: str, body: Any) -> tuple[int, str]:
        """Send a request to another gateway; returns the status and the text of its response.

        If the gateway does not answer, the result is 0 and the reason.
        """
        headers = {"authorization": f"Bearer {self.admin_key()}", PEER_HEADER: "1"}
        try:
            async with self.session.post(
                f"{peer.url}{path}", json=body, headers=headers, timeout=_TIMEOUT, ssl=self._trust(peer.url)
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ConfigError) as error:
            return 0, refusal_of(error) or str(error) or type(error).__name__

    @property
    def own_id(self) -> str:
        """The id that all processes of this gateway share and by which other gateways know it."""
        if self.siblings.group is not None:
            return self.siblings.group.group_id
        return "" if self.recorder.spool is None else self.recorder.spool.gateway_id

    @property
    def _has_peers(self) -> bool:
        return self.recorder.spool is not None and self.is_shared

    def _others(self) -> list[AnnouncedGateway]:
        """Return the newest record of each other running gateway."""
        found = [each for each in self._known if each.group != self.own_id and each.is_shared and not each.is_gone]
        return list({each.group: each for each in sorted(found, key=lambda each: each.seen_at)}.values())

    async def _look(self) -> None:
        """Read the list of gateways from the store, retrying until it answers: no attempt can end without it."""
        while True:
            try:
                return await self._read()
            except StoreError:
                await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        """Read the list of gateways from the store, unless it was read less than half an announcement interval ago."""
        if time.monotonic() - self._looked_at > BEAT_S / 2:
            self._known = await gateways_of(self.store)
            self._looked_at = time.monotonic()

    async def _settle_sibling(self, number: int, attempt_id: str) -> None:
        """Ask process ``number`` until it has stored the attempt's calls; a killed process restarts with its spool."""

        async def ask() -> tuple[int, str]:
            status, answer = await self.siblings.ask(number, "/settle", {"attempt_id": attempt_id})
            return status, answer if isinstance(answer, str) else _message_of(answer)

        left = await _until_settled(ask, pause_s=_SIBLING_RETRY_S)
        if left:
            raise CaptureError(
                f"process {number} of this gateway may hold calls of attempt {attempt_id!r} and does not answer "
                f"({left}); see why it cannot be started, then run the rollout again"
            )

    async def _settle_at(self, peer: AnnouncedGateway, attempt_id: str) -> None:
        """Ask another gateway until it has stored the attempt's calls, or until it counts as gone."""

        async def is_gone() -> bool:
            await self._look()
            return not any(each.group == peer.group for each in self._others())

        left = await _until_settled(
            lambda: self.ask(peer, "/settle", {"attempt_id": attempt_id}), pause_s=_RETRY_S, is_gone=is_gone
        )
        if left and await is_gone():
            _log.warning("%s; attempt %s ends without asking it for calls", peer, attempt_id)
        elif left:
            raise CaptureError(
                f"the gateway {peer.url} on {peer.machine} may hold calls of attempt {attempt_id!r} and cannot be "
                f"asked from here ({left}): let the gateways of one store reach each other, and give each the "
                "name by which the others do with --advertise"
            )

    def _trust(self, url: str) -> ssl.SSLContext | bool:
        """Return the TLS context for requests to another gateway, created at first use; ``True`` without TLS."""
        if url.startswith("https:") and self._context is None:
            self._context = client_context()
        return self._context or True


async def _until_settled(
    ask: Callable[[], Awaitable[tuple[int, str]]],
    *,
    pause_s: float,
    is_gone: Callable[[], Awaitable[bool]] | None = None,
) -> str:
    """Repeat ``ask`` until the attempt's calls are stored, time runs out or the gateway is gone.

    Returns ``""`` once the calls are stored, else the text of the last answer.

    Raises:
        CaptureError: The store refused some of the calls.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        status, text = await ask()
        if status == 200:
            return ""
        if status == 409:
            raise CaptureError(text)
        if status == 202:  # it lives, and asks for patience
            deadline = time.monotonic() + _PATIENCE_S
            continue
        if (is_gone is not None and await is_gone()) or time.monotonic() > deadline:
            return text
        await asyncio.sleep(pause_s)


def _message_of(answer: Any) -> str:
    """Return the message in a gateway's error response, or the whole response as JSON."""
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return msgspec.json.encode(answer).decode()
