"""Reports patterns of agents that match no agent of the collected episodes."""

import logging
import re
from collections.abc import Sequence

from agl.algorithms import AlgorithmConfig
from agl.errors import ConfigError
from agl.schemas import Episode, Transition
from agl_run.experiment.plan import Plan

_LOG = logging.getLogger("agl_run.experiment")


class AgentPatternCheck:
    """Reports patterns that matched no agent in an algorithm's first rollouts.

    Args:
        plan: The experiment, whose policies have ``agents`` patterns.
        algorithm: The algorithm that collects, if any. An unmatched pattern is an error if it leaves this algorithm
            without training data, and else a warning, because the agent may not have been needed yet.
    """

    def __init__(self, plan: Plan, algorithm: AlgorithmConfig | None) -> None:
        self._patterns = {name: policy.agents for name, policy in plan.config.policy.items() if policy.agents}
        self._selects = algorithm.agents if algorithm else ""
        self._name = algorithm.name if algorithm else ""
        self._tunes = algorithm.tunes if algorithm else ()

    def check(self, episodes: Sequence[Episode]) -> None:
        """Check the first episodes that have model calls; does nothing after that.

        Raises:
            ConfigError: An algorithm has nothing to train on; lists the names that were seen.
        """
        calls = [call for episode in episodes for call in episode.transitions]
        if not calls:
            return
        patterns, self._patterns = self._patterns, {}
        selects, self._selects = self._selects, ""
        for name, pattern in patterns.items():
            if not any(_reached(call, name, pattern) for call in calls):
                self._report(
                    name, f"[policy.{name}] agents = {pattern!r} matched none of the agents, nodes and roles", calls
                )
        if selects and all(call.reject == "not_selected" for call in calls):
            text = f"algorithm {self._name!r}: agents = {selects!r} selected none of the calls"
            raise ConfigError(f"{text} of its policy; {_seen(calls)}")

    def _report(self, policy: str, text: str, calls: Sequence[Transition]) -> None:
        if policy in self._tunes:
            raise ConfigError(f"{text} of the first rollouts; {_seen(calls)}")
        _LOG.warning("%s of the first rollouts; %s", text, _seen(calls))


def _reached(call: Transition, policy: str, pattern: str) -> bool:
    return call.policy == policy and any(re.fullmatch(pattern, name) for name in call.path)


def _seen(calls: Sequence[Transition]) -> str:
    names = sorted({name for call in calls for name in call.path})
    if not names:
        return (
            "no call came from a named agent. Install the tracer of the agent's framework and list it under tracers, "
            'or name the agents in the code: with agl.operation("write"):'
        )
    shown = ", ".join(map(repr, names[:30]))
    return f"these were seen: {shown}{' and more' if len(names) > 30 else ''}. Correct the pattern"
