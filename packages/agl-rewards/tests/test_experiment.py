"""The emitters within real experiments: built from a file, run by the worker, recorded in the store."""

from pathlib import Path
from typing import Any

import pytest

import agl
from agl.errors import AglError
from agl_run import parse_config
from agl_testing.model_server import Reply, ScriptedModelServer

from .cases import database

pytestmark = pytest.mark.alone

AGENT = """
import agl


def solve(task):
    with agl.operation("write"):
        agl.emit_object({"sql": task["say"]}, name="draft")
    return {"sql": task["say"]}
"""

COMPOSITE = {
    "use": "composite",
    "params": {
        "parts": {
            "syntax": {"use": "sql-syntax", "weight": 0.3, "params": {"source": "output:sql"}},
            "execution": {
                "use": "sql-executes",
                "weight": 0.4,
                "params": {"source": "output:sql", "database": "data/{db}.sqlite"},
            },
            "goal": {
                "use": "sql-match",
                "weight": 0.3,
                "params": {"source": "object:draft:sql", "database": "data/{db}.sqlite", "answer": "gold"},
            },
        }
    },
}

JUDGED = Reply(text="Fine.\nScore: 9")
QUERIES = ["SELECT 2", "SELECT 1 + 1", "SELECT 3", "SELECT nope", "SELECT FROM", "DROP TABLE singer"]
TASKS = [{"say": say, "gold": "SELECT 2", "db": "songs"} for say in QUERIES]


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    (tmp_path / "data").mkdir()
    database(tmp_path / "data" / "songs.sqlite")
    (tmp_path / "agent_of_rewards.py").write_text(AGENT, encoding="utf-8")

    def make(*rewards: Any, **section: Any) -> agl.Trainer:
        experiment = {"agent": "agent_of_rewards:solve", "store": "memory://", **section}
        config = parse_config({"experiment": experiment, "reward": list(rewards)})
        return agl.Trainer.from_config(config, folder=tmp_path)

    return make


def test_composite_of_sql_is_one_block(trainer: Any) -> None:
    episodes = trainer(COMPOSITE).dev(train_dataset=TASKS, tasks=9).episodes
    assert [1.0, 1.0, 0.7, 0.3, 0.0, 0.0] == [pytest.approx(episode.reward) for episode in episodes]
    (reward,) = episodes[3].rewards
    parts = {name: reward.dimensions[name] for name in ("syntax", "execution", "goal")}
    assert ("evaluator", {"syntax": 1.0, "execution": 0.0, "goal": 0.0}) == (reward.source, parts)
    assert "execution: no such column: nope" in reward.feedback


def test_dimensions_of_one_reward_can_be_weighted_by_the_experiment(trainer: Any) -> None:
    params = {"source": "output:sql", "database": "data/{db}.sqlite", "answer": "gold"}
    weights = {"syntax": 0.3, "execution": 0.4, "goal": 0.3}
    episodes = (
        trainer({"use": "sql-match", "params": params}, reward_weights=weights)
        .dev(train_dataset=TASKS, tasks=9)
        .episodes
    )
    assert [1.0, 1.0, 0.7, 0.3, 0.0, 0.0] == [pytest.approx(episode.reward) for episode in episodes]


def test_part_that_is_missing_leaves_no_sum(trainer: Any, tmp_path: Path) -> None:
    text = "class Silent:\n    def __call__(self, rollout, spans):\n        return None\n"
    (tmp_path / "silent_of_rewards.py").write_text(text, encoding="utf-8")
    parts = {
        "silent": {"use": "silent_of_rewards:Silent", "weight": 0.5},
        "syntax": {"use": "sql-syntax", "weight": 0.5, "params": {"source": "output:sql"}},
    }
    (episode,) = trainer({"use": "composite", "params": {"parts": parts}}).dev(train_dataset=TASKS[:1]).episodes
    assert (None, {"silent": None, "syntax": 1.0}) == (episode.reward, episode.rewards[0].dimensions)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": {"use": "sql-sintax", "weight": 1}}, "sql-syntax"),
        ({"a": {"use": "sql-syntax", "weight": 1, "params": {"sorce": "output"}}}, "sorce"),
        ({"a": {"use": "sql-match", "weight": 1}}, "database"),
        ({"a": {"use": "sql-syntax"}}, "weight"),
        ({}, "no parts"),
    ],
)
def test_wrong_part_is_refused_before_anything_runs(trainer: Any, parts: Any, message: str) -> None:
    with pytest.raises(AglError, match=message):
        trainer({"use": "composite", "params": {"parts": parts}}).dev(train_dataset=TASKS[:1])


ASKING = """
import openai


async def solve(task, main_llm):
    async with openai.AsyncOpenAI(base_url=main_llm.base_url, api_key=main_llm.api_key or "none") as client:
        messages = [{"role": "user", "content": task["question"]}]
        answer = await client.chat.completions.create(model="scripted", messages=messages)
    return answer.choices[0].message.content
"""


@pytest.mark.parametrize("gateway", ["auto", "none"])
def test_calls_of_a_judge_are_not_the_agents(tmp_path: Path, gateway: str) -> None:
    (tmp_path / "asking_of_rewards.py").write_text(ASKING, encoding="utf-8")
    with ScriptedModelServer(default=Reply(text="42")) as agents, ScriptedModelServer(default=JUDGED) as judges:
        data = {
            "experiment": {"agent": "asking_of_rewards:solve", "store": "memory://"},
            "gateway": {"use": gateway},
            "policy": {
                "main_llm": {"use": "openai", "model": "scripted", "base_url": agents.base_url, "api_key_env": ""},
                "judge_lm": {"use": "openai", "model": "judging", "base_url": judges.base_url, "api_key_env": ""},
            },
            "reward": [{"use": "judge", "params": {"model": "judge_lm"}}],
        }
        trainer = agl.Trainer.from_config(parse_config(data), folder=tmp_path)
        episodes = trainer.dev(train_dataset=[{"question": "6 * 7?"}, {"question": "1 + 1?"}]).episodes
        assert [0.9, 0.9] == [episode.reward for episode in episodes]
        assert [1, 1] == [len(episode.transitions) for episode in episodes]
        assert (2, 2) == (len(agents.calls), len(judges.calls))
        assert {"judging"} == {call.json["model"] for call in judges.calls}
        assert not [call for call in judges.calls if "x-agl-span-id" in call.headers]


def test_judge_without_its_policy_is_refused_before_anything_runs(trainer: Any) -> None:
    with pytest.raises(AglError, match="judge_lm"):
        trainer({"use": "judge", "params": {"model": "judge_lm"}}).dev(train_dataset=TASKS[:1])
