"""Turns rows of the call forest into samples with masks and advantages; `rows/batches.py` makes VERL's batches of them.

VERL's row is a prompt and a response. Here the prompt is everything before the first trained token, and the response is
the rest, including tool results and other agents' tokens, where `response_mask` is 0. Tokens after the last trained one
are left out: the model reads from left to right, so no trained token depends on them. Rows that are too long or mix
temperatures are counted and not trained on; their rollout stays in every denominator.

T is the length of a row, P of its prompt, R of its response; T = P + R.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from agl.errors import MissingTokenIdsError, RunError
from agl_algo_verl.losses.choice import chosen_estimator
from agl_algo_verl.typed import from_bytes
from agl_objectives.advantages import call_advantages
from agl_objectives.answers import SoftOverlong, rollout_shares, without_truncated
from agl_objectives.groups import trained_tokens
from agl_objectives.uses import group_uses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import CallUse, Credit
    from agl.schemas import CallCredit, Episode, Row
    from agl_algo_verl.settings.settings import VerlSettings
    from agl_objectives.groups import Baseline


class RowTooLongError(RunError):
    """Raised for a row that is longer than the configured lengths, if the configuration says to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSample:
    """One row ready to train on; tensors are on the CPU.

    Attributes:
        rollout: Id of the row's rollout; the rows of a rollout share an update.
        group: Index of the rollout's task in the step.
        ids: Prompt and response; int64, [T].
        mask: True on the tokens that the policy wrote; bool, [R].
        advantages: Advantages from credit and the estimator; float32, [R].
        behaviour: Log-probabilities that the server recorded as it sampled the tokens; float32, [R].
        temperature: The temperature at which all of the row's calls were sampled.
        calls: Span id, first token and end of each trained call, as positions in the response.
        old: The engine's log-probabilities before the step's first update; [R], None before they are computed.
        entropy: The policy's entropy before each token at the row's temperature, in nats, likewise.
        reference: The reference's log-probabilities, likewise.
        values: The critic's value before each token, likewise.
        returns: The critic's targets, likewise.
        importance: Weights of importance sampling (`losses/correction.py`); float32, [R], None if they are off.
        rejected: True on trained tokens without a part in the loss; bool, [R], None if rejection is off.
        held: True on the tokens of an agent that is held and not trained (`anchor.py`); bool, [R], None for other rows.
    """

    rollout: str
    group: int
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    behaviour: Tensor
    temperature: float
    calls: tuple[tuple[str, int, int], ...] = ()
    old: Tensor | None = None
    entropy: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    importance: Tensor | None = None
    rejected: Tensor | None = None
    held: Tensor | None = None

    @property
    def prompt(self) -> int:
        """The number of tokens before the response; at least 1."""
        return len(self.ids) - len(self.mask)

    @property
    def trained(self) -> Tensor:
        """True at trained tokens; bool, [R]."""
        return self.mask

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens."""
        return int(self.mask.sum())

    @property
    def is_silent(self) -> bool:
        """True if every kept token's advantage, times its importance weight, is 0."""
        weighed_R = self.advantages if self.importance is None else self.advantages * self.importance
        return not bool((self.kept & (weighed_R != 0)).any())

    @property
    def kept(self) -> Tensor:
        """True at trained tokens that are not rejected; bool, [R]."""
        return self.mask if self.rejected is None else self.mask & ~self.rejected

    @property
    def kept_tokens(self) -> int:
        """The number of trained tokens that are not rejected."""
        return int(self.kept.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """The rows of a step in the order of its episodes, with metrics to log.

    Attributes:
        samples: The rows that can be trained on.
        rollouts: Id and task index of every rollout, including those without a row.
        metrics: The metrics, by name.
        credits: The credit of each rollout's calls, in the order of `rollouts`.
        uses: The use of every call, by rollout id.
        tokens: The number of tokens that each call wrote, by span id.
    """

    samples: list[RowSample]
    rollouts: list[tuple[str, int]]
    metrics: dict[str, float]
    credits: tuple[tuple[CallCredit, ...], ...] = ()
    uses: dict[str, tuple[CallUse, ...]] = field(default_factory=dict[str, "tuple[CallUse, ...]"])
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def finished(self) -> dict[str, int]:
        """The number of calls with credit (`calls`), and of those whose credit is a finished advantage (`final`)."""
        calls = [call for given in self.credits for call in given]
        return {"calls": len(calls), "final": sum(call.is_advantage for call in calls)}


def prepare(
    groups: Sequence[Sequence[Episode]],
    *,
    credit: Credit,
    settings: VerlSettings,
    dropped: int = 0,
    baselines: Sequence[Baseline] = (),
) -> PreparedStep:
    """Return the samples of groups of episodes that share a task.

    With `sampling.mask_truncated`, calls that were cut at a token limit count in the statistics but are not trained on.
    `dropped` is the number of rollouts that are not among the episodes. `baselines` holds the greedy rollout's result
    for each group.

    Raises RowTooLongError for a prompt that is too long, if the configuration says to stop, and MissingTokenIdsError if
    no call of the step has token ids.
    """
    places = [index for index, group in enumerate(groups) for _ in group]  # the task of each episode
    # Credit compares the episodes of one task, so it gets them group by group.
    credits = [list(calls) for group in groups for calls in credit.assign(group)]
    episodes = [episode for group in groups for episode in group]
    overlong = soft_overlong(settings)
    credits = [overlong.applied(episode, calls) for episode, calls in zip(episodes, credits, strict=True)]
    tokens = trained_tokens(episodes)
    if settings.has_critic:
        # The critic's values turn returns into advantages later (`shaping.py`). Until then returns stand in; they only
        # decide which calls are trained on.
        by_span = [{call.span_id: call.value for call in calls} for calls in credits]
    else:
        estimator = chosen_estimator(settings).call
        compared = [baselines[place] for place in places] if baselines else None
        by_span = call_advantages(credits, groups=places, tokens=tokens, estimator=estimator, baselines=compared)
    samples: list[RowSample] = []
    left_out: Counter[str] = Counter()
    refused: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by rollout and span id: why its row is left out
    for episode, place, values in zip(episodes, places, by_span, strict=True):
        if settings.sampling.mask_truncated:
            values = without_truncated(episode, values)
        temperatures = {call.span_id: call.temperature for call in episode.transitions}
        for row in episode.rows:
            found = read_row(row, group=place, advantages=values, temperatures=temperatures, settings=settings)
            if isinstance(found, RowSample):
                samples.append(found)
            elif found:
                left_out[found] += 1
                refused[row.rollout_id] |= dict.fromkeys((part.span_id for part in row.segments), found)
                _check_length(row, found, settings)
    if not samples:
        _check_ids(episodes)
    # Every episode counts as a rollout, even if none of its rows is left: means over rollouts divide by this list.
    rollouts = [(e.rollout.rollout_id, place) for e, place in zip(episodes, places, strict=True)]
    metrics = _metrics(groups, samples) | {f"rows_{reason}": float(count) for reason, count in left_out.items()}
    # Rollouts with a gradient; with a critic, whose values come later, all rollouts with a row.
    loud = {s.rollout for s in samples if settings.has_critic or bool((s.advantages[s.mask] != 0).any())}
    metrics |= rollout_shares(episodes, dropped=dropped, loud=loud)
    metrics |= {} if settings.has_critic else {"groups_silent": _silent(groups, loud)}
    kept = tuple(tuple(calls) for calls in credits)
    # A critic's values or a penalty change advantages per token later, so a call then has no single advantage.
    is_final = not settings.has_critic and not settings.algorithm.use_kl_in_reward
    trained: defaultdict[str, set[str]] = defaultdict(set)
    for sample in samples:
        trained[sample.rollout].update(span_id for span_id, _, _ in sample.calls)
    uses = group_uses(
        groups,
        trained=[trained[rollout] for rollout, _ in rollouts],
        loud=loud,
        credits=[{call.span_id: call.value for call in calls} for calls in kept],
        advantages=by_span if is_final else None,
        refused=refused,
    )
    return PreparedStep(samples=samples, rollouts=rollouts, metrics=metrics, credits=kept, uses=uses, tokens=tokens)


def soft_overlong(settings: VerlSettings) -> SoftOverlong:
    """Return the penalty for long answers that VERL's keys describe.

    It equals that of VERL's reward manager `dapo` up to the limit of an answer, where VERL's answers end. Beyond the
    limit it stays constant; VERL's would grow.
    """
    long = settings.reward.reward_kwargs
    buffer = long.overlong_buffer_cfg
    if not buffer.enable:
        return SoftOverlong()
    return SoftOverlong(limit=long.max_resp_len or 0, buffer=buffer.len, factor=buffer.penalty_factor)


def _check_length(row: Row, reason: str, settings: VerlSettings) -> None:
    """Raise RowTooLongError if `reason` is a prompt that is too long and the configuration says to stop."""
    if reason == "prompt_too_long" and not settings.data.filter_overlong_prompts:
        raise RowTooLongError(
            f"The rollout {row.rollout_id!r} has a prompt of more than data.max_prompt_length = "
            f"{settings.data.max_prompt_length} tokens, and data.filter_overlong_prompts is false. Raise the length, "
            "or set data.filter_overlong_prompts = true to leave such rows out and count them."
        )


def _check_ids(episodes: Sequence[Episode]) -> None:
    """Raise MissingTokenIdsError if no call has token ids, because such a step would silently train nothing."""
    calls = [call for episode in episodes for call in episode.transitions]
    missing = [call for call in calls if call.reject == "missing_token_ids"]
    if missing and len(missing) == len(calls):
        raise MissingTokenIdsError(
            f"None of {len(calls)} calls has token ids ({missing[0].detail or 'the server returned none'}), and VERL "
            "trains on tokens. Serve the policy with agl's torch policy, or with vLLM or SGLang behind agl's gateway."
        )


def read_row(
    row: Row,
    *,
    group: int,
    advantages: Mapping[str, float],
    temperatures: Mapping[str, float | None],
    settings: VerlSettings,
) -> RowSample | str:
    """Return a row as a sample, or the reason why it cannot be trained on; `""` if no call in it has credit."""
    ids_T = from_bytes(row.ids, "<i4").long()  # [T]; packed as int32, indexed by torch as int64
    # The policy's own tokens are trained: its segments of the row whose calls have credit. Prompts, tool results and
    # tokens of agents that are not trained keep mask 0.
    mask_T = torch.zeros(len(ids_T), dtype=torch.bool)  # [T]
    found: set[float] = set()
    counted = [part for part in row.segments if part.span_id in advantages]
    for part in counted:
        mask_T[part.start : part.stop] = True
        given = temperatures.get(part.span_id)
        found.add(1.0 if given is None else given)  # a request without a temperature is drawn at 1
    mask_T[:1] = False  # nothing predicts the first token of a row
    trained = mask_T.nonzero()
    if not len(trained):
        return ""
    first, stop = int(trained[0]), int(trained[-1]) + 1  # the response is [first, stop), so P = first and R = stop - P
    if first > settings.data.max_prompt_length:
        return "prompt_too_long"
    if stop - first > settings.data.max_response_length:
        return "response_too_long"
    if len(found) > 1:
        return "mixed_temperatures"  # VERL's engine has one temperature per row, to divide all its logits by
    # Positions from the start of the response; a call that begins before it (at token 0) is cut there.
    calls = tuple((part.span_id, max(0, part.start - first), part.stop - first) for part in counted)
    return RowSample(
        rollout=row.rollout_id,
        group=group,
        ids=ids_T[:stop],
        mask=mask_T[first:stop],
        advantages=spread(advantages, calls=calls, length=stop - first),
        behaviour=from_bytes(row.logprobs, "<f4")[first:stop],
        temperature=found.pop() or 1.0,  # 0 is greedy, whose log-probabilities are reported at 1
        calls=calls,
    )


def spread(values: Mapping[str, float], *, calls: Sequence[tuple[str, int, int]], length: int) -> Tensor:
    """Return the value of each call, given by span id, at all tokens of the call, and 0 elsewhere; [R], float32."""
    # One value for all tokens of a call: credit is per call, not per token.
    found_R = torch.zeros(length)
    for span_id, start, stop in calls:
        # A number beyond float32 becomes infinite, and an update with it is skipped.
        found_R[start:stop] = torch.tensor(values[span_id], dtype=torch.float64).float()
    return found_R


def _metrics(groups: Sequence[Sequence[Episode]], samples: Sequence[RowSample]) -> dict[str, float]:
    # Rollouts without a reward are left out of the mean reward; no value could stand for them.
    rewards = torch.tensor([e.reward for group in groups for e in group if e.reward is not None], dtype=torch.float64)
    calls = [call for group in groups for episode in group for call in episode.transitions]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "groups": float(len(groups)),
        "rollouts": float(sum(len(group) for group in groups)),
        "rows": float(len(samples)),
        "calls_without_ids": float(sum(call.reject == "missing_token_ids" for call in calls)),
    }


def _silent(groups: Sequence[Sequence[Episode]], loud: set[str]) -> float:
    """Count the groups whose advantages are all 0, for example because their rewards are equal.

    `loud` has the ids of the rollouts with another advantage.
    """
    return float(sum(1 for group in groups if not any(e.rollout.rollout_id in loud for e in group)))
