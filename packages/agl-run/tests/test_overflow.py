"""Failed rollouts whose tokens ran out train, so that a policy learns that long answers fail; others are left out."""

import pytest

from agl.schemas import Episode, Rollout, Transition
from agl_run.config.sections import ExperimentSection
from agl_run.run.training_episodes import training_reward

REFUSED = "HTTP status 400: This model's context is 64 tokens; the prompt has 60. Shorten the messages."


def failed(*calls: Transition) -> Episode:
    rollout = Rollout(rollout_id="r", task={}, status="failed")
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


def test_drop_leaves_overflow_out() -> None:
    assert (None, "failed") == training_reward(failed(CUT), ExperimentSection(failed="drop"), lowest=0.25)
