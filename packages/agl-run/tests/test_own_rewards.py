"""Rewards that an experiment brings itself: functions, instances and classes, from a file and from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl import Reward, Rollout, Span, semconv
from agl.algorithms import component
from agl.errors import AglError, ConfigError
from agl_run import DevResult, Quiet, Trainer, parse_config

JUDGE = """
from agl import Reward, semconv

THRESHOLD = 3

def said(spans):
    return next(span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes)

def score(rollout, spans):
    return float(said(spans) == rollout.task["answer"])

async def later(rollout, spans):
    return Reward(value=score(rollout, spans), name="later")

def near(rollout, spans, *, tolerance: float = 0.0):
    return float(abs(float(said(spans)) - float(rollout.task["answer"])) <= tolerance)

def silent(rollout, spans):
    return None

class Near:
    def __init__(self, *, tolerance: float = 0.0):
        self.tolerance = tolerance

    def __call__(self, rollout, spans):
        return near(rollout, spans, tolerance=self.tolerance)

class Mute:
    pass

exactly = Near()

def by_task(task, answer):
    return 1.0

def alone(rollout):
    return 1.0

def third(rollout, spans, truth):
    return 1.0
"""


def double(task: Any) -> str:
    return str(2 * task["number"])


TASKS = [{"number": 1, "answer": "2"}, {"number": 2, "answer": "5"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a new folder, where trainers write their files."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module of rewards next to the experiment, and return its name."""
    name = f"judge_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def in_file(folder: Path, use: str, **params: Any) -> DevResult:
    """Return the rollouts of an experiment whose file names the reward."""
    data = {"experiment": {"agent": "", "store": "memory://"}, "reward": [{"use": use, "params": params}]}
    trainer = Trainer.from_config(parse_config(data), folder=folder, progress=Quiet())
    return trainer.dev(double, TASKS)


def in_python(*rewards: Any, **settings: Any) -> DevResult:
    """Return the rollouts of a trainer that got the rewards as objects."""
    return Trainer(rewards=rewards, store="memory://", progress=Quiet(), **settings).dev(double, TASKS)


def rewards_of(result: DevResult) -> list[float | None]:
    return [episode.reward for episode in result.episodes]


@pytest.mark.parametrize(
    ("attribute", "params", "expected"),
    [
        ("score", {}, [1.0, 0.0]),
        ("later", {}, [1.0, 0.0]),
        ("near", {"tolerance": 1.0}, [1.0, 1.0]),
        ("near", {}, [1.0, 0.0]),
        ("silent", {}, [None, None]),
        ("Near", {"tolerance": 1.0}, [1.0, 1.0]),
        ("exactly", {}, [1.0, 0.0]),
    ],
)
def test_file_names_a_function_an_instance_or_a_class(
    tmp_path: Path, judge: str, attribute: str, params: dict[str, Any], expected: list[float | None]
) -> None:
    assert expected == rewards_of(in_file(tmp_path, f"{judge}:{attribute}", **params))


def score(rollout: Rollout, spans: Sequence[Span]) -> float:
    said = next(span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes)
    return float(said == rollout.task["answer"])


async def later(rollout: Rollout, spans: Sequence[Span]) -> Reward:
    return Reward(value=score(rollout, spans), feedback="seen later")


class Scaled:
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> float:
        return self.factor * score(rollout, spans)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (score, [1.0, 0.0]),
        (later, [1.0, 0.0]),
        (lambda rollout, spans: 0.25, [0.25, 0.25]),
        (Scaled, [1.0, 0.0]),
        (Scaled(3.0), [3.0, 0.0]),
        (Scaled(3.0).__call__, [3.0, 0.0]),
    ],
    ids=["function", "async function", "lambda", "class", "instance", "method"],
)
def test_trainer_takes_a_function_an_instance_or_a_class(reward: Any, expected: list[float]) -> None:
    assert expected == rewards_of(in_python(reward))
    assert expected == rewards_of(Trainer(rewards=reward, store="memory://", progress=Quiet()).dev(double, TASKS))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (float("nan"), "nan"),
        (Reward(value=float("-inf")), "-inf"),
        (Reward(value=1.0, dimensions={"goal": float("inf")}), "inf as 'goal'"),
        ([Reward(value=1.0), Reward(value=float("nan"), name="second")], "nan"),
    ],
)
def test_reward_that_is_not_finite_fails_its_own_rollout_and_names_its_emitter(
    given: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(rollout: Rollout, spans: Sequence[Span]) -> Any:
        return given if rollout.task["number"] == 1 else 1.0

    result = in_python(judge)

    assert ["failed", "succeeded"] == [episode.rollout.status for episode in result.episodes]
    assert [None, 1.0] == rewards_of(result)
    assert f"the reward 'judge' returned {said}; return a finite number" in caplog.text


def test_agents_own_reward_that_is_not_finite_fails_its_rollout_alone() -> None:
    def agent(task: Any) -> Reward:
        return Reward(value=float("inf") if task["number"] == 1 else 1.0)

    result = Trainer(store="memory://", progress=Quiet()).dev(agent, TASKS)

    assert ["failed", "succeeded"] == [episode.rollout.status for episode in result.episodes]


def test_given_rewards_are_recorded_and_weighed_by_their_names() -> None:
    result = in_python(score, Scaled(3.0), component("exact-match"), reward_weights={"score": 1.0, "Scaled": 2.0})

    assert [7.0, 0.0] == rewards_of(result)
    assert {"score", "Scaled"} <= {reward.name for reward in result.episodes[0].rewards}


@pytest.mark.parametrize(
    ("attribute", "params", "message"),
    [
        ("by_task", {}, r"takes \(task, answer\) and cannot .* its first arguments are the rollout and its spans"),
        ("alone", {}, r"takes \(rollout\) and cannot .*: too many positional arguments. Write def alone\(rollout, sp"),
        ("third", {}, r"takes \(rollout, spans, truth\) and cannot .*: missing a required argument: 'truth'"),
        ("score", {"tolerance": 1}, "and the params tolerance: got an unexpected keyword argument 'tolerance'"),
        ("Near", {"tolerence": 1}, "takes no parameter 'tolerence'; did you mean 'tolerance'"),
        ("Mute", {}, "lacks __call__, which its contract in agl.contracts has"),
        ("THRESHOLD", {}, "is of the type int, which cannot be called; name a function, def score"),
        ("scor", {}, "has no 'scor'; did you mean 'score'"),
    ],
)
def test_unusable_reward_is_refused_before_a_rollout(
    tmp_path: Path, judge: str, attribute: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(AglError, match=message) as raised:
        in_file(tmp_path, f"{judge}:{attribute}", **params)
    assert "\n" not in str(raised.value)


def test_agent_and_reward_may_share_a_module_that_needs_a_key_to_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    text = f"import os\nKEY = os.environ['OPENAI_API_KEY']\n{JUDGE}\ndef solve(task): return str(2 * task['number'])\n"
    (tmp_path / "keyed_pair.py").write_text(text)
    data = {"experiment": {"agent": "keyed_pair:solve", "store": "memory://"}, "reward": [{"use": "keyed_pair:score"}]}
    trainer = Trainer.from_config(parse_config(data), folder=tmp_path, progress=Quiet())

    assert [1.0, 0.0] == rewards_of(trainer.dev(train_dataset=TASKS))


def test_missing_module_of_a_reward_names_the_folder_that_was_searched(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no module 'absent' for the reward; looked in {tmp_path}"):
        in_file(tmp_path, "absent:score")


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([score, score], "two rewards are called 'score'"),
        ([3], "rewards has 3; give a function of the rollout and its spans"),
        ([lambda answer: 1.0], r"the reward '<lambda>' takes \(answer\)"),
    ],
)
def test_trainer_refuses_rewards_that_cannot_be_used(rewards: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_python(*rewards)


def test_reward_is_found_beside_an_experiment_whose_agent_comes_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "beside_the_experiment.py").write_text(JUDGE)

    assert [None, None] == rewards_of(in_file(tmp_path, "beside_the_experiment:silent"))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "could not be run or judged" in record.getMessage()]


def test_reward_that_always_raises_is_reported_once_and_counted_while_the_store_keeps_each_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(rollout: Rollout, spans: Sequence[Span]) -> float:
        raise KeyError(f"anser {rollout.task['number']}")

    tasks = [{"number": number} for number in range(12)]
    trainer = Trainer(rewards=broken, store="memory://", progress=Quiet())
    result = trainer.dev(double, tasks, tasks=12)

    errors = [episode.attempt.error.message for episode in result.episodes if episode.attempt and episode.attempt.error]
    assert [f"the reward 'broken' raised KeyError: 'anser {n}'" for n in range(12)] == [
        error.partition(" at ")[0] for error in errors
    ]
    assert {"agl.errors.RewardError"} == {
        episode.attempt.error.type for episode in result.episodes if episode.attempt and episode.attempt.error
    }
    first, tenth, last = told(caplog)
    assert first.startswith("attempt ")
    assert tenth.startswith("10 attempts by now could not be run or judged for one reason: the reward 'broken' raised")
    assert last.startswith("12 attempts in all could not be run or judged for one reason: the reward 'broken' raised")


def test_reward_that_exits_fails_its_own_rollout() -> None:
    def leaves(rollout: Rollout, spans: Sequence[Span]) -> float:
        raise SystemExit(3)

    (error,) = Trainer(rewards=leaves, store="memory://", progress=Quiet()).dev(double, [{"number": 0}]).errors.values()
    assert "the reward 'leaves' raised SystemExit: 3" in error


def test_errors_of_rewards_that_differ_are_reported_each(caplog: pytest.LogCaptureFixture) -> None:
    def broken(rollout: Rollout, spans: Sequence[Span]) -> float:
        raise ValueError(["no answer", "no question"][rollout.task["number"]])

    trainer = Trainer(rewards=broken, store="memory://", progress=Quiet())
    trainer.dev(double, [{"number": 0}, {"number": 1}])

    assert ["attempt", "attempt"] == [text.partition(" ")[0] for text in told(caplog)]
