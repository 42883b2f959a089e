"""Keeps in the store what ``agl resources try`` measured, so that it stands beside the versions that were compared."""

import time
from collections.abc import Sequence

import msgspec

from agl.contracts import Store
from agl.schemas import Record


class TrialScore(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A version in a trial, measured by itself and against the trial's baseline.

    Attributes:
        version: The version.
        mean: Mean of its rewards over tasks, ``None`` without any.
        low: Lower end of the 95 % interval of that mean over tasks, ``None`` below two; ``high`` the upper end.
        tasks: Tasks with a reward.
        difference: Its mean minus the baseline's, paired by task; ``None`` for the baseline, and where fewer than two
            tasks have both.
        difference_low: Lower end of the 95 % interval of the difference; ``difference_high`` the upper end.
        paired: Tasks with rewards of both.
        verdict: ``better``, ``worse`` or ``unclear``; ``""`` for the baseline.
    """

    version: str
    mean: float | None
    low: float | None
    high: float | None
    tasks: int
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    paired: int = 0
    verdict: str = ""


class KeptTrial(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A trial that ended.

    Attributes:
        time: Unix seconds.
        experiment: The experiment of its rollouts.
        source: The tasks in words, such as ``20 of 40 validation tasks``.
        scores: The versions; the first is the baseline.
    """

    time: float
    experiment: str
    resource: str
    source: str
    scores: list[TrialScore]


async def keep_trial(
    store: Store, *, experiment: str, resource: str, source: str, scores: Sequence[TrialScore]
) -> None:
    """Keep a trial of a resource beside those before it."""
    now = time.time()
    kept = KeptTrial(time=now, experiment=experiment, resource=resource, source=source, scores=list(scores))
    await store.save_state({f"{_folder(resource)}{now:017.6f}": msgspec.json.encode(kept)})


async def read_trials(store: Store, resource: str) -> list[KeptTrial]:
    """Return the trials of a resource, newest first."""
    found = await store.load_state(_folder(resource))
    trials = [msgspec.json.decode(data, type=KeptTrial) for data in found.values()]
    return sorted(trials, key=lambda trial: -trial.time)


def _folder(resource: str) -> str:
    return f"trial/{resource}/"
