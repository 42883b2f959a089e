"""Which policy an agent's calls go to, whatever model name its code sends: ``[policy.NAME] agents = "write|rewrite"``.

The wire hook says with each call who makes it, in one header that ends at the gateway; both decide by the rule here.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from agl._who import Who
from agl.contracts import Upstream
from agl.errors import ConfigError

WHO_HEADER = "x-agl-who"
"""Names of who makes the call, innermost first, percent-encoded and separated by commas."""

_MAX_HEADER = 4000


def names_of(who: Who) -> tuple[str, ...]:
    """The names that select a call: the innermost one first, out to the nearest agent."""
    return tuple(dict.fromkeys(name for name in (*reversed(who.inside), who.agent) if name))


def encode_names(names: Sequence[str]) -> str:
    """The header's value; the outermost names are left out where it would be longer than a server takes."""
    text = ""
    for name in names:
        longer = f"{text},{quote(name, safe='')}" if text else quote(name, safe="")
        if len(longer) > _MAX_HEADER:
            break
        text = longer
    return text


def decode_names(text: str) -> tuple[str, ...]:
    """The names in a header's value, innermost first."""
    return tuple(unquote(part) for part in text[: 2 * _MAX_HEADER].split(",") if part)


def claimants(upstreams: Sequence[Upstream], names: Sequence[str]) -> tuple[Upstream, ...]:
    """The policies that claim a call made by ``names``: those whose pattern matches the innermost name that any does.

    More than one is a defect of the configuration; none means that the request's model name decides.
    """
    patterned = [upstream for upstream in upstreams if upstream.agents]
    for name in names if patterned else ():
        found = tuple(upstream for upstream in patterned if re.fullmatch(upstream.agents, name))
        if found:
            return found
    return ()


def check_patterns(patterns: Mapping[str, str]) -> None:
    """Refuse patterns by policy name that are none, or of which two name one agent.

    Two expressions can overlap in ways that only a call shows; such a call is refused by the gateway.

    Raises:
        ConfigError: Names the policies, and the agent that both claim.
    """
    for policy, pattern in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"[policy.{policy}] agents = {pattern!r} is no regular expression: {error}") from None
    for policy, pattern in patterns.items():
        for name in pattern.split("|"):
            others = [other for other, theirs in patterns.items() if other != policy and re.fullmatch(theirs, name)]
            if others:
                raise ConfigError(
                    f"[policy.{policy}] and [policy.{others[0]}] both take the calls of agent {name!r} "
                    f"(agents = {pattern!r} and {patterns[others[0]]!r}); let one policy name it"
                )
