"""Reports ``agents`` and ``roles`` patterns of policies, algorithms and credits that match no recorded agent.

A pattern that matches nothing is reported after the first rollouts. A single name in a pattern, such as ``author`` in
``write|author``, is reported only at the end of the run, because its agent may be needed late.

It also ends a run whose agent calls none of the policies that an algorithm trains.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agl.algorithms import AlgorithmConfig
from agl.errors import ConfigError
from agl.hints import count_of
from agl.schemas import Episode, Transition
from agl_run.plan import Plan
from agl_run.watch.observers import Batch, Observer

_LOG = logging.getLogger("agl_run.run")

ENOUGH = 16
"""The number of rollouts without a call of a policy in training after which a run ends."""

SHOWN = 30
"""The most names of agents that a message lists."""

_Matches = Callable[[str, str], object]
"""A function that tests whether a pattern matches a name, in the same way as the pattern's setting is applied."""


class PatternReport(Observer):
    """Collects the patterns that have matched no agent in a run, and the names of all agents that were seen."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._checks: dict[str, AgentPatternCheck] = {}
        self._unmatched: dict[str, set[str]] = {}
        self._seen: set[str] = set()
        self._warned: set[str] = set()
        self._trained: set[str] = set()

    def has_trained(self, algorithm: str) -> None:
        """Note that an algorithm trained before the run was resumed; its unmatched patterns are no longer errors."""
        self._trained.add(algorithm)

    def batch(self, batch: Batch) -> None:
        """Check the patterns that concern the caller; see :meth:`AgentPatternCheck.check`."""
        # One check per caller: an agent that only one algorithm's tasks need is not missing
        # elsewhere.
        if batch.mode != "val" and batch.caller not in self._checks:
            self._checks[batch.caller] = AgentPatternCheck(self._plan, batch.algorithm, report=self)
        if batch.mode != "val":
            trains = batch.trains and batch.is_own and batch.caller not in self._trained
            self._checks[batch.caller].check(batch.episodes, trains=trains)

    def see(self, calls: Sequence[Transition]) -> None:
        """Add the names of the agents that made these calls."""
        self._seen |= _names(calls)

    def add(self, setting: str, pattern: str, names: set[str], *, matches: _Matches) -> bool:
        """Match a pattern against names; return true if any alternative of it has matched a name in this run."""
        parts = set(_parts(pattern))
        # Parts that matched once are settled; the rest may match in a later batch.
        left = self._unmatched.get(setting, parts)
        self._unmatched[setting] = {part for part in left if not any(matches(part, name) for name in names)}
        return self._unmatched[setting] != parts

    def warn(self, setting: str, text: str) -> None:
        """Log a warning about a setting, at most once in a run."""
        if setting not in self._warned:
            # Said once a run, since every batch would find the same.
            self._warned.add(setting)
            _LOG.warning("%s", text)

    def end(self) -> None:
        """Warn of each pattern with an alternative that matched nothing, unless the pattern was reported before."""
        for setting, parts in self._unmatched.items():
            if parts:
                named = ", ".join(map(repr, sorted(parts)))
                self.warn(setting, f"{setting}: {named} matched no agent, node or role in this run; {seen(self._seen)}")


class AgentPatternCheck:
    """Checks the patterns that concern the rollouts of one algorithm.

    Args:
        plan: The experiment, whose policies have ``agents`` patterns.
        algorithm: The algorithm that collects, if any. An unmatched pattern is an error if it leaves this algorithm
            without training data. Otherwise it is a warning, because the agent may not have been needed yet.
        report: Collects the findings.
    """

    def __init__(self, plan: Plan, algorithm: AlgorithmConfig | None, *, report: PatternReport) -> None:
        self._policies = {name: policy.agents for name, policy in plan.config.policy.items() if policy.agents}
        self._algorithm = algorithm
        self._roles = [] if algorithm is None else _roles(algorithm, plan)
        self._uncalled = set(plan.config.policy).intersection(() if algorithm is None else algorithm.tunes)
        self._missed = 0
        self._report = report
        self._has_judged = self._is_first = False

    def check(self, episodes: Sequence[Episode], *, trains: bool) -> None:
        """Check the patterns with a batch of episodes.

        Args:
            episodes: The batch; without model calls in it nothing is checked.
            trains: Whether an algorithm trains on the calls, so that it needs some.

        Raises:
            ConfigError: An algorithm has nothing to train on; the message lists the names that were seen.
        """
        calls = [call for episode in episodes for call in episode.transitions]
        if not calls:
            return
        self._report.see(calls)
        # An agent that failed may have failed before it called what is missing. Later batches may lack an agent by
        # chance. So the first batch with a rollout that succeeded is judged, and no other.
        succeeded = [one for one in episodes if one.transitions and one.rollout.status == "succeeded"]
        self._is_first = bool(succeeded) and not self._has_judged
        self._has_judged |= self._is_first
        for policy, pattern in self._policies.items():
            self._check_policy(policy, pattern, calls, trains=trains)
        if self._algorithm is not None and trains:
            self._check_models(self._algorithm, calls, succeeded=len(succeeded))
        if self._algorithm is not None and self._algorithm.agents:
            self._check_algorithm(self._algorithm, calls, trains=trains)
        for role in self._roles:
            self._check_role(role, calls)

    def _check_models(self, algorithm: AlgorithmConfig, calls: Sequence[Transition], *, succeeded: int) -> None:
        """Report that the agent calls none of the policies that the algorithm tunes; refuse to go on without any."""
        if any(call.policy in self._uncalled or call.reject != "not_selected" for call in calls):
            self._uncalled.clear()
        if not self._uncalled or not succeeded:
            return
        self._missed += succeeded
        names = " or ".join(map(repr, sorted(self._uncalled)))
        reasons = "; ".join(list(dict.fromkeys(call.detail for call in calls))[:3])
        text = (
            f"algorithm {algorithm.name!r} has nothing to train on: no model call of the first "
            f"{count_of(self._missed, 'rollout')} went to the policy {names}. Reasons: {reasons}. Let the agent call "
            f"the model {names}, or write the name that it calls into aliases of the policy"
        )
        # A policy may be called for some tasks only.
        if self._missed >= ENOUGH:
            raise ConfigError(text)
        self._report.warn(f"algorithm {algorithm.name!r}: calls", text)

    def _check_policy(self, policy: str, pattern: str, calls: Sequence[Transition], *, trains: bool) -> None:
        setting = f"[policy.{policy}] agents = {pattern!r}"
        own = [call for call in calls if call.policy == policy]
        is_matched = self._report.add(setting, pattern, _names(own), matches=re.fullmatch)
        if is_matched or not self._is_first:
            return
        text = f"{setting} matched none of the agents, nodes and roles of the first rollouts; {seen(_names(calls))}"
        # Nothing will train, so waiting for a later batch would only cost rollouts.
        if trains and self._algorithm is not None and policy in self._algorithm.tunes:
            raise ConfigError(text)
        self._report.warn(setting, text)

    def _check_algorithm(self, algorithm: AlgorithmConfig, calls: Sequence[Transition], *, trains: bool) -> None:
        setting = f"algorithm {algorithm.name!r}: agents = {algorithm.agents!r}"
        is_matched = self._report.add(setting, algorithm.agents, _names(calls), matches=re.search)
        if not self._is_first:
            return
        # The batch shows agents, and none of them is selected.
        if trains and all(call.reject == "not_selected" for call in calls):
            raise ConfigError(f"{setting} selected none of the calls of its policy; {seen(_names(calls))}")
        if not is_matched:
            self._report.warn(setting, f"{setting} matched no agent, node or role; {seen(_names(calls))}")

    def _check_role(self, role: "_Role", calls: Sequence[Transition]) -> None:
        # A credit matches the calls of no agent as well, by an empty name.
        names = {call.agent for call in calls} if role.is_agents_alone else _names(calls)
        is_matched = self._report.add(role.setting, role.pattern, names, matches=role.matches)
        if self._is_first and not is_matched:
            self._report.warn(role.setting, f"{role.setting} matched none of the first rollouts; {seen(names - {''})}")


@dataclass(frozen=True, kw_only=True)
class _Role:
    """A pattern in ``roles``, and how to match it: a credit matches only the whole names of agents."""

    setting: str
    pattern: str
    matches: _Matches
    is_agents_alone: bool


def _roles(algorithm: AlgorithmConfig, plan: Plan) -> list[_Role]:
    """Return the ``roles`` patterns of an algorithm; if it tunes weights, also those of its credit."""
    found: list[_Role] = []
    for name, pattern in _table(algorithm.params.get("roles")).items():
        setting = f"algorithm {algorithm.name!r}: roles.{name} = {pattern!r}"
        found.append(_Role(setting=setting, pattern=str(pattern), matches=re.search, is_agents_alone=False))
    if plan.trained_policies().intersection(algorithm.tunes):
        credit = algorithm.credit or plan.config.credit
        owner = f"credit of the algorithm {algorithm.name!r}" if algorithm.credit else "[credit]"
        for pattern in _table(credit.params.get("roles")):
            setting = f"{owner}: the role {pattern!r}"
            found.append(_Role(setting=setting, pattern=pattern, matches=re.fullmatch, is_agents_alone=True))
    return [role for role in found if _is_expression(role.pattern)]


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_expression(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False  # its user refuses it
    return True


def _names(calls: Sequence[Transition]) -> set[str]:
    return {name for call in calls for name in call.path}


def _parts(pattern: str) -> list[str]:
    """Split a pattern at its bars; return the whole pattern if one of the alternatives is not a regular expression."""
    parts = pattern.split("|")
    try:
        for part in parts:
            re.compile(part)
    except re.error:
        return [pattern]
    return parts


def seen(names: set[str]) -> str:
    """Return the names of the recorded agents, and the next step, as text for a warning."""
    if not names:
        return (
            "no call came from a named agent. Install the tracer of the agent's framework and list it under tracers, "
            'or name the agents in the code: with agl.operation("write"):'
        )
    shown = ", ".join(map(repr, sorted(names)[:SHOWN]))
    return f"these were seen: {shown}{' and more' if len(names) > SHOWN else ''}. Correct the pattern"
