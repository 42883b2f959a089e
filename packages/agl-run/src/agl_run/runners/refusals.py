"""Explains why an agent's client was refused although the attempt has a key: the client read the environment.

Attempts that share a process share its environment, which therefore cannot hold the key of one attempt. The wire hook
puts the attempt's token into calls over httpx; other clients must be given the token.
"""

from collections.abc import Callable

import msgspec

from agl import semconv
from agl.schemas import ErrorInfo, Span
from agl_run.access.tokens import REFUSED

ARGUMENT = "pass base_url and api_key of the agent's argument llm to the client"
"""Advice that applies to every runner."""

KEY_ADVICE = f'{ARGUMENT}, or set [runner] use = "process", where the environment has the attempt\'s own key'
"""Advice for an experiment with a gateway."""


class RefusedCalls:
    """Passes an attempt's spans on, and remembers the clients whose API keys were refused.

    Args:
        record: Called with each span.
        has_gateway: Whether the attempt calls its model through a gateway.
    """

    def __init__(self, record: Callable[[Span], None], *, has_gateway: bool) -> None:
        self._record = record
        self._advice = KEY_ADVICE if has_gateway else ARGUMENT
        self._clients: dict[str, None] = {}

    def record(self, span: Span) -> None:
        """Pass a span on; if it reports a refused API key, remember the client."""
        # Only the span names the client; the agent's own error has just a status.
        if span.attributes.get(semconv.UNRECORDED) == REFUSED:
            self._clients[str(span.attributes.get(semconv.CLIENT))] = None
        self._record(span)

    def explained(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Return the attempt's error; if a client's API key was refused, advice is appended to the message."""
        if error is None or not self._clients:
            return error
        said = f"the key that {', '.join(self._clients)} sent is of no attempt; {self._advice}"
        return msgspec.structs.replace(error, message=f"{error.message} ({said})")
