"""Checks before a run that each agent's calls go to one policy: ``[policy.NAME] agents = "write|rewrite"``."""

import re
from collections.abc import Mapping

from agl.contracts import Upstream
from agl.errors import ConfigError
from agl.tracing import upstreams_for


def check_patterns(patterns: Mapping[str, str]) -> None:
    """Refuse ``agents`` patterns, by policy name, that are no regular expression or that share an agent's name.

    Two expressions can overlap in ways that only a call shows; the gateway refuses such a call.

    Raises:
        ConfigError: A pattern is wrong; names the policies and the agent that both claim.
    """
    for policy, pattern in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"[policy.{policy}] agents = {pattern!r} is no regular expression: {error}; list names as in "
                "'write|rewrite'"
            ) from None
    upstreams = [Upstream(name=policy, base_url="", agents=pattern) for policy, pattern in patterns.items()]
    for name in (name for pattern in patterns.values() for name in pattern.split("|")):
        claimed = [upstream.name for upstream in upstreams_for(upstreams, names=[name])]
        if len(claimed) > 1:
            first, second = sorted(claimed, key=list(patterns).index)[:2]
            raise ConfigError(
                f"[policy.{first}] and [policy.{second}] both take the calls of agent {name!r} "
                f"(agents = {patterns[first]!r} and {patterns[second]!r}); let one policy name it"
            )
