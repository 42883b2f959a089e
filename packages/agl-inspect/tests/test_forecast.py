"""A forecast finds each seeded fault and no other, and estimates its numbers from few rollouts, without bias."""

import itertools
import random
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace

from agl.contracts import Recording
from agl.episodes import build_episode
from agl.schemas import Attempt, ErrorInfo, Json, ModelCall, Reward, Rollout, Sampling, Span, pack_floats, pack_ids
from agl_inspect.forecast.faults import Examined, faults_in, faults_of_tasks
from agl_inspect.forecast.observed import Observed, covered, observe
from agl_inspect.forecast.queueing import at_once, forecast, idle_share, makespan, uncertainty_of
from agl_inspect.forecast.silence import best_size, silent_shares

WORDS = ("red", "green", "blue", "black", "white", "brown")
TASKS: Sequence[dict[str, Json]] = [{"question": f"what of {word}?", "answer": f"mostly {word}"} for word in WORDS]
SAMPLES = 2
SECOND = 10**9
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def make(task: dict[str, Json], sample: int) -> Recording:
    """Return a rollout without faults: two turns that continue each other, a tool call between them, a reward."""
    rollout_id = f"sums-1-grpo-train-00001-{task['question']}-{sample}"
    attempt_id = f"{rollout_id}.1"
    rollout = Rollout(
        rollout_id=rollout_id,
        task=task,
        group_id=str(task["question"]),
        hidden=("answer",),
        status="succeeded",
        attempts=1,
        attempt_id=attempt_id,
        started_at=100.0,
        finished_at=110.0,
    )
    ask = {"role": "user", "content": f"Answer: {task['question']}"}
    use = {"role": "assistant", "content": f"let me look, {sample} times at {task['question']}"}
    told = {"role": "user", "content": "nothing was found"}
    end = {"role": "assistant", "content": f"I would say number {sample} for {task['question']}"}
    spans = [
        chat(rollout_id, 1, given=[ask], answer=use, ids=((1, 2, 3), (4, 5))),
        tool(rollout_id, 2),
        chat(rollout_id, 3, given=[ask, use, told], answer=end, ids=((1, 2, 3, 4, 5, 6), (7, 8, 9))),
        Span(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            span_id="reward",
            name="evaluate",
            sequence=4,
            start_ns=109 * SECOND,
            end_ns=109 * SECOND,
            reward=Reward(value=float(sample % 2)),
        ),
    ]
    attempt = Attempt(
        attempt_id=attempt_id,
        rollout_id=rollout_id,
        number=1,
        worker="w",
        status="succeeded",
        started_at=100.0,
        finished_at=110.0,
    )
    return Recording(rollout=rollout, attempts=[attempt], spans=spans)


def chat(
    rollout_id: str,
    number: int,
    *,
    given: list[dict[str, str]],
    answer: dict[str, str],
    ids: tuple[tuple[int, ...], tuple[int, ...]],
) -> Span:
    prompt, response = ids
    call = ModelCall(
        request_id=f"q{number}",
        dialect="chat",
        model="m",
        policy="main",
        request={"messages": given, "tools": TOOLS},
        response={"choices": [{"message": {**answer, "tool_calls": []}}]},
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(response),
        logprobs=pack_floats([-1.0] * len(response)),
        finish_reason="stop",
    )
    return Span(
        rollout_id=rollout_id,
        attempt_id=f"{rollout_id}.1",
        span_id=f"c{number}",
        name="chat m",
        sequence=number,
        start_ns=(100 + number) * SECOND,
        end_ns=(102 + number) * SECOND,
        attributes={"gen_ai.agent.name": "solver"},
        call=call,
    )


def tool(rollout_id: str, number: int) -> Span:
    return Span(
        rollout_id=rollout_id,
        attempt_id=f"{rollout_id}.1",
        span_id=f"t{number}",
        name="execute_tool look",
        sequence=number,
        start_ns=(101 + number) * SECOND,
        end_ns=(101 + number) * SECOND + SECOND // 2,
        status="ok",
        attributes={"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look"},
    )


Change = Callable[[Recording], Recording]


def calls(**fields: Any) -> Change:
    """Return a change that sets these fields of every model call."""

    def change(recording: Recording) -> Recording:
        spans = [replace(s, call=replace(s.call, **fields)) if s.call else s for s in recording.spans]
        return replace(recording, spans=spans)

    return change


def failed(kind: str, message: str, status: Any = "failed") -> Change:
    """Return a change that makes every rollout fail with this error."""

    def change(recording: Recording) -> Recording:
        error = ErrorInfo(type=kind, message=message)
        attempt = replace(recording.attempts[0], status=status, error=error)
        spans = [span for span in recording.spans if span.reward is None]
        rollout = replace(recording.rollout, status="failed")
        return replace(recording, rollout=rollout, attempts=[attempt], spans=spans)

    return change


def rewarded(value: float | None) -> Change:
    def change(recording: Recording) -> Recording:
        reward = Reward(value=value)
        return replace(recording, spans=[replace(s, reward=reward) if s.reward else s for s in recording.spans])

    return change


def without_calls(recording: Recording) -> Recording:
    return replace(recording, spans=[span for span in recording.spans if span.reward])


def leaked(recording: Recording) -> Recording:
    hint = {"role": "system", "content": f"The solution is {recording.rollout.task['answer']}."}
    return edited(recording, lambda messages: [hint, *messages])


def edited(recording: Recording, edit: Callable[[list[Any]], list[Any]]) -> Recording:
    spans: list[Span] = []
    for span in recording.spans:
        request: Any = span.call.request if span.call else None
        changed = {**request, "messages": edit(request["messages"])} if request else None
        spans.append(replace(span, call=replace(span.call, request=changed)) if span.call else span)
    return replace(recording, spans=spans)


def alike(recording: Recording) -> Recording:
    """Give the answers of all rollouts of a task the same words."""
    answer = {"role": "assistant", "content": f"the very same words on {recording.rollout.group_id}"}
    return calls(response={"choices": [{"message": answer}]})(recording)


def without_tools(recording: Recording) -> Recording:
    return replace(recording, spans=[span for span in recording.spans if not span.span_id.startswith("t")])


def broken_tools(recording: Recording) -> Recording:
    spans = [replace(span, status="error") if span.span_id.startswith("t") else span for span in recording.spans]
    return replace(recording, spans=spans)


def nameless(recording: Recording) -> Recording:
    spans = [replace(span, attributes={}) if span.span_id == "c3" else span for span in recording.spans]
    return replace(recording, spans=spans)


def bypassed(recording: Recording) -> Recording:
    """Add a call that was noticed only at its HTTP client."""
    attributes = {"agl.unrecorded": "policy", "gen_ai.operation.name": "chat", "agl.client": "urllib"}
    seen = replace(tool(recording.rollout.rollout_id, 5), span_id="u5", status="unset", attributes=attributes)
    return replace(recording, spans=[*recording.spans, seen])


def repeated(recording: Recording) -> Recording:
    first = replace(recording.attempts[0], attempt_id="earlier", status="failed")
    return replace(recording, attempts=[first, *recording.attempts])


def rewritten(recording: Recording) -> Recording:
    """Let the second prompt repeat the first answer in other tokens."""
    return with_prompts(recording, c3=(1, 2, 30, 40, 50, 60))


def lengthened(recording: Recording) -> Recording:
    """Put three thousand tokens before both prompts."""
    before = (0,) * 3000
    return with_prompts(recording, c1=(*before, 1, 2, 3), c3=(*before, 1, 2, 3, 4, 5, 6))


def with_prompts(recording: Recording, **ids: tuple[int, ...]) -> Recording:
    calls = {span.span_id: span.call for span in recording.spans if span.call and span.span_id in ids}
    changed = {name: replace(call, prompt_ids=pack_ids(ids[name])) for name, call in calls.items()}
    spans = [replace(span, call=changed.get(span.span_id, span.call)) for span in recording.spans]
    return replace(recording, spans=spans)


SEEDED: dict[str, Change] = {
    "failed-rollouts": failed("ValueError", "no [bold]answer"),
    "timeouts": failed("TimeoutError", "the agent ran longer than 5 s and was stopped", "timeout"),
    "retries": repeated,
    "no-calls": without_calls,
    "other-policy": calls(policy="judge"),
    "unseen-calls": bypassed,
    "call-errors": calls(response=None, response_ids=b"", logprobs=b"", status_code=500, error="overloaded"),
    "missing-token-ids": calls(prompt_ids=b"", response_ids=b"", logprobs=b"", ids_missing="the backend gave none"),
    "reward-errors": failed("agl.errors.RunError", "the reward 'judge:score' raised KeyError: 'goal'"),
    "reward-missing": rewarded(None),
    "reward-never-varies": rewarded(0.0),
    "cut-answers": calls(finish_reason="length"),
    "over-token-budget": lengthened,
    "hidden-in-prompt": leaked,
    "identical-answers": alike,
    "unused-tools": without_tools,
    "failing-tools": broken_tools,
    "nameless-agents": nameless,
    "split-rows": rewritten,
}


def examined(change: Change = lambda recording: recording, *, part: float = 1.0) -> Examined:
    """Return the facts of twelve rollouts, of which the share ``part`` was changed by ``change``."""
    made = [make(task, sample) for task in TASKS for sample in range(SAMPLES)]
    made = [change(one) if place < part * len(made) else one for place, one in enumerate(made)]
    facts = [facts_of(one, other=made[(place + SAMPLES) % len(made)].rollout.task) for place, one in enumerate(made)]
    return Examined(rollouts=facts, needs_token_ids=True, token_budget=2048)


def facts_of(recording: Recording, *, other: Json = None) -> Observed:
    episode = build_episode(recording.rollout, recording.attempts[-1], recording.spans, policy="main")
    trains = episode.reward if recording.rollout.status == "succeeded" else None
    return observe(recording, episode, trains=trains, left_out="", other=other)


def test_clean_recording_has_no_fault() -> None:
    assert [] == faults_in(examined())


@pytest.mark.parametrize("rule", SEEDED)
def test_seeded_fault_is_found_and_no_other(rule: str) -> None:
    found = faults_in(examined(SEEDED[rule]))

    assert [rule] == [fault.rule for fault in found]
    assert found[0].example.startswith("sums-1-grpo")


PARTIAL = sorted(SEEDED.keys() - {"reward-never-varies", "identical-answers", "unused-tools", "failing-tools"})


@pytest.mark.parametrize("rule", PARTIAL)
def test_fault_in_a_third_of_the_rollouts_is_found(rule: str) -> None:
    assert [rule] == [fault.rule for fault in faults_in(examined(SEEDED[rule], part=1 / 3))]


def test_hidden_values_that_stand_in_every_prompt_are_no_leak() -> None:
    """The answers of other tasks are in the prompts as often as the task's own answer, so this is not a leak."""
    every = " ".join(str(task["answer"]) for task in TASKS)

    found = examined(lambda one: edited(one, lambda messages: [{"role": "system", "content": every}, *messages]))

    assert [] == faults_in(found)


def test_hidden_value_in_what_the_agent_may_see_is_no_leak() -> None:
    task: dict[str, Json] = {"question": "blue or mostly red?", "answer": "mostly red"}
    recording = make(task, 0)

    assert () == facts_of(edited(recording, lambda messages: [{"role": "user", "content": task["question"]}])).leaked


def test_same_single_word_from_every_rollout_is_no_fault() -> None:
    yes = calls(response={"choices": [{"message": {"role": "assistant", "content": "yes"}}]})

    assert [] == faults_in(examined(yes))


def test_same_single_word_at_temperature_zero_is_one() -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}
    greedy = calls(response=answer, sampling=Sampling(temperature=0.0))

    assert ["identical-answers"] == [fault.rule for fault in faults_in(examined(greedy))]


def test_tasks_that_stand_twice_or_in_both_datasets_are_named() -> None:
    found = faults_of_tasks([*TASKS, TASKS[0]], [TASKS[1], {"question": "new"}])

    assert ["repeated-tasks", "shared-tasks"] == [fault.rule for fault in found]
    assert "1 of 7 training tasks" in found[0].evidence
    assert "1 of 2 validation tasks" in found[1].evidence
    assert [] == faults_of_tasks(TASKS, [{"question": "new"}])


def test_facts_of_a_rollout() -> None:
    facts = facts_of(make(TASKS[0], 1))

    assert (2, 1, 9, 5) == (facts.calls, facts.rows, facts.row_tokens, facts.trained_tokens)
    assert (9, 5, 9) == (facts.prompt_tokens, facts.response_tokens, facts.context)
    assert (9.0, 4.0, 0.0) == (facts.seconds, facts.model_s, facts.tool_s)  # the model's calls cover the tool
    assert {"solver": 2} == facts.agents


def test_time_that_two_calls_share_counts_once() -> None:
    assert 7 == covered([(0, 4), (2, 5), (10, 12)])


@pytest.mark.parametrize("shares", [(0.3, 0.7), (0.5, 0.3, 0.2), (1.0,)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_counted_share_of_silent_groups_has_no_bias(shares: tuple[float, ...], size: int) -> None:
    """The expected estimate over all outcomes of five rollouts is the probability that ``size`` draws agree."""
    expected = sum(share**size for share in shares)
    mean = 0.0
    for drawn in itertools.product(range(len(shares)), repeat=5):
        chance = 1.0
        for value in drawn:
            chance *= shares[value]
        mean += chance * silent_shares([[float(value) for value in drawn]], [size])[0].share

    assert expected == pytest.approx(mean)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (1.0, 3.0), (5.0, 5.0)])
def test_modelled_share_of_silent_groups_agrees_with_running_them(alpha: float, beta: float) -> None:
    draw = random.Random(3)
    chances = [draw.betavariate(alpha, beta) for _ in range(3000)]
    seen = [[float(draw.random() < chance) for _ in range(4)] for chance in chances]
    expected = fmean(chance**16 + (1 - chance) ** 16 for chance in chances)

    found = silent_shares(seen, [16])[0]

    assert ("model", pytest.approx(expected, abs=0.03)) == (found.basis, found.share)


def test_tasks_that_ran_once_give_no_share() -> None:
    assert [] == silent_shares([[1.0], [0.0], []])


def test_rewards_that_never_agree_are_never_silent() -> None:
    draw = random.Random(5)

    found = silent_shares([[draw.random() for _ in range(4)] for _ in range(8)])

    assert [0.0] * 5 == [pytest.approx(one.share, abs=1e-6) for one in found]


def test_rewards_that_always_agree_are_always_silent() -> None:
    assert [1.0] * 5 == [one.share for one in silent_shares([[1.0] * 4] * 8)]


def test_hard_tasks_are_given_larger_groups() -> None:
    draw = random.Random(7)

    def best(chance: float) -> int:
        seen = [[float(draw.random() < chance) for _ in range(32)] for _ in range(200)]
        found = best_size(silent_shares(seen), rollouts=128, tasks=200)
        return found.size if found else 0

    assert (4, 8, 32) == (best(0.5), best(0.05), best(0.01))


def test_group_size_for_which_there_are_too_few_tasks_is_not_proposed() -> None:
    shares = silent_shares([[0.0, 1.0] * 8] * 4)

    found = best_size(shares, rollouts=128, tasks=8)

    assert found is not None
    assert 16 == found.size


def test_jobs_begin_in_order_as_soon_as_a_place_is_free() -> None:
    assert 5.0 == makespan([3.0, 1.0, 1.0, 3.0], concurrency=2)
    assert 3.0 == makespan([3.0, 1.0, 1.0, 3.0], concurrency=9)
    assert 0.0 == makespan([], concurrency=2)


def test_forecast_of_a_step_scales_with_its_rollouts() -> None:
    rollouts = examined().rollouts

    step = forecast(rollouts, tasks=8, samples=4, concurrency=16)

    assert (32, 32 * 5, 32) == (step.rollouts, step.trained_tokens.mean, step.rows.mean)
    assert 18.0 == step.collect_s.mean


def test_tokens_of_few_tasks_are_less_sure() -> None:
    first = examined().rollouts[0]

    def ran(tasks: int) -> list[Observed]:
        return [replace(first, group_id=str(n), row_tokens=100 + 20 * (n % 2)) for n in range(tasks)]

    few, many = uncertainty_of(ran(4), tasks=1000), uncertainty_of(ran(40), tasks=1000)

    assert few is not None
    assert many is not None
    assert 3.182 * 11.547 / 110 / 2 == pytest.approx(few, rel=0.01)  # Student's quantile for four tasks
    assert few > 3 * many
    assert 0.0 == uncertainty_of(ran(4), tasks=4)
    assert uncertainty_of(ran(1), tasks=4) is None


def test_tokens_are_as_unsure_as_the_less_sure_of_those_computed_and_those_trained() -> None:
    first = examined().rollouts[0]
    ran = [replace(first, group_id=str(n), row_tokens=100 + n % 2, trained_tokens=10 + 8 * (n % 2)) for n in range(20)]

    found = uncertainty_of(ran, tasks=1000)

    assert found is not None
    assert 0.1 < found < 0.2


def test_rollouts_of_one_task_that_differ_stay_unsure_when_all_tasks_were_run() -> None:
    first = examined().rollouts[0]
    ran = [replace(first, group_id=str(n // 2), row_tokens=100 + 40 * (n % 2)) for n in range(16)]

    assert (uncertainty_of(ran, tasks=8) or 0.0) == 0.0  # the means of the tasks agree
    mixed = [replace(one, row_tokens=one.row_tokens + 15 * (n % 5)) for n, one in enumerate(ran)]
    assert 0.02 < (uncertainty_of(mixed, tasks=8) or 0.0) < 0.2


def test_interval_of_the_tokens_holds_the_mean_of_all_tasks_nearly_always() -> None:
    draw, first = random.Random(11), examined().rollouts[0]
    tasks = [draw.lognormvariate(4, 0.7) for _ in range(400)]
    hits = 0
    for _ in range(300):
        chosen = draw.sample(range(400), 24)
        ran = [
            replace(first, group_id=str(task), row_tokens=max(1, round(tasks[task] * draw.uniform(0.6, 1.4))))
            for task in chosen
            for _ in range(2)
        ]
        ran = [replace(one, trained_tokens=one.row_tokens) for one in ran]
        mean = fmean(one.row_tokens for one in ran)
        hits += abs(mean - fmean(tasks)) <= (uncertainty_of(ran, tasks=400) or 0.0) * mean

    assert 0.88 < hits / 300 <= 1.0


def test_first_step_of_a_recording_counts_for_tokens_and_not_for_time() -> None:
    first = examined().rollouts[0]
    cold = [replace(first, batch="a 0", started_at=1.0, seconds=50.0, trained_tokens=20) for _ in range(4)]
    warm = [replace(first, batch="a 1", started_at=9.0, seconds=2.0, trained_tokens=10) for _ in range(4)]

    step = forecast([*warm, *cold], tasks=2, samples=2, concurrency=4)

    assert 2.0 == step.collect_s.most
    assert 60 == pytest.approx(step.trained_tokens.mean, rel=0.1)
    assert 50.0 == forecast(cold, tasks=2, samples=2, concurrency=4).collect_s.mean


def run_step(batch: str, *, shares_a_processor: bool, draw: random.Random, rollouts: int = 32) -> list[Observed]:
    """Simulate rollouts of random work, 8 at once, either independent of each other or sharing one processor."""
    work = [draw.expovariate(1.0) for _ in range(rollouts)]
    places, now = 8, 0.0
    running: dict[int, tuple[float, float]] = {}  # the start of a rollout, and its remaining work
    done: list[Observed] = []
    while work or running:
        while work and len(running) < places:
            running[len(work)] = (now, work.pop())
        speed = places / len(running) if shares_a_processor else 1.0
        first = min(running, key=lambda place: running[place][1])
        passed = running[first][1] / speed
        now += passed
        running = {place: (begun, left - passed * speed) for place, (begun, left) in running.items()}
        begun, _ = running.pop(first)
        name = f"{batch}-{first}"
        done.append(Observed(rollout_id=name, group_id=name, batch=batch, started_at=begun, seconds=now - begun))
    return done


@pytest.mark.parametrize(("shares_a_processor", "idle"), [(True, (0.0, 0.35)), (False, (0.8, 1.0))])
def test_end_of_a_step_costs_what_recorded_steps_lost_there(
    shares_a_processor: bool, idle: tuple[float, float]
) -> None:
    draw = random.Random(0)
    steps = [run_step(f"{step}", shares_a_processor=shares_a_processor, draw=draw) for step in range(60)]
    took = fmean(max(one.started_at + one.seconds for one in step) for step in steps)
    at_once = forecast([one for step in steps for one in step], tasks=32, samples=1, concurrency=8)

    assert idle[0] <= idle_share(steps) <= idle[1]
    assert took == pytest.approx(at_once.collect_s.mean, rel=0.06)


@pytest.mark.parametrize(("shares_a_processor", "near"), [(True, 0.3), (False, 0.1)])
def test_longest_rollout_ends_sooner_where_the_others_leave_it_the_processor(
    shares_a_processor: bool, near: float
) -> None:
    draw = random.Random(0)
    recorded = [run_step(f"{step}", shares_a_processor=shares_a_processor, draw=draw) for step in range(60)]
    small = [run_step("", shares_a_processor=shares_a_processor, draw=draw, rollouts=8) for _ in range(200)]
    took = fmean(max(one.started_at + one.seconds for one in step) for step in small)

    planned = forecast([one for step in recorded for one in step], tasks=8, samples=1, concurrency=8)

    assert took == pytest.approx(planned.collect_s.mean, rel=near)


def test_steps_without_a_queue_say_nothing_of_its_end() -> None:
    step = [Observed(rollout_id=f"{n}", group_id=f"{n}", started_at=n / 10, seconds=1.0 + n) for n in range(8)]

    assert 1.0 == idle_share([step]) == idle_share([])


def test_rollouts_at_once_are_counted_while_any_runs() -> None:
    first = examined().rollouts[0]
    times = [(0.0, 4.0), (0.0, 2.0), (10.0, 12.0)]
    observed = [replace(first, started_at=begin, finished_at=end) for begin, end in times]

    assert pytest.approx(8 / 6) == at_once(observed)
