from pathlib import Path
from typing import Any

import msgspec
import pytest

import agl
from agl.contracts import RewardEmitter, RewardSetup, Upstream
from agl.errors import ConfigError
from agl.experiment.build import build_rewards
from agl.experiment.config import parse_config
from agl.plugins import PluginManager
from agl.schemas import Rollout, Span
from agl.train.rewards import ExactMatch, final_text
from agl_testing.conformance.reward import RewardConformance

from .train_cases import agent_span, call_span


class TestExactMatch(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return ExactMatch()


def chat(number: int, text: str | None, **fields: Any) -> Span:
    response = {"choices": [{"message": {"role": "assistant", "content": text}}]}
    request = {"messages": [{"role": "user", "content": "question"}]}
    return with_bodies(call_span(number, **fields), request, response)


def with_bodies(span: Span, request: object, response: object) -> Span:
    assert span.call is not None
    return msgspec.structs.replace(span, call=msgspec.structs.replace(span.call, request=request, response=response))


def rollout(task: object) -> Rollout:
    return Rollout(rollout_id="r", task=task, hidden=("answer",))


def test_exact_match_compares_with_the_hidden_answer() -> None:
    reward = ExactMatch()(rollout({"question": "?", "answer": 42}), [chat(1, "  42 ")])
    assert (1.0, "evaluator", "rollout", "") == (reward.value, reward.source, reward.scope, reward.feedback)


def test_exact_match_says_what_it_expected() -> None:
    reward = ExactMatch()(rollout({"answer": "Paris"}), [chat(1, "Rome")])
    assert (0.0, "expected 'Paris', got 'Rome'") == (reward.value, reward.feedback)


def test_exact_match_without_any_answer_is_zero() -> None:
    assert 0.0 == ExactMatch()(rollout({"answer": "x"}), []).value


def test_exact_match_takes_any_of_several_answers() -> None:
    assert 1.0 == ExactMatch()(rollout({"answer": ["NYC", "new  york"]}), [chat(1, "New York")]).value


def test_exact_match_can_tell_case_and_name() -> None:
    reward = ExactMatch(case=True, name="em", answer="gold")(rollout({"gold": "a"}), [chat(1, "A")])
    assert (0.0, "em") == (reward.value, reward.name)


@pytest.mark.parametrize("task", [{"question": "?"}, "text", {"answer": None}, {"answer": []}])
def test_exact_match_refuses_a_task_without_an_answer(task: object) -> None:
    with pytest.raises(ConfigError, match="compares with the task's 'answer', which rollout r does not have"):
        ExactMatch()(rollout(task), [])


def test_final_text_is_the_last_complete_answer_that_has_text() -> None:
    spans = [
        agent_span("a"),
        chat(1, "first"),
        chat(2, "second"),
        chat(3, None),
        chat(4, "cut", is_complete=False),
        chat(5, "failed", status_code=500),
        chat(6, "late", is_late=True),
    ]
    assert "second" == final_text(spans[::-1])


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}


@pytest.mark.parametrize(
    ("dialect", "response"),
    [
        ("completions", {"choices": [{"text": "hi"}]}),
        ("messages", {"content": [{"type": "text", "text": "hi"}]}),
        (
            "responses",
            {"output": [MESSAGE]},
        ),
    ],
)
def test_final_text_reads_every_dialect(dialect: str, response: object) -> None:
    span = with_bodies(call_span(1, dialect=dialect), {}, response)
    assert "hi" == final_text([span])


def test_final_text_of_nothing_is_empty() -> None:
    assert "" == final_text([])
    assert "" == final_text([with_bodies(call_span(1, dialect="embeddings"), {"input": "x"}, {"data": []})])


class Asking:
    """An emitter that wants to know the experiment, and says what it was told."""

    def __init__(self, *, setup: RewardSetup, part: str = "") -> None:
        self.setup = setup
        self.part = setup.build(part, {}) if part else None

    def __call__(self, rollout: Rollout, spans: object) -> float:
        return float(self.part is not None)


class AskingPlugin:
    @agl.hookimpl
    def agl_rewards(self) -> list[agl.RewardEntry]:
        return [agl.RewardEntry(name="asking", factory=Asking, takes_setup=True)]


def test_emitter_that_asks_for_it_learns_about_its_experiment(tmp_path: Path) -> None:
    manager = PluginManager()
    manager.register(AskingPlugin(), name="asking")
    policy = {"use": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    config = parse_config(
        {
            "experiment": {"agent": "agent:solve"},
            "policy": {"judge": policy},
            "reward": [{"use": "asking", "params": {"part": "exact-match"}}, {"use": "exact-match"}],
        }
    )
    plan = agl.Trainer.from_config(config, folder=tmp_path, plugins=manager).plan(lambda task: None, [{"q": 1}])
    up = Upstream(name="judge", base_url="http://127.0.0.1:9/v1", model="m", api_key_env="KEY")
    for upstreams, endpoint in (((), ""), ((up,), up.base_url)):
        (name, asking), (other, _) = build_rewards(plan, upstreams)
        assert isinstance(asking, Asking)
        assert ("asking", "exact-match", tmp_path) == (name, other, asking.setup.folder)
        assert (["judge"], endpoint) == (list(asking.setup.policies), asking.setup.policies["judge"].endpoint)
        assert isinstance(asking.part, ExactMatch)
