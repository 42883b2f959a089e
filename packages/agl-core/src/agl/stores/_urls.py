"""Reads URLs that people wrote, and removes credentials before they are shown, logged or sent to other machines."""

import re
from urllib.parse import SplitResult, urlsplit, urlunsplit

_WRITTEN = re.compile(r"[!-~]+")
"""Text of the characters that URLs are made of."""


def web_parts(url: str) -> SplitResult | None:
    """Return the parts of an ``http`` or ``https`` URL with a host; ``None`` for any other text, or a port of 0."""
    try:
        parts = urlsplit(url)
        # Port 0 means "any free one" to a server, and nothing to a client.
        is_web = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of brackets or a port that are none
        return None
    return parts if is_web and _WRITTEN.fullmatch(url) else None


def without_credentials(url: str) -> str:
    """A well-formed URL without the user and password before its host; still good to connect to."""
    parts = urlsplit(url)
    # From the right: a password may contain an @ that should have been quoted.
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def shown_url(url: str) -> str:
    """Any store's URL for people: no user, password or token, and ``***`` for passwords and shards in its options.

    In a URL with characters that should have been quoted, it hides too much rather than show part of the password.
    """
    scheme, separator, rest = url.partition("://")
    if separator and not rest.startswith("/"):
        where, mark, options = rest.partition("?")
        rest = where.rpartition("@")[2] + mark + re.sub(r"((?:password|shards)=)[^&]*", r"\1***", options)
    return f"{scheme}{separator}{rest}"
