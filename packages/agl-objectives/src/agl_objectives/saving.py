"""Decides when the steps of an algorithm are saved: by number, by time, or by the share of time that saving takes.

Weights and moments are several times the size of a model, so saving them takes time. The steps since the last save can
be repeated from their recorded rollouts, so a killed run loses only time: the rarer the saves, the more. An interval as
a share of time balances both costs by the duration of a save on the machine at hand.

This module only decides when to save. An algorithm writes its state, and the experiment's driver saves the states that
belong together.
"""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from agl.contracts import AlgorithmContext

__all__ = ["SAVE_EVERY", "LiveAtSaves", "SaveInterval", "begin_saving", "offer_of"]

SAVE_EVERY = "5%"
"""Default interval: the largest share of a run's time that goes into saving."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?([smh%])", re.ASCII)


class SaveInterval:
    """The interval between two saves.

    Args:
        algorithm: The algorithm's registered name, for messages.
        every: Steps between two saves, a time such as `"60s"`, `"5m"` or `"1h"`, or the largest share of the time that
            may go into saving, such as `"5%"`. With a share the first step is saved, to measure the duration of a save.
        clock: Returns the time in seconds, which never decreases.

    Raises:
        ConfigError: `every` has none of these forms.
    """

    def __init__(self, algorithm: str, every: int | str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._seconds, self._share = _read(algorithm, every)
        self._clock = clock
        self._waiting = 0
        self._saved_at = clock()
        self._cost: float | None = None

    def stepped(self) -> None:
        """Count a step whose result is not saved yet."""
        self._waiting += 1

    def is_due(self) -> bool:
        """Return true if it is time to save."""
        if self._steps:
            return self._waiting >= self._steps
        passed = self._clock() - self._saved_at
        if self._share:
            # cost / (cost + passed) <= share
            return self._cost is None or passed >= self._cost * (1 / self._share - 1)
        return passed >= self._seconds

    def saved(self, seconds: float) -> None:
        """Record that all steps are saved, and the duration of the save in seconds."""
        self._waiting, self._saved_at, self._cost = 0, self._clock(), seconds


class LiveAtSaves:
    """Remembers the steps whose weights were live at the last two saves, because these weights must stay on disk.

    A resumed run serves the weights that the stored state names. They were live at the last save, or at the one before
    it if the run was killed before the experiment had stored the new state.

    Args:
        context: The algorithm's context.
        policy: Name of the policy in training.
    """

    def __init__(self, context: AlgorithmContext, policy: str) -> None:
        self._context, self._policy = context, policy
        self._steps: tuple[int, ...] = ()  # newest first; 0 for weights that this algorithm has not published

    def note(self) -> None:
        """Remember which step made the weights that are live now.

        Call this before each save, and when training continues from a state.
        """
        version = self._context.current(self._policy)
        step = version.step if version.algorithm == self._context.name else 0
        self._steps = (step, *self._steps[:1])

    def with_live(self, kept: Collection[int]) -> frozenset[int]:
        """Return the steps `kept` together with those whose weights were live at the last two saves."""
        return frozenset((*kept, *self._steps))


def begin_saving(
    context: AlgorithmContext,
    save: Callable[[bool], Awaitable[bool]],
    *,
    algorithm: str,
    save_every: int | str,
    serves: str = "",
) -> None:
    """Register `save` with the experiment, which calls it whenever it saves, so that a step need not be saved at once.

    Without deferred saving (algorithms that run side by side), nothing is registered, and every step is saved.
    `serves` names the policy that gets new weights in every step, if there is one. If the policy reads weights from
    disk, a notice says that `save_every` does not apply to the weights.
    Raises ConfigError for an interval that has no effect because the experiment saves every step.
    """
    if context.defer is not None:
        context.defer(save)
        if serves and save_every != 1 and offer_of(context, serves) is None:
            context.say(
                f"the policy {serves!r} reads its weights from disk, so they are written in every step; save_every "
                "spaces the state of training alone"
            )
    elif save_every not in (1, SAVE_EVERY):
        raise ConfigError(
            f"{algorithm} got save_every = {save_every!r}, which would be ignored: algorithms that run side by side "
            '(mode = "concurrent" in [schedule]) save every step. Remove it, or let them take turns.'
        )


def offer_of(context: AlgorithmContext, policy: str) -> Callable[[Any, Any], None] | None:
    """Return a policy's method `offer_weights`, which takes weights from memory; `None` if it reads them from disk.

    Call the method with the resource that is published next, and with the model or the state with these weights.
    """
    try:
        return getattr(context.policy(policy), "offer_weights", None)
    except ConfigError:  # weights that nobody serves here
        return None


def _read(algorithm: str, every: int | str) -> tuple[int, float, float]:
    """Parse a save interval into a number of steps, seconds, and a share of time; only one of the three is above 0."""
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return every, 0.0, 0.0
    found = _TIME.fullmatch(every) if isinstance(every, str) else None
    number = float(found[1]) if found else 0.0
    if found and found[2] == "%" and 0 < number < 100:
        return 0, 0.0, number / 100
    if found and found[2] != "%" and 0 < number < math.inf:
        return 0, number * _UNITS[found[2]], 0.0
    raise ConfigError(
        f"{algorithm} got save_every = {every!r}. Give a number of steps (1 saves every step), a time such as "
        f'"60s", "5m" or "1h", or the largest share of the time that may go into saving, such as "{SAVE_EVERY}".'
    )
