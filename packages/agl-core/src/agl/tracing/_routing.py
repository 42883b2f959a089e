"""Finds the policy for a model call, by one rule for the wire hook, the gateway and the checks before a run.

The candidates are, in this order: the policy whose ``agents`` match the caller, the policy with the requested name, the
policy whose model has that name, the policy with the most specific alias for that name, and the only policy if there is
just one. The order in which policies are configured never matters. The hook sends the caller's names to the gateway in
a header, so that hook and gateway choose the same policy.
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from urllib.parse import quote, unquote, urlsplit

from agl.contracts import Upstream
from agl.schemas import Dialect

WHO_HEADER = "x-agl-who"
"""The header with the caller's names, innermost first, percent-encoded and separated by commas."""

# Characters: servers refuse headers beyond 8 KB in all (nginx, aiohttp), and there are others.
_MAX_HEADER = 4000


def upstreams_for(
    upstreams: Sequence[Upstream],
    *,
    dialect: Dialect = "chat",
    model: str = "",
    names: Sequence[str] = (),
    url: str | None = None,
) -> tuple[Upstream, ...]:
    """Return the policies to which a model call belongs.

    Args:
        upstreams: The configured policies, in any order.
        dialect: The API of the call. Embeddings are routed by their model alone, whatever the caller.
        model: The model that the request names.
        names: The caller's names, innermost first, as in ``Who.names``.
        url: The URL that the client calls. If only one policy is configured, it gets calls without other evidence only
            if its server is at the host of this URL. ``None`` for a call that has reached the gateway, which always
            goes to an only policy.

    Returns:
        One policy; an empty tuple if no policy serves the call; several, sorted by name, if the configuration is
        ambiguous.
    """
    # The first kind of evidence that finds anything decides, even if it finds several: a weaker
    # kind must not break its tie.
    for found in _by_evidence(upstreams, model, () if dialect == "embeddings" else names):
        if found:
            # By name, so that the order of configuration never matters.
            return tuple(sorted(found, key=lambda upstream: upstream.name))
    if len(upstreams) == 1 and (url is None or is_same_host(url, upstreams[0].base_url)):
        return tuple(upstreams)
    return ()


def _by_evidence(upstreams: Sequence[Upstream], model: str, names: Sequence[str]) -> Iterator[list[Upstream]]:
    """Yield the policies that each kind of evidence selects, strongest evidence first."""
    patterned = [upstream for upstream in upstreams if upstream.agents] if names else []
    for name in names if patterned else ():
        yield [upstream for upstream in patterned if re.fullmatch(upstream.agents, name)]
    if model:
        yield [upstream for upstream in upstreams if upstream.name == model]
        yield [upstream for upstream in upstreams if upstream.model == model]
        aliased = {upstream: _literal_length(upstream.aliases, model) for upstream in upstreams}
        # The more literal characters an alias has, the more specific it is; "*" has none.
        best = max(aliased.values(), default=0)
        yield [upstream for upstream, length in aliased.items() if length == best >= 0]


def _literal_length(aliases: Sequence[str], model: str) -> int:
    """The number of literal characters in the longest alias that matches ``model``; -1 without one, 0 for ``*``."""
    return max((len(alias.replace("*", "")) for alias in aliases if fnmatchcase(model, alias)), default=-1)


def encode_names(names: Sequence[str]) -> str:
    """Encode a caller's names for :data:`WHO_HEADER`; outermost names are dropped if the header would be too long."""
    text = ""
    for name in names:
        longer = f"{text},{quote(name, safe='')}" if text else quote(name, safe="")
        if len(longer) > _MAX_HEADER:
            break
        text = longer
    return text


def decode_names(text: str) -> tuple[str, ...]:
    """Decode the names in a value of :data:`WHO_HEADER`, innermost first."""
    # Cut, because the header comes from outside.
    return tuple(unquote(part) for part in text[: 2 * _MAX_HEADER].split(",") if part)


def is_same_host(url: str, other: str) -> bool:
    """True if both URLs have the same scheme, host and port."""
    first, second = urlsplit(url), urlsplit(other)
    return (first.scheme, first.netloc) == (second.scheme, second.netloc)
