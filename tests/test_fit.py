"""``Trainer.fit`` and ``dev`` as people call them: from a script, awaited, with every schedule and policy."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.errors import AglError, ConfigError
from agl.schemas import LLM, Episode, PromptTemplate, Reward, Rollout, Span, new_span_id
from agl.stores import MemoryStore
from agl_gateway.client import HttpStore
from agl_inspect.records.state import load_experiment
from agl_run import Quiet, ScheduleConfig, policy
from agl_store_sqlite._store import SQLiteStore
from agl_testing.model_server import ScriptedModelServer
from agl_testing.plugins import PluginFolder
from agl_testing.waiting import eventually

LEARNERS = '''
import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm

LOG = []


class Writer(ToyAlgorithm):
    """Learns nothing: collects, then writes its step into the prompt that it tunes."""

    def __init__(self, *, steps: int = 2, fails_at: int = 0):
        self._steps, self._fails_at, self._step = steps, fails_at, 0

    async def step(self):
        context, self._step = self._context, self._step + 1
        if self._step == self._fails_at:
            raise RuntimeError("stopped on purpose")
        collected = await context.collect(context.train, step=self._step)
        episodes = collected.episodes
        LOG.append((context.name, self._step, list(episodes), dict(collected.dropped)))
        prompt = PromptTemplate(template=f"{context.name} {self._step}")
        await context.publish(context.tunes[0], prompt, step=self._step)
        return StepReport(
            step=self._step,
            is_finished=self._step >= self._steps,
            metrics={"truncated_share": 0.25, "dropped_share": 0.0, "silent_share": 0.5},
            trained=tuple(episode.rollout.rollout_id for episode in episodes),
        )


@agl.hookimpl
def agl_algorithms():
    for name in ("writer", "second"):
        yield agl.AlgorithmEntry(name=name, factory=Writer, tunes=("prompt_template",), needs_token_ids=False)
    yield agl.AlgorithmEntry(name="reader", factory=Writer, tunes=("weights",), needs_token_ids=True)
'''

SCRIPT = """
import agl
from agl.algorithms import algorithm

async def solve(task, prompt):
    return float(task == prompt.template)

result = agl.Trainer(
    name="script",
    algorithm=algorithm("writer", tunes="prompt"),
    initial_resources={"prompt": agl.PromptTemplate(template="none")},
).fit(solve, train_dataset=["a", "b"], val_dataset=["none", "writer 2"])
print("result", result.before, result.after, result.steps)
"""

Log = list[tuple[str, int, list[Episode], dict[str, int]]]


@pytest.fixture
def log(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Log:
    """The collection of the toy algorithms: name, step, episodes, dropped."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    module = agl_plugins.install(LEARNERS, name="learners")
    return __import__(module).LOG


@pytest.fixture
def trainer(log: Log, tmp_path: Path) -> Callable[..., agl.Trainer]:
    """Makes a trainer in the test's folder; one prompt and one algorithm unless told otherwise."""

    def make(**changes: Any) -> agl.Trainer:
        settings: dict[str, Any] = {
            "algorithm": algorithm("writer", tunes="prompt"),
            "initial_resources": {"prompt": PromptTemplate(template="none")},
            "store": "memory://",
            "folder": tmp_path,
            "progress": Quiet(),
        }
        return agl.Trainer(**{**settings, **changes})

    return make


async def guess(task: str, prompt: PromptTemplate) -> float:
    """Right when the task is what the prompt says."""
    return float(task == prompt.template)


def test_fit_from_a_script_trains_and_says_what_it_reached(log: Log, agl_plugins: PluginFolder, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=agl_plugins.environment, capture_output=True, text=True
    )

    assert 0 == done.returncode, done.stderr
    assert "result 0.5 0.5 {'writer': 2}" in done.stdout
    assert "validation reward after step 2: 0.500" in done.stdout
    assert "writer step 1 of 2: 25% truncated, 0% dropped, 50% silent" in done.stdout
    assert (tmp_path / "runs" / "agl.db").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith("2 of 2 rollouts made no recorded model call.")


OF_PROMPT = """
[experiment]
name = "halves"
agent = "agent:guess"
train = "train.jsonl"
val = "val.jsonl"
validate_every = 1

[resource.prompt]
template = "none"

[[algorithm]]
use = "writer"
tunes = "prompt"
params = {{ steps = 3, fails_at = {fails_at} }}
"""


def run_file(folder: Path, agl_plugins: PluginFolder, *options: str, best: str, fails_at: int = 0) -> Any:
    """Runs an experiment whose prompt scores 1 while it is ``best``, and 0 otherwise."""
    (folder / "agent.py").write_text("def guess(task, prompt):\n    return float(task['best'] == prompt.template)\n")
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"best": best}))
    (folder / "experiment.toml").write_text(OF_PROMPT.format(fails_at=fails_at))
    command = [sys.executable, "-m", "agl", "run", "experiment.toml", "--quiet", *options]
    return subprocess.run(command, cwd=folder, env=agl_plugins.environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("final", "best", "place"),
    [
        ("best", "none", "before the first step"),
        ("best", "writer 2", "after step 2"),
        ("last", "writer 2", "after step 2"),
        ("last", "writer 3", ""),
        ("best", "nothing", ""),
    ],
)
def test_run_says_when_its_end_is_below_its_start_or_its_best(
    final: str, best: str, place: str, log: Log, agl_plugins: PluginFolder, tmp_path: Path
) -> None:
    done = run_file(tmp_path, agl_plugins, "--set", f"experiment.final={final}", best=best)

    assert 0 == done.returncode, done.stderr
    lines = [line for line in done.stdout.splitlines() if "below the highest" in line or "not the best" in line]
    expected = {
        "best": f"the last step was not the best: validation reward 0.000 after it, 1.000 {place}; "
        "the versions of then are live, and have the label best",
        "last": f"the last validation reward, 0.000, is below the highest one, 1.000 {place}; "
        "agl resources list shows the versions of every step",
    }
    assert [expected[final]] * bool(place) == lines


def test_resumed_run_remembers_the_best_of_before(log: Log, agl_plugins: PluginFolder, tmp_path: Path) -> None:
    assert 0 != run_file(tmp_path, agl_plugins, best="writer 1", fails_at=2).returncode

    done = run_file(tmp_path, agl_plugins, "--resume", best="writer 1")

    assert 0 == done.returncode, done.stderr
    assert "the last step was not the best: validation reward 0.000 after it, 1.000 after step 1;" in done.stdout
    assert "prompt: halves-1-writer-1" in done.stdout.splitlines()
    assert "agl data export prompt@halves-1-writer-1 --format json" in done.stdout


def test_run_that_was_given_validation_tasks_later_says_how_it_ended(
    log: Log, agl_plugins: PluginFolder, tmp_path: Path
) -> None:
    options = ("--set", "experiment.validate_every=0", "--set", "experiment.val=")
    assert 0 != run_file(tmp_path, agl_plugins, *options, best="writer 2", fails_at=2).returncode

    done = run_file(tmp_path, agl_plugins, "--resume", best="writer 2")

    assert 0 == done.returncode, done.stderr
    assert "validation reward: 1.000 after" in done.stdout.splitlines()
    assert "the last step was not the best: validation reward 0.000 after it, 1.000 after step 2;" in done.stdout


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_fit_publishes_each_step_and_later_rollouts_see_it(
    kind: str, trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    store = MemoryStore() if kind == "memory" else SQLiteStore(f"sqlite:///{tmp_path}/own.db")

    result = trainer(store=store).fit(guess, train_dataset=["none", "writer 1"], val_dataset=["writer 2"])

    assert (0.0, 1.0) == (result.before, result.after)
    assert {"prompt": "experiment-1-writer-2"} == result.resources
    assert [[1.0, 0.0], [0.0, 1.0]] == [[episode.reward for episode in episodes] for _, _, episodes, _ in log]

    async def look() -> None:
        lineage = [(v.version, v.parent, v.step) for v in await store.resources("prompt")]
        first, one, two = ("experiment-1-initial", "experiment-1-writer-1", "experiment-1-writer-2")
        assert [(first, ""), (one, first), (two, one)] == [version[:2] for version in lineage]
        assert 6 == len(await store.rollouts(RolloutQuery(experiment="experiment")))
        state = await load_experiment(store, "experiment")
        assert state is not None
        assert "finished" == state.status
        await store.close()

    asyncio.run(look())


def test_finished_experiment_is_refused_until_a_fresh_run_is_asked_for(
    trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    trainer(store=url).fit(guess, train_dataset=["a"])

    with pytest.raises(ConfigError, match="is finished; pass --fresh"):
        trainer(store=url).fit(guess, train_dataset=["a"])

    assert {"writer": 2} == trainer(store=url).fit(guess, train_dataset=["a"], fresh=True).steps


def test_wrong_parameters_leave_an_experiment_that_was_not_started(
    trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    with pytest.raises(ConfigError, match="stepz"):
        trainer(store=url, algorithm=algorithm("writer", tunes="prompt", stepz=3)).fit(guess, train_dataset=["a"])

    assert {"writer": 2} == trainer(store=url).fit(guess, train_dataset=["a"]).steps


async def beat(beats: list[float]) -> None:
    """Note the time, over and over."""
    while True:
        beats.append(time.monotonic())
        await asyncio.sleep(0.01)


def test_awaited_fit_leaves_the_programs_loop_responsive(trainer: Callable[..., agl.Trainer]) -> None:
    def slow(task: str) -> float:
        time.sleep(0.3)
        return 1.0

    async def program() -> tuple[Any, list[float]]:
        beats: list[float] = []
        beating = asyncio.create_task(beat(beats))
        result = await trainer(n_runners=1).fit_async(slow, train_dataset=["a", "b"])
        beating.cancel()
        return result, beats

    result, beats = asyncio.run(program())

    assert {"writer": 2} == result.steps
    assert len(beats) >= 20
    assert (beats[-1] - beats[0]) / 2 > max(later - earlier for earlier, later in pairwise(beats))


def test_cancelled_fit_stops_the_run_and_can_be_resumed(
    trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    started: list[str] = []
    stopped: list[str] = []

    async def agent(task: str) -> float:
        if not stopped:
            started.append(task)
            try:
                await asyncio.Event().wait()  # for ever
            except asyncio.CancelledError:
                stopped.append(task)
                raise
        return 1.0

    async def program() -> None:
        running = asyncio.create_task(trainer(store=url).fit_async(agent, train_dataset=["a", "b"]))
        await eventually(lambda: started)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 60)

    asyncio.run(program())
    assert sorted(started) == sorted(stopped)

    result = trainer(store=url).fit(agent, train_dataset=["a", "b"], resume=True)
    assert {"writer": 2} == result.steps
    assert 4 == len({episode.rollout.rollout_id for _, _, episodes, _ in log for episode in episodes})


def test_dev_shows_what_would_be_recorded_and_trains_nothing(
    trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")

    result = trainer(store=store).dev(guess, train_dataset=["none", "b", "c", "d"], tasks=2)

    assert [1.0, 0.0] == [episode.reward for episode in result.episodes]
    assert [] == log

    async def look() -> None:
        assert {"test"} == {rollout.mode for rollout in await store.rollouts(RolloutQuery())}
        assert await load_experiment(store, "experiment") is None
        await store.close()

    asyncio.run(look())
    assert {"writer": 2} == trainer().fit(guess, train_dataset=["a"]).steps


async def awaited_dev(trainer: agl.Trainer) -> Any:
    """``dev`` in an async program."""
    return await trainer.dev_async(guess, train_dataset=["none"])


def test_dev_may_be_awaited(trainer: Callable[..., agl.Trainer]) -> None:
    assert [1.0] == [episode.reward for episode in asyncio.run(awaited_dev(trainer())).episodes]


TWO = {
    "algorithm": [
        algorithm("writer", tunes="prompt"),
        algorithm("second", tunes="other", steps=3),
    ],
    "initial_resources": {"prompt": PromptTemplate(template="p"), "other": PromptTemplate(template="o")},
}

ORDERS = {
    "sequential": ["writer 1", "writer 2", "second 1", "second 2", "second 3"],
    "alternate": ["writer 1", "second 1", "writer 2", "second 2", "second 3"],
}


@pytest.mark.parametrize("mode", ["sequential", "alternate", "concurrent"])
def test_schedule_gives_every_algorithm_its_steps(mode: str, trainer: Callable[..., agl.Trainer], log: Log) -> None:
    result = trainer(schedule=mode, **TWO).fit(guess, train_dataset=["a"])

    assert {"writer": 2, "second": 3} == result.steps
    taken = [f"{name} {step}" for name, step, _, _ in log]
    assert sorted(ORDERS["sequential"]) == sorted(taken)
    assert ORDERS.get(mode, taken) == taken
    if mode == "concurrent":
        assert {"writer 1", "second 1"} == set(taken[:2])


WARM_UP = {
    "algorithm": [
        algorithm("second", tunes="other"),
        algorithm("writer", tunes="prompt", name="warm-up", steps=3),
        algorithm("writer", tunes="prompt"),
    ],
    "initial_resources": TWO["initial_resources"],
    "schedule": ScheduleConfig(mode="alternate", first=("warm-up",)),
}
WARMED_UP = [*(f"warm-up {step}" for step in (1, 2, 3)), "second 1", "writer 1", "second 2", "writer 2"]


def test_first_runs_to_its_end_and_hands_its_resource_over(trainer: Callable[..., agl.Trainer], log: Log) -> None:
    result = trainer(**WARM_UP).fit(guess, train_dataset=["a"])

    assert {"second": 2, "warm-up": 3, "writer": 2} == result.steps
    assert WARMED_UP == [f"{name} {step}" for name, step, _, _ in log]
    ran_with = [episodes[0].rollout.resources["prompt"] for name, _, episodes, _ in log if name == "writer"]
    assert ["experiment-1-warm-up-3", "experiment-1-writer-1"] == ran_with


@pytest.mark.parametrize(("number", "step"), [(1, 2), (0, 1), (2, 1), (0, 2), (2, 2)])
def test_first_and_the_turns_after_it_go_on_where_they_stopped(
    number: int, step: int, trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path
) -> None:
    settings = {**WARM_UP, "store": f"sqlite:///{tmp_path}/runs.db"}
    algorithms = list(WARM_UP["algorithm"])
    algorithms[number] = msgspec.structs.replace(
        algorithms[number], params={**algorithms[number].params, "fails_at": step}
    )

    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(**{**settings, "algorithm": algorithms}).fit(guess, train_dataset=["a"])
    trainer(**settings).fit(guess, train_dataset=["a"], resume=True)

    assert WARMED_UP == [f"{name} {step}" for name, step, _, _ in log]


def test_validation_runs_every_so_many_steps(trainer: Callable[..., agl.Trainer], log: Log, tmp_path: Path) -> None:
    store = MemoryStore()
    longer = algorithm("writer", tunes="prompt", steps=4)

    trainer(store=store, algorithm=longer, validate_every=2, validation_limit=1).fit(
        guess, train_dataset=["a"], val_dataset=["writer 2", "never"]
    )

    async def look() -> list[tuple[int, float]]:
        return [
            (m.step, m.value) for m in await store.metrics("experiment", name="reward") if m.algorithm == "validate"
        ]

    assert [(0, 0.0), (2, 1.0), (4, 0.0)] == asyncio.run(look())


def failing(task: str) -> float | None:
    """Fails, gives no reward, or succeeds."""
    if task == "fail":
        raise ValueError("as the task says")
    return None if task == "silent" else 1.0


POLICIES = [
    ({}, [1.0], {"failed": 1, "no reward": 1}),
    ({"failed": "penalise", "penalty": -1.0}, [-1.0, 1.0], {"no reward": 1}),
    ({"missing_reward": "penalise"}, [0.0, 1.0], {"failed": 1}),
    ({"failed": "penalise", "missing_reward": "penalise", "penalty": -2.0}, [-2.0, -2.0, 1.0], {}),
]


@pytest.mark.parametrize(("settings", "rewards", "dropped"), POLICIES)
def test_failed_and_unrewarded_rollouts_are_dropped_or_penalised(
    settings: dict[str, Any],
    rewards: list[float],
    dropped: dict[str, int],
    trainer: Callable[..., agl.Trainer],
    log: Log,
) -> None:
    trainer(**settings).fit(failing, train_dataset=["fail", "silent", "good"])

    assert rewards == [episode.reward for episode in log[0][2]]
    assert dropped == log[0][3]


def test_run_in_which_nothing_can_be_used_says_why(trainer: Callable[..., agl.Trainer]) -> None:
    with pytest.raises(AglError, match="none of 2 rollouts can be used: 1 failed, 1 no reward"):
        trainer().fit(failing, train_dataset=["fail", "silent"])


def test_rewards_that_are_dimensions_only_are_named_with_what_gives_them_a_value(
    trainer: Callable[..., agl.Trainer],
) -> None:
    with pytest.raises(AglError, match=r"2 no reward\. Their rewards are the dimensions turns, won without a value"):
        trainer().fit(lambda task: {"won": 1.0, "turns": 4.0}, train_dataset=["a", "b"])


class Authors(agl.LitAgent[dict[str, Any]]):
    """Three agents that call one model; only two of them match."""

    async def rollout(self, task: dict[str, Any], resources: Any, rollout: Any) -> None:
        import openai

        llm = resources["main"]
        assert "answer" not in task
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            for name in ("write", "check", "rewrite"):
                with agl.operation(name, **{"gen_ai.agent.name": name}):
                    messages = [{"role": "user", "content": f"{name} {task['question']}"}]
                    await client.chat.completions.create(model=llm.model, messages=messages)
        agl.emit_observation(role="user", content="well done")
        agl.emit_reward(1.0)


def test_lit_agent_with_the_names_of_agent_lightning_trains_the_agents_that_match(
    trainer: Callable[..., agl.Trainer], toy: str, server: ScriptedModelServer
) -> None:
    tasks = [{"question": f"what is {n}?", "answer": n} for n in range(2)]
    made = trainer(
        n_runners=2,
        algorithm=algorithm("counter", steps=1, tasks_per_step=2),
        adapter={"agent_match": "write|rewrite"},
        policies={"main": policy("served", base_url=server.base_url)},
        initial_resources={"check_prompt": PromptTemplate(template="check it")},
        hidden=["answer"],
    )

    result = made.fit(Authors(), train_dataset=tasks)
    (episode,) = made.dev(Authors(), train_dataset=tasks[:1]).episodes

    assert {"counter": 1} == result.steps
    assert {"check_prompt": "experiment-1-initial", "main": "experiment-1-counter-1"} == result.resources
    assert ["write", "rewrite"] == [call.agent for call in episode.transitions if not call.reject]
    assert [("check", "not_selected")] == [(call.agent, call.reject) for call in episode.transitions if call.reject]
    assert 2 == len(episode.rows)
    assert 1.0 == episode.reward


async def flatterer(task: str, llm: LLM, rollout: Rollout) -> None:
    """Writes a reward for itself over the gateway, with its own token."""
    assert rollout.attempt_id is not None
    store = HttpStore(llm.endpoint.removesuffix("/v1"), token=llm.api_key)
    span = Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt_id,
        span_id=new_span_id(),
        name="praise",
        reward=Reward(value=9.0, source="evaluator"),
    )
    await store.append_spans([span])
    await store.close()


@pytest.mark.parametrize("is_trusted", [False, True])
def test_reward_that_came_with_the_agents_own_token_trains_only_where_it_is_trusted(
    is_trusted: bool, trainer: Callable[..., agl.Trainer], server: ScriptedModelServer
) -> None:
    llm = {"main": LLM(endpoint=server.base_url, model="scripted")}
    made = trainer(
        algorithm=(), initial_resources=llm, gateway="gateway", store="memory://", trust_agent_rewards=is_trusted
    )

    (episode,) = made.dev(flatterer, train_dataset=["a"]).episodes

    assert "succeeded" == episode.rollout.status
    assert (9.0 if is_trusted else None) == episode.reward
    assert ["agent"] == [reward.source for reward in episode.rewards]
