"""Notices that the rewards of the served versions have fallen, and since when."""

import math

from agl.acceptance import BETS

USUAL = 30
"""The number of first rewards whose mean is the usual reward."""

MARGIN = 0.05
"""How far below the usual reward a mean is still no fall."""

ALARM = 2000.0
"""The evidence of an alarm; rewards that have not fallen raise a false one once in this many conversations at most."""


class FallDetector:
    """Reads rewards one after another, and restarts its bets at each of them.

        M = (1 + M) * (1 + L * x),     x = usual - MARGIN - reward

    is averaged over the bets L in :data:`agl.acceptance.BETS`. As long as the mean reward is at least usual - MARGIN,
    the mean of M after n rewards is at most n. Sources: Shiryaev 1963 and Roberts 1966; Shin, Ramdas and Rinaldo 2024,
    "E-detectors", for the mean of bounded rewards. The beginning of the fall is where the cumulative sum of
    log(1 + x / 2) was smallest (Page 1954).

    Attributes:
        has_fallen: Whether the average ever reached `ALARM`.
        since: When the first of the fallen rewards began, in Unix seconds; meaningful once they have fallen.
    """

    def __init__(self) -> None:
        self.has_fallen = False
        self.since = 0.0
        self._first: list[float] = []
        self._restarted = [0.0] * len(BETS)
        self._sum = 0.0

    def add(self, reward: float, *, at: float) -> None:
        """Add a reward from 0 to 1 and the time to which it belongs."""
        if self.has_fallen:
            return
        if len(self._first) < USUAL:
            self._first.append(reward)
            return
        x = sum(self._first) / USUAL - MARGIN - reward
        self._restarted = [(1 + m) * (1 + bet * x) for m, bet in zip(self._restarted, BETS, strict=True)]
        if self._sum <= 0:
            self._sum, self.since = 0.0, at
        self._sum += math.log1p(x / 2)
        self.has_fallen = sum(self._restarted) / len(BETS) >= ALARM
