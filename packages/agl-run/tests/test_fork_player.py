"""Answers of a fork: recorded up to the fork, new after it, refused after a divergence."""

import random
from typing import Any

import msgspec
import pytest

from agl.contracts import DIVERGED, REPLAY_VERSION, ForkPlan
from agl.dialects import Request
from agl.schemas import to_json
from agl_inspect.rollouts.answers import RecordedAnswer
from agl_run.replay.fork_player import REFUSED, ForkPlayer, ForkScript

Call = tuple[str, str]
"""The name of an agent and its request."""

RUN = [("plan", "p"), ("write", "w"), ("check", "c")]


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def answered(call: Call, number: int) -> RecordedAnswer:
    agent, text = call
    message = {"role": "assistant", "content": f"said {number}"}
    return RecordedAnswer(
        agent=agent,
        dialect="chat",
        request=body(text),
        response={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]},
        span_ids=(f"span-{number}",),
    )


def player(at: int, calls: list[Call] = RUN, *, answer: RecordedAnswer | None = None, **plan: Any) -> ForkPlayer:
    """Return a player that forks at the call number ``at``, counted from 1."""
    recorded = tuple(answered(call, number) for number, call in enumerate(calls, start=1))
    fork = ForkPlan(rollout_id="r", span_id=f"span-{at}", **plan)
    return ForkPlayer(ForkScript(plan=fork, position=at - 1, recorded=recorded, answer=answer))


def ask(of: ForkPlayer, *calls: Call) -> list[str]:
    """Return the source of each answer: ``live``, or the model version without its prefix and the answer's text."""
    found: list[str] = []
    for agent, text in calls:
        answer = of.respond(Request("chat", to_json(body(text))), agent=agent)
        if answer is None:
            found.append("live")
        elif answer.status == REFUSED:
            assert DIVERGED == answer.model_version
            found.append("refused")
        else:
            said = msgspec.json.decode(answer.body)["choices"][0]["message"]["content"]
            found.append(f"{answer.model_version.removeprefix(REPLAY_VERSION)} {said}")
    return found


@pytest.mark.parametrize("at", [1, 2, 3])
def test_calls_before_the_fork_are_recorded_and_all_others_live(at: int) -> None:
    fork = player(at)
    expected = [f"recorded said {number}" if number < at else "live" for number in (1, 2, 3)]
    assert expected == ask(fork, *RUN)
    assert "" == fork.divergence(is_over=True)


def test_later_calls_may_ask_something_else_and_be_more_than_were_recorded() -> None:
    fork = player(2)
    assert ["recorded said 1", "live", "live", "live"] == ask(fork, RUN[0], RUN[1], ("check", "other"), ("new", "x"))
    assert "" == fork.divergence(is_over=True)


def test_coupled_fork_keeps_the_answers_to_unchanged_requests() -> None:
    fork = player(1, is_coupled=True)
    assert ["live", "recorded said 2", "live"] == ask(fork, RUN[0], RUN[1], ("check", "other"))


def test_given_answer_stands_in_at_the_fork_alone() -> None:
    fork = player(2, answer=answered(("write", "w"), 9), answer_rollout="s", answer_span="span-9", is_coupled=True)
    assert ["recorded said 1", "sibling said 9", "recorded said 3"] == ask(fork, *RUN)


def test_another_request_before_the_fork_is_refused_and_its_first_difference_named() -> None:
    fork = player(3)
    assert ["recorded said 1", "refused", "refused"] == ask(fork, RUN[0], ("write", "w, at noon"), RUN[2])
    found = fork.divergence(is_over=False)
    assert "write made a request that the recorded rollout did not make: user: w, at noon" in found
    assert "Due was call 2 of r by write: message 1 (user) was 'w', is 'w, at noon'" in found
    assert found == fork.divergence(is_over=True)


def test_the_call_at_the_fork_must_be_asked_the_same() -> None:
    fork = player(2)
    assert ["recorded said 1", "refused"] == ask(fork, RUN[0], ("write", "changed"))


def test_another_agent_with_the_recorded_request_diverges() -> None:
    assert ["refused"] == ask(player(2), ("someone", "p"))


@pytest.mark.parametrize("agent", ["", "plan"])
def test_request_that_was_made_once_diverges_when_it_comes_again(agent: str) -> None:
    fork = player(3, [(agent, "p"), (agent, "w"), (agent, "c")])
    assert ["recorded said 1", "refused"] == ask(fork, (agent, "p"), (agent, "p"))


@pytest.mark.parametrize(("made", "missing"), [([], 1), (RUN[:1], 2), (RUN[:2], 3)])
def test_agent_that_ends_before_the_fork_has_diverged(made: list[Call], missing: int) -> None:
    fork = player(3)
    ask(fork, *made)
    assert f"the agent ended without call {missing} of r by {RUN[missing - 1][0]}" in fork.divergence(is_over=True)
    assert "" == fork.divergence(is_over=False)


def test_agents_side_by_side_may_call_in_another_order() -> None:
    calls = [("a", "1"), ("b", "1"), ("a", "2"), ("b", "2")]
    fork = player(3, calls)
    assert ["recorded said 2", "live", "recorded said 1", "live"] == ask(
        fork, ("b", "1"), ("b", "2"), ("a", "1"), ("a", "2")
    )
    assert "" == fork.divergence(is_over=True)


def test_calls_of_one_agent_side_by_side_may_come_in_another_order() -> None:
    calls = [("a", "1"), ("a", "2"), ("a", "3")]
    fork = player(2, calls)
    assert ["live", "live", "recorded said 1"] == ask(fork, ("a", "3"), ("a", "2"), ("a", "1"))
    assert "" == fork.divergence(is_over=True)


def test_agent_beside_the_fork_must_still_make_its_recorded_calls() -> None:
    calls = [("a", "1"), ("b", "1"), ("a", "2")]
    fork = player(3, calls)
    assert ["recorded said 1", "live", "refused"] == ask(fork, ("a", "1"), ("a", "2"), ("b", "other"))


def mutated(calls: list[Call], place: int, draw: random.Random) -> list[Call]:
    """Return the calls with one random change before ``place``: a text or an agent, or a call more or less."""
    one = draw.randrange(place)
    agent, text = calls[one]
    match draw.choice(["text", "agent", "less", "more"]):
        case "text":
            return [*calls[:one], (agent, f"{text}!"), *calls[one + 1 :]]
        case "agent":
            return [*calls[:one], (f"{agent}!", text), *calls[one + 1 :]]
        case "less":
            return [*calls[:one], *calls[one + 1 :]]
        case _:
            return [*calls[:one], (agent, f"{text}, and more"), *calls[one:]]


@pytest.mark.parametrize("seed", range(40))
def test_every_change_before_the_fork_is_detected_and_no_other_is(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        calls = [(draw.choice("abc"), draw.choice("xyz")) for _ in range(draw.randint(2, 8))]
        at = draw.randint(2, len(calls))
        plan = {"is_coupled": draw.random() < 0.5}
        same = player(at, calls, **plan)
        ask(same, *calls[:at], *[(draw.choice("abc"), f"new {number}") for number in range(draw.randint(0, 3))])
        assert "" == same.divergence(is_over=True), calls
        other = player(at, calls, **plan)
        ask(other, *mutated(calls[:at], at - 1, draw))
        assert other.divergence(is_over=True), (calls, at)


def test_equal_requests_are_answered_in_their_order() -> None:
    fork = player(3, [("a", "again")] * 4)
    assert ["recorded said 1", "recorded said 2", "live", "live"] == ask(fork, *[("a", "again")] * 4)


def test_embeddings_and_what_is_no_object_are_left_to_the_model() -> None:
    fork = player(1)
    assert fork.respond(Request("embeddings", b'{"input": "x"}'), agent="plan") is None
    assert fork.respond(Request("chat", b"[]"), agent="plan") is None
    assert "call 1" in fork.divergence(is_over=True)
