"""Removes credentials from URLs before they are shown, logged or sent to other machines."""

import re
from urllib.parse import urlsplit, urlunsplit


def without_credentials(url: str) -> str:
    """A well-formed URL without the user and password before its host; still good to connect to."""
    parts = urlsplit(url)
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
