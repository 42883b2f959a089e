"""Explains the failure of agents whose clients take their key from the environment, which has none for threads.

Attempts that share a process share its environment, so its key can be no attempt's own. The wire hook puts the
attempt's token into calls over httpx; other clients must be given it.
"""

from collections.abc import Callable

import msgspec

from agl import semconv
from agl.schemas import ErrorInfo, Span
from agl_run.access.tokens import REFUSED

ARGUMENT = "pass base_url and api_key of the agent's argument llm to the client"
"""The way out for every runner."""

KEY_ADVICE = f'{ARGUMENT}, or set [runner] use = "process", where the environment has the attempt\'s own key'
"""The way out with a gateway."""


class RefusedCalls:
    """Passes an attempt's spans on, and remembers the clients whose keys were refused.

    Args:
        record: Takes each span.
        has_gateway: True if the attempt calls its model by a gateway.
    """

    def __init__(self, record: Callable[[Span], None], *, has_gateway: bool) -> None:
        self._record = record
        self._advice = KEY_ADVICE if has_gateway else ARGUMENT
        self._clients: dict[str, None] = {}

    def record(self, span: Span) -> None:
        """Take a span."""
        # Only the span says which client it was; the agent's own error names a status.
        if span.attributes.get(semconv.UNRECORDED) == REFUSED:
            self._clients[str(span.attributes.get(semconv.CLIENT))] = None
        self._record(span)

    def explained(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Return the attempt's error with the way out, if it had one and a key was refused."""
        if error is None or not self._clients:
            return error
        said = f"the key that {', '.join(self._clients)} sent is of no attempt; {self._advice}"
        return msgspec.structs.replace(error, message=f"{error.message} ({said})")
