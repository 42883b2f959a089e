"""Steps report the entropy of every trained token, and its advantage if the tokens of a call differ in it."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from agl.schemas import Weights, unpack_floats, unpack_ids
from agl_algo_torch.distill import Distill
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.ppo import PPO
from agl_algo_torch.sdpo import SDPO
from agl_inspect.rollouts.training import token_values
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .chat_world import TOKENS, ChatWorld
from .token_world import made, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agl.contracts import CallUse, StepReport
    from agl.schemas import Episode, Row, Segment
    from agl_testing.conformance.bench import RolloutOrder

COMMON = {"steps": 1, "tasks_per_step": 2, "group_size": 4, "lr": 1e-2, "device": "cpu", "threads": 1}


@pytest.fixture
def model_dir(model_dir: Path) -> Path:
    """Directory of a model with a flatter distribution of answers, so that rewards differ."""
    loaded = load_model(str(model_dir), device="cpu")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.div_(3.0)  # type: ignore[operator]
    loaded.model.save_pretrained(model_dir)  # type: ignore[operator]
    return model_dir


def step_of(
    make: Callable[[], Any], model_dir: Path, folder: Path, *, reward: float | None = None
) -> tuple[StepReport, AlgorithmBench]:
    """Run one step of an algorithm in a world of two calls per rollout, with two tokens each."""
    world = ChatWorld()

    def play(order: RolloutOrder) -> Episode:
        played = world.play(order)
        return played if reward is None else msgspec.structs.replace(played, reward=reward)

    weights = {"llm": Weights(uri=str(model_dir))}
    bench = AlgorithmBench(AlgorithmScenario(make=make, play=play, tunes=("llm",), resources=weights), folder)
    (report,) = asyncio.run(run(bench))
    return report, bench


def calls_of(report: StepReport, bench: AlgorithmBench) -> list[tuple[CallUse, Row, Segment]]:
    """Return every trained call with its row and its segment of the row."""
    rows = [(name, row) for name, episode in bench.collected.items() for row in episode.rows]
    parts = {(name, part.span_id): (row, part) for name, row in rows for part in row.segments}
    return [(use, *parts[name, use.span_id]) for name, uses in report.uses.items() for use in uses if use.row >= 0]


@pytest.mark.parametrize("epochs", [1, 2])
def test_entropies_are_those_of_the_policy_that_sampled(model_dir: Path, tmp_path: Path, epochs: int) -> None:
    report, bench = step_of(lambda: made(GRPO, epochs=epochs, **COMMON), model_dir, tmp_path)
    model = load_model(str(model_dir), device="cpu").model
    measured = [each for each in calls_of(report, bench) if each[0].advantage]
    assert len(measured) >= 8
    for use, row, part in measured:
        ids = torch.tensor([unpack_ids(row.ids)])
        logp = model(input_ids=ids).logits[0].detach().log_softmax(-1)  # type: ignore[operator]
        expected = [-float((logp[at - 1].exp() * logp[at - 1]).sum()) for at in range(part.start, part.stop)]
        assert expected == pytest.approx(token_values(use, "entropy"), rel=2e-3)
        assert [] == token_values(use, "advantage"), "one for all tokens of a call"
    if epochs == 1:
        every = [value for use, _, _ in measured for value in token_values(use, "entropy")]
        assert report.metrics["entropy"] == pytest.approx(sum(every) / len(every), rel=2e-3)


def test_silent_rollouts_cost_no_pass_and_have_no_entropy(model_dir: Path, tmp_path: Path) -> None:
    report, bench = step_of(lambda: made(GRPO, **COMMON), model_dir, tmp_path, reward=1.0)
    assert [{}] * 2 * len(bench.collected) == [use.tokens for use, _, _ in calls_of(report, bench)]


def test_ppo_reports_the_advantage_of_every_token(model_dir: Path, tmp_path: Path) -> None:
    report, bench = step_of(lambda: made(PPO, lam=0.5, **COMMON), model_dir, tmp_path)
    found = calls_of(report, bench)
    assert 2 * len(bench.collected) == len(found)
    assert {TOKENS} == {len(token_values(use, "entropy")) for use, _, _ in found}
    paid = [use for use, _, _ in found if use.credit]
    assert paid
    for use in paid:  # the critic knows nothing yet, and lambda halves a reward with every token before it
        first, last = token_values(use, "advantage")
        assert first < last
        assert use.advantage == pytest.approx((first + last) / TOKENS, abs=2e-3)


def test_distillation_reports_the_teachers_preference_of_every_token(
    make_loaded: Any, model_dir: Path, tmp_path: Path
) -> None:
    teacher = make_loaded(seed=9)
    teacher.model.save_pretrained(tmp_path / "teacher")
    teacher.tokenizer.save_pretrained(tmp_path / "teacher")
    report, bench = step_of(
        lambda: made(Distill, teacher=str(tmp_path / "teacher"), **COMMON), model_dir, tmp_path / "work"
    )
    model = load_model(str(tmp_path / "teacher"), device="cpu").model
    found = calls_of(report, bench)
    assert 2 * len(bench.collected) == len(found)
    for use, row, part in found:
        ids, own = unpack_ids(row.ids), unpack_floats(row.logprobs)
        logq = model(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)  # type: ignore[operator]
        expected = [float(logq[at - 1, ids[at]]) - own[at] for at in range(part.start, part.stop)]
        assert expected == pytest.approx(token_values(use, "advantage"), rel=2e-3, abs=2e-3)
        assert use.advantage == pytest.approx(sum(expected) / TOKENS, rel=1e-3, abs=1e-3)


def test_sdpo_reports_the_teachers_preference_of_taught_tokens(model_dir: Path, tmp_path: Path) -> None:
    report, bench = step_of(lambda: made(SDPO, **COMMON), model_dir, tmp_path)
    values = [value for use, _, _ in calls_of(report, bench) for value in token_values(use, "advantage")]
    assert values
    assert all(map(math.isfinite, values))
    assert report.metrics["teacher_gap"] == pytest.approx(sum(values) / len(values), rel=5e-3, abs=2e-3)
