"""Runs environments that have ``load_environment``, from the experiment file to the reward."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError
from agl_run import Trainer
from agl_testing.model_server import Reply, ScriptedModelServer, ToolCall

from .conftest import IS_CLASSIC, spans_of

pytestmark = pytest.mark.skipif(not IS_CLASSIC, reason="this verifiers has no load_environment")

Make = Callable[..., Trainer]


def only(trainer: Trainer) -> Any:
    """Return the only episode of a dry run."""
    (episode,) = trainer.dev(tasks=1).episodes
    return episode


def test_single_turn_environment_is_agent_tasks_and_reward(
    words: str, trainer: Make, model: ScriptedModelServer
) -> None:
    made = trainer(words)
    plan = made.plan()
    assert ["red", "blue"] == [task["answer"] for task in plan.train]
    assert 2 == len(plan.val)

    first, second = made.dev(tasks=2).episodes
    assert [1.25, 0.25] == [first.reward, second.reward]
    (reward,) = first.rewards
    assert {"exact": 1.0, "short": 1.0, "num_turns": 1.0} == reward.dimensions
    assert {"exact": 1.0, "short": 0.25, "num_turns": 0.0} == reward.weights
    assert "environment" == reward.source
    assert ["main"] == [transition.policy for transition in first.transitions]
    system, question = model.calls[0].json["messages"]
    assert ("Be brief.", True) == (system["content"], question["content"].startswith("Say "))


def test_multi_turn_environment_continues_one_branch(words: str, trainer: Make) -> None:
    episode = only(trainer(words, args='{ kind = "multi" }'))
    assert ("succeeded", 3.0) == (episode.rollout.status, episode.rewards[0].dimensions["num_turns"])
    assert 3 == len(episode.transitions)


def test_tools_are_called_and_recorded(tmp_path: Path, words: str, trainer: Make, model: ScriptedModelServer) -> None:
    model.enqueue(
        Reply(text="", tool_calls=(ToolCall(name="add", arguments={"a": 2, "b": 3}),)),
        Reply(text="", tool_calls=(ToolCall(name="add", arguments={"a": -2, "b": 3}),)),
        Reply(text="red"),
    )
    episode = only(trainer(words, args='{ kind = "tool" }'))
    right, wrong = (span for span in spans_of(tmp_path, episode) if span.name == "execute_tool add")
    assert ("5", "ok") == (right.attributes["gen_ai.tool.call.result"], right.status)
    assert ("error", "a is negative") == (wrong.status, wrong.status_message)
    assert "a is negative" in model.calls[2].json["messages"][-1]["content"]
    assert 1.25 == episode.reward


def test_stateful_tools_keep_the_state_of_their_own_rollout(
    words: str, trainer: Make, model: ScriptedModelServer
) -> None:
    model.enqueue(
        *(Reply(text="", tool_calls=(ToolCall(name="remember", arguments={"word": word}),)) for word in ("a", "b"))
    )
    only(trainer(words, args='{ kind = "notes" }'))
    assert "noted 2" == model.calls[2].json["messages"][-1]["content"]
    assert ["word"] == list(model.calls[0].json["tools"][0]["function"]["parameters"]["properties"])


@pytest.mark.filterwarnings("ignore")  # of reasoning-gym and what it imports
def test_environment_that_ships_with_verifiers_runs(tmp_path: Path, trainer: Make, model: ScriptedModelServer) -> None:
    name = f"sums_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import verifiers as vf\n\n"
        "def load_environment(gym, examples=4):\n"
        "    return vf.ReasoningGymEnv(gym, num_train_examples=examples, num_eval_examples=1)\n"
    )
    made = trainer(name, args='{ gym = "chain_sum", examples = 3 }')
    task: Any = made.plan().train[0]
    sums: Any = re.search(r"problem: (.*) =", task["question"])
    assert (3, 1) == (len(made.plan().train), len(made.plan().val))
    model.enqueue(Reply(text=f"<answer>{eval(sums[1])}</answer>"))
    assert only(made).reward >= 1.0


def test_sandbox_that_went_away_repeats_the_attempt_and_other_errors_fail_it(words: str, trainer: Make) -> None:
    episode = only(trainer(words, args='{ kind = "gone" }'))
    assert (2, "failed") == (episode.attempt.number, episode.rollout.status)
    assert f"the environment '{words}' failed: ToolError: no such tool" == episode.attempt.error.message


@pytest.mark.parametrize(
    "args", ['{ reward = "exact" }', '{ reward = "broken" }', '{ reward = "exact", kind = "gone" }']
)
def test_rubric_cleans_up_after_every_rollout(tmp_path: Path, words: str, trainer: Make, args: str) -> None:
    only(trainer(words, args=args))
    assert (tmp_path / "cleaned").exists()


def test_time_limit_reaches_the_environment(words: str, trainer: Make) -> None:
    episode = only(trainer(words, args='{ kind = "slow" }', timeout_s=1))
    assert "timeout" == episode.attempt.status
    assert "ran longer than 1 s and was stopped" in episode.attempt.error.message


@pytest.mark.parametrize(
    ("reward", "cause"),
    [
        ("broken", "the reward function 'broken' of the environment '{}' raised KeyError: 'missing'"),
        ("wordless", "the reward function 'wordless' of the environment '{}' raised TypeError: float() argument"),
        ("nothing", "the environment '{}' scored this rollout with nan as 'nothing'"),
    ],
)
def test_reward_function_without_a_number_fails_the_rollout(words: str, trainer: Make, reward: str, cause: str) -> None:
    episode = only(trainer(words, args=f'{{ reward = "{reward}" }}'))
    assert "failed" == episode.rollout.status
    assert cause.format(words) in episode.attempt.error.message


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        ("{ rows = 0 }", "has no tasks: its datasets are empty"),
        ("{ row = 1 }", "has no argument 'row' (in experiment.agent_args); did you mean 'rows'?"),
        ('{ rows = "two" }', "could not be loaded with rows of agent_args: TypeError"),
        ('{ reward = "together" }', "scores rollouts of a task together"),
    ],
)
def test_environment_that_cannot_be_used_is_refused(words: str, trainer: Make, args: str, cause: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trainer(words, args=args).plan()
    assert cause in str(refused.value)


def test_signals_stay_those_of_the_experiment(words: str, trainer: Make) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    only(trainer(words))
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
