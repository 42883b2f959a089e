"""The output of ``agl why``."""

import math
import struct

from msgspec.structs import replace

from agl import semconv
from agl.contracts import CallUse
from agl.episodes._scores import ScoreOptions
from agl.episodes._transitions import EpisodeOptions, build_episode
from agl.schemas import Attempt, Reward
from agl.tracing import make_reward_span
from agl_inspect.rollouts.explanations import explain, explain_training
from agl_inspect.rollouts.training import TrainingRecord
from tests.cases import ATTEMPT, ROLLOUT, agent_span, call_span, plain_span, reward_span


def test_explain_says_what_became_of_every_call() -> None:
    spans = [
        agent_span("writer"),
        call_span(1, parent="writer", prompt=(1, 2), response=(3, 4)),
        call_span(2, ids_missing="the backend returned none", prompt_ids=b""),
        call_span(3, parent="writer", prompt=(1, 2, 3, 9), response=(5,)),
        reward_span(4, 1.0, source="agent"),
        reward_span(5, 0.5),
    ]
    text = "\n".join(explain(build_episode(ROLLOUT, ATTEMPT, spans), spans))
    assert "rollout r: succeeded; attempt 1 succeeded" in text
    assert "reward 0.5: the environment's reward" in text
    assert "1 reward came with the agent's own token and does not count" in text
    assert "3 calls recorded, 1 rejected; 2 rows with 3 sampled tokens; 1 prompt drifted" in text
    assert "call c1 (agent 'writer', turn 0, p, 2 + 2 tokens): row 0 at 2" in text
    assert "call c3 (agent 'writer', turn 1, p, 4 + 1 tokens): row 1 at 4; drift: " in text
    assert "call c2 (no agent, turn 0, p, 0 + 1 tokens): rejected, missing_token_ids: the backend returned none" in text
    assert "missing_token_ids: Ask the backend for token ids" in text


def test_explain_claims_no_training_for_a_validation_rollout() -> None:
    spans = [call_span(1, prompt=(1, 2), response=(3, 4))]
    rollout = replace(ROLLOUT, mode="val")
    text = "\n".join(explain(build_episode(rollout, ATTEMPT, spans), spans))
    assert "1 call recorded, 0 rejected; 1 row with 2 sampled tokens, which do not train" in text


def test_explain_names_each_reward_with_its_parts_and_the_words_of_its_judge() -> None:
    parts = {"style": 1.0, "length": 0.0}
    judged = Reward(
        value=0.5, name="judge", dimensions=parts, weights={"style": 0.5}, source="evaluator", feedback="too long"
    )
    step = Reward(value=1.0, name="step", scope="turn", span_id="c1")
    spans = [call_span(1), *(make_reward_span(ROLLOUT.rollout_id, ATTEMPT.attempt_id, each) for each in (judged, step))]
    text = explain(build_episode(ROLLOUT, ATTEMPT, spans), spans)
    assert "recorded reward 'judge' 0.5 (style 1 weighing 0.5, length 0) by evaluator; feedback: too long" in text
    assert "recorded reward 'step' 1 by environment about turn c1" in text


def test_explain_does_not_alarm_where_the_model_gives_no_token_ids_at_all() -> None:
    missing = {"ids_missing": "the backend returned none", "prompt_ids": b""}
    spans = [call_span(1, **missing), call_span(2, **missing), reward_span(3, 1.0)]
    text = "\n".join(explain(build_episode(ROLLOUT, ATTEMPT, spans), spans))
    assert "call c1 (no agent, turn 0, p, 0 + 1 tokens): recorded without token ids" in text
    assert "missing_token_ids: The model gave no token ids. Measuring, prompt search and export need none" in text
    assert "calls recorded without token ids, none rejected" in text
    assert "rejected, " not in text


def test_explain_counts_late_rewards_and_trusts_where_told() -> None:
    spans = [call_span(1), reward_span(2, 1.0, source="agent"), reward_span(3, 0.5, is_late=True)]
    scores = ScoreOptions(trust_agent=True)
    episode = build_episode(ROLLOUT, ATTEMPT, spans, options=EpisodeOptions(score=scores))
    text = "\n".join(explain(episode, spans, scores=scores))
    assert "reward 1: the agent's reward" in text
    assert "own token" not in text
    assert "1 reward was reported by the attempt after it was decided and does not count" in text


def test_explain_of_no_calls_says_what_was_expected_and_what_to_check() -> None:
    attempt = Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w", status="failed")
    text = "\n".join(explain(build_episode(ROLLOUT, attempt, []), []))
    assert "No model call was recorded. Expected: " in text
    assert "OPENAI_BASE_URL" in text
    assert "reward None: no reward about the whole rollout was recorded" in text


def test_explain_shows_drift_as_text() -> None:
    spans = [call_span(1, prompt=(1, 2), response=(3, 4)), call_span(2, prompt=(1, 2, 3, 9), response=(5,))]
    options = EpisodeOptions(decode=lambda ids: "".join(chr(96 + i) for i in ids))
    text = "\n".join(explain(build_episode(ROLLOUT, ATTEMPT, spans, options=options), spans))
    assert "recorded ids [4] 'd', sent ids [9] 'i'" in text


def test_explain_names_calls_that_only_one_side_saw() -> None:
    chat = {semconv.OPERATION: "chat", semconv.CLIENT: "Grpc"}
    lost = plain_span("lost", attributes=chat)
    outside = call_span(2, attributes={semconv.USER_AGENT: "OpenAI/Python 3.1", semconv.FRAMEWORK_SPAN_ID: "gone"})
    episode = build_episode(ROLLOUT, ATTEMPT, [lost, outside])
    text = "\n".join(explain(episode, [lost, outside]))
    assert "unseen: Grpc (no agent) made a call that was not recorded; span " in text
    assert "unattributed: OpenAI/Python 3.1" in text
    assert 'unseen_calls = "accept"' in text


def test_training_tells_of_the_tokens_of_a_call_what_the_step_measured() -> None:
    tokens = {"entropy": struct.pack("<3e", 0.5, 1.0, math.nan), "advantage": struct.pack("<3e", -1.0, 2.0, math.nan)}
    use = CallUse(span_id="1" * 16, row=0, credit=1.0, advantage=0.5, tokens=tokens)
    record = TrainingRecord(experiment="e", run=1, algorithm="ppo", step=3, calls=(use,))
    (_, line) = explain_training(record)
    measured = "advantage 0.5, advantage of its tokens from -1 to 2, mean entropy 0.75"
    assert f"ppo, step 3, call {use.span_id}: row 0, credit 1, {measured}" == line
