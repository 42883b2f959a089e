"""Choose which reward belongs to an episode and which to a call, and explain the choice."""

import pytest

from agl.episodes import Enclosing, ScoreOptions, call_rewards, chronological, counts, episode_reward, score
from agl.schemas import Reward, Span
from tests.cases import agent_span, call_span, plain_span, reward_span


def scored(*rewards: Reward, **options: object) -> tuple[float | None, str]:
    found = score(rewards, options=ScoreOptions(**options))  # pyright: ignore[reportArgumentType]  # a test's shorthand
    return found.value, found.note


def about_calls(*spans: Span, without: str = "", **options: object) -> dict[str, float]:
    timeline = chronological(spans)
    calls = [span for span in timeline.spans if span.call is not None and span.span_id != without]
    chosen = ScoreOptions(**options)  # pyright: ignore[reportArgumentType]
    return call_rewards(timeline, calls, enclosing=Enclosing(timeline.spans), options=chosen)


def test_score_of_nothing_about_the_rollout_is_none() -> None:
    nothing = (None, "no reward about the whole rollout was recorded")
    assert nothing == scored()
    assert nothing == scored(Reward(value=1.0, scope="turn"), Reward(value=2.0, scope="span"))


def test_score_of_one_reward_is_its_value_and_says_whose_it_is() -> None:
    assert (0.5, "the environment's reward") == scored(Reward(value=0.5))
    assert (0.5, "reward 'em' of the evaluator") == scored(Reward(value=0.5, name="em", source="evaluator"))


def test_score_prefers_the_better_source_and_of_one_source_the_last() -> None:
    rewards = [
        Reward(value=1.0, source="evaluator"),
        Reward(value=2.0, source="evaluator"),
        Reward(value=3.0, source="environment"),
        Reward(value=4.0, source="human"),
    ]
    assert (2.0, "the evaluator's reward") == scored(*rewards)
    assert (2.0, "the evaluator's reward") == scored(*rewards[::-1][:-1], rewards[1])
    assert (3.0, "the environment's reward") == scored(*rewards[2:])
    assert (4.0, "the human's reward") == scored(Reward(value=5.0, source="hook"), rewards[3])


def test_score_takes_the_unnamed_reward_of_the_best_source() -> None:
    named = Reward(value=9.0, name="style", source="evaluator")
    assert (0.0, "the evaluator's reward") == scored(named, Reward(value=0.0, source="evaluator"))
    assert (9.0, "reward 'style' of the evaluator") == scored(Reward(value=0.0, source="environment"), named)


def test_score_of_several_names_needs_a_declaration() -> None:
    expected = (None, "several rewards were recorded (a, b); declare a key or weights for them")
    assert expected == scored(Reward(value=1.0, name="b"), Reward(value=1.0, name="a"))


def test_score_by_key_is_the_reward_of_that_name_or_a_dimension() -> None:
    whole = Reward(value=0.2, name="all", dimensions={"goal": 0.7})
    assert (0.2, "reward 'all' of the environment") == scored(whole, Reward(value=1.0), key="all")
    assert (0.7, "reward 'goal' of the environment") == scored(whole, Reward(value=1.0), key="goal")
    assert (1.0, "the environment's reward") == scored(whole, Reward(value=1.0), key="")


def test_score_by_key_takes_a_dimension_from_the_best_source() -> None:
    rewards = [
        Reward(value=0.0, name="x", source="human", dimensions={"goal": 0.1}),
        Reward(value=0.0, name="y", source="evaluator", dimensions={"goal": 0.2}),
        Reward(value=0.0, name="z", source="environment", dimensions={"goal": 0.3}),
    ]
    assert (0.2, "reward 'goal' of the evaluator") == scored(*rewards, key="goal")


def test_score_by_a_key_that_is_absent_names_those_that_are_there() -> None:
    expected = (None, "no reward or dimension 'c' was recorded; recorded: 'a', 'b'")
    assert expected == scored(Reward(value=1.0, name="b"), Reward(value=1.0, name="a"), key="c")


def test_score_by_weights_sums_rewards_and_dimensions() -> None:
    rewards = [Reward(value=1.0, name="a"), Reward(value=0.0, name="b", dimensions={"goal": 0.5})]
    assert (2.5, "weighted sum of a, goal") == scored(*rewards, weights={"a": 2.0, "goal": 1.0})


@pytest.mark.parametrize("value", [None, 1.0])
def test_score_by_weights_needs_all_of_them(value: float | None) -> None:
    weights = {"a": 1.0, "b": 1.0}
    missing = "b" if value else "a"
    assert (None, f"the weighted reward '{missing}' is missing") == scored(
        Reward(value=value, name="a"), weights=weights
    )


def test_score_by_weights_is_none_where_the_sum_is_too_large_for_a_number() -> None:
    rewards = [Reward(value=1.7e308, name="a"), Reward(value=1.7e308, name="b")]
    assert (None, "the weighted sum of a, b is inf") == scored(*rewards, weights={"a": 1.0, "b": 1.0})


def test_agents_reward_counts_where_it_is_trusted() -> None:
    spans = [reward_span(1, 1.0, source="agent")]
    assert episode_reward(spans) is None
    assert 1.0 == episode_reward(spans, trust_agent=True)
    assert 0.5 == episode_reward([*spans, reward_span(2, 0.5, source="evaluator")])


def test_episode_reward_takes_key_and_weights() -> None:
    spans = [reward_span(n, float(n), name=name, source="hook") for n, name in ((1, "a"), (2, "b"))]
    assert 2.0 == episode_reward(spans, key="b")
    assert 5.0 == episode_reward(spans, weights={"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    ("source", "is_late", "expected"),
    [
        ("evaluator", True, True),
        ("hook", True, True),
        ("human", True, True),
        ("environment", True, False),
        ("agent", True, False),
        ("environment", False, True),
    ],
)
def test_late_reward_counts_if_it_comes_from_outside(source: str, is_late: bool, expected: bool) -> None:
    span = reward_span(1, 1.0, source=source, is_late=is_late)
    assert expected is counts(span, ScoreOptions(trust_agent=True))
    assert not counts(agent_span("a"), ScoreOptions(trust_agent=True))


def test_reward_about_the_rollout_is_no_calls() -> None:
    about = reward_span(2, 1.0, span_id="c1", source="hook")
    assert {} == about_calls(call_span(1), about)
    assert {"c1": 0.5} == about_calls(call_span(1), about, reward_span(3, 0.5, scope="turn", source="hook"))


def test_reward_about_nothing_known_does_not_hide_the_next() -> None:
    spans = [call_span(1), reward_span(2, 1.0, scope="span", span_id="gone", source="hook")]
    assert {"c1": 0.5} == about_calls(*spans, reward_span(3, 0.5, scope="turn", source="hook"))


def test_untrusted_reward_does_not_hide_the_next() -> None:
    spans = [call_span(1), reward_span(2, 1.0, scope="turn", source="agent")]
    assert {"c1": 0.5} == about_calls(*spans, reward_span(3, 0.5, scope="turn", source="hook"))
    assert {"c1": 1.0} == about_calls(*spans, trust_agent=True)


def test_reward_about_a_span_is_about_the_one_it_was_reported_in() -> None:
    calls = [call_span(1), call_span(2), call_span(3)]
    assert {"c2": 1.0} == about_calls(*calls, reward_span(4, 1.0, parent="c2", scope="span", source="hook"))
    assert {"c3": 1.0} == about_calls(*calls, reward_span(4, 1.0, parent="c2", scope="turn", source="hook"))
    named = reward_span(4, 1.0, parent="c2", scope="span", span_id="c1", source="hook")
    assert {"c1": 1.0} == about_calls(*calls, named)


def test_reward_about_a_call_that_is_no_candidate_is_nobodys() -> None:
    about = reward_span(3, 1.0, scope="span", span_id="c2", source="hook")
    assert {} == about_calls(call_span(1), call_span(2), about, without="c2")


def test_reward_at_the_moment_a_call_begins_is_that_calls() -> None:
    first, second = call_span(1), call_span(2)
    reward = reward_span(2, 1.0, scope="turn", source="hook")
    assert {"c2": 1.0} == about_calls(first, second, reward)
    assert {"c1": 1.0} == about_calls(first, reward_span(1, 1.0, scope="turn", source="hook"), second)


def tool(parent: str | None, *, end: int) -> Span:
    return plain_span("tool", parent=parent, start=1, end=end, attributes={"gen_ai.tool.name": "t"})


def test_reward_about_a_tool_is_about_the_newest_call_that_its_agent_began_before_its_end() -> None:
    agents = [agent_span("a"), agent_span("b")]
    calls = [call_span(2, parent="a"), call_span(3, parent="b"), call_span(4, parent="a"), call_span(6, parent="a")]
    reward = reward_span(9, 1.0, scope="span", span_id="tool", source="hook")
    assert {"c4": 1.0} == about_calls(*agents, *calls, tool("a", end=5), reward)
    assert {"c3": 1.0} == about_calls(*agents, *calls, tool("b", end=5), reward)


def test_reward_about_a_tool_of_an_agent_without_calls_is_about_any_agents_newest() -> None:
    agents = [agent_span("a"), agent_span("b")]
    calls = [call_span(2, parent="a"), call_span(3, parent="a"), call_span(6, parent="b")]
    reward = reward_span(9, 1.0, scope="span", span_id="tool", source="hook")
    assert {"c3": 1.0} == about_calls(*agents, *calls, tool("b", end=5), reward)
    assert {"c2": 1.0} == about_calls(*agents, *calls, tool(None, end=3), reward)
    assert {} == about_calls(*agents, *calls, tool("b", end=1), reward)
