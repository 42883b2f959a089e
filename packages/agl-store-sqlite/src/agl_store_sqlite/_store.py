"""``sqlite:///runs.db``: the default store, one file, durable, for several threads, event loops and processes.

Every write returns after its commit has reached the disk (WAL with ``synchronous = FULL``). The file must be on
a local disk: WAL needs shared memory.
"""

import time
from collections.abc import Callable

from agl.stores import TableStore
from agl_store_sqlite._backend import SQLiteBackend
from agl_store_sqlite._schema import path_of
from agl_store_sqlite.sql.compaction import Compaction


class SQLiteStore(TableStore):
    """A :class:`agl.contracts.Store` in one SQLite file.

    Args:
        url: ``sqlite:///relative.db`` or ``sqlite:////absolute.db``; a missing folder is created.
        clock: Unix seconds; leases and time limits follow it.
        poll_s: Seconds within which changes by other processes are noticed.
        busy_s: Seconds to wait for another process's transaction.

    Raises:
        StoreError: The file cannot be used; the message names the reason and the next step.
    """

    def __init__(
        self, url: str, *, clock: Callable[[], float] = time.time, poll_s: float = 0.05, busy_s: float = 30.0
    ) -> None:
        self._sqlite = SQLiteBackend(path_of(url), clock=clock, poll_s=poll_s, busy_s=busy_s)
        super().__init__(self._sqlite)

    async def compact(self) -> Compaction:
        """Write the file anew without its unused space, unless there is little.

        Other processes that write to it wait meanwhile; the disk needs room for a second file.
        """
        return await self._sqlite.compact()

    async def vacuum(self) -> Compaction:
        """Write the file anew without any unused space; other processes and disk space as for :meth:`compact`."""
        return await self._sqlite.vacuum()

    async def size(self) -> int:
        """Return the bytes of the file that hold data."""
        return await self._sqlite.size()
