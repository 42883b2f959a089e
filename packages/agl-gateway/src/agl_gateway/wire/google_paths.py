"""Finds model and method in the paths of Google's API, ``/models/MODEL:generateContent``."""

import re
from dataclasses import dataclass

from agl_gateway.wire.google_answers import GoogleTranslation

GOOGLE_BASE = "/v1beta/models"
COUNT_TOKENS = "countTokens"

_GENERATE = "generateContent"
_STREAM = "streamGenerateContent"
GOOGLE_METHODS = (_GENERATE, _STREAM, COUNT_TOKENS)
_ENDPOINT = re.compile(rf"/models/(.{{1,512}}):({_GENERATE}|{_STREAM}|{COUNT_TOKENS})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleEndpoint:
    """A method of Google's API with the model that its path names."""

    model: str
    method: str

    def translation(self, alt: str) -> GoogleTranslation:
        """Return what translates a call; ``alt`` is the query's parameter of that name."""
        is_streamed = self.method == _STREAM
        return GoogleTranslation(model=self.model, is_streamed=is_streamed, is_sse=alt == "sse")


def google_endpoint(endpoint: str) -> GoogleEndpoint | None:
    """Return the method at a decoded endpoint such as ``/models/m:generateContent``; ``None`` for any other."""
    found = _ENDPOINT.fullmatch(endpoint)
    return None if found is None else GoogleEndpoint(model=found[1], method=found[2])
