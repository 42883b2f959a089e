"""The attributes of a model call: by the GenAI conventions, and agl's own for what they lack."""

from agl import semconv
from agl.schemas import Json, ModelCall, Transition
from agl_sinks.otlp.messages import message_attributes

_PROVIDERS = {"messages": "anthropic"}
"""The provider whose wire format a dialect is; OpenAI's for the others."""


def call_attributes(call: ModelCall, seen: Transition | None, *, has_contents: bool) -> dict[str, Json]:
    """Return the attributes that a model call adds to those of its span.

    Args:
        call: The call.
        seen: The call as the episode has it, with its agent, reward and reject reason.
        has_contents: Whether messages and explanations are included.
    """
    return {
        semconv.PROVIDER: _PROVIDERS.get(call.dialect, "openai"),
        semconv.REQUEST_MODEL: call.model,
        semconv.FINISH_REASONS: [call.finish_reason] if call.finish_reason else None,
        **_sampling(call),
        "gen_ai.request.stream": call.is_streamed or None,
        "gen_ai.response.time_to_first_chunk": call.first_token_s if call.is_streamed else None,
        "http.response.status_code": call.status_code or None,
        "agl.dialect": call.dialect,
        "agl.policy": call.policy,
        semconv.MODEL_VERSION: call.model_version,
        **(_seen(seen, has_contents=has_contents) if seen else {}),
        **(message_attributes(call) if has_contents else {}),
    }


def _sampling(call: ModelCall) -> dict[str, Json]:
    sampling = call.sampling
    named = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "max_tokens": sampling.max_tokens,
        "stop_sequences": list(sampling.stop),
        "seed": sampling.seed,
        "choice.count": call.choices if call.choices != 1 else None,
    }
    return {f"gen_ai.request.{name}": value for name, value in named.items()}


def _seen(seen: Transition, *, has_contents: bool) -> dict[str, Json]:
    return {
        semconv.AGENT_NAME: seen.agent,
        "agl.agent_path": list(seen.path),
        "agl.turn": seen.turn,
        "agl.reward": seen.reward,
        "agl.reject": seen.reject,
        "agl.reject_detail": seen.detail if has_contents else None,
    }
