"""Runs the replays and forks of a counterfactual credit: rollouts of a step again, with some answers replaced."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec.structs import replace

from agl.contracts import (
    FORK,
    REPLAY,
    REPLAY_VERSION,
    TRAINED_POLICIES,
    AnyPlan,
    CounterfactualCredit,
    Credit,
    ForkPlan,
    ReplayPlan,
    Store,
)
from agl.errors import AglError, CaptureError, ConfigError
from agl.schemas import Episode, Json, Rollout, to_builtins, to_json
from agl_inspect.rollouts.answers import answer_counts
from agl_run.plan import Plan

RunAll = Callable[[Sequence[Rollout]], Awaitable[list[Episode]]]
"""A function that enqueues rollouts and returns their episodes in the same order."""


def check_replays(plan: Plan, credit: Credit) -> None:
    """Raise :class:`ConfigError` if the credit replays rollouts and the runner cannot replay."""
    if isinstance(credit, CounterfactualCredit) and not can_replay(plan):
        raise ConfigError(
            f"the credit {type(credit).__name__} replays rollouts and answers the agents' model calls in their own "
            f"process, which the {plan.config.runner.use!r} runner cannot do. Use the 'async' or the 'process' runner, "
            "or a credit without replays, such as 'episode' or 'role'"
        )


def can_replay(plan: Plan) -> bool:
    """Run the replays and forks that the plans describe; see :class:`agl.contracts.ReplayFn`."""
    return plan.manager.runner(plan.config.runner.use).can_replay


class Replays:
    """Replays and forks the episodes of one step; see :class:`agl.contracts.ReplayFn`.

    Args:
        episodes: The episodes that may be replayed.
        prefix: Prefix of the replays' ids.
        run_all: Runs the replays.
        store: The store that records the replays.

    Attributes:
        count: Replays so far, including those that a repeated step found in the store.
        failed: Replays that did not succeed.
        calls: Live model calls of the replays, which were paid for.
    """

    def __init__(self, episodes: Sequence[Episode], *, prefix: str, run_all: RunAll, store: Store) -> None:
        self._recorded = {episode.rollout.rollout_id: episode.rollout for episode in episodes}
        # The position of a call is the same in every run, its span id is not.
        self._places = {call.span_id: place for one in episodes for place, call in enumerate(one.transitions)}
        self._prefix = prefix
        self._run_all = run_all
        self._store = store
        self.count = 0
        self.failed = 0
        self.calls = 0

    async def __call__(self, plans: Sequence[AnyPlan]) -> list[Episode]:
        """Run the replays and forks of some plans; see :class:`agl.contracts.ReplayFn`."""
        # By plan: equal plans are one rollout, and are paid for once.
        rollouts = {plan: self._rollout(plan) for plan in plans}
        episodes = dict(zip(rollouts, await self._run_all(list(rollouts.values())), strict=True))
        for plan, episode in episodes.items():
            if isinstance(plan, ReplayPlan):
                await self._check_answered(plan, episode)
        # A later fork may be given the answer that an earlier one drew.
        self._recorded |= {episode.rollout.rollout_id: episode.rollout for episode in episodes.values()}
        self.count += len(episodes)
        self.calls += sum(
            answer_counts(call.model_version for call in episode.transitions).live for episode in episodes.values()
        )
        self.failed += sum(episode.rollout.status != "succeeded" for episode in episodes.values())
        return [episodes[plan] for plan in plans]

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of replays, failures and live calls as metrics; empty if nothing was replayed."""
        counts = {"replays": self.count, "replays_failed": self.failed, "replay_calls": self.calls}
        return {name: float(count) for name, count in counts.items()} if self.count else {}

    def _rollout(self, plan: AnyPlan) -> Rollout:
        then, other = self._recorded.get(plan.rollout_id), _other(plan)
        if then is None or (other and other not in self._recorded):
            raise AglError(
                f"the credit asked to replay {plan.rollout_id!r} (with answers of {other!r}), which this step did not "
                "collect; this is a defect of the credit"
            )
        # The id follows from the plan, so a repeated step finds its replays.
        digest = hashlib.blake2b(to_json(plan), digest_size=8).hexdigest()
        seed = self._seed(plan, then)
        again = Rollout(
            rollout_id=f"{self._prefix}{digest}",
            task=then.task,
            experiment=then.experiment,
            group_id=then.group_id,
            # A replay never trains by itself; its reward becomes the credit of the rollout that it
            # replays.
            mode="test",
            resources=then.resources,
            retry=then.retry,
            hidden=then.hidden,
        )
        if isinstance(plan, ForkPlan):
            return as_fork(again, plan, of=then, metadata={**then.metadata, **seed})
        return replace(again, metadata={**then.metadata, **seed, REPLAY: to_builtins(replace(plan, mode=then.mode))})

    def _seed(self, plan: AnyPlan, then: Rollout) -> Mapping[str, int]:
        """Return the seed of a replay, derived from its plan and the seeds of the recorded rollouts.

        The plan enters the seed so that different samples draw different tokens.
        """
        if "seed" not in then.metadata:
            return {}
        other = _other(plan)
        sibling = self._recorded[other].metadata.get("seed") if other else None
        words = to_json([then.metadata["seed"], sibling, self._as_seed(plan)])
        return {"seed": int.from_bytes(hashlib.blake2b(words, digest_size=6).digest())}

    def _as_seed(self, plan: AnyPlan) -> AnyPlan | list[Json]:
        """Return the plan without rollout and span ids, which differ from run to run, as an input of the seed."""
        if isinstance(plan, ReplayPlan):
            return replace(plan, rollout_id="", sibling="")
        return [FORK, self._places.get(plan.span_id, -1), plan.is_coupled, plan.sample]

    async def _check_answered(self, plan: ReplayPlan, episode: Episode) -> None:
        """Raise :class:`CaptureError` if a model answered for a replaced agent, which invalidates the replay."""
        live = _unanswered(plan, episode)
        from agl.stores import all_spans  # here, because a check of settings reads no spans

        spans = await all_spans(self._store, episode.rollout.rollout_id) if live else []
        for span in spans:
            if span.span_id in live and span.call is not None and span.call.dialect != "embeddings":
                raise CaptureError(
                    f"a model answered for the agent {live[span.span_id]!r} in the replay "
                    f"{episode.rollout.rollout_id}, which replaces that agent. Replays answer calls that leave through "
                    "httpx or httpx2 in the agent's process, made "
                    "while the agent's span is open. Use a client on httpx, such as openai's, or another credit"
                )


def as_fork(rollout: Rollout, plan: ForkPlan, *, of: Rollout, metadata: Mapping[str, Json]) -> Rollout:
    """Turn a rollout into a fork of ``of``; it gets one attempt, because another one would diverge in the same way."""
    retry = replace(rollout.retry, max_attempts=1)
    trains = {TRAINED_POLICIES: of.metadata[TRAINED_POLICIES]} if TRAINED_POLICIES in of.metadata else {}
    fork = to_builtins(replace(plan, mode=of.mode))
    return replace(rollout, retry=retry, metadata={**metadata, **trains, FORK: fork})


def _other(plan: AnyPlan) -> str:
    """Return the id of the second rollout whose answers the plan needs; ``""`` if it needs no second one."""
    return plan.answer_rollout if isinstance(plan, ForkPlan) else plan.sibling


def _unanswered(plan: ReplayPlan, episode: Episode) -> dict[str, str]:
    """Map span ids to agents, for calls that a model answered although the plan replaces their agent."""
    return {
        call.span_id: call.agent
        for call in episode.transitions
        if call.agent in plan.replaced and not call.model_version.startswith(REPLAY_VERSION)
    }
