"""Pairs of rollouts of one task, the better against the worse, and what `dpo` and `ipo` learn from them."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from agl.errors import ConfigError
from agl_algo_torch.learner import mean
from agl_algo_torch.preference import Gathered, Judgement, PreferenceAlgorithm, PreferenceSettings, Ratio, can_teach
from agl_algo_torch.tuned_policy import at_least_one, one_of
from agl_algo_torch.written_pairs import WrittenPair, check_source, read_pairs, told
from agl_objectives.tasks import by_task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode
    from agl_algo_torch.learner import PolicyLearner
    from agl_algo_torch.supply import RolloutSupply

Pairing = Literal["extremes", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two rollouts of one task by id; `chosen` has the higher reward."""

    chosen: str
    rejected: str

    @property
    def rollouts(self) -> tuple[str, ...]:
        """Both."""
        return (self.chosen, self.rejected)


class PairAlgorithm(PreferenceAlgorithm[Pair]):
    """Learns from pairs, of rollouts or of texts; a subclass says how a pair's loss follows from its margin.

    Args:
        name: The algorithm's registered name.
        supply: Where its rollouts come from.
        settings: What it shares with others that learn from log-ratios.
        pairing: `extremes` (one pair per group) or `all`.
        min_gap: Least difference of two rewards that is a preference.
        is_per_token: Whether a margin compares mean log-ratios per token; else sums.
        data: File of pairs of texts, `""` for those of rollouts.
        steps: Steps in all with `data`.
    """

    def __init__(
        self,
        name: str,
        *,
        supply: RolloutSupply,
        settings: PreferenceSettings,
        pairing: Pairing,
        min_gap: float,
        is_per_token: bool,
        data: str,
        steps: int | None,
    ) -> None:
        super().__init__(name, supply=supply, settings=settings, left_out="its rollout is in no pair")
        one_of(name, pairs=(pairing, get_args(Pairing)))
        at_least_one(name, pairs_per_update=settings.per_update)
        if min_gap <= 0:
            raise ConfigError(f"{name} got min_gap = {min_gap}; two equal rewards are no preference: set it above 0.")
        self._pairing: Pairing = pairing
        self._min_gap, self._is_per_token = min_gap, is_per_token
        self._data, self._steps = data, steps or 1
        self._written: list[WrittenPair] = []

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the policy, and where the pairs come from; reads those of `data`."""
        if not self._data:
            await super().setup(context)
            return
        self.begin(context)
        check_source(self._data, context.sources, algorithm=context.name)
        self._written = read_pairs(context.folder / self._data)
        context.say(f"{context.name}: {told(len(self._written), 'pairs', self._data)}")

    def step_size(self, tasks: int) -> tuple[int, int]:
        """Return how many of so many tasks a step draws, and how many times it runs each; none with `data`."""
        return (0, 0) if self._data else super().step_size(tasks)

    async def gather(self, step: int, learner: PolicyLearner) -> Gathered[Pair]:
        """Return the pairs of `data` if there is one, else those of a step's groups."""
        if not self._data:
            return await super().gather(step, learner)
        loaded = learner.loaded
        rows = [
            row
            for pair in self._written
            for row in pair.rows(tokenizer=loaded.tokenizer, max_tokens=loaded.context_length)
        ]
        pairs = [Pair(chosen=pair.chosen.where, rejected=pair.rejected.where) for pair in self._written]
        is_last = step >= self._steps
        return Gathered(examples=pairs, rows=rows, metrics={}, stop_reason=f"{step} steps done" if is_last else "")

    @abstractmethod
    def pair_loss(self, margin: float) -> tuple[float, float]:
        """Return the loss of a pair and -d loss / d margin; the margin is in nats."""

    def examples(self, groups: Sequence[Sequence[Episode]]) -> list[Pair]:
        """Return the pairs of all groups, each of two answers to one task: with a `group_key` groups have several."""
        same = [rollouts for group in groups for rollouts in by_task(group).values()]
        return [pair for rollouts in same for pair in make_pairs(rollouts, gap=self._min_gap, pairing=self._pairing)]

    def judge(self, examples: Sequence[Pair], ratios: Mapping[str, Ratio]) -> Judgement:
        """Average the pairs' losses."""
        sizes = {name: ratio.tokens if self._is_per_token else 1 for name, ratio in ratios.items()}
        value = {name: ratio.total / sizes[name] for name, ratio in ratios.items()}
        margins = [value[pair.chosen] - value[pair.rejected] for pair in examples]
        losses: list[float] = []
        factors: defaultdict[str, float] = defaultdict(float)  # adds up over the pairs that a rollout is in
        for pair, margin in zip(examples, margins, strict=True):
            loss, slope = self.pair_loss(margin)
            losses.append(loss)
            factors[pair.chosen] += slope / len(examples) / sizes[pair.chosen]
            factors[pair.rejected] -= slope / len(examples) / sizes[pair.rejected]
        metrics = {
            "loss": mean(losses),
            "margin": mean(margins),
            "accuracy": mean([float(margin > 0) for margin in margins]),  # pairs that the policy ranks as the rewards
        }
        return Judgement(factors=factors, metrics=metrics)

    def sides(self, examples: Sequence[Pair]) -> dict[str, str]:
        """Return how often each rollout is chosen and rejected."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for pair in examples:
            found[pair.chosen]["chosen"] += 1
            found[pair.rejected]["rejected"] += 1
        return {
            rollout: ", ".join(f"{name} in {count} pairs" for name, count in counted.items())
            for rollout, counted in found.items()
        }

    def counts(self, examples: Sequence[Pair]) -> dict[str, float]:
        """Count the pairs."""
        return {"pairs": float(len(examples))}


def make_pairs(group: Sequence[Episode], *, gap: float, pairing: Pairing) -> list[Pair]:
    """Return the pairs of a group, best rollouts first; of equal rewards the earlier rollout comes first.

    Only rollouts with a reward and with tokens of the policy take part. `extremes` gives one pair at most. A group of
    one rollout, or one whose rewards differ by less than `gap`, gives none.
    """
    # `reward or 0.0` is for the type checker: rollouts without a reward are filtered out here.
    ranked = sorted(filter(can_teach, group), key=lambda e: (-(e.reward or 0.0), e.rollout.rollout_id))
    found = [
        Pair(chosen=better.rollout.rollout_id, rejected=worse.rollout.rollout_id)
        for index, better in enumerate(ranked)
        for worse in ranked[index + 1 :]
        if (better.reward or 0.0) - (worse.reward or 0.0) >= gap
    ]
    if pairing == "all" or not found:
        return found
    # Best against worst has the largest gap of the group, and one pair lets every task count the same.
    return [Pair(chosen=ranked[0].rollout.rollout_id, rejected=ranked[-1].rollout.rollout_id)]
