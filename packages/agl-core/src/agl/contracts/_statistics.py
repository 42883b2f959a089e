"""Statistics of rollouts, which stores update as rollouts finish, so that showing them reads no rollouts."""

from msgspec.structs import replace

from agl.schemas import Mode, Record


class Moments(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Number, mean and spread of a set of values; the moments of two sets can be merged.

    The spread is measured from the mean and not from zero, so that it stays exact if the mean is large (Chan, Golub and
    LeVeque, 1979). Removing values leaves a rounding error, in about the sixteenth digit of the largest removed value.

    Attributes:
        count: Number of values.
        mean: Mean of the values.
        squares: Sum of the squared differences of the values from the mean.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def variance(self) -> float | None:
        """The unbiased variance; ``None`` with fewer than two values."""
        # Bessel's correction, as in the group baselines of GRPO.
        return self.squares / (self.count - 1) if self.count > 1 else None

    def plus(self, other: "Moments") -> "Moments":
        """The moments of both sets together; if the count of ``other`` is negative, its values are removed instead."""
        count = self.count + other.count
        if not count:
            return Moments()
        # Chan, Golub and LeVeque (1979): with delta = mean_b - mean_a, M2 = M2_a + M2_b + delta^2
        # n_a n_b / n. A negative n_b takes the set b out again.
        apart = other.mean - self.mean
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        # Removing values may leave a rounding error below 0, which has no square root.
        return Moments(count=count, mean=self.mean + apart * other.count / count, squares=max(0.0, squares))


_SUMS = ("succeeded", "failed", "cancelled", "seconds", "calls", "prompt_tokens", "response_tokens")


class Statistics(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Sums over the finished rollouts of one step of an algorithm in one mode, in all runs of the experiment.

    Attributes:
        experiment: The experiment's name.
        algorithm: The algorithm that the rollouts' metadata name; ``""`` if they name none.
        step: The step that the rollouts' metadata name; ``None`` if they name none.
        mode: The rollouts' mode.
        succeeded: Number of rollouts that succeeded.
        failed: Number of rollouts that failed.
        cancelled: Number of rollouts that were cancelled.
        reward: Moments of the rewards, which are chosen as by :func:`agl.episodes.score` without key and weights.
            Rollouts without a reward, and rewards beyond 1e100, are left out.
        seconds: Time from the first attempt's start to the rollout's end, summed over the rollouts.
        calls: Model calls of the deciding attempts; see :class:`agl.schemas.Tally`.
        prompt_tokens: Tokens of these calls' prompts.
        response_tokens: Tokens of these calls' responses.
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
        """The sums of both statistics, with the experiment, algorithm, step and mode of this one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return replace(self, reward=self.reward.plus(other.reward), **sums)

    @property
    def negative(self) -> "Statistics":
        """The negative of these statistics; adding it with :meth:`plus` removes these rollouts from others."""
        # The mean keeps its sign: plus() weighs it by the negative count.
        reward = replace(self.reward, count=-self.reward.count, squares=-self.reward.squares)
        return replace(self, reward=reward, **{name: -getattr(self, name) for name in _SUMS})
