"""Decides which calls of messages and responses reach their policy as chat completions.

A policy that is trained needs the ids of its tokens, which most servers give for chat completions alone: vLLM has none
in messages, and no log-probabilities of tool calls in responses, and the servers of this project speak neither API. A
server that gives them in these APIs too is named in the gateway's settings. Of policies that nothing trains the server
is asked as the client asks, unless it does not have the API.
"""

import logging
from collections.abc import Collection

from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Dialect
from agl_gateway.relay.callers import clean
from agl_gateway.wire.messages import MessagesTranslation
from agl_gateway.wire.responses import ResponsesTranslation
from agl_gateway.wire.translation import Outgoing, Translation

_log = logging.getLogger(__name__)

ABSENT = (404, 405, 501)
"""Answers of servers that do not have an endpoint."""

FIRST_ERROR = 400
_MAX_WARNED = 1000
_MAX_NAME = 200

_TRANSLATED: dict[Dialect, type[Translation]] = {"messages": MessagesTranslation, "responses": ResponsesTranslation}


class NotSpokenError(Exception):
    """The policy's server does not have the API of a call, which sampled nothing."""


class ClientApis:
    """The rule for one gateway. Used in one event loop only.

    Args:
        native: APIs in which the servers of policies in training give the ids of all tokens.

    Raises:
        ConfigError: An API in ``native`` is none of ``messages`` and ``responses``.
    """

    def __init__(self, native: Collection[str] = ()) -> None:
        unknown = sorted(set(native) - _TRANSLATED.keys())
        if unknown:
            hint = did_you_mean(unknown[0], _TRANSLATED, otherwise=f"known are {' and '.join(_TRANSLATED)}")
            raise ConfigError(f"native_apis names {unknown[0]!r}, which is never translated; {hint}")
        self._native = frozenset(native)
        self._absent: set[tuple[str, Dialect]] = set()
        self._warned: set[tuple[str, str]] = set()

    def is_translated(self, upstream: Upstream, dialect: Dialect) -> bool:
        """Return true if calls of this API go to the policy's server as chat completions."""
        is_absent = (upstream.name, dialect) in self._absent
        return dialect in _TRANSLATED and (is_absent or (upstream.is_trained and dialect not in self._native))

    def translated(self, call: Outgoing, upstream: Upstream) -> Outgoing:
        """Return a call as a chat completion; logs once per policy what is dropped for it.

        Raises:
            Problem: 400 for a call that no chat completion can express.
        """
        translated = call.translated(_TRANSLATED[call.request.dialect]())
        for name in translated.dropped:
            warning = (upstream.name, name)
            if warning not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add(warning)
                _log.warning(
                    "a request offers the tool %r to policy %r, whose server cannot run it; the policy does not see "
                    "it. Switch it off in the client, or let the client run it",
                    clean(name, _MAX_NAME),
                    upstream.name,
                )
        return translated

    def check(self, dialect: Dialect, status: int) -> None:
        """Raise :class:`NotSpokenError` if the status of an answer says that the server lacks this API."""
        if status in ABSENT and dialect in _TRANSLATED:
            raise NotSpokenError

    def learn(self, upstream: Upstream, dialect: Dialect, status: int) -> None:
        """Remember that a server lacks an API, once it has answered a chat completion instead."""
        if status < FIRST_ERROR:
            self._absent.add((upstream.name, dialect))
