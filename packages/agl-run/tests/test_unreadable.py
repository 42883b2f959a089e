"""A rollout whose attempt has a damaged span trains with no reward, not even with a penalty."""

from agl import semconv
from agl.episodes import build_episode
from agl.schemas import Attempt, ModelCall, Rollout, Span
from agl_run.config.sections import ExperimentSection
from agl_run.run.training_episodes import training_reward


def test_damaged_span_is_no_missing_reward_to_penalise() -> None:
    rollout = Rollout(rollout_id="a", task=1, status="succeeded", attempts=1, attempt_id="a.1")
    attempt = Attempt(attempt_id="a.1", rollout_id="a", number=1, worker="w", status="succeeded")
    call = ModelCall(request_id="q", dialect="chat", model="m")
    spans = [
        Span(rollout_id="a", attempt_id="a.1", span_id="1", name="chat", call=call),
        Span(rollout_id="a", attempt_id="a.1", span_id="2", name=semconv.UNREADABLE),
    ]
    section = ExperimentSection(name="e", agent="m:f", missing_reward="penalise", penalty=-1.0)
    assert (None, "damaged spans") == training_reward(build_episode(rollout, attempt, spans), section)
