from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl.episodes._scores import ScoreOptions, episode_reward
from agl.episodes._transitions import EpisodeOptions, build_episode
from agl.errors import ConfigError
from agl.schemas import Reward, Sampling, Span, Transition
from tests.cases import ATTEMPT, ROLLOUT, agent_span, call_span, plain_span, reward_span


def only(*spans: Span) -> Transition:
    (transition,) = build_episode(ROLLOUT, ATTEMPT, spans).transitions
    return transition


def rejects(*spans: Span, agent_match: str | None = None, policy: str | None = None) -> list[str]:
    episode = build_episode(ROLLOUT, ATTEMPT, spans, agent_match=agent_match, policy=policy)
    return [transition.reject for transition in episode.transitions]


def test_agent_is_the_nearest_enclosing_one() -> None:
    node = plain_span("n", parent="inner", attributes={"agl.node": "step", "gen_ai.operation.name": "x"})
    spans = [agent_span("outer"), agent_span("inner", parent="outer"), node, call_span(1, parent="n")]
    transition = only(*spans)
    assert ("inner", ("outer", "inner", "step")) == (transition.agent, transition.path)


def test_workflow_is_in_the_path_of_its_agents_and_does_not_select_them() -> None:
    team = plain_span("t", attributes={"gen_ai.workflow.name": "writers"})
    named = {"gen_ai.agent.name": "calc", "gen_ai.workflow.name": "writers"}
    calc = plain_span("calc", parent="t", attributes={"gen_ai.operation.name": "invoke_agent", **named})
    spans = [team, calc, call_span(1, parent="calc"), call_span(2, parent="t")]
    own, managed = build_episode(ROLLOUT, ATTEMPT, spans).transitions
    assert [("calc", ("writers", "calc")), ("writers", ("writers",))] == [(t.agent, t.path) for t in (own, managed)]
    assert ["not_selected", ""] == rejects(*spans, agent_match="writers")


@pytest.mark.parametrize(
    ("attributes", "name", "agent"),
    [
        ({"agl.node": "write"}, "x", "write"),
        ({"gen_ai.workflow.name": "team"}, "x", "team"),
        ({"agl.role": "critic"}, "x", "critic"),
        ({}, "plan", "plan"),
        ({}, "rollout", ""),
        ({"gen_ai.tool.name": "search", "gen_ai.operation.name": "execute_tool"}, "x", ""),
    ],
)
def test_agent_falls_back_to_node_role_and_operation(attributes: dict[str, str], name: str, agent: str) -> None:
    assert agent == only(plain_span("s", attributes=attributes, name=name), call_span(1, parent="s")).agent


def test_agent_comes_from_the_framework_span_that_travelled_with_the_call() -> None:
    call = call_span(1, parent="other", attributes={"agl.framework_span_id": "writer"})
    assert "writer" == only(agent_span("other"), agent_span("writer"), call).agent


def test_agent_falls_back_to_the_parent_when_the_framework_span_is_lost() -> None:
    call = call_span(1, parent="other", attributes={"agl.framework_span_id": "gone"})
    assert "other" == only(agent_span("other"), call).agent


def test_agent_survives_a_cycle_of_parents() -> None:
    spans = [agent_span("a", parent="b"), agent_span("b", parent="a"), call_span(1, parent="a")]
    assert "a" == only(*spans).agent


@pytest.mark.long
def test_transitions_of_a_hundred_thousand_nested_spans() -> None:
    spans = [plain_span(f"s{i}", parent=f"s{i - 1}" if i else None, name=f"n{i}") for i in range(100_000)]
    transition = only(*spans, call_span(1, parent="s99999"))
    assert ("n99999", 64) == (transition.agent, len(transition.path))


def test_turn_counts_an_agents_calls_and_shares_retries_and_choices() -> None:
    spans = [
        agent_span("a"),
        agent_span("b"),
        call_span(1, parent="a"),
        call_span(2, parent="b"),
        call_span(3, parent="a", request_id="x", is_complete=False),
        call_span(4, parent="a", request_id="x", retry_count=1, choice=0),
        call_span(5, parent="a", request_id="x", retry_count=1, choice=1),
        call_span(6, parent="a"),
    ]
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    assert [0, 0, 1, 1, 1, 2] == [transition.turn for transition in episode.transitions]


def test_transition_carries_sampling_and_version() -> None:
    transition = only(call_span(1, sampling=Sampling(temperature=0.7), model_version="v3"))
    assert (0.7, True, "v3") == (transition.temperature, transition.is_distribution_changed, transition.model_version)
    assert 1.0 == only(call_span(1)).temperature


@pytest.mark.parametrize(
    ("said", "is_truncated"),
    [
        ("length", True),
        ("max_tokens", True),
        ("MAX_TOKENS", True),
        ("max_output_tokens", True),
        ("stop", False),
        ("tool_calls", False),
        ("end_turn", False),
        ("", False),
    ],
)
def test_transition_carries_the_finish_reason_and_knows_a_cut_answer(said: str, is_truncated: bool) -> None:
    transition = only(call_span(1, finish_reason=said))
    assert (said, is_truncated) == (transition.finish_reason, transition.is_truncated)


@pytest.mark.parametrize(
    ("call", "reason", "words"),
    [
        ({"status_code": 500, "response": (), "error": "boom"}, "error", "HTTP status 500: boom"),
        ({"status_code": 0, "response": ()}, "error", "no response"),
        ({"is_complete": False}, "incomplete", "cut at token 1"),
        ({"ids_missing": "the backend returned none", "prompt_ids": b""}, "missing_token_ids", "backend returned none"),
        ({"prompt": ()}, "missing_token_ids", "no prompt ids"),
        ({"logprobs": b""}, "length_mismatch", "1 response ids, 0 log-probabilities"),
        ({"prompt_ids": b"12345"}, "length_mismatch", "not whole int32"),
        ({"response": ()}, "empty_response", "no token"),
        ({"inputs": ("sha256:1",)}, "non_token_input", "sha256:1"),
        ({"dialect": "embeddings"}, "not_selected", "embeddings"),
        ({"is_late": True}, "late", "after the attempt was decided"),
        ({"attempt_id": "r.0"}, "not_final", "attempt r.0"),
    ],
)
def test_reject_reason(call: dict[str, object], reason: str, words: str) -> None:
    transition = only(call_span(1, **call))  # pyright: ignore[reportArgumentType]  # parametrized
    assert reason == transition.reject
    assert words in transition.detail
    assert (-1, -1) == (transition.branch, transition.start)


def test_reject_retries_but_the_last_complete_exchange() -> None:
    spans = [
        call_span(1, request_id="x"),
        call_span(2, request_id="x", retry_count=1, choice=0),
        call_span(3, request_id="x", retry_count=1, choice=1, is_complete=False),
        call_span(4, request_id="x", retry_count=2, status_code=500, response=()),
        call_span(5, request_id=""),
        call_span(6, request_id=""),
    ]
    assert ["superseded", "", "incomplete", "superseded", "", ""] == rejects(*spans)


def test_reject_retries_keeps_each_reason_when_none_was_complete() -> None:
    spans = [
        call_span(1, request_id="x", status_code=429, response=()),
        call_span(2, request_id="x", retry_count=1, is_complete=False),
    ]
    assert ["error", "incomplete"] == rejects(*spans)


@pytest.mark.parametrize(
    ("agent_match", "expected"),
    [
        ("write|rewrite", ["", "", "not_selected", "not_selected"]),
        ("^write$", ["", "not_selected", "not_selected", "not_selected"]),
        (None, ["", "", "", ""]),
        ("nested", ["not_selected", "not_selected", "not_selected", ""]),
    ],
)
def test_agent_match_searches_agent_names(agent_match: str | None, expected: list[str]) -> None:
    spans = [
        agent_span("write"),
        agent_span("rewrite_query"),
        agent_span("check"),
        agent_span("nested", parent="write"),
        *(call_span(i, parent=p) for i, p in enumerate(["write", "rewrite_query", "check", "nested"], start=1)),
    ]
    assert expected == rejects(*spans, agent_match=agent_match)


def test_agent_match_selects_nodes_within_the_agent() -> None:
    node = plain_span("n", parent="graph", attributes={"agl.node": "write"})
    spans = [agent_span("graph"), node, call_span(1, parent="n"), call_span(2, parent="graph")]
    assert ["", "not_selected"] == rejects(*spans, agent_match="write")


def test_agent_match_refuses_a_broken_expression() -> None:
    with pytest.raises(ConfigError, match="not a regular expression"):
        rejects(call_span(1), agent_match="(")


def test_policy_selects_its_own_calls() -> None:
    spans = [call_span(1, policy="p"), call_span(2, policy="q"), call_span(3, policy="")]
    assert ["", "not_selected", "not_selected"] == rejects(*spans, policy="p")


def test_unselected_agents_tokens_stay_context_in_a_shared_conversation() -> None:
    spans = [
        agent_span("write"),
        agent_span("check"),
        call_span(1, prompt=(1,), response=(2,), parent="write"),
        call_span(2, prompt=(1, 2, 3), response=(4,), parent="check"),
        call_span(3, prompt=(1, 2, 3, 4, 5), response=(6,), parent="write"),
    ]
    (row,) = build_episode(ROLLOUT, ATTEMPT, spans, agent_match="write").rows
    assert b"\x00\x01\x00\x00\x00\x01" == row.mask


def call_rewards(*spans: Span, trust_agent: bool = False) -> list[float | None]:
    options = EpisodeOptions(score=ScoreOptions(trust_agent=trust_agent))
    return [t.reward for t in build_episode(ROLLOUT, ATTEMPT, spans, options=options).transitions]


def test_turn_reward_goes_to_the_newest_call_before_it() -> None:
    spans = [
        call_span(1),
        reward_span(1, 0.5, scope="turn"),
        call_span(2),
        call_span(3),
        reward_span(3, 1.0, scope="turn"),
    ]
    assert [0.5, None, 1.0] == call_rewards(*spans)


def test_turn_reward_before_any_call_goes_nowhere() -> None:
    assert [None] == call_rewards(reward_span(0, 0.5, scope="turn"), call_span(1))


def test_turn_reward_names_its_call() -> None:
    assert [0.5, None] == call_rewards(call_span(1), call_span(2), reward_span(3, 0.5, scope="turn", span_id="c1"))


def test_turn_rewards_of_one_name_replace_and_of_several_add() -> None:
    about = {"scope": "turn", "span_id": "c1"}
    spans = [
        call_span(1),
        *(reward_span(i, v, name=n, **about) for i, (v, n) in enumerate([(9, "a"), (1, "a"), (2, "b")], 2)),
    ]
    assert [3.0] == call_rewards(*spans)
    assert [2.0] == call_rewards(*spans, reward_span(8, None, name="a", **about))


def test_span_reward_of_a_tool_goes_to_the_same_agents_newest_call() -> None:
    spans = [
        agent_span("a"),
        agent_span("b"),
        call_span(1, parent="a"),
        call_span(2, parent="b"),
        plain_span("tool", parent="a", start=3, end=4, attributes={"gen_ai.tool.name": "t"}),
        call_span(5, parent="a"),
        reward_span(9, 0.25, scope="span", span_id="tool"),
    ]
    assert [0.25, None, None] == call_rewards(*spans)


def test_rewards_from_the_agents_token_count_only_when_trusted() -> None:
    spans = [call_span(1), reward_span(2, 1.0, scope="turn", source="agent"), reward_span(3, 1.0, source="agent")]
    assert [None] == call_rewards(*spans)
    assert [1.0] == call_rewards(*spans, trust_agent=True)
    assert None is episode_reward(spans)
    assert 1.0 == episode_reward(spans, trust_agent=True)
    assert 2 == len(build_episode(ROLLOUT, ATTEMPT, spans).rewards)


def test_episode_reward_prefers_evaluator_then_environment_then_others() -> None:
    spans = [
        reward_span(1, 0.1, source="evaluator"),
        reward_span(2, 0.2, source="evaluator"),
        reward_span(3, 0.3, source="environment"),
        reward_span(4, 0.4, source="human"),
    ]
    assert 0.2 == episode_reward(spans)
    assert 0.3 == episode_reward(spans[2:])
    assert 0.4 == episode_reward(spans[3:])
    assert None is episode_reward([])


def test_episode_reward_none_stays_none() -> None:
    assert None is episode_reward([reward_span(1, 1.0), reward_span(2, None)])


def test_episode_reward_of_several_names_needs_a_declaration() -> None:
    spans = [reward_span(1, 1.0, name="a"), reward_span(2, 0.5, name="b", dimensions={"c": 4.0})]
    assert None is episode_reward(spans)
    assert 7.0 == episode_reward([*spans, reward_span(3, 7.0)])
    assert 0.5 == episode_reward(spans, key="b")
    assert 4.0 == episode_reward(spans, key="c")
    assert None is episode_reward(spans, key="d")
    assert pytest.approx(0.3 * 1.0 + 0.7 * 4.0) == episode_reward(spans, weights={"a": 0.3, "c": 0.7})
    assert None is episode_reward(spans, weights={"a": 0.3, "d": 0.7})
    assert 1.0 == episode_reward(spans[:1])


def test_late_rewards_count_from_outside_the_attempt_only() -> None:
    def reward(**fields: str) -> float | None:
        return build_episode(ROLLOUT, ATTEMPT, [reward_span(1, 1.0, is_late=True, **fields)]).reward

    assert [1.0, 1.0, None] == [reward(source=source) for source in ("human", "evaluator", "environment")]


def test_episode_lists_rewards_of_every_source_without_the_attempts_own_late_ones() -> None:
    own = [reward_span(1, 1.0, source="agent"), reward_span(2, 2.0)]
    late = [reward_span(3, -3.0, is_late=True), reward_span(4, -4.0, is_late=True, source="agent")]
    judged = reward_span(5, 5.0, is_late=True, source="human")
    episode = build_episode(ROLLOUT, ATTEMPT, [*own, *late, judged])
    assert [1.0, 2.0, 5.0] == [reward.value for reward in episode.rewards]


def test_rewards_of_other_attempts_do_not_count() -> None:
    spans = [call_span(1, attempt_id="r.0"), reward_span(1, 1.0, attempt_id="r.0"), call_span(2), reward_span(2, 0.5)]
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    assert (0.5, (Reward(value=0.5),)) == (episode.reward, episode.rewards)


def test_episode_without_an_attempt_has_no_rows() -> None:
    episode = build_episode(ROLLOUT, None, [call_span(1)])
    assert (None, None, ()) == (episode.attempt, episode.reward, episode.rows)
    assert ["not_final"] == [transition.reject for transition in episode.transitions]


def test_order_is_by_start_time_and_by_sequence_where_that_is_missing() -> None:
    first, second = call_span(1), call_span(2)
    crossed = [Span(**{**fields_of(first), "sequence": 9}), second]
    assert ["c1", "c2"] == [t.span_id for t in build_episode(ROLLOUT, ATTEMPT, crossed).transitions]
    untimed = [Span(**{**fields_of(span), "start_ns": 0}) for span in (crossed[0], second)]
    assert ["c2", "c1"] == [t.span_id for t in build_episode(ROLLOUT, ATTEMPT, untimed).transitions]


def fields_of(span: Span) -> dict[str, object]:
    return {name: getattr(span, name) for name in span.__struct_fields__}


@given(st.permutations(range(6)))
def test_episode_does_not_depend_on_the_order_of_spans(order: list[int]) -> None:
    spans = [
        agent_span("a"),
        call_span(1, parent="a"),
        call_span(2),
        reward_span(2, 1.0, scope="turn"),
        call_span(3),
        reward_span(4, 2.0),
    ]
    assert build_episode(ROLLOUT, ATTEMPT, spans) == build_episode(ROLLOUT, ATTEMPT, [spans[i] for i in order])


CHAT = {"gen_ai.operation.name": "chat", "agl.client": "grpc.ChatThing"}


@pytest.mark.parametrize(
    ("verdict", "attributes", "expected"),
    [
        ("drop", {}, ["unseen_calls"]),
        ("accept", {}, [""]),
        ("drop", {"agl.unrecorded": "foreign"}, [""]),
    ],
    ids=["drop", "accept", "foreign"],
)
def test_calls_of_an_attempt_train_unless_others_bypassed_the_gateway(
    verdict: Literal["drop", "accept"], attributes: dict[str, str], expected: list[str]
) -> None:
    missed = plain_span("missed", start=50, end=60, attributes={**CHAT, **attributes})
    spans = [agent_span("a"), call_span(1, parent="a"), missed]
    episode = build_episode(ROLLOUT, ATTEMPT, spans, options=EpisodeOptions(unseen=verdict))
    assert expected == [transition.reject for transition in episode.transitions]
    if expected == ["unseen_calls"]:
        assert episode.transitions[0].detail.endswith("not recorded: 1, such as by grpc.ChatThing")


@pytest.mark.parametrize(("verdict", "expected"), [("drop", ["unattributed"] * 2), ("accept", ["", ""])])
def test_calls_of_an_attempt_train_unless_some_are_outside_the_frameworks_spans(
    verdict: Literal["drop", "accept"], expected: list[str]
) -> None:
    spans = [
        plain_span("chat", attributes=CHAT, start=1, end=2),
        call_span(1, parent="chat"),
        call_span(3, prompt=(9,)),
    ]
    episode = build_episode(ROLLOUT, ATTEMPT, spans, options=EpisodeOptions(unattributed=verdict))
    assert expected == [transition.reject for transition in episode.transitions]
    if verdict == "drop":
        assert "outside the framework's spans: 1" in episode.transitions[0].detail


def test_attempt_with_a_damaged_span_has_no_reward_and_does_not_train() -> None:
    damaged = plain_span("8", name="agl.unreadable")
    other = plain_span("9", name="agl.unreadable", attempt_id="r.2")
    whole = build_episode(ROLLOUT, ATTEMPT, [call_span(1), reward_span(1, 1.0), other])
    odd = build_episode(ROLLOUT, ATTEMPT, [call_span(1), reward_span(1, 1.0), damaged, other])
    assert (1.0, 0, [""]) == (whole.reward, whole.unreadable, [t.reject for t in whole.transitions])
    assert (None, 1, ["unreadable"]) == (odd.reward, odd.unreadable, [t.reject for t in odd.transitions])
    assert "damaged spans of the attempt: 1" in odd.transitions[0].detail


def test_transition_describes_the_drift_of_its_call_with_decoded_tokens() -> None:
    first = call_span(1, prompt=tuple(range(20)), response=(20, 21, 22, 23, 24, 25))
    second = call_span(2, prompt=(*range(20), 20, 21, 99, 98, 97, 96), response=(5,))
    options = EpisodeOptions(decode=lambda ids: "-".join(map(str, ids)))
    before, after = build_episode(ROLLOUT, ATTEMPT, [first, second], options=options).transitions
    assert "" == before.detail
    assert "differs from token 22 on" in after.detail
    assert "99-98" in after.detail
