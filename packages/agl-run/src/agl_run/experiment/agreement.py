"""What an experiment makes of rollouts in which the tracer and the recording did not see the same model calls."""

import logging
from collections import Counter
from collections.abc import Sequence

from agl.episodes import Verdict
from agl.errors import RunError
from agl.schemas import Episode, LooseCall
from agl_run.experiment.config import ExperimentSection

_LOG = logging.getLogger("agl_run.experiment")

UNSEEN = "unseen calls"
UNATTRIBUTED = "unattributed calls"
"""Reasons under which such rollouts are counted."""


class AgreementPolicy:
    """Applies ``unseen_calls`` and ``unattributed_calls``; each kind is reported once."""

    def __init__(self, section: ExperimentSection) -> None:
        self._settings = {UNSEEN: section.unseen_calls, UNATTRIBUTED: section.unattributed_calls}
        self._told: set[str] = set()

    def verdict(self, kind: str) -> Verdict:
        """Whether calls of such rollouts train."""
        return "accept" if self._settings[kind] == "accept" else "drop"

    def refusal(self, episode: Episode) -> str:
        """Why the rollout does not train, ``""`` if nothing here speaks against it."""
        return next((kind for kind in self._settings if _found(episode, kind) and self.verdict(kind) == "drop"), "")

    def report(self, episodes: Sequence[Episode]) -> None:
        """Say what was found in a batch.

        Raises:
            RunError: Where the experiment wants to end then.
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
    """Which clients made such calls, and what to do."""
    calls = [call for episode in episodes for call in _found(episode, kind)]
    clients = Counter(call.client for call in calls)
    named = ", ".join(f"{client} ({count})" for client, count in clients.most_common(5))
    if kind == UNSEEN:
        return (
            f"{len(calls)} model calls that the framework's tracer saw and nobody recorded, made by {named}. Let these "
            "clients call over HTTP with httpx, or give them the base URL and key of the resource; where they are "
            'meant to be unknown, such as a cached answer or a local model, set [experiment] unseen_calls = "accept"'
        )
    return (
        f"{len(calls)} recorded model calls outside of everything that the framework's tracer saw, made by {named}. "
        "Install the tracer of whoever makes them, or name them in the code: with agl.operation(...)"
    )


def _found(episode: Episode, kind: str) -> tuple[LooseCall, ...]:
    return episode.unseen if kind == UNSEEN else episode.unattributed
