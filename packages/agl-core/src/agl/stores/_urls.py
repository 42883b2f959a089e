"""URLs as they may be shown to people, written into logs, and told to other machines: without keys."""

import re
from urllib.parse import urlsplit, urlunsplit


def without_credentials(url: str) -> str:
    """A well-formed URL without what stands before its host's ``@``; still good to connect to."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def shown_url(url: str) -> str:
    """Any store's URL for people: no user, password or token, and ``***`` for passwords among its options.

    Of a URL with characters that should have been quoted it rather hides too much than a part of the password.
    """
    scheme, separator, rest = url.partition("://")
    if separator and not rest.startswith("/"):
        where, mark, options = rest.partition("?")
        rest = where.rpartition("@")[2] + mark + re.sub(r"(password=)[^&]*", r"\1***", options)
    return f"{scheme}{separator}{rest}"
