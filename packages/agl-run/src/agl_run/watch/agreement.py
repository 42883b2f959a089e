"""Checks collected episodes for model calls that are missing from their records.

Every command that collects rollouts uses this check, so that no command ignores missing calls.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from agl.episodes import Verdict
from agl.errors import RunError
from agl.hints import count_of
from agl.schemas import Episode, LooseCall
from agl_inspect.stores import proposal
from agl_run.config.sections import ExperimentSection
from agl_run.tracers.module_tracer import cache_advice
from agl_run.watch.observers import Batch, Observer

_LOG = logging.getLogger("agl_run.run")

UNSEEN = "unseen calls"
UNATTRIBUTED = "unattributed calls"
"""The reasons for which rollouts are dropped."""

_NO_CALLS = "no calls"

ATTRIBUTE = "Install the tracer of the framework that makes them, or name them in the code: with agl.operation(...)"
"""Advice about recorded calls that belong to no agent."""

_REMEDIES = {
    UNSEEN: "Point these clients at the gateway, with the base URL and key of the resource, or let them call through "
    'httpx; if they need no record, such as a cached answer or a local model, set [experiment] unseen_calls = "accept"',
    UNATTRIBUTED: ATTRIBUTE,
}

_MEANINGS = {"drop": "training leaves such rollouts out", "error": "such a rollout ends a run", "accept": ""}
_TRAINED = "they train with the calls that were recorded"
_FATES = {"drop": "they are left out of training", "error": _TRAINED, "accept": _TRAINED}


def settings_by_kind(section: ExperimentSection) -> dict[str, Verdict | Literal["error"]]:
    """Map each kind of missing calls to its setting: ``unseen_calls`` or ``unattributed_calls``."""
    return {UNSEEN: section.unseen_calls, UNATTRIBUTED: section.unattributed_calls}


def refusal(episode: Episode, section: ExperimentSection) -> str:
    """Return the kind of missing calls because of which a rollout may not train; ``""`` if it may."""
    settings = settings_by_kind(section)
    return next((kind for kind, setting in settings.items() if setting != "accept" and _counts(episode, kind)), "")


class AgreementReport(Observer):
    """Reports model calls that are missing from the records, each kind once in a run.

    Args:
        section: The section with ``unseen_calls`` and ``unattributed_calls``.
        is_trial: If true, missing calls are only reported, whatever the settings say.
        store_url: The store's URL, for the commands in the reports.
    """

    def __init__(self, section: ExperimentSection, *, is_trial: bool = False, store_url: str = "") -> None:
        self._store_url = store_url
        self._settings = settings_by_kind(section)
        self._is_trial = is_trial
        self._reported: set[tuple[str, bool]] = set()

    def batch(self, batch: Batch) -> None:
        """Log a warning about calls that are missing from a batch; see :meth:`report`."""
        self.report(batch.episodes, trains=batch.trains)

    def report(self, episodes: Sequence[Episode], *, trains: bool) -> None:
        """Log a warning about calls that are missing from the episodes of a batch.

        Args:
            episodes: The batch.
            trains: True if an algorithm trains on the episodes, false if they are only recorded or validated.

        Raises:
            RunError: Missing calls were found, and the setting for their kind is ``error``.
        """
        for kind in self._settings:
            concerned = [episode for episode in episodes if _found(episode, kind)]
            if concerned and not (kind == UNSEEN and self._settings[kind] == "accept"):
                self._report(kind, concerned, of=len(episodes), trains=trains)
        silent = [episode for episode in episodes if _has_no_call(episode)]
        if silent and self._is_new(_NO_CALLS, trains=False):
            _LOG.warning(
                "%d of %d rollouts made no recorded model call. If their agent calls a model, let its client call over "
                "HTTP with httpx, as the openai and anthropic clients do, or give it the base URL and key of the "
                "resource.%s%s",
                len(silent),
                len(episodes),
                cache_advice(),
                self._see("show", silent[0]),
            )

    def _report(self, kind: str, concerned: Sequence[Episode], *, of: int, trains: bool) -> None:
        setting = self._settings[kind]
        text = f"{len(concerned)} of {of} rollouts have {describe(concerned, kind)}"
        # A trial exists to show problems, so it never ends at the first.
        if setting == "error" and not self._is_trial:
            raise RunError(text)
        # Once for rollouts that train and once for others, because what follows from it differs.
        if self._is_new(kind, trains=trains):
            # Calls to servers of others, such as a tool's model, are reported and cost nothing.
            if not any(_counts(episode, kind) for episode in concerned):
                setting = "accept"
            lacks = "their records are incomplete" if kind == UNSEEN else "no agent is recorded for these calls"
            fate = _FATES[setting] if trains else " and ".join(filter(None, (lacks, _MEANINGS[setting])))
            _LOG.warning("%s; %s.%s", text, fate, self._see("why", concerned[0]))

    def _see(self, name: str, episode: Episode) -> str:
        return proposal("See", name, episode.rollout.rollout_id, store_url=self._store_url)

    def _is_new(self, kind: str, *, trains: bool) -> bool:
        """Return true if this kind has not been reported before for rollouts that train, or for others."""
        is_new = (kind, trains) not in self._reported
        self._reported.add((kind, trains))
        return is_new


def describe(episodes: Sequence[Episode], kind: str) -> str:
    """Describe the missing calls of a kind by their clients, and add the next step within an experiment."""
    text = describe_calls([call for episode in episodes for call in _found(episode, kind)], kind)
    return f"{text}. {_REMEDIES[kind]}"


def describe_calls(calls: Sequence[LooseCall], kind: str) -> str:
    """Describe missing calls by their number, their kind and their clients."""
    clients = Counter(call.client for call in calls)
    named = ", ".join(f"{client} ({count})" for client, count in clients.most_common(5))
    found = {
        UNSEEN: f"{count_of(len(calls), 'model call')} that {'was' if len(calls) == 1 else 'were'} not recorded",
        UNATTRIBUTED: f"{count_of(len(calls), 'recorded model call')} outside of the framework's spans",
    }
    return f"{found[kind]}, made by {named}"


def _found(episode: Episode, kind: str) -> tuple[LooseCall, ...]:
    return episode.unseen if kind == UNSEEN else episode.unattributed


def _counts(episode: Episode, kind: str) -> bool:
    """Return true if a missing call of this kind went to a policy's server or to an unknown server."""
    return any(not call.is_foreign for call in _found(episode, kind))


def _has_no_call(episode: Episode) -> bool:
    """Return true if a rollout succeeded without any recorded or noticed model call."""
    return episode.rollout.status == "succeeded" and not (episode.transitions or episode.unseen)
