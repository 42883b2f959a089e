"""Runs the replays of a counterfactual credit: rollouts of a step again, with some agents replaced."""

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from agl.contracts import Credit, Store
from agl.errors import AglError, CaptureError, ConfigError
from agl.schemas import Episode, Rollout, to_builtins, to_json
from agl.stores import all_spans
from agl_run.experiment.plan import Plan
from agl_run.replay.plan import REPLAY, CounterfactualCredit, ReplayPlan
from agl_run.replay.player import VERSION

RunAll = Callable[[Sequence[Rollout]], Awaitable[list[Episode]]]
"""Enqueues rollouts and returns their episodes in order."""


def check_replays(plan: Plan, credit: Credit) -> None:
    """Raise :class:`ConfigError` if the credit replays rollouts and the runner cannot."""
    runner = plan.config.runner.use
    if isinstance(credit, CounterfactualCredit) and not plan.manager.runner(runner).can_replay:
        raise ConfigError(
            f"the credit {type(credit).__name__} replays rollouts and answers the agents' model calls in their own "
            f"process, which the {runner!r} runner cannot do. Use the 'async' or the 'process' runner, or a credit "
            "without replays, such as 'episode' or 'role'"
        )


class Replays:
    """Runs the episodes of one step again; see :class:`agl_run.replay.ReplayFn`.

    Args:
        episodes: The episodes that may be replayed.
        prefix: Start of the replays' ids.
        run_all: Runs the replays.
        store: The store that records them.

    Attributes:
        count: Replays so far, including those that a repeated step found in the store.
        failed: Replays that did not succeed.
    """

    def __init__(self, episodes: Iterable[Episode], *, prefix: str, run_all: RunAll, store: Store) -> None:
        self._recorded = {episode.rollout.rollout_id: episode.rollout for episode in episodes}
        self._prefix = prefix
        self._run_all = run_all
        self._store = store
        self.count = 0
        self.failed = 0

    async def __call__(self, plans: Sequence[ReplayPlan]) -> list[Episode]:
        """See :class:`agl_run.replay.ReplayFn`."""
        rollouts = {plan: self._rollout(plan) for plan in plans}
        episodes = dict(zip(rollouts, await self._run_all(list(rollouts.values())), strict=True))
        for plan, episode in episodes.items():
            await self._check_answered(plan, episode)
        self.count += len(episodes)
        self.failed += sum(episode.rollout.status != "succeeded" for episode in episodes.values())
        return [episodes[plan] for plan in plans]

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics to log; empty if nothing was replayed."""
        return {"replays": float(self.count), "replays_failed": float(self.failed)} if self.count else {}

    def _rollout(self, plan: ReplayPlan) -> Rollout:
        then = self._recorded.get(plan.rollout_id)
        if then is None or (plan.sibling and plan.sibling not in self._recorded):
            raise AglError(
                f"the credit asked to replay {plan.rollout_id!r} (sibling {plan.sibling!r}), which this step did not "
                "collect; this is a defect of the credit"
            )
        digest = hashlib.blake2b(to_json(plan), digest_size=8).hexdigest()
        return Rollout(
            rollout_id=f"{self._prefix}{digest}",
            task=then.task,
            experiment=then.experiment,
            group_id=then.group_id,
            mode="test",
            resources=then.resources,
            retry=then.retry,
            hidden=then.hidden,
            metadata={**then.metadata, **self._seed(plan, then), REPLAY: to_builtins(plan)},
        )

    def _seed(self, plan: ReplayPlan, then: Rollout) -> Mapping[str, int]:
        """Return the seed of a replay's draws, which follows from its plan and the recorded rollouts' seeds.

        With the seed of the recorded rollout alone, all samples of a plan would draw the same tokens.
        """
        if "seed" not in then.metadata:
            return {}
        sibling = self._recorded[plan.sibling].metadata.get("seed") if plan.sibling else None
        words = to_json([then.metadata["seed"], sibling, replace(plan, rollout_id="", sibling="")])
        return {"seed": int.from_bytes(hashlib.blake2b(words, digest_size=6).digest())}

    async def _check_answered(self, plan: ReplayPlan, episode: Episode) -> None:
        """Raise :class:`CaptureError` if a model answered for a replaced agent, which makes the replay worthless."""
        live = _live_calls(plan, episode)
        spans = await all_spans(self._store, episode.rollout.rollout_id) if live else []
        for span in spans:
            if span.span_id in live and span.call is not None and span.call.dialect != "embeddings":
                raise CaptureError(
                    f"a model answered for the agent {live[span.span_id]!r} in the replay "
                    f"{episode.rollout.rollout_id}, which replaces that agent. Replays answer calls that leave through "
                    "httpx or httpx2 in the agent's process, made "
                    "while the agent's span is open. Use a client on httpx, such as openai's, or another credit"
                )


def _live_calls(plan: ReplayPlan, episode: Episode) -> dict[str, str]:
    """Return the replaced agents whose calls the replay did not answer, by the call's span id."""
    return {
        call.span_id: call.agent
        for call in episode.transitions
        if call.agent in plan.replaced and not call.model_version.startswith(VERSION)
    }
