"""A store's URL as it may be shown to people and written into logs."""

import re


def shown_url(url: str) -> str:
    """The URL without user, password and token, and with ``***`` for passwords among its options."""
    scheme, separator, rest = url.partition("://")
    if separator and not rest.startswith("/"):
        where, mark, options = rest.partition("?")
        rest = where.rpartition("@")[2] + mark + re.sub(r"(password=)[^&]*", r"\1***", options)
    return f"{scheme}{separator}{rest}"
