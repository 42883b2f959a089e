"""The processes of one ``agl serve --workers N``: they share a port, and ask each other over sockets of their own.

Each has a number, from 0, and listens on a socket in a folder that only this user can enter. A few numbers lie in
memory that all of them share, so that a process asks only those that have something to tell.
"""

import asyncio
import json
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import aiohttp

from agl.schemas import new_trace_id

PEER_HEADER = "x-agl-peer"
"""Marks a question of another gateway, answered for this gateway's processes; with :data:`SIBLING` for one alone."""

SIBLING = "sibling"

UNKNOWN = -1
"""Calls held by a process that has not said so: it has not started yet, or has ended."""

_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
_WIDTH = 8
_FIELDS = 2


class Board:
    """Numbers in memory that a parent and its processes share: calls held by each, and starts of any.

    Make it before the processes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._numbers = memoryview(mmap.mmap(-1, _WIDTH * (_FIELDS + count))).cast("q")
        for number in range(count):
            self.hold(number, UNKNOWN)  # until it has looked into its spool

    @property
    def starts(self) -> int:
        """The number of processes that were started."""
        return self._numbers[0]

    @starts.setter
    def starts(self, starts: int) -> None:
        self._numbers[0] = starts

    def held(self, number: int) -> int:
        """Return how many calls a process holds that are not in the store; below 0 if that is not known."""
        return self._numbers[_FIELDS + number]

    def hold(self, number: int, calls: int) -> None:
        """Record how many calls a process holds."""
        self._numbers[_FIELDS + number] = calls


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one gateway, as one of them sees it.

    Attributes:
        number: This process among them.
        folder: The folder of their sockets.
        board: What they share.
        group_id: The same in all of them, and new whenever the whole gateway starts.
        taken: Files of spools that the others have.
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
        """The id of the processes' newest start: another one whenever a process was started again."""
        return f"{self.group_id}-{self.board.starts}"

    def socket(self, number: int) -> Path:
        """Return the path of a process's own socket."""
        return self.folder / f"{number}.sock"

    def keeper_of(self, key: str) -> int:
        """Return the process that counts for ``key``, the same in all of them."""
        return max(range(self.count), key=lambda number: blake2b(f"{key}\n{number}".encode(), digest_size=8).digest())


class Siblings:
    """Asks the other processes of a gateway. Used in one event loop only.

    Args:
        group: The processes; ``None`` for a gateway of one.
        admin_key: Returns a key that all of them accept.
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
        """The numbers of the other processes."""
        if self.group is None:
            return ()
        return [number for number in range(self.group.count) if number != self.group.number]

    def holding(self) -> list[int]:
        """Return the other processes that hold calls which are not in the store, or of which that is not known."""
        return [number for number in self.others if self.group is not None and self.group.board.held(number)]

    def is_away(self, number: int) -> bool:
        """Return true for a process that has ended and is not started again yet."""
        return self.group is not None and self.group.board.held(number) < 0

    def held(self, calls: int) -> None:
        """Tell the others how many calls this process holds."""
        if self.group is not None:
            self.group.board.hold(self.group.number, calls)

    async def ask(self, number: int, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the JSON of another process's answer; 0 and the reason if there is none."""
        try:
            async with self._session(number).post(
                f"http://localhost{path}", json=body, headers=self._headers()
            ) as reply:
                return reply.status, json.loads(await reply.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            return 0, str(error) or type(error).__name__

    async def ask_all(self, path: str, body: Any) -> dict[int, Any]:
        """Ask all others at once; returns the answers of those that gave one, by their numbers."""
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

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._admin_key()}", PEER_HEADER: SIBLING}
