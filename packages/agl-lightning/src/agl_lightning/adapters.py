"""Adapters: what a trainer's algorithm reads of the recorded spans, and spans as messages or triplets by hand."""

from collections.abc import Sequence
from typing import Any

from agl.dialects import call_messages
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.schemas import Attempt, Rollout, Span, Transition, unpack_floats, unpack_ids
from agl_lightning.types import Triplet

_LEFT_OUT = frozenset({"error", "incomplete", "superseded", "not_final", "late", "not_selected"})
_SETTINGS = frozenset({"exclude_llm_call_in_reward", "llm_call_match", "repair_hierarchy", "reward_match"})


class TraceToMessages:
    """Converts spans to the conversations of their model calls, in OpenAI's chat format."""

    agent_match: str | None = None

    def adapt(self, spans: Sequence[Span]) -> list[dict[str, Any]]:
        """Return ``{"messages": [...], "tools": [...]}`` for every answered call."""
        calls = [span.call for span in spans if span.call is not None and not span.call.error]
        return [{"messages": call_messages(call), "tools": _tools(call.request)} for call in calls]


class TracerTraceToTriplet:
    """Converts spans to one triplet for each call that trains.

    Args:
        agent_match: Regular expression over the names of agents, nodes and roles whose calls train.
        settings: Settings of Agent Lightning that repair and match spans, which nothing needs here: calls carry the
            agent that made them and their own token ids.
    """

    def __init__(self, agent_match: str | None = None, **settings: Any) -> None:
        unknown = sorted(settings.keys() - _SETTINGS)
        if unknown:
            raise ConfigError(
                f"the adapter got {unknown}; it takes agent_match, a regular expression over the names of agents, see "
                "docs/how-to/roles.md"
            )
        self.agent_match = agent_match
        self.settings = settings

    def adapt(self, spans: Sequence[Span]) -> list[Triplet]:
        """Return the calls of a rollout's last attempt in order; the last one has the rollout's reward.

        Calls whose endpoint gave no token ids have empty lists.
        """
        if not spans:
            return []
        ids: dict[str, Any] = {"rollout_id": spans[0].rollout_id, "attempt_id": spans[-1].attempt_id}
        rollout = Rollout(rollout_id=ids["rollout_id"], task=None, attempt_id=ids["attempt_id"], status="succeeded")
        attempt = Attempt(**ids, number=1, worker="", status="succeeded")
        episode = build_episode(rollout, attempt, spans, agent_match=self.agent_match)
        calls = [call for call in episode.transitions if call.reject not in _LEFT_OUT]
        return [_triplet(call, episode.reward if call is calls[-1] else None) for call in calls]


class LlmProxyTraceToTriplet(TracerTraceToTriplet):
    """Converts spans that the gateway recorded, which are like all others."""


def _tools(request: Any) -> list[Any] | None:
    return request.get("tools") if isinstance(request, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # any JSON


def _triplet(call: Transition, final: float | None) -> Triplet:
    return Triplet(
        prompt={"token_ids": list(unpack_ids(call.prompt_ids))},
        response={"token_ids": list(unpack_ids(call.response_ids)), "logprobs": list(unpack_floats(call.logprobs))},
        reward=final if call.reward is None else call.reward,
        metadata={"agent_name": call.agent, "span_id": call.span_id},
    )
