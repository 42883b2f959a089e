"""The policy for rollouts in which the tracer and the recording saw different model calls."""

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
