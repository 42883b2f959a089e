"""Scores recorded rollouts again with an experiment's rewards, as its worker would, without running the agent.

Nothing is written. An emitter gets the same input as in a worker: the rollout with the task's hidden keys, and the
spans of the attempt until it ended, without the rewards that evaluators added. Rewards of the agent and of people stay,
and still count.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from agl import PluginManager
from agl.contracts import GroupRewardEmitter, Policy, Recording, RewardEmitter, Upstream
from agl.episodes import Score, ScoreOptions, admitted_rewards, recorded_rewards, score
from agl.errors import AglError, ConfigError, RewardError
from agl.schemas import Record, Reward, Rollout, Span
from agl.tracing import make_reward_span
from agl_inspect.records.names import broke_in_reward, run_of
from agl_run import AgentSpec, ExperimentConfig
from agl_run.engine import (
    Plan,
    build_rewards,
    check_known,
    compared,
    named,
    placeholder_keys,
    policy_params,
    rewards_of,
    score_options,
)

_ENDPOINT = "openai"
"""The kind of policy that only names an endpoint, so that its model can be called without starting anything."""


class EmitterError(Record, frozen=True, kw_only=True):
    """The exception of a reward emitter: the emitter's name, and the exception's text."""

    emitter: str
    message: str


class Rescored(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A rollout that was scored again.

    Attributes:
        group: Key of the rollout's group: rollouts that training compares with each other have the same key.
        before: The reward that trained, ``None`` without one.
        after: The reward that would train now, ``None`` without one.
        recorded: The recorded rewards that evaluators gave, which the new rewards replace.
        kept: The other recorded rewards, which still count.
        rewards: The new rewards.
        errors: The errors of emitters. A worker would have failed the rollout, so with an error ``after`` is ``None``.
        rule: The rule that selects the reward that trains, or the reason why there is no such reward.
        skipped: The reason why the rollout was not scored, ``""`` if it was scored.
    """

    rollout_id: str
    group_id: str
    group: str
    before: float | None
    after: float | None
    recorded: list[Reward]
    kept: list[Reward]
    rewards: list[Reward]
    errors: list[EmitterError]
    rule: str = ""
    skipped: str = ""


class Rescorer:
    """Scores recordings again.

    Args:
        emitters: The reward emitters by name.
        before: The rules by which recorded rewards count.
        after: The rules by which new rewards count.
    """

    def __init__(
        self, emitters: Sequence[tuple[str, RewardEmitter]], *, before: ScoreOptions, after: ScoreOptions
    ) -> None:
        self._emitters = emitters
        self._comparing = [(name, one) for name, one in emitters if isinstance(one, GroupRewardEmitter)]
        self._compared: defaultdict[str, list[Reward | EmitterError]] = defaultdict(list)
        self._before, self._after = before, after

    async def run(self, recordings: AsyncIterator[Recording], *, concurrency: int) -> AsyncIterator[Rescored]:
        """Score up to ``concurrency`` recordings at once, and yield the results in order.

        At most ``concurrency`` recordings are in memory, or all of them if a reward compares rollouts.
        """
        if self._comparing:
            recordings = self._compare(recordings)
        waiting: deque[asyncio.Task[Rescored]] = deque()
        try:
            async for recording in recordings:
                waiting.append(asyncio.create_task(self.rescore(recording)))
                if len(waiting) >= concurrency:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _compare(self, recordings: AsyncIterator[Recording]) -> AsyncIterator[Recording]:
        """Yield the recordings, after the rewards that compare rollouts have seen every group among them."""
        every = [one async for one in recordings]
        groups: defaultdict[str, list[Recording]] = defaultdict(list)
        for one in every:
            if one.rollout.status == "succeeded":
                spans = [span for span in _without_evaluators(one) if not span.is_late]
                groups[_group_of(one.rollout)].append(msgspec.structs.replace(one, spans=spans))
        await asyncio.gather(*(self._compare_group(group) for group in groups.values() if len(group) > 1))
        for one in every:
            yield one

    async def _compare_group(self, group: Sequence[Recording]) -> None:
        for name, emitter in self._comparing:
            found: Sequence[Reward | EmitterError]
            try:
                found = await compared(name, emitter, group)
            except RewardError as error:
                found = [EmitterError(emitter=name, message=str(error))] * len(group)
            for one, reward in zip(group, found, strict=True):
                self._compared[one.rollout.rollout_id].append(reward)

    async def rescore(self, recording: Recording) -> Rescored:
        """Score one recording, which must have all spans of its deciding attempt."""
        rollout = recording.rollout
        own = [span for span in recording.spans if span.attempt_id == rollout.attempt_id]
        kept = _without_evaluators(recording)
        found = Rescored(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            group=_group_of(rollout),
            before=_score(own, rollout, self._before).value if rollout.status == "succeeded" else None,
            after=None,
            recorded=[reward for reward in _rewards(own, rollout) if reward.source == "evaluator"],
            kept=_rewards(kept, rollout),
            rewards=[],
            errors=[],
        )
        if rollout.status != "succeeded" and not _is_unjudged(recording):
            return msgspec.structs.replace(found, skipped=f"{rollout.status}: only successful attempts are judged")
        rewards, errors = await self._judge(rollout, [span for span in kept if not span.is_late])
        made = [make_reward_span(rollout.rollout_id, rollout.attempt_id or "", reward) for reward in rewards]
        now = _score([*kept, *made], rollout, self._after)
        after = None if errors else now.value
        return msgspec.structs.replace(found, after=after, rule=now.note, rewards=rewards, errors=errors)

    async def _judge(self, rollout: Rollout, spans: Sequence[Span]) -> tuple[list[Reward], list[EmitterError]]:
        """Call the emitters one after the other; if one raises, the others are still called."""
        judged = msgspec.structs.replace(rollout, status="running", finished_at=0.0)  # as emitters see it in a worker
        found = self._compared[rollout.rollout_id]
        rewards = [each for each in found if isinstance(each, Reward)]
        errors = [each for each in found if isinstance(each, EmitterError)]
        for name, emitter in self._emitters:
            try:
                rewards += await rewards_of(name, emitter, judged, spans)
            except Exception as error:  # noqa: BLE001  # an emitter may raise anything, and harms one rollout only
                text = str(error) if isinstance(error, AglError) else f"{type(error).__name__}: {error}"
                errors.append(EmitterError(emitter=name, message=text))
        return rewards, errors


async def make_rescorer(plan: Plan, *, before: ScoreOptions) -> Rescorer:
    """Make a rescorer with the rewards of an experiment; ``before`` are the rules by which recorded rewards count.

    Rewards can call the policies that are endpoints; policies that would have to be started are not available.

    Raises:
        ConfigError: The experiment has no reward, or one cannot be built.
        PluginError: A component is unknown or broken.
    """
    if not plan.config.reward:
        raise ConfigError(
            'the experiment has no [[reward]] to score with; add one, such as [[reward]] use = "exact-match", or '
            "pass --set reward.use=NAME"
        )
    with placeholder_keys():
        check_known(plan)
    return Rescorer(await build_emitters(plan), before=before, after=score_options(plan.config.experiment))


async def build_emitters(plan: Plan) -> list[tuple[str, RewardEmitter]]:
    """Build an experiment's rewards for recorded rollouts; return them as ``(name, emitter)``.

    Rewards can call the policies that are endpoints; the others would have to be started.
    """
    upstreams, unreachable = await _endpoints(plan)
    emitters = build_rewards(plan, upstreams, unreachable=unreachable)
    return [(name, named(name, emitter, folder=plan.folder)) for name, emitter in emitters]


def rewards_plan(config: ExperimentConfig, *, folder: Path, manager: PluginManager) -> Plan:
    """Return a plan that suffices for building rewards: it has no tasks, and its agent is not imported."""
    return Plan(
        config=config,
        folder=folder,
        manager=manager,
        agent=AgentSpec.of(config.experiment.agent, folder=str(folder)),
        train=(),
        val=(),
        resources={},
        store=None,
        workdir=folder,
    )


async def _endpoints(plan: Plan) -> tuple[list[Upstream], dict[str, str]]:
    """Return the policies that are endpoints, and, for each other policy, the reason why a reward cannot call it."""
    upstreams: list[Upstream] = []
    unreachable: dict[str, str] = {}
    for name, config in plan.config.policy.items():
        if config.use != _ENDPOINT:
            unreachable[name] = (
                f"a reward calls the policy {name!r}, which an experiment starts (use = {config.use!r}), and scoring "
                f"again starts nothing; serve the model, and pass --set policy.{name}.use=openai with its base_url"
            )
            continue
        try:
            policy: Policy = plan.manager.build(plan.manager.policy(_ENDPOINT), name=name, **policy_params(plan, name))
            served = await policy.start()
        except AglError as error:  # the error matters only if a reward calls this policy
            unreachable[name] = str(error)
            continue
        key = served.api_key_env
        upstreams.append(Upstream(name=name, base_url=served.base_urls[0], model=served.model, api_key_env=key))
    return upstreams, unreachable


def _group_of(rollout: Rollout) -> str:
    """Return a key that is equal for the rollouts of one task in one step; without a group id, the key is unique."""
    if not rollout.group_id:
        return rollout.rollout_id
    algorithm, step = rollout.metadata.get("algorithm", ""), rollout.metadata.get("step", "")
    return f"{rollout.experiment}/{run_of(rollout) or ''}/{rollout.mode}/{algorithm}/{step}/{rollout.group_id}"


def _is_unjudged(recording: Recording) -> bool:
    """Return true if the rollout failed because a reward emitter raised an error, and not because of the agent."""
    deciding = [each for each in recording.attempts if each.attempt_id == recording.rollout.attempt_id]
    return bool(deciding) and broke_in_reward(deciding[0])


def _without_evaluators(recording: Recording) -> list[Span]:
    """Return the spans of the deciding attempt without the rewards that evaluators gave."""
    own = [span for span in recording.spans if span.attempt_id == recording.rollout.attempt_id]
    return [span for span in own if span.reward is None or span.reward.source != "evaluator"]


def _rewards(spans: Sequence[Span], rollout: Rollout) -> list[Reward]:
    return [span.reward for span in recorded_rewards(spans, rollout.attempt_id) if span.reward is not None]


def _score(spans: Sequence[Span], rollout: Rollout, options: ScoreOptions) -> Score:
    return score(admitted_rewards(spans, rollout.attempt_id, options), options=options)
