"""Token counts in the form of each provider."""

from typing import Any

import pytest

from agl.schemas import Usage


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            {
                **{"prompt_tokens": 1112, "completion_tokens": 30, "total_tokens": 1142},
                "prompt_tokens_details": {"cached_tokens": 1000},
                "completion_tokens_details": {"reasoning_tokens": 20},
            },
            Usage(prompt=1112, answer=30, cached=1000, thoughts=20),
        ),
        (
            {
                **{"input_tokens": 1112, "output_tokens": 30},
                "input_tokens_details": {"cached_tokens": 1000},
                "output_tokens_details": {"reasoning_tokens": 20},
            },
            Usage(prompt=1112, answer=30, cached=1000, thoughts=20),
        ),
        (
            {
                **{"input_tokens": 12, "output_tokens": 30},
                **{"cache_creation_input_tokens": 100, "cache_read_input_tokens": 1000},
            },
            Usage(prompt=1112, answer=30, cached=1000, written=100),
        ),
        (
            {"inputTokens": 12, "outputTokens": 30, "cacheReadInputTokens": 1000, "cacheWriteInputTokens": 100},
            Usage(prompt=1112, answer=30, cached=1000, written=100),
        ),
        (
            {
                **{"promptTokenCount": 1100, "toolUsePromptTokenCount": 12, "cachedContentTokenCount": 1000},
                **{"candidatesTokenCount": 10, "thoughtsTokenCount": 20},
            },
            Usage(prompt=1112, answer=30, cached=1000, thoughts=20),
        ),
        (
            {
                **{"input_tokens": 1112, "output_tokens": 30, "total_tokens": 1142},
                "input_token_details": {"cache_read": 1000, "cache_creation": 100},
                "output_token_details": {"reasoning": 20},
            },
            Usage(prompt=1112, answer=30, cached=1000, written=100, thoughts=20),
        ),
        (
            {"prompt_tokens": 1112, "completion_tokens": 30, "cache_read_input_tokens": 1000},
            Usage(prompt=1112, answer=30, cached=1000),
        ),
        (
            {"prompt_tokens": 1112, "completion_tokens": 30, "prompt_cache_hit_tokens": 1000},
            Usage(prompt=1112, answer=30, cached=1000),
        ),
    ],
    ids=["chat", "responses", "anthropic", "bedrock", "google", "langchain", "litellm", "deepseek"],
)
def test_counts_mean_the_same_whoever_counted(counts: dict[str, Any], expected: Usage) -> None:
    assert expected == Usage.read(counts)


@pytest.mark.parametrize(
    "counts", [None, 7, "12", [], {}, {"prompt_tokens": "12"}, {"input_tokens": True}, {"prompt_tokens_details": 3}]
)
def test_garbage_counts_nothing(counts: Any) -> None:
    assert Usage() == Usage.read(counts)
