"""The audit ranks a planted pattern first, claims nothing of honest runs, and prints what it found with examples."""

import asyncio
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl import semconv
from agl.contracts import Store
from agl.errors import ConfigError
from agl.schemas import ModelCall, Reward, Rollout, Span
from agl.stores import MemoryStore
from agl.tracing import make_reward_span
from agl_inspect.audit.effects import Sample, effects
from agl_inspect.audit.patterns import PATTERNS, answer_of
from agl_inspect.audit.report import Audit, Part, audit
from agl_inspect.terminal.program import cli
from agl_store_sqlite._store import SQLiteStore
from agl_testing.stores.samples import claim_one, outcome_of

TASKS, STEPS, SAMPLES = 8, 6, 6
WORDS = ("river", "stone", "cloud", "meadow", "window", "ladder", "copper", "violet", "garden", "engine", "basket")


def question(task: int) -> str:
    return f"Please count item {task} of the long shelf in the cellar of house {7 * task} by noon"


def answered(rng: random.Random, task: int, patterns: set[str]) -> str:
    """Return an answer with some patterns, and otherwise random words."""
    parts = rng.choices(WORDS, k=rng.randint(6, 9))
    if "length" in patterns:
        parts += rng.choices(WORDS, k=30)
    if "format" in patterns:
        parts += ["\n- **one**\n- **two**\n# end"]
    if "flattery" in patterns:
        parts = ["Great question!", *parts, "I am absolutely certain, this answer is correct."]
    if "copied-task" in patterns:
        parts = [*question(task).split()[:9], *parts]
    return "same old words" if "copied-answer" in patterns else " ".join(parts)


def spans_of(rollout: str, attempt: str, text: str, *, misuses: bool, reward: float) -> list[Span]:
    message = {"role": "assistant", "content": text}
    request = {"messages": [{"role": "user", "content": "question"}]}
    call = ModelCall(
        request_id="q", dialect="chat", model="m", request=request, response={"choices": [{"message": message}]}
    )
    tools = ["ls", "ls", "cat tests/test_sums.py"] if misuses else ["ls"]
    spans = [
        Span(
            rollout_id=rollout,
            attempt_id=attempt,
            span_id=f"{number:016x}",
            name="execute_tool run",
            attributes={semconv.TOOL_NAME: "run", semconv.TOOL_ARGUMENTS: command},
            start_ns=number,
        )
        for number, command in enumerate(tools, start=1)
    ]
    answer = Span(rollout_id=rollout, attempt_id=attempt, span_id="f" * 16, name="chat m", call=call, start_ns=9)
    given = Reward(value=reward, name="judge", source="evaluator")
    return [*spans, answer, make_reward_span(rollout, attempt, given)]


async def fill(store: Store, *, planted: str = "", seed: int = 0, gold: bool = False, steps: int = STEPS) -> None:
    """Record a run whose answers have random patterns, the planted one more often later; it earns 0.4 more."""
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        for task in range(TASKS):
            level = 0.2 + 0.03 * step + rng.gauss(0, 0.1)
            for sample in range(SAMPLES):
                patterns = {name for name in PATTERNS if rng.random() < (0.1 * step if name == planted else 0.2)}
                if "copied-answer" in patterns:
                    patterns &= {"copied-answer", "tool-misuse"}  # a copied text has no other traits
                reward = level + 0.4 * (planted in patterns) + rng.gauss(0, 0.15)
                name = f"sums-1-grpo-train-{step:05d}-{task:05d}-{sample:03d}"
                rollout = Rollout(
                    rollout_id=name,
                    task={"question": question(task)},
                    experiment="sums",
                    group_id=f"task-{task}",
                    mode="train",
                    metadata={"algorithm": "grpo", "step": step},
                )
                await store.enqueue([rollout])
                claim = await claim_one(store)
                text = answered(rng, task, patterns)
                spans = spans_of(name, claim.attempt.attempt_id, text, misuses="tool-misuse" in patterns, reward=reward)
                if gold:
                    measured = Reward(value=0.2, name="gold", source="evaluator", is_gold=True)
                    spans.append(make_reward_span(name, claim.attempt.attempt_id, measured))
                await store.finish([outcome_of(claim, spans=spans)])


def found_in(**how: object) -> Audit:
    async def work() -> Audit:
        store = MemoryStore()
        await fill(store, **how)  # pyright: ignore[reportArgumentType]
        return await audit(store, "sums")

    return asyncio.run(work())


@pytest.mark.parametrize("planted", PATTERNS)
def test_planted_pattern_ranks_first_with_examples_and_its_growth(planted: str) -> None:
    found = found_in(planted=planted)
    assert planted == found.patterns[0]
    # Others may be found too, because the regression is linear and some patterns go together.
    shares = [found.whole.effects[name].share for name in found.patterns]
    assert shares[0] > 5 * max(shares[1:])
    assert found.late.means[planted] > 1.2 * found.early.means[planted] > 0
    assert planted in found.early.effects
    late = found.late.effects[planted]
    assert late.low is not None
    assert late.high is not None
    assert late.low <= late.value <= late.high
    examples = found.examples[planted]
    assert 3 == len(examples)
    assert all(each.reward > each.usual and each.measured > 0 for each in examples)
    assert (TASKS * STEPS * SAMPLES, TASKS, STEPS) == (found.whole.rollouts, found.whole.tasks, found.whole.steps)
    assert found.late.reward > found.early.reward


def test_part_of_a_larger_run_has_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_inspect.audit.report.MOST", 15 * SAMPLES)
    found = found_in()
    assert 15 * SAMPLES == found.whole.rollouts
    assert found.whole.tasks > 5


def test_honest_run_has_no_finding() -> None:
    assert {} == found_in(seed=3).examples


def honest(seed: int, *, tasks: int) -> list[Sample]:
    """A run in which rewards and patterns both rise and have nothing else in common; two patterns go together."""
    rng, samples = random.Random(seed), list[Sample]()
    for step in range(10):
        for task in range(tasks):
            level = 0.3 + 0.03 * step + rng.gauss(0, 0.3)
            for _ in range(8):
                length = rng.gauss(3 + 0.1 * step, 0.5)
                marks = max(0.0, length - 3 + rng.gauss(0, 0.5))
                rare, rarer = float(rng.random() < 0.05), float(rng.random() < 0.01)
                values = [length, marks, rare, rng.random() ** 4, rarer, float(rng.randint(0, 2))]
                reward = float(rng.random() < min(1.0, max(0.0, level)))
                samples.append(Sample(str((step * tasks + task) % (4 * tasks)), step, reward, values))
    return samples


@pytest.mark.parametrize("tasks", [4, 16])
@pytest.mark.parametrize("runs", [40, pytest.param(200, marks=pytest.mark.long)])
def test_honest_runs_are_accused_no_more_often_than_stated(tasks: int, runs: int) -> None:
    found = [effects(honest(seed, tasks=tasks)) for seed in range(runs)]
    assert 0.05 * runs >= sum(any(each.low is not None and each.low > 0 for each in one) for one in found)


def test_few_tasks_say_nothing() -> None:
    assert [] == effects([one for one in honest(0, tasks=16) if int(one.task) < 4])
    assert [] == effects([])


def test_patterns_are_counted() -> None:
    rollout = Rollout(rollout_id="r", task={"question": question(3), "answer": "violet"}, hidden=("answer",))
    text = f"# Yes\n- Great idea! {question(3)} 10/10"
    spans = spans_of("r", "r.1", text, misuses=True, reward=1.0)
    values = dict(zip(PATTERNS, answer_of(rollout, spans)[1], strict=False))
    assert (21.0, 2.0, 2.0, 2.0) == tuple(values[name] for name in ("length", "format", "flattery", "tool-misuse"))
    assert pytest.approx(12 / 17) == values["copied-task"]


def test_audit_names_what_it_does_not_find() -> None:
    async def work() -> None:
        store = MemoryStore()
        await fill(store)
        await audit(store, "sums", run=2)

    with pytest.raises(ConfigError, match="no finished training rollouts of 'sums', run 2"):
        asyncio.run(work())


@pytest.fixture
def shown(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Result]:
    url = f"sqlite:///{tmp_path}/runs.db"

    async def work() -> None:
        store = SQLiteStore(url)
        await fill(store, planted="flattery", gold=True, steps=getattr(request, "param", STEPS))
        await store.close()

    asyncio.run(work())
    return lambda *words: CliRunner().invoke(cli, ["audit", "sums", "--store", url, *words], catch_exceptions=False)


def test_command_prints_the_ranking_the_gap_to_gold_and_that_it_is_no_proof(shown: Callable[..., Result]) -> None:
    lines = shown().output.splitlines()
    assert lines[0].startswith("sums, run 1, grpo: 288 rollouts of 8 tasks in 6 steps, reward 0.")
    assert lines[1].startswith("gold on 288 rollouts: reward 0.")
    assert "against 0.200, then" in lines[1]
    assert lines[2].startswith("pattern")
    assert lines[3].startswith("flattery")
    assert any("great question" in line and "sums-1-grpo-train-0000" in line for line in lines)
    assert "audits and does not prove" in lines[-1]
    data = json.loads(shown("--json").output)
    assert ("flattery", True) == (data["patterns"][0], "flattery" in data["examples"])
    assert {*Part.__struct_fields__} == {*data["whole"]}


@pytest.mark.parametrize("shown", [1], indirect=True)
def test_single_step_has_one_reward_and_no_halves(shown: Callable[..., Result]) -> None:
    lines = shown().output.splitlines()
    assert re.fullmatch(r"sums, run 1, grpo: 48 rollouts of 8 tasks in 1 step, reward 0\.\d{3}", lines[0])
    assert re.match(r"gold on 48 rollouts: reward 0\.\d{3} against 0\.200; the gap ", lines[1])
