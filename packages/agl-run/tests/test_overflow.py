"""Failed rollouts whose tokens ran out train, so that a policy learns that long answers fail; others are left out."""

from typing import Literal

import pytest

from agl.schemas import Episode, Rollout, Transition
from agl_run.config.sections import ExperimentSection
from agl_run.run.training_episodes import training_reward

REFUSED = "HTTP status 400: This model's context is 64 tokens; the prompt has 60. Shorten the messages."


def failed(*calls: Transition, status: Literal["failed", "cancelled"] = "failed") -> Episode:
    rollout = Rollout(rollout_id="r", task={}, status=status)
    return Episode(rollout=rollout, attempt=None, reward=None, transitions=calls)


def call(**fields: str) -> Transition:
    return Transition(rollout_id="r", attempt_id="a", span_id="s", **fields)  # type: ignore[arg-type]


CUT = call(finish_reason="length")
TOO_LONG = call(reject="error", detail=REFUSED)
PLAIN = call(finish_reason="stop")
OTHERS = call(reject="not_selected", finish_reason="length")


@pytest.mark.parametrize(
    ("calls", "trains"),
    [
        ((PLAIN, CUT), True),
        ((PLAIN, TOO_LONG), True),
        ((CUT, PLAIN), False),
        ((PLAIN, OTHERS), False),
        ((call(reject="error", detail="HTTP status 500: no context"),), False),
        ((), False),
    ],
)
def test_failed_rollout_trains_with_the_penalty_if_its_last_call_overflowed(
    calls: tuple[Transition, ...], trains: bool
) -> None:
    expected = (0.0, "") if trains else (None, "failed")
    assert expected == training_reward(failed(*calls), ExperimentSection(), lowest=0.25)


def test_overflow_is_never_better_than_the_worst_success_and_needs_one() -> None:
    assert (-1.0, "") == training_reward(failed(CUT), ExperimentSection(), lowest=-1.0)
    assert (None, "failed") == training_reward(failed(CUT), ExperimentSection(), lowest=None)


@pytest.mark.parametrize(
    "words",
    [
        "400: This model's maximum context length is 4097 tokens. However, your messages resulted in 5000 tokens.",
        "400: Your input exceeds the context window of this model. Please adjust your input and try again.",
        "400: prompt is too long: 200251 tokens > 200000 maximum",
        "400: The decoder prompt (length 70) is longer than the maximum model length of 64.",
        "400: The input (70 tokens) is longer than the model's context length (64 tokens).",
        "400: the request exceeds the available context size, try increasing it",
        "400: The input token count (70) exceeds the maximum number of tokens allowed (64).",
        "400: The template needs more than the model's context of 64 tokens. Shorten the messages.",
        "413: <title>413 Request Entity Too Large</title>",
    ],
)
def test_overflow_is_recognised_by_the_words_of_servers(words: str) -> None:
    refused = failed(call(reject="error", detail=f"HTTP status {words}"))
    assert (0.0, "") == training_reward(refused, ExperimentSection(), lowest=0.25)


@pytest.mark.parametrize(
    "words",
    [
        "400: tool name is too long",
        "401: invalid key in this context",
        "413: Request too large for model m on tokens per minute (TPM): limit 6000",
        "429: number of tokens per minute exceeded; shorten the context length",
    ],
)
def test_other_refusals_are_no_overflow(words: str) -> None:
    refused = failed(call(reject="error", detail=f"HTTP status {words}"))
    assert (None, "failed") == training_reward(refused, ExperimentSection(), lowest=0.25)


def test_cancelled_rollout_is_no_overflow() -> None:
    assert (None, "cancelled") == training_reward(failed(CUT, status="cancelled"), ExperimentSection(), lowest=0.25)


def test_drop_leaves_overflow_out() -> None:
    assert (None, "failed") == training_reward(failed(CUT), ExperimentSection(failed="drop"), lowest=0.25)
