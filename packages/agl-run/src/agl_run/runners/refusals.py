"""Explains the failure of agents whose clients take their key from the environment, where threads have no own key.

Attempts that share a process share its environment, which therefore cannot hold the key of one attempt. The wire hook
puts the attempt's token into calls over httpx; other clients must be given the token.
"""

from collections.abc import Callable

import msgspec

from agl import semconv
from agl.schemas import ErrorInfo, Span
from agl_run.access.tokens import REFUSED

ARGUMENT = "pass base_url and api_key of the agent's argument llm to the client"
"""What to do with any runner."""

KEY_ADVICE = f'{ARGUMENT}, or set [runner] use = "process", where the environment has the attempt\'s own key'
"""What to do if the experiment has a gateway."""


class RefusedCalls:
    """Passes an attempt's spans on, and remembers the clients whose keys were refused.

    Args:
        record: Called with each span.
        has_gateway: Whether the attempt calls its model through a gateway.
    """

    def __init__(self, record: Callable[[Span], None], *, has_gateway: bool) -> None:
        self._record = record
        self._advice = KEY_ADVICE if has_gateway else ARGUMENT
        self._clients: dict[str, None] = {}

    def record(self, span: Span) -> None:
        """Pass a span on, and note its client if the client's key was refused."""
        # Only the span names the client; the agent's own error has just a status.
        if span.attributes.get(semconv.UNRECORDED) == REFUSED:
            self._clients[str(span.attributes.get(semconv.CLIENT))] = None
        self._record(span)

    def explained(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Return the attempt's error, with the advice appended if a client's key was refused."""
        if error is None or not self._clients:
            return error
        said = f"the key that {', '.join(self._clients)} sent is of no attempt; {self._advice}"
        return msgspec.structs.replace(error, message=f"{error.message} ({said})")
