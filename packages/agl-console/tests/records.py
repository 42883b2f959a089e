"""Fills a store as training runs do: with numbers, teams of agents, tokens, failures and rewards."""

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from agl import semconv
from agl.contracts import CallUse, ExperimentRecord, LabelMove, Metric, Moments, Presence, Store, VersionScore
from agl.schemas import (
    ErrorInfo,
    JsonResource,
    Mode,
    ModelCall,
    Outcome,
    PromptTemplate,
    ResourceVersion,
    Reward,
    Rollout,
    Span,
    Weights,
    pack_floats,
    pack_ids,
    to_builtins,
    to_json,
)
from agl_inspect.learning import decision_of, replay_gates
from agl_inspect.records.learning import (
    GateRules,
    LearnerState,
    LearningCandidate,
    LearningRecords,
    Move,
    ReplayPair,
    ServedUnit,
    entry_name,
)
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally, add_tallies

TRAINING = "agl.training"
"""The attribute of a span that says what a step made of a rollout."""

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)> \u202eright to left\u202c nul:\x00 escape:\x1b[31mred "
    "{{ 7 * 7 }} </pre></textarea>"
)
"""Text that a page must display, and never interpret."""

LONG_LINE = "x" * 1_000_000
LONG_NAME = "a-run-with-a-name-that-is-much-too-long-for-any-table-but-has-to-be-shown-as-it-is-all-of-it"
START_NS = 1_700_000_000_000_000_000


def call(
    number: int, *, prompt: Sequence[int], answer: Sequence[int], version: str, messages: list[Any], said: Any
) -> ModelCall:
    generator = random.Random(number)
    return ModelCall(
        request_id=f"request-{number}",
        dialect="chat",
        policy="small",
        model="small",
        model_version=version,
        request={"messages": messages},
        response={"choices": [{"message": {"role": "assistant", "content": said}}]},
        prompt_ids=pack_ids(prompt),
        response_ids=pack_ids(answer),
        logprobs=pack_floats([-generator.expovariate(1.0) for _ in answer]),
        finish_reason="stop",
        latency_s=0.2,
    )


class Recorder:
    """Makes the spans of one attempt, 100 ms apart."""

    def __init__(self, rollout_id: str, attempt_id: str) -> None:
        self._ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
        self.spans: list[Span] = []

    def add(self, name: str, *, parent: str | None = None, lasts_ms: int = 80, **fields: Any) -> str:
        number = len(self.spans) + 1
        start = START_NS + number * 100_000_000
        span_id = f"{number:016x}"
        times = {"start_ns": start, "end_ns": start + lasts_ms * 1_000_000}
        self.spans.append(Span(**self._ids, span_id=span_id, name=name, parent_id=parent, **times, **fields))
        return span_id


def team(recorder: Recorder, *, text: str, reward: float | None, version: str) -> None:
    """Record a planner and a writer with a tool; the writer's second call continues the first."""
    root = recorder.add("rollout", lasts_ms=900)
    planner = agent(recorder, root, "planner")
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    recorder.add(
        "chat small",
        parent=planner,
        call=call(1, prompt=range(10, 40), answer=range(40, 60), version=version, messages=asked, said="a plan"),
    )
    writer = agent(recorder, root, "writer")
    asked = [{"role": "user", "content": "write"}]
    recorder.add(
        "chat small",
        parent=writer,
        call=call(2, prompt=range(100, 120), answer=range(120, 150), version=version, messages=asked, said=text),
    )
    attributes = {
        semconv.OPERATION: semconv.OP_EXECUTE_TOOL,
        semconv.TOOL_NAME: "look_up",
        semconv.TOOL_ARGUMENTS: {"word": text},
        semconv.TOOL_RESULT: text,
    }
    recorder.add("execute_tool look_up", parent=writer, attributes=attributes, status="ok" if reward else "error")
    handed = {
        semconv.OPERATION: semconv.OP_HANDOFF,
        semconv.HANDOFF_SOURCE: "planner",
        semconv.HANDOFF_TARGET: "writer",
    }
    recorder.add("handoff writer", parent=root, attributes=handed, lasts_ms=1)
    more = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    recorder.add(
        "chat small",
        parent=writer,
        call=call(3, prompt=range(100, 160), answer=range(160, 180), version=f"{version}b", messages=more, said="done"),
    )
    if reward is not None:
        given = Reward(value=reward, name="grade", dimensions={"form": 1.0}, source="evaluator", feedback=text)
        recorder.add("evaluate grade", parent=root, reward=given, lasts_ms=1)


def agent(recorder: Recorder, parent: str, name: str) -> str:
    attributes = {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: name}
    return recorder.add(f"invoke_agent {name}", parent=parent, attributes=attributes, lasts_ms=350)


def token_numbers(row: int, reward: float) -> dict[str, bytes]:
    """Return numbers per token: entropies for the writer's first answer, advantages for the best planners."""
    if row == 1:
        return {"entropy": struct.pack("<30e", *(number / 8 for number in range(29)), math.nan)}
    return {"advantage": struct.pack("<20e", *[-0.5] * 10, *[1.0] * 10)} if reward > 0.9 else {}


def training(rollout_id: str, spans: Sequence[Span], *, step: int, reward: float) -> Span:
    """Return the span that says how a step of ``grpo`` used the calls: the last call was not trained on."""
    calls = [span.span_id for span in spans if span.call is not None]
    uses = [
        CallUse(span_id=name, row=row, credit=reward, advantage=reward - 0.5, tokens=token_numbers(row, reward))
        for row, name in enumerate(calls[:-1])
    ]
    uses += [CallUse(span_id=name, note="its answer was cut at a limit of tokens") for name in calls[-1:]]
    record = {"experiment": "sums", "run": 1, "algorithm": "grpo", "step": step, "calls": to_builtins(uses)}
    return Span(rollout_id=rollout_id, attempt_id="", span_id="a" * 16, name="training", attributes={TRAINING: record})


async def record(
    store: Store,
    rollout_id: str,
    *,
    text: str = "What is 2 + 3?",
    reward: float | None = 1.0,
    error: ErrorInfo | None = None,
    step: int = 1,
    experiment: str = "sums",
    group: str = "task-1",
    spans: Any = team,
    trains: bool = False,
    mode: Mode = "train",
) -> None:
    """Record a rollout from its enqueueing to its end."""
    metadata = {"algorithm": "grpo", "step": step}
    task = {"question": text}
    about: dict[str, Any] = {"experiment": experiment, "group_id": group, "metadata": metadata, "mode": mode}
    made = Rollout(rollout_id=rollout_id, task=task, **about)
    await store.enqueue([made])
    (claim,) = await store.claim(worker="worker@here:1:a", experiment=experiment)
    recorder = Recorder(rollout_id, claim.attempt.attempt_id)
    spans(recorder, text=text, reward=reward, version=f"v{step}")
    status = "failed" if error else "succeeded"
    await store.finish(
        [Outcome(attempt_id=claim.attempt.attempt_id, status=status, error=error, spans=tuple(recorder.spans))]
    )
    if trains and reward is not None:
        await store.append_spans([training(rollout_id, recorder.spans, step=step, reward=reward)])


def numbers(experiment: str, *, steps: int, speed: float) -> list[Metric]:
    """Return the metrics of a run that learns, with some noise, and of the validations in that run."""
    noise = random.Random(experiment)
    found: list[Metric] = []
    for step in range(1, steps + 1):
        reward = 1 - math.exp(-step * speed) + noise.gauss(0, 0.02)
        values = {
            **{"reward": reward, "reward_low": reward - 0.05, "reward_high": reward + 0.05},
            **{"kl": step * 0.001, "entropy": 2.0 - step * 0.02, "clipped_low": 0.01, "clipped_high": 0.02},
            **{"tokens": 1000.0 + step, "groups_silent": float(step % 4), "loss": noise.gauss(0, 0.1)},
            **{"collect_s": 2.0, "update_s": 1.0},
        }
        validation = {"reward": reward - 0.03, "failed": 0.0} if step % 5 == 0 else {}
        found += [
            Metric(experiment=experiment, algorithm=algorithm, step=step, name=name, value=value)
            for algorithm, logged in (("grpo", values), ("validate", validation))
            for name, value in logged.items()
        ]
    return found


def rollout_name(number: int) -> str:
    """Return a rollout id in the form that trainers give."""
    return f"sums-1-grpo-train-{number % 3 + 1:05d}-{number:05d}-000"


def version(name: str, version: str, resource: Any, *, parent: str = "", step: int = 0, **metadata: Any) -> Any:
    """Return a version that ``grpo`` made at ``step``; step 0 makes a first version, published by hand."""
    made = {"algorithm": "grpo", "step": step} if step else {}
    named = {"experiment": "sums", **metadata} if not step else metadata
    created = {"created_at": START_NS / 1e9 + step, "metadata": named}
    return ResourceVersion(name=name, version=version, resource=resource, parent=parent, **made, **created)


async def publish(store: Store) -> None:
    """Publish a prompt with two branches, a tried version, labels and a score; also weights, tools and a long text."""
    texts = {"first": "Answer.\nBe brief.\n", "sums-1-grpo-1": "Answer.\nBe kind.\n"}
    texts["sums-1-grpo-2"] = f"Answer.\nBe kind.\n{HOSTILE}\n"
    lines = list(texts)
    prompts = [
        version("style", made, PromptTemplate(template=text), parent=lines[step - 1] if step else "", step=step)
        for step, (made, text) in enumerate(texts.items())
    ]
    aside = PromptTemplate(template="Answer at length.")
    prompts.insert(2, version("style", "sums-1-grpo-1-b", aside, parent="first", step=1))
    tried = version("style", "sums-1-grpo-3-c", aside, parent="sums-1-grpo-2", step=3, candidate=True)
    others = [
        version("main_llm", "sums-1-grpo-1", Weights(uri="checkpoints/1"), step=1),
        version("tools", "first", JsonResource(value=[{"name": "look_up", "about": HOSTILE}])),
        version(LONG_NAME, LONG_NAME, PromptTemplate(template=LONG_LINE)),
        version(LONG_NAME, f"{LONG_NAME}-2", PromptTemplate(template=LONG_LINE + "y"), parent=LONG_NAME),
    ]
    await store.publish([*prompts, tried, *others])
    for to, why in (("first", ""), ("sums-1-grpo-1", HOSTILE), ("sums-1-grpo-2", "better on 40 tasks")):
        await store.move_label(LabelMove(name="style", label="production", version=to, reason=why))
    await store.move_label(LabelMove(name="style", label="production", version="sums-1-grpo-1", is_back=True))
    score = VersionScore(name="style", version="sums-1-grpo-2", mean=0.8, low=0.7, high=0.9, n=40, how="fresh rollouts")
    await store.save_scores([score])


def fitted() -> bytes:
    """Return the ranking that ``agl metrics --rank`` stores: two parameters, one of them with a long name."""
    values = {"algorithm.grpo.params.lr": "0.05"}
    facts = {"run": 1, "turn": 40, "mean": 0.8, "low": 0.7, "high": 0.9, "tasks": 40, "values": values}
    runs = [{"experiment": name, **facts} for name in ("sums", "sums-slow", LONG_NAME)]
    one = {"tried": "0.001 to 0.1", "importance": 0.84, "low": 0.61, "high": 0.95, "chance": 0.002, "is_clear": True}
    other = {"tried": HOSTILE, "importance": 0.09, "low": 0.02, "high": 0.25, "chance": 0.61, "is_clear": False}
    parameters = [{"name": "algorithm.grpo.params.lr", **one}, {"name": f"algorithm.{LONG_NAME}.params.loss", **other}]
    proposed = {"algorithm.grpo.params.lr": "0.021", f"algorithm.{LONG_NAME}.params.loss": None}
    found = {"agent": "team:solve", "runs": runs, "unfinished": 1, "missing": 0, "best": runs[0]}
    fit = {**found, "parameters": parameters, "next": proposed, "notes": ["the best run has the largest lr"]}
    return to_json({"time": START_NS / 1e9, "fit": fit})


def tried() -> bytes:
    """Return the record that ``agl resources try`` stores of a trial of two versions."""
    first = {"version": "first", "mean": 0.5, "low": 0.4, "high": 0.6, "tasks": 20}
    other = {"version": "sums-1-grpo-2", "mean": 0.62, "low": 0.5, "high": 0.74, "tasks": 20}
    ends = {"difference": 0.12, "low": 0.02, "high": 0.22, "evidence": 44.0, "evidence_of_harm": 0.1}
    counts = {"threshold": 40.0, "pairs": 20, "needed": 18, "old_count": 20, "new_count": 20, "paired_tasks": 20}
    compared = {"verdict": "better", "policy_improvement_ratio": 1.24, **ends, **counts}
    about = {"experiment": "sums-try", "resource": "style", "source": "20 of 40 validation tasks"}
    return to_json({"time": START_NS / 1e9, **about, "scores": [first, {**other, "comparison": compared}]})


def tallies(steps: int) -> list[StepTally]:
    """Return the sums that a run stores per step: a planner that helps, and a writer that gets better."""
    found: list[StepTally] = []
    for step in range(1, steps + 1):
        credit = Moments(count=8, mean=step / steps, squares=0.5)
        agents = [
            AgentTally(
                agent="writer", rollouts=4, calls=8, tokens=160, trained=120, seconds=2.0, credit=credit, errors=1
            ),
            AgentTally(agent="planner", rollouts=4, calls=4, tokens=40, trained=40, seconds=0.5, reward=credit),
        ]
        ends = {"reward": step / steps, "low": step / steps - 0.1, "high": step / steps + 0.1}
        found.append(StepTally(algorithm="grpo", step=step, mode="train", rollouts=4, agents=tuple(agents), **ends))
    others = AgentTally(agent="", rollouts=9, calls=9, tokens=900)
    return [*found, StepTally(algorithm="validate", step=0, mode="val", rollouts=9, agents=(others,))]


async def learn(store: Store) -> None:
    """Record a learner as `agl learn` does: a promoted candidate, and one with hostile texts that is refused."""
    records = LearningRecords("support")
    moves = [
        Move(stage="replay", at=1_700_000_000.0, share=0.0, reason="proposed by apo"),
        Move(stage="canary", at=1_700_000_060.0, share=0.2, reason="better in the replay"),
        Move(stage="canary", at=1_700_000_120.0, share=0.5, reason="no harm so far", first=20),
        Move(stage="watch", at=1_700_000_180.0, share=0.9, reason="promoted", first=40),
    ]
    good = candidate(1, moves)
    bad = candidate(2, [moves[0], Move(stage="refused", at=1_700_000_300.0, share=0.0, reason=HOSTILE)])
    pairs = [
        ReplayPair(unit=f"user-{n}", kind="", old=0.0, new=1.0, rollouts=[rollout_name(n % 12)]) for n in range(30)
    ]
    units = [unit(n) for n in range(60)]
    replay = replay_gates(good.rules, number=1, pairs=pairs)["replay"]
    harm = replay_gates(bad.rules, number=2, pairs=[swapped(pair) for pair in pairs])["replay"]
    decisions = [
        decision_of(replace(each, moves=each.moves[:1]), "replay", gate, first=0, end=len(pairs), at=1_700_000_050.0)
        for each, gate in ((good, replay), (bad, harm))
    ]
    await records.pairs("c1").add(store, {entry_name(n): pair for n, pair in enumerate(pairs)})
    await records.pairs("c2").add(store, {entry_name(n): swapped(pair) for n, pair in enumerate(pairs)})
    await records.units("c1").add(store, {entry_name(n): each for n, each in enumerate(units)})
    await records.candidates.add(store, {each.id: each for each in (good, bad)})
    await records.decisions.add(store, {each.id: each for each in decisions})
    state = LearnerState(watched="c1", candidates=2, rounds=3, rated=240, excluded={"mallory": HOSTILE})
    await records.state.add(store, {"": state})


def candidate(number: int, moves: list[Move]) -> LearningCandidate:
    return LearningCandidate(
        id=f"c{number}",
        number=number,
        versions={"style": "sums-1-grpo-2"},
        baseline={"style": "first"},
        origin="apo",
        conversations=120,
        created_at=moves[0].at,
        moves=moves,
        rules=GateRules(),
    )


def swapped(pair: ReplayPair) -> ReplayPair:
    return replace(pair, old=pair.new, new=pair.old)


def unit(number: int) -> ServedUnit:
    """Return a user of the canary, or from number 40 on of the watch."""
    is_new = number % 4 != 0
    share = 0.2 if number < 20 else 0.5 if number < 40 else 0.9
    ids = [rollout_name(number % 12)] * 2
    return ServedUnit(
        unit=f"user-{number}",
        candidate="c1",
        kind="",
        is_new=is_new,
        share=share,
        reward=1.0 if is_new else 0.25,
        rollouts=ids,
    )


async def fill(store: Store) -> None:
    """Fill a store with runs and rollouts; one run has a long name, and one failed at its start."""
    await publish(store)
    runs = (("sums", "finished", 60, 0.05), ("sums-slow", "running", 40, 0.02), (LONG_NAME, "running", 3, 0.1))
    for name, status, steps, speed in runs:
        live = {"style": "sums-1-grpo-2"} if name == "sums" else {}
        experiment = ExperimentRecord(name=name, status=status, live=live, turn=steps, agent="team:solve")
        state = b'{"step": 1, "settings": {"use": "grpo", "lr": "%s", "seed": "1"}}' % str(speed).encode()
        await store.save_state({f"experiment/{name}/1/algorithm/grpo": state}, experiment=experiment)
        await store.log_metrics(numbers(name, steps=steps, speed=speed))
    await store.save_state({"experiment/sums/1/fit": fitted(), "trial/style/1": tried()})
    await add_tallies(store, ExperimentRecord(name="sums"), tallies(60))
    await store.announce(Presence(experiment="sums-slow", session="s"))
    await store.save_state({}, experiment=ExperimentRecord(name="refused", agent="team:solve"))
    for number in range(12):
        step, task = number % 3 + 1, number % 4
        await record(store, rollout_name(number), reward=number / 12, step=step, group=f"task-{task}", trains=True)
    failure = ErrorInfo(type="KeyError", message="'answer'", traceback="  File \"team.py\", line 3\nKeyError: 'answer'")
    await record(store, "sums-1-grpo-failed", reward=None, error=failure)
    await record(store, "sums-1-grpo-hostile", text=HOSTILE, reward=0.5)
    await record(store, "sums-1-grpo-long", text=LONG_LINE, reward=0.25)
    waiting = Rollout(rollout_id="sums-1-grpo-waiting", task="sum", experiment="sums")
    await store.enqueue([waiting])
    await learn(store)
