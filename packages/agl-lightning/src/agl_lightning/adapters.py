"""Reads recorded spans: as messages, as triplets, and their rewards, texts and objects one by one."""

from collections.abc import Iterable, Sequence
from typing import Any

from agl import semconv
from agl.dialects import call_messages
from agl.episodes import build_episode
from agl.errors import ConfigError
from agl.schemas import Attempt, Reward, Rollout, Span, Transition, unpack_floats, unpack_ids
from agl_lightning.types import Triplet

_LEFT_OUT = frozenset({"error", "incomplete", "superseded", "not_final", "late", "not_selected"})
_SETTINGS = frozenset(
    {"_skip_empty_token_spans", "exclude_llm_call_in_reward", "llm_call_match", "repair_hierarchy", "reward_match"}
)


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
        settings: Settings by which Agent Lightning repairs and matches spans; ignored, because calls here have their
            agent and their token ids.
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
        """Return the calls of a rollout's last attempt in order; the last call has the rollout's reward.

        Calls without token ids have empty lists.
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
    """The same as :class:`TracerTraceToTriplet`, because spans that the gateway recorded have no other form."""


def _tools(request: Any) -> list[Any] | None:
    return request.get("tools") if isinstance(request, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  # any JSON


def _triplet(call: Transition, final: float | None) -> Triplet:
    return Triplet(
        prompt={"token_ids": list(unpack_ids(call.prompt_ids))},
        response={"token_ids": list(unpack_ids(call.response_ids)), "logprobs": list(unpack_floats(call.logprobs))},
        reward=final if call.reward is None else call.reward,
        metadata={"agent_name": call.agent, "span_id": call.span_id},
    )


def get_reward_value(span: Span) -> float | None:
    """Return the reward that a span reports; ``None`` if it reports none."""
    return span.reward.value if span.reward is not None else None


def get_rewards_from_span(span: Span) -> list[Reward]:
    """Return the rewards that a span reports: the scalar first, then its dimensions."""
    if span.reward is None:
        return []
    parts = [Reward(value=value, name=name) for name, value in span.reward.dimensions.items()]
    return [span.reward, *parts]


def is_reward_span(span: Span) -> bool:
    """Return true if a span reports a reward."""
    return get_reward_value(span) is not None


def find_reward_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that report a reward."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Sequence[Span]) -> float | None:
    """Return the last reward that the spans report; ``None`` if no span reports one."""
    return next((span.reward.value for span in reversed(find_reward_spans(spans)) if span.reward), None)


def get_message_value(span: Span) -> str | None:
    """Return the text of a span of :func:`emit_message`; ``None`` for other spans."""
    return span.attributes.get(semconv.MESSAGE)


def get_object_value(span: Span) -> Any:
    """Return the value of a span of :func:`emit_object`; ``None`` for other spans."""
    return span.attributes.get(semconv.OBJECT)
