"""Decides which calls of messages and responses reach their policy as chat completions.

A policy that is trained needs the ids of its tokens, which most servers give for chat completions alone: vLLM has none
in messages, and no log-probabilities of tool calls in responses, and the servers of this project speak neither API. A
server that gives them in these APIs too is named in the gateway's settings. Of policies that nothing trains the server
is asked as the client asks, unless it does not have the API.
"""

from collections.abc import Collection

from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Dialect
from agl_gateway.wire.messages import MessagesTranslation
from agl_gateway.wire.responses import ResponsesTranslation
from agl_gateway.wire.translation import Translation

CHAT = "/chat/completions"

ABSENT = (404, 405, 501)
"""Answers of servers that do not have an endpoint."""

_FIRST_ERROR = 400

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

    def is_translated(self, upstream: Upstream, dialect: Dialect) -> bool:
        """Return true if calls of this API go to the policy's server as chat completions."""
        is_absent = (upstream.name, dialect) in self._absent
        return dialect in _TRANSLATED and (is_absent or (upstream.is_trained and dialect not in self._native))

    def check(self, dialect: Dialect, status: int) -> None:
        """Raise :class:`NotSpokenError` if the status of an answer says that the server lacks this API."""
        if status in ABSENT and dialect in _TRANSLATED:
            raise NotSpokenError

    def learn(self, upstream: Upstream, dialect: Dialect, status: int) -> None:
        """Remember that a server lacks an API, once it has answered a chat completion instead."""
        if status < _FIRST_ERROR:
            self._absent.add((upstream.name, dialect))


def translation_of(dialect: Dialect) -> Translation | None:
    """Return what translates a call to a chat completion; ``None`` for an API that is never translated."""
    translated = _TRANSLATED.get(dialect)
    return None if translated is None else translated()
