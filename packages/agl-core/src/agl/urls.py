"""Parses URLs that people wrote, and removes credentials before URLs are shown, logged or sent elsewhere."""

import re
from unicodedata import category
from urllib.parse import SplitResult, urlsplit, urlunsplit

from agl.dialects._exchange import ENDPOINTS, dialect_of
from agl.errors import ConfigError

__all__ = ["base_url_of", "shown_url", "web_parts", "without_credentials"]

_WRITTEN = re.compile(r"[A-Za-z]+://[^\s\x00-\x1f\x7f-\x9f/?#]+([/?#][!-~]*)?")
"""Matches a URL in printable ASCII without spaces, whose host may have letters of any script: clients encode it."""


def web_parts(url: str) -> SplitResult | None:
    """Return the parts of an ``http`` or ``https`` URL with a host and a valid port; ``None`` for any other text."""
    try:
        parts = urlsplit(url)
        # Port 0 means "any free one" to a server, and nothing to a client.
        is_web = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_web = is_web and _is_host(parts.hostname or "")
    except ValueError:  # brackets without an address, an impossible port, or a name that no client can encode
        return None
    return parts if is_web and _WRITTEN.fullmatch(url) else None


def _is_host(name: str) -> bool:
    """Return false, or raise :class:`UnicodeError`, if clients cannot encode a host name of another script."""
    if name.isascii():
        return True
    # Clients drop or refuse other characters, such as spaces without width, quotes and ellipses.
    return all(category(char)[0] in "LMN" or char in "-." for char in name) and bool(name.encode("idna"))


def base_url_of(given: str, *, who: str) -> str:
    """Return the base URL of a model API, to which calls add their endpoint, without a slash at its end.

    Args:
        given: The URL as a person wrote it.
        who: The start of the error's message, such as ``policy 'main': base_url``.

    Raises:
        ConfigError: The text is not an http(s) URL, has a query, or ends with an endpoint such as
            ``/chat/completions``.
    """
    plain, _, query = given.partition("?")
    plain, found = plain.rstrip("/"), f"{who} {shown_url(given)!r}"
    if web_parts(given) is None:
        host = "[IPV6]" if given.count(":") > 2 and "[" not in given else "HOST"
        raise ConfigError(f"{found} is not a URL; write http://{host}:PORT/v1")
    if query:
        raise ConfigError(
            f"{found} has a query, which would get lost; leave it out. Azure needs no api-version at "
            "https://RESOURCE.openai.azure.com/openai/v1"
        )
    if dialect := dialect_of(plain):
        endpoint = ENDPOINTS[dialect]
        raise ConfigError(f"{found} ends with {endpoint}, which calls add; write {plain.removesuffix(endpoint)}")
    return plain


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
