"""Token counts of a model call, read from the fields of every provider."""

from collections.abc import Mapping
from typing import Any, cast

from agl.schemas._base import Record

_PROMPT = ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "input")
_ANSWER = ("completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount", "output")
_CACHED = (
    *("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"),  # OpenAI's two APIs
    *("cache_read_input_tokens", "cacheReadInputTokens"),  # Anthropic, Bedrock
    *("cachedContentTokenCount", "prompt_cache_hit_tokens", "input_token_details.cache_read"),  # + DeepSeek, LangChain
)
_WRITTEN = ("cache_creation_input_tokens", "cacheWriteInputTokens", "input_token_details.cache_creation")
_THOUGHTS = (
    *("completion_tokens_details.reasoning_tokens", "output_tokens_details.reasoning_tokens", "reasoning_tokens"),
    *("thoughtsTokenCount", "output_token_details.reasoning"),
)
_WITHOUT_CACHE = ("input_tokens", "inputTokens")
"""Fields with prompt counts that exclude cached tokens (Anthropic, Bedrock); those are in fields next to these."""


class Usage(Record, frozen=True, kw_only=True):
    """Token counts of one call, with the same meaning for all providers.

    Attributes:
        prompt: All tokens of the prompt, including cached ones; 0 if unknown.
        answer: All tokens of the answer, including thoughts; 0 if unknown.
        cached: Tokens of the prompt that were read from a cache.
        written: Tokens of the prompt that were written to a cache.
        thoughts: Tokens of the answer that are thoughts.
    """

    prompt: int = 0
    answer: int = 0
    cached: int = 0
    written: int = 0
    thoughts: int = 0

    @classmethod
    def read(cls, counts: object) -> "Usage":
        """Read the counts of OpenAI, Anthropic, Google, Bedrock, DeepSeek or LangChain; all 0 for any other value."""
        given = cast("Mapping[str, Any]", counts) if isinstance(counts, Mapping) else dict[str, Any]()
        name, prompt = _first(given, _PROMPT)
        _, answer = _first(given, _ANSWER)
        cached, written, thoughts = (_first(given, names)[1] for names in (_CACHED, _WRITTEN, _THOUGHTS))
        if name in _WITHOUT_CACHE and any(other in given for other in (*_CACHED, *_WRITTEN)):
            prompt += cached + written
        if name == "promptTokenCount":  # Google counts a tool's results and thoughts apart
            prompt += _first(given, ("toolUsePromptTokenCount",))[1]
            answer += thoughts
        return cls(prompt=prompt, answer=answer, cached=cached, written=written, thoughts=thoughts)


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    """The first of ``names`` that has a count, and the count; ``""`` and 0 without one. A dot enters an object."""
    for name in names:
        value: Any = given
        for key in name.split("."):
            value = cast("Mapping[str, Any]", value).get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return name, value
    return "", 0
