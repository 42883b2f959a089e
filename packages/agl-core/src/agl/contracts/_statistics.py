"""Statistics of rollouts, which stores keep as rollouts finish, so that nobody has to read the rollouts for them."""

from msgspec.structs import replace

from agl.schemas import Mode, Record


class Moments(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Number, mean and spread of some values; those of two sets merge into those of their union.

    The spread is kept around the mean and not around zero, so that it stays exact where the mean is large (Chan,
    Golub and LeVeque, 1979). Values that were taken out leave an error behind, of about the sixteenth digit of the
    largest of them.

    Attributes:
        squares: The sum of the squared differences from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def variance(self) -> float | None:
        """The unbiased variance, ``None`` below two values."""
        # Bessel's correction, as in the group baselines of GRPO.
        return self.squares / (self.count - 1) if self.count > 1 else None

    def plus(self, other: "Moments") -> "Moments":
        """The moments of both sets; a negative count takes a set out that is part of this one."""
        count = self.count + other.count
        if not count:
            return Moments()
        # Chan, Golub and LeVeque (1979): with delta = mean_b - mean_a, M2 = M2_a + M2_b + delta^2
        # n_a n_b / n. A negative n_b takes the set b out again.
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        # Taking values out may leave a rounding error below 0, of which a root cannot be taken.
        return Moments(count=count, mean=self.mean + apart * other.count / count, squares=max(0.0, squares))


_SUMS = ("succeeded", "failed", "cancelled", "seconds", "calls", "prompt_tokens", "response_tokens")


class Statistics(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The finished rollouts of one step of an algorithm in one mode, over all runs of the experiment.

    Attributes:
        algorithm: The algorithm and ``step`` that the rollouts' metadata name; ``""`` and ``None`` without.
        succeeded: Rollouts of that status, like ``failed`` and ``cancelled``.
        reward: The rewards by the rule of :func:`agl.episodes.score` without a key and weights; rollouts without one,
            and rewards beyond 1e100, are left out.
        seconds: Time from the first attempt's start to the end, summed over the rollouts.
        calls: Model calls of the deciding attempts, like the tokens that follow; see :class:`agl.schemas.Tally`.
    """

    experiment: str
    algorithm: str = ""
    step: int | None = None
    mode: Mode = "train"
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    reward: Moments = Moments()
    seconds: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0

    @property
    def rollouts(self) -> int:
        """The number of finished rollouts."""
        return self.succeeded + self.failed + self.cancelled

    def plus(self, other: "Statistics") -> "Statistics":
        """The sums of both, under the names of this one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return replace(self, reward=self.reward.plus(other.reward), **sums)

    @property
    def negative(self) -> "Statistics":
        """The share that takes these rollouts out of statistics that hold them, when it is added."""
        # The mean stays: with a negative count, plus() weighs it against the other set's.
        reward = replace(self.reward, count=-self.reward.count, squares=-self.reward.squares)
        return replace(self, reward=reward, **{name: -getattr(self, name) for name in _SUMS})
