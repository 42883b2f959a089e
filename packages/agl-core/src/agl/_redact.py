"""Removes secrets from texts and URLs before they are recorded, logged or shown, and parses URLs that people wrote."""

import re
from urllib.parse import SplitResult, urlsplit, urlunsplit

_SECRET = re.compile(
    # In this order: an attempt token of the gateway, a key in OpenAI's format, a bearer credential,
    # and a key in a header that was printed as text.
    r"(?P<token>agl_[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
    r"|(?P<key>\bsk-[A-Za-z0-9_-]{12,})"
    r"|(?P<bearer>\b[Bb]earer\s+[A-Za-z0-9._~+/=-]{12,})"
    r"|(?P<header>\b(?:x-)?api-key['\"]?\s*[:=]\s*['\"]?[A-Za-z0-9._~+/=-]{12,})"
)
_WRITTEN = re.compile(r"[!-~]+")
"""A regular expression for printable ASCII text without spaces, which every URL is."""

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


def web_parts(url: str) -> SplitResult | None:
    """Return the parts of an ``http`` or ``https`` URL with a host and a valid port; ``None`` for any other text."""
    try:
        parts = urlsplit(url)
        # Port 0 means "any free one" to a server, and nothing to a client.
        is_web = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of brackets or a port that are none
        return None
    return parts if is_web and _WRITTEN.fullmatch(url) else None


def without_credentials(url: str) -> str:
    """Return a URL without user and password; it still names the server to connect to."""
    parts = urlsplit(url)
    # From the right: a password may contain an @ that should have been quoted.
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def shown_url(url: str) -> str:
    """Return any store's URL for messages: without user and password, and with ``***`` for passwords in its options.

    The option ``shards`` is hidden as well. In a URL with characters that should have been quoted, too much is hidden
    rather than a part of the password shown.
    """
    scheme, separator, rest = url.partition("://")
    if separator and not rest.startswith("/"):
        where, mark, options = rest.partition("?")
        rest = where.rpartition("@")[2] + mark + re.sub(r"((?:password|shards)=)[^&]*", r"\1***", options)
    return f"{scheme}{separator}{rest}"
