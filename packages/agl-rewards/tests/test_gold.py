"""A gold reward measures its share of the rollouts, the same ones each time, and never trains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl.contracts import RewardEmitter
from agl.episodes import ScoreOptions, admitted_rewards
from agl.errors import ConfigError
from agl.schemas import Rollout
from agl.tracing import make_reward_span
from agl_rewards.composite import Composite, CompositePart
from agl_rewards.gold import Gold, GoldReward
from agl_testing.conformance.reward import RewardConformance, evaluate

from .cases import chat, setup

NUMBER = GoldReward(use="numeric-match", params={"tolerance": 0.5})


def gold(**params: Any) -> Gold:
    return Gold(**{"reward": NUMBER, "setup": setup(), **params})


class TestGold(RewardConformance):
    @pytest.fixture
    def emitter(self) -> RewardEmitter:
        return gold(share=1.0)


def test_gold_gives_the_other_reward_under_its_own_name_and_does_not_train() -> None:
    rollout = Rollout(rollout_id="r", task={"answer": 4}, attempt_id="r.1")
    (reward,) = evaluate(gold(share=1.0), rollout, [chat(1, "it is 4.25")])
    assert (1.0, "gold", True) == (reward.value, reward.name, reward.is_gold)
    spans = [make_reward_span("r", "r.1", reward)]
    assert [] == admitted_rewards(spans, "r.1", ScoreOptions(key="gold", trust_agent=True))


def unavailable(rollout: Rollout, spans: object) -> float:
    """A reward whose server is away."""
    raise RuntimeError("429 too many requests")


def test_gold_that_fails_measures_nothing_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rollout = Rollout(rollout_id="r", task={"answer": 4}, attempt_id="r.1")
    broken = gold(share=1.0, setup=replace(setup(), build=lambda _use, _params: unavailable))
    assert [] == evaluate(broken, rollout, [chat(1, "4")])
    assert "the gold reward of rollout r failed" in caplog.text


def test_composite_refuses_gold() -> None:
    with pytest.raises(ConfigError, match="part 'checked' of a composite is gold, which never trains"):
        Composite(parts={"checked": CompositePart(use="gold", weight=1.0)}, setup=setup())


def test_gold_measures_its_share_of_the_rollouts_and_the_same_ones_again() -> None:
    rollouts = [Rollout(rollout_id=f"run-{n}", task={"answer": 4}, attempt_id="r.1") for n in range(500)]
    first, second = ([bool(evaluate(gold(share=0.2), one, [chat(1, "4")])) for one in rollouts] for _ in range(2))
    assert first == second
    assert 70 < sum(first) < 130


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"share": 0.0}, "above 0 and at most 1"),
        ({"setup": None}, "pass setup"),
        ({"reward": GoldReward(use="group-judge", params={"model": "m"})}, "compares the rollouts of a group"),
    ],
)
def test_gold_refuses_what_it_cannot_measure(params: dict[str, Any], words: str, tmp_path: Path) -> None:
    from agl.schemas import LLM

    with pytest.raises(ConfigError, match=words):
        gold(**{"setup": setup(tmp_path, m=LLM(endpoint="http://127.0.0.1:1/v1", model="m")), **params})
