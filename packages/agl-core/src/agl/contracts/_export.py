"""The contract of exporters, which send finished rollouts to other systems."""

from collections.abc import Sequence
from typing import Protocol

from agl.contracts._store import Recording


class Exporter(Protocol):
    """Sends finished rollouts to another system.

    Used by one task at a time. After a restart or an error a rollout may be exported again, so sending a rollout twice
    must do no harm.
    """

    @property
    def destination(self) -> str:
        """The other system as messages name it, such as a URL without its keys."""
        ...

    async def export(self, recordings: Sequence[Recording]) -> None:
        """Send finished rollouts with all of their spans.

        Raises :class:`~agl.errors.ExportError`; if its ``is_passing`` is true, the caller repeats the call later.
        """
        ...

    async def close(self) -> None:
        """Release connections; idempotent."""
        ...
