"""Checks collected episodes: calls that the tracer and the recording disagree on, patterns that match no agent."""

import logging
import re
from collections import Counter
from collections.abc import Sequence

from agl.algorithms import AlgorithmConfig
from agl.episodes import Verdict
from agl.errors import ConfigError, RunError
from agl.schemas import Episode, LooseCall, Transition
from agl_run.experiment.config import ExperimentSection
from agl_run.experiment.plan import Plan

_LOG = logging.getLogger("agl_run.experiment")

UNSEEN = "unseen calls"
UNATTRIBUTED = "unattributed calls"
"""The reasons for which rollouts are dropped."""


class AgreementPolicy:
    """Applies ``unseen_calls`` and ``unattributed_calls``; reports each kind once."""

    def __init__(self, section: ExperimentSection) -> None:
        self._settings = {UNSEEN: section.unseen_calls, UNATTRIBUTED: section.unattributed_calls}
        self._told: set[str] = set()

    def verdict(self, kind: str) -> Verdict:
        """Return the setting that decides if calls of such rollouts train."""
        return "accept" if self._settings[kind] == "accept" else "drop"

    def refusal(self, episode: Episode) -> str:
        """Return the reason why the rollout is left out of training, ``""`` if there is none."""
        return next((kind for kind in self._settings if _found(episode, kind) and self.verdict(kind) == "drop"), "")

    def report(self, episodes: Sequence[Episode]) -> None:
        """Log a warning about the disagreements in a batch.

        Raises:
            RunError: The setting for a kind that was found is ``error``.
        """
        for kind, setting in self._settings.items():
            concerned = [episode for episode in episodes if _found(episode, kind)]
            if not concerned or (kind in self._told and setting != "error"):
                continue
            self._told.add(kind)
            text = f"{len(concerned)} of {len(episodes)} rollouts have {describe(concerned, kind)}"
            if setting == "error":
                raise RunError(text)
            done = "are left out of training" if setting == "drop" else "train with the calls that were recorded"
            _LOG.warning("%s; they %s. See: agl why %s", text, done, concerned[0].rollout.rollout_id)


def describe(episodes: Sequence[Episode], kind: str) -> str:
    """Name the clients that made such calls, and the next step."""
    calls = [call for episode in episodes for call in _found(episode, kind)]
    clients = Counter(call.client for call in calls)
    named = ", ".join(f"{client} ({count})" for client, count in clients.most_common(5))
    if kind == UNSEEN:
        return (
            f"{len(calls)} model calls that the framework's tracer saw and that were not recorded, made by {named}. "
            "Let these clients call over HTTP with httpx, or give them the base URL and key of the resource; if they "
            'need no record, such as a cached answer or a local model, set [experiment] unseen_calls = "accept"'
        )
    return (
        f"{len(calls)} recorded model calls outside of the framework's spans, made by {named}. "
        "Install the tracer of the framework that makes them, or name them in the code: with agl.operation(...)"
    )


def _found(episode: Episode, kind: str) -> tuple[LooseCall, ...]:
    return episode.unseen if kind == UNSEEN else episode.unattributed


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
