"""The tallies of a step by agent and by task, as the driver makes and saves them."""

import asyncio
import math
import struct
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agl.contracts import CallUse, ExperimentRecord, Moments, Recording
from agl.episodes import build_episode
from agl.schemas import Episode
from agl.stores import MemoryStore
from agl_inspect.rollouts.step_tallies import (
    MOST_AGENTS,
    Observed,
    StepTallies,
    StepTally,
    add_tallies,
    read_tallies,
)
from tests.cases import ATTEMPT, ROLLOUT, agent_span, call_span

RUN = ExperimentRecord(name="sums", run=2)


def played(number: int, *, task: str = "a", reward: float | None = 1.0) -> tuple[Episode, Recording]:
    """Return a rollout: the planner makes a call of one token, the writer two of two tokens, one with an error."""
    rollout_id = f"r{number}"
    rollout = replace(ROLLOUT, rollout_id=rollout_id, attempt_id=f"{rollout_id}.1", group_id=task)
    attempt = replace(ATTEMPT, rollout_id=rollout_id, attempt_id=f"{rollout_id}.1")
    spans = [
        agent_span("planner"),
        call_span(1, parent="planner", prompt=(1, 2), response=(3,)),
        agent_span("writer"),
        call_span(2, parent="writer", prompt=(5, 6), response=(7, 8)),
        replace(call_span(3, parent="writer", prompt=(9,), response=(7, 8)), status="error"),
    ]
    placed = [replace(span, rollout_id=rollout_id, attempt_id=attempt.attempt_id) for span in spans]
    timed = [replace(span, start_ns=10**9, end_ns=3 * 10**9) if span.call else span for span in placed]
    episode = replace(build_episode(rollout, attempt, timed), reward=reward)
    return episode, Recording(rollout=rollout, attempts=[attempt], spans=timed)


def tally_of(*rollouts: tuple[Episode, Recording], uses: Any = None) -> StepTally:
    tallies, observed = StepTallies(), Observed()
    for _, recording in rollouts:
        observed.add(recording)
    tallies.add("grpo", [episode for episode, _ in rollouts], observed, step=1, mode="train")
    (found,) = tallies.take("grpo", step=1, uses=uses or {})
    return found


def test_agents_have_calls_tokens_seconds_rewards_and_errors() -> None:
    use = CallUse(span_id="c2", row=0, credit=1.0, advantage=0.5)
    found = tally_of(played(1), played(2, reward=0.0), uses={"r1": [use]})
    writer, planner = found.agents
    assert ("writer", 2, 4, 8, 2) == (writer.agent, writer.rollouts, writer.calls, writer.tokens, writer.trained)
    assert ("planner", 2, 2, 2, 0) == (planner.agent, planner.rollouts, planner.calls, planner.tokens, planner.trained)
    assert (8.0, 4.0) == (writer.seconds, planner.seconds)
    assert (2, 0) == (writer.errors, planner.errors)
    assert (2, 0.5, 0.5) == (writer.reward.count, writer.reward.mean, writer.reward.variance)
    assert (Moments(count=1, mean=1.0), Moments(count=1, mean=0.5)) == (writer.credit, writer.advantage)
    assert (10, 2) == (found.tokens, found.trained)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_credit_that_is_no_number_counts_as_none(value: float) -> None:
    found = tally_of(played(1), uses={"r1": [CallUse(span_id="c2", row=0, credit=value, advantage=value)]})
    writer = next(agent for agent in found.agents if agent.agent == "writer")
    assert (Moments(), Moments()) == (writer.credit, writer.advantage)
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_interval_is_over_tasks_and_not_over_rollouts() -> None:
    rollouts = [played(n, task="abc"[n % 3], reward=float(n % 3)) for n in range(9)]
    found = tally_of(*rollouts)
    assert (9, 1.0) == (found.rollouts, found.reward)
    assert (found.low, found.high) == (pytest.approx(1 - 2.484, abs=1e-3), pytest.approx(1 + 2.484, abs=1e-3))
    alone = tally_of(played(1), played(2, reward=None))
    assert (1.0, None, None) == (alone.reward, alone.low, alone.high)


def test_entropies_are_means_over_first_second_and_third_calls() -> None:
    def use(number: int, *values: float) -> CallUse:
        return CallUse(span_id=f"c{number}", row=0, tokens={"entropy": struct.pack(f"<{len(values)}e", *values)})

    uses = {"r1": [use(1, 1.0), use(2, 0.5, math.nan)], "r2": [use(1, 3.0), CallUse(span_id="c2", row=0)]}
    found = tally_of(played(1), played(2), uses=uses)
    assert [(2, 2.0), (1, 0.5)] == [(each.count, each.mean) for each in found.entropies]


def test_modes_and_steps_are_told_apart_and_a_step_that_is_ahead_waits() -> None:
    tallies = StepTallies()
    for step, mode in ((1, "train"), (1, "val"), (2, "train")):
        episode, recording = played(step)
        observed = Observed()
        observed.add(recording)
        tallies.add("grpo", [episode], observed, step=step, mode=mode)  # type: ignore[arg-type]
    assert [(1, "train"), (1, "val")] == [(each.step, each.mode) for each in tallies.take("grpo", step=1, uses={})]
    assert [] == tallies.take("ppo", step=9, uses={})
    assert [(2, "train")] == [(each.step, each.mode) for each in tallies.take("grpo", step=2, uses={})]
    assert [] == tallies.take("grpo", step=2, uses={})


def test_only_agents_with_the_most_calls_are_kept() -> None:
    episode, recording = played(1)
    calls = [
        replace(episode.transitions[0], agent=f"agent-{n:03d}", span_id=f"{n}-{again}")
        for n in range(MOST_AGENTS + 9)
        for again in range(1 + (n == MOST_AGENTS + 8))
    ]
    found = tally_of((replace(episode, transitions=tuple(calls)), replace(recording, spans=[])))
    assert MOST_AGENTS == len(found.agents)
    assert f"agent-{MOST_AGENTS + 8:03d}" == found.agents[0].agent


def test_sums_are_kept_with_their_run_and_a_repeated_step_replaces_its_own() -> None:
    async def body() -> None:
        store = MemoryStore()
        await add_tallies(store, RUN, [tally_of(played(1))])
        await add_tallies(store, RUN, [tally_of(played(1), played(2))])
        await add_tallies(store, replace(RUN, run=3), [tally_of(played(1))])
        assert [2] == [each.rollouts for each in await read_tallies(store, RUN)]
        assert [] == await read_tallies(store, replace(RUN, run=1))

    asyncio.run(body())
