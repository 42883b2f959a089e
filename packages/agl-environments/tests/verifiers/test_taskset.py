"""Runs environments made of a taskset and a harness, from the experiment file to the reward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_run import Trainer
from agl_testing.model_server import ScriptedModelServer, Status

from .conftest import IS_CLASSIC

pytestmark = pytest.mark.skipif(IS_CLASSIC, reason="tasksets are tested with verifiers 0.4 and newer")

Make = Callable[..., Trainer]
HERE = 'agent = { runtime = { type = "subprocess" } }'


def test_taskset_is_agent_tasks_and_reward(words: str, trainer: Make, model: ScriptedModelServer) -> None:
    made = trainer(words, args=f"{{ {HERE} }}")
    assert ["red", "blue"] == [task["word"] for task in made.plan().train]

    first, second = made.dev(tasks=2).episodes
    assert [1.25, 0.25] == [first.reward, second.reward]
    (reward,) = first.rewards
    assert {"exact": 1.0, "short": 1.0, "letters": 3.0} == reward.dimensions
    assert {"exact": 1.0, "short": 0.25, "letters": 0.0} == reward.weights
    assert ["main"] == [transition.policy for transition in first.transitions]
    assert {"Say red.", "Say blue."} == {call.json["messages"][-1]["content"] for call in model.calls}


def test_arguments_configure_the_taskset(words: str, trainer: Make) -> None:
    plan = trainer(words, args=f'{{ {HERE}, taskset = {{ words = ["green"] }} }}').plan()
    assert ["Say green."] == [task["prompt"] for task in plan.train]


def test_failing_harness_fails_the_rollout_with_its_cause(
    words: str, trainer: Make, model: ScriptedModelServer
) -> None:
    model.enqueue(*(Status(code=400, message="too long") for _ in range(3)))
    (episode,) = trainer(words, args=f"{{ {HERE} }}").dev(tasks=1).episodes
    error: Any = episode.attempt.error
    assert "failed" == episode.rollout.status
    assert f"the environment '{words}' failed: " in error.message
    assert "too long" in error.message


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a new home folder, and remove Prime Intellect's key from the environment variables."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PRIME_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (f"{{ {HERE}, taskset = {{ words = [] }} }}", "has no tasks"),
        ("{}", "is no key for it (not authenticated with prime"),
        ("{ taskset = { word = 1 } }", "refuses its configuration"),
        ('{ tasks = "all" }', "refuses its configuration"),
    ],
)
def test_taskset_that_cannot_be_used_is_refused(words: str, trainer: Make, args: str, cause: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer(words, args=args).plan()
    assert cause in str(refused.value)


def test_interception_server_is_replaced_behind_its_rollouts(
    words: str, trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_environments.verifiers.taskset.ROLLOUTS_PER_SERVER", 2)
    more = f'{{ {HERE}, taskset = {{ words = ["red", "blue", "pink", "grey", "cyan", "gold"] }} }}'
    episodes = trainer(words, args=more).dev(tasks=6).episodes
    assert [1.25, *[0.25] * 5] == [episode.reward for episode in episodes]
