"""Removes secrets from text before it reaches a span or a log."""

import re

_SECRET = re.compile(
    # In this order: an attempt token of the gateway, a key in OpenAI's format, a bearer credential,
    # and a key in a header that was printed as text.
    r"(?P<token>agl_[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
    r"|(?P<key>\bsk-[A-Za-z0-9_-]{12,})"
    r"|(?P<bearer>\b[Bb]earer\s+[A-Za-z0-9._~+/=-]{12,})"
    r"|(?P<header>\b(?:x-)?api-key['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9._~+/=-]{12,})"
)
_SHOWN = {"token": "agl_***", "key": "sk-***", "bearer": "Bearer ***", "header": "api-key: ***"}


def redact(text: str) -> str:
    """Mask attempt tokens, ``sk-`` keys, bearer credentials and ``api-key`` headers in a text.

    Text without such secrets is returned as the same object.
    """
    # All emitted text passes here. Substring tests run in C and spare nearly every text the slower
    # regular expression.
    if "agl_" in text or "sk-" in text or "earer" in text or "api-key" in text:
        return _SECRET.sub(lambda match: _SHOWN[match.lastgroup or "token"], text)
    return text
