"""Notices that the rewards of the served versions have fallen, and since when."""

from collections import deque

from agl.acceptance import BETS

FIRST = 30
"""The number of first rewards of each kind of task that only show which reward is usual."""

MARGIN = 0.05
"""How far below the usual reward a mean is still no fall."""

ALARM = 2000.0
"""The evidence of an alarm; rewards that have not fallen raise a false one once in this many conversations at most."""

SEEN = 1000
"""The number of newest rewards among which the beginning of a fall is looked for."""


class FallDetector:
    """Reads rewards one after another, and restarts its bets at each of them.

        M = (1 + M) * (1 + L * x),     x = usual - MARGIN - reward

    is averaged over the bets L in :data:`agl.acceptance.BETS`; the usual reward is the mean of all earlier ones on the
    same kind of task, so other kinds that become frequent are no fall. As long as the mean reward is at least usual -
    MARGIN, the mean of M after n rewards is at most n. Sources: Shiryaev 1963 and Roberts 1966; Shin, Ramdas and
    Rinaldo 2024, "E-detectors", for the mean of bounded rewards.

    Attributes:
        has_fallen: Whether the average ever reached `ALARM`.
        since: When the first of the fallen rewards began, in Unix seconds; meaningful once they have fallen.
    """

    def __init__(self) -> None:
        self.has_fallen = False
        self.since = 0.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=SEEN)
        self._usual: dict[str, tuple[float, int]] = {}
        self._restarted = [0.0] * len(BETS)

    def add(self, reward: float, *, at: float, kind: str = "") -> None:
        """Add a reward from 0 to 1 on a kind of task, and the time to which it belongs."""
        total, count = self._usual.get(kind, (0.0, 0))
        self._usual[kind] = total + reward, count + 1
        if count < FIRST:
            return
        less = total / count - reward
        self._seen.append((less, at))
        self._restarted = [(1 + m) * (1 + bet * (less - MARGIN)) for m, bet in zip(self._restarted, BETS, strict=True)]
        if sum(self._restarted) / len(BETS) >= ALARM:
            self.has_fallen, self.since = True, self._beginning()

    def _beginning(self) -> float:
        """Return the time of the reward that divides all into the two parts with the most different means."""
        count, total = len(self._seen), sum(less for less, _ in self._seen)
        since, most, before = self.since, 0.0, 0.0
        for n, (less, at) in enumerate(self._seen):
            # The square of the difference between the means, times n (count - n) / count: the likeliest single change.
            explained = (before - n * total / count) ** 2 / (n * (count - n)) if n else 0.0
            if explained > most:
                since, most = at, explained
            before += less
        return since
