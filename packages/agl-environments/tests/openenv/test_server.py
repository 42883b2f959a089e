"""A real OpenEnv server, started by a command, with an environment made with classes of the published package."""

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_run import Trainer
from agl_testing.model_server import Reply, ScriptedModelServer

from .conftest import SYNC_AGENT, spans_of

pytest.importorskip("openenv", reason="the package openenv has the server")

SERVER = """
import os
from pathlib import Path

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field

class Guess(Action):
    guess: str = Field(min_length=1, max_length=8)

class Hint(Observation):
    hint: str = ""

class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = IS_SAFE

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="none", step_count=0)

    def reset(self, seed=None, episode_id=None, word="red", **kwargs):
        self.word = word
        self._state = State(episode_id=episode_id or "one", step_count=0)
        return Hint(hint=f"{len(word)} letters", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "die" and not Path("died").exists():
            Path("died").touch()
            os._exit(3)
        if action.guess == "raise":
            raise ValueError("no such word")
        self._state.step_count += 1
        is_right = action.guess == self.word
        done = is_right or self._state.step_count == 3
        return Hint(hint="right" if is_right else "wrong", done=done, reward=1.0 if is_right else -0.25)

    @property
    def state(self):
        return self._state

app = create_app(Words, Guess, Hint, env_name="words", max_concurrent_envs=MANY)
"""


@pytest.fixture
def params(tmp_path: Path) -> Callable[..., str]:
    """A function that writes the server's module, and returns the runner's parameters that start it."""

    def write(*, concurrent: bool = True, sessions: int = 8) -> str:
        name = f"words_{uuid.uuid4().hex}"
        text = SERVER.replace("IS_SAFE", str(concurrent)).replace("MANY", str(sessions))
        (tmp_path / f"{name}.py").write_text(text)
        words = [sys.executable, "-m", "uvicorn", f"{name}:app", "--port", "{port}", "--log-level", "warning"]
        return f"{{ command = {json.dumps(words)} }}"

    return write


Make = Callable[..., Trainer]


def test_episode_is_played_recorded_and_rewarded(
    tmp_path: Path, trainer: Make, model: ScriptedModelServer, params: Any
) -> None:
    model.enqueue(Reply(text="blue"))
    (episode,) = trainer(params()).dev(tasks=1).episodes
    assert ("succeeded", 0.75) == (episode.rollout.status, episode.reward)
    assert ["", "return"] == sorted(reward.name for reward in episode.rewards if reward.scope == "rollout")

    spans = spans_of(tmp_path, episode)
    wrong, right = (span for span in spans if span.name == "execute_tool step")
    assert {"guess": "blue"} == wrong.attributes["gen_ai.tool.call.arguments"]
    result: Any = right.attributes["gen_ai.tool.call.result"]
    assert ("right", 1.0, True) == (result["observation"]["hint"], result["reward"], result["done"])
    steps = {span.reward.span_id: span.reward.value for span in spans if span.reward and span.reward.scope == "span"}
    assert [-0.25, 1.0] == [steps[wrong.span_id], steps[right.span_id]]
    assert "3 letters" in model.calls[0].json["messages"][0]["content"]


def test_server_that_dies_is_started_again_and_the_attempt_repeated_and_a_refused_action_is_data(
    trainer: Make, model: ScriptedModelServer, params: Any
) -> None:
    model.enqueue(Reply(text="die"), Reply(text="much too long"))
    (episode,) = trainer(params(), agent=SYNC_AGENT).dev(tasks=1).episodes
    assert (2, "succeeded") == (episode.attempt.number, episode.rollout.status)
    assert 0.0 == episode.reward


def test_server_with_one_session_serves_one_rollout_after_the_other(trainer: Make, params: Any) -> None:
    made = trainer(params(concurrent=False, sessions=1), words=("red", "blue", "gold"))
    assert [1.0, -0.75, -0.75] == [episode.reward for episode in made.dev(tasks=3).episodes]
