"""Reads finished rollouts as episodes, and decides which of them train and with which reward."""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from agl.algorithms import AlgorithmConfig
from agl.contracts import Recording, RolloutQuery, SpanChoice, Store
from agl.episodes import EpisodeOptions, ScoreOptions, build_episode
from agl.errors import MissingTokenIdsError
from agl.hints import count_of
from agl.schemas import Episode, Record, Span
from agl.stores import read_recordings
from agl_inspect.stores import proposal
from agl_run.config.sections import ExperimentSection
from agl_run.plan import Plan
from agl_run.watch.agreement import UNATTRIBUTED, UNSEEN, describe, refusal
from agl_run.watch.failures import RolloutCounts

_TOO_LONG = re.compile(
    r"HTTP status (400|413): .*("
    r"model's context|context (length|window|size)|maximum context|maximum model length|input token count"
    r"|prompt is too long|request entity too large)",
    re.IGNORECASE | re.DOTALL,
)
"""Matches the refusals of a request that does not fit into a model's context.

The words are those of our own servers, OpenAI, Anthropic, Google, vLLM, SGLang, llama.cpp and nginx. A refused key or
rate may mention contexts and tokens too, but has another status.
"""


def training_reward(
    episode: Episode, section: ExperimentSection, *, lowest: float | None = None
) -> tuple[float | None, str]:
    """Return the reward with which a rollout trains and ``""``, or ``None`` and the reason why it is left out.

    ``lowest`` is the lowest reward of the rollouts of the request that succeeded, ``None`` if none did: only beside
    these can a rollout that overflowed teach anything.
    """
    is_failed = episode.rollout.status != "succeeded"
    # Missing calls come first: a reward of a rollout that is incomplete would train on the wrong
    # calls.
    if refused := refusal(episode, section):
        return None, refused
    if not is_failed and episode.reward is not None:
        return episode.reward, ""
    if episode.unreadable:
        return None, "damaged spans"
    if (section.failed if is_failed else section.missing_reward) == "penalise":
        return section.penalty, ""
    if is_failed and section.failed == "overflow" and lowest is not None and has_overflowed(episode):
        return min(section.penalty, lowest), ""
    return None, f"{episode.rollout.status}" if is_failed else "no reward"


def has_overflowed(episode: Episode) -> bool:
    """Return true if a rollout failed whose last selected call was cut at a token limit or did not fit the context."""
    calls = [call for call in episode.transitions if call.reject not in ("not_selected", "superseded", "late")]
    is_failed = episode.rollout.status == "failed"
    return is_failed and bool(calls) and (calls[-1].is_truncated or bool(_TOO_LONG.match(calls[-1].detail)))


class EpisodeSelection(Record, frozen=True, kw_only=True):
    """Selects the calls and the rewards from which an episode is built.

    Attributes:
        agents: Regular expression over the names of the agents whose calls train; ``None`` for all.
        policy: The policy whose calls train; ``None`` for any.
        options: Further options for building the episode.
    """

    agents: str | None = None
    policy: str | None = None
    options: EpisodeOptions = EpisodeOptions()


def score_options(section: ExperimentSection) -> ScoreOptions:
    """Return the experiment's options for selecting and weighting the rewards that train."""
    return ScoreOptions(weights=section.reward_weights, trust_agent=section.trust_agent_rewards)


def selection_of(plan: Plan, algorithm: AlgorithmConfig | None) -> EpisodeSelection:
    """Return the selection of calls and rewards for an algorithm; with ``None``, all calls are selected."""
    section = plan.config.experiment
    policies = [name for name in algorithm.tunes if name in plan.config.policy] if algorithm else []
    return EpisodeSelection(
        agents=(algorithm.agents or None) if algorithm else None,
        # With several policies, the algorithm itself distinguishes their calls.
        policy=policies[0] if len(policies) == 1 else None,
        options=EpisodeOptions(
            score=score_options(section),
            unseen="accept" if section.unseen_calls == "accept" else "drop",
            unattributed="accept" if section.unattributed_calls == "accept" else "drop",
        ),
    )


async def read_episodes(store: Store, rollout_ids: Sequence[str], *, selection: EpisodeSelection) -> list[Episode]:
    """Read the episodes of finished rollouts, in the given order."""
    return [episode_of(recording, selection) for recording in await read_finished(store, rollout_ids)]


async def read_finished(
    store: Store, rollout_ids: Sequence[str], *, cached: Mapping[str, tuple[str, list[Span]] | None] | None = None
) -> list[Recording]:
    """Read finished rollouts and the spans of their deciding attempts, in the given order, with few requests.

    Args:
        store: The store of the rollouts.
        rollout_ids: Distinct ids.
        cached: Attempt id and spans of rollouts that need not be read again; a rollout may be missing or ``None``.
    """
    # What the worker handed over saves the larger part of the read: the spans.
    known = {rollout_id: found for rollout_id in rollout_ids if (found := (cached or {}).get(rollout_id)) is not None}
    recordings = await _recordings(store, list(known), spans="none")
    for recording in recordings.values():
        attempt_id, spans = known[recording.rollout.rollout_id]
        if recording.rollout.attempt_id == attempt_id:  # another attempt may have decided the rollout
            recordings[recording.rollout.rollout_id] = msgspec.structs.replace(recording, spans=spans)
        else:
            # The spans are read below, together with those of all rollouts that were not handed
            # over.
            del known[recording.rollout.rollout_id]
    recordings |= await _recordings(store, [each for each in rollout_ids if each not in known], spans="deciding")
    return [recordings[rollout_id] for rollout_id in rollout_ids]


async def _recordings(store: Store, rollout_ids: Sequence[str], *, spans: SpanChoice) -> dict[str, Recording]:
    query = RolloutQuery(ids=tuple(rollout_ids), limit=len(rollout_ids))
    found = [recording async for recording in read_recordings(store, query, spans=spans)] if rollout_ids else []
    return {recording.rollout.rollout_id: recording for recording in found}


def episode_of(recording: Recording, selection: EpisodeSelection) -> Episode:
    """Build the episode of a finished rollout from the spans of its deciding attempt."""
    rollout = recording.rollout
    # A rollout has one attempt that counts; those before it failed or lost their worker.
    deciding = [attempt for attempt in recording.attempts if attempt.attempt_id == rollout.attempt_id]
    return build_episode(
        rollout,
        deciding[0] if deciding else None,
        recording.spans,
        agent_match=selection.agents,
        policy=selection.policy,
        options=selection.options,
    )


def with_reward(episode: Episode, reward: float) -> Episode:
    """Return the episode with ``reward`` as its reward."""
    # Most rewards stay as they are, and episodes are large.
    return episode if episode.reward == reward else msgspec.structs.replace(episode, reward=reward)


def nothing_left(episodes: Sequence[Episode], dropped: Mapping[str, int], *, store_url: str) -> str:
    """Return the error text for a step in which no rollout can be used for training."""
    first = episodes[0]
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    errors = RolloutCounts((episode.rollout, episode.attempt) for episode in episodes)
    why = f"The errors: {errors.errors}" if errors.failed else _without_reward(episodes)
    disagreed = next((kind for kind in (UNSEEN, UNATTRIBUTED) if kind in dropped), "")
    if disagreed:
        why = f"Noticed {describe(episodes, disagreed)}"
    look = proposal("Look at one with", "show", errors.example or first.rollout.rollout_id, store_url=store_url)
    return f"none of {count_of(len(episodes), 'rollout')} can be used: {counts}. {why}.{look}"


def _without_reward(episodes: Iterable[Episode]) -> str:
    names = sorted({name for episode in episodes for reward in episode.rewards for name in reward.dimensions})
    if not names:
        return "No reward was returned, emitted or computed"
    return (
        f"Their rewards are the dimensions {', '.join(names)} without a value; give one: "
        "agl.Reward(value=..., dimensions=...), agl.emit_reward(..., primary=NAME), or reward_weights of [experiment]"
    )


def check_trainable(episodes: Sequence[Episode]) -> None:
    """Raise :class:`MissingTokenIdsError` if no selected call has token ids."""
    calls = [transition for episode in episodes for transition in episode.transitions]
    missing = [call for call in calls if call.reject == "missing_token_ids"]
    # A few calls without ids are rejected one by one; all of them mean that the backend cannot give
    # any.
    if missing and len(missing) == len([call for call in calls if call.reject != "not_selected"]):
        raise MissingTokenIdsError(
            f"the backend returned no token ids for any of {len(missing)} calls ({missing[0].detail}); "
            "training on tokens needs them. Serve the model with agl's torch policy, vLLM or SGLang, which return them "
            "when asked"
        )
