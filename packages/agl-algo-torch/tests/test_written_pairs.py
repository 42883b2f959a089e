"""DPO, IPO and KTO on texts: the tokens that train, the effect of training, and refused files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from agl.errors import ConfigError, DatasetError
from agl.schemas import Episode, Weights
from agl_algo_torch.data.dialogues import read_answers, read_pairs
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.preferences import DPO, IPO, KTO
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench, RolloutOrder

from .token_world import made, published, run

if TYPE_CHECKING:
    from pathlib import Path


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(question: str, better: str, worse: str) -> dict[str, Any]:
    return {
        "prompt": [said("user", question)],
        "chosen": [said("assistant", better)],
        "rejected": [said("assistant", worse)],
        "score_chosen": 1.0,
    }


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


PAIRS = lines(*(pair(f"q{number}", "yes", "no") for number in range(6)))


def labelled(question: str, answer: str, *, is_good: bool) -> dict[str, Any]:
    return {"prompt": [said("user", question)], "completion": [said("assistant", answer)], "label": is_good}


LABELLED = lines(*(labelled(f"q{n}", "yes" if n % 3 else "no", is_good=bool(n % 3)) for n in range(6)))


def scenario_of(model_dir: Path, text: str = PAIRS, kind: Any = DPO, **params: Any) -> AlgorithmScenario:
    def make() -> Any:
        per_update = {"rollouts_per_update": 4} if kind is KTO else {"pairs_per_update": 2}
        settings = {"steps": 3, "lr": 3e-3, "threads": 1, "device": "cpu", **per_update, **params}
        return made(kind, data="pairs.jsonl", **settings)

    def play(_: RolloutOrder) -> Episode:
        raise AssertionError("pairs of texts need no rollouts")

    return AlgorithmScenario(
        make=make,
        play=play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        files={"pairs.jsonl": text},
    )


class TestConformance(AlgorithmConformance):
    collects = False

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return replace(scenario_of(model_dir), make_longer=scenario_of(model_dir, steps=4).make)


def test_better_answers_become_more_likely_than_worse_ones(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, epochs=2), tmp_path / "work")
    first, *_, last = asyncio.run(run(bench))

    assert (6, 1.0) == (first.metrics["pairs"], last.metrics["accuracy"])
    assert last.metrics["margin"] > first.metrics["margin"]
    assert last.metrics["loss"] < first.metrics["loss"]
    assert ((), "reached steps = 3") == (last.trained, last.stop_reason)
    assert published(bench).is_dir()


def test_only_what_stands_behind_the_prompt_is_trained(model_dir: Path, tmp_path: Path) -> None:
    prompt = [said("user", "a"), said("assistant", "b"), said("user", "c")]
    row = {"prompt": prompt, "chosen": [said("assistant", "d")], "rejected": [said("assistant", "e")]}
    path = tmp_path / "pairs.jsonl"
    path.write_text(lines(row))
    (found,) = read_pairs(path)
    tokenizer = load_model(str(model_dir), device="cpu").tokenizer

    trained = [
        tokenizer.decode(sample.ids[sample.mask].tolist())
        for sample in found.rows(tokenizer=tokenizer, max_tokens=999, stop_ids=())
    ]
    assert ["d<|im_end|>", "e<|im_end|>"] == trained


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "p.jsonl:2: the line is not JSON"),
        ("[]", "p.jsonl:2: expected .*agl data export --format dpo"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "p.jsonl:2: expected .*agl data export --format dpo"),
        (
            lines({**pair("a", "b", "c"), "rejected": [said("user", "x")]}),
            "p.jsonl:2 rejected: no message has the role",
        ),
    ],
    ids=["no JSON", "no object", "texts", "no answer"],
)
def test_line_that_is_no_pair_is_named(row: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(lines(pair("a", "b", "c")) + row)

    with pytest.raises(DatasetError, match=message):
        read_pairs(path)


@pytest.mark.parametrize("text", ["", "\n"])
def test_file_without_pairs_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)

    with pytest.raises(DatasetError, match=r"file of pairs .* is empty"):
        read_pairs(path)


@pytest.mark.parametrize(
    "ignored",
    [{"tasks_per_step": 4}, {"group_size": 4}, {"max_age": 1}, {"pairs": "all"}, {"min_gap": 0.1}],
    ids=lambda given: next(iter(given)),
)
def test_settings_that_pairs_of_texts_make_idle_are_refused(ignored: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"data = 'p.jsonl', so {next(iter(ignored))} would be ignored"):
        made(DPO, data="p.jsonl", **ignored)


def test_recorded_logprobs_are_no_reference_of_texts() -> None:
    with pytest.raises(ConfigError, match=r'so reference = "behaviour" would be ignored'):
        made(DPO, data="p.jsonl", reference="behaviour")


@pytest.mark.long
class TestConformanceOfKto(AlgorithmConformance):
    collects = False

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(model_dir, LABELLED, KTO)


def test_ipo_brings_pairs_of_texts_towards_its_margin(model_dir: Path, tmp_path: Path) -> None:
    first, *_, last = asyncio.run(run(AlgorithmBench(scenario_of(model_dir, kind=IPO, epochs=2), tmp_path / "work")))

    assert (6, 0.0) == (first.metrics["pairs"], len(first.trained))
    assert last.metrics["loss"] < first.metrics["loss"] <= 25.0
    assert last.metrics["margin"] > 0


@pytest.mark.parametrize(("text", "counts"), [(PAIRS, (6, 6)), (LABELLED, (4, 2)), (PAIRS + LABELLED, (10, 8))])
def test_kto_learns_from_labelled_answers_and_from_pairs(
    model_dir: Path, tmp_path: Path, text: str, counts: tuple[int, int]
) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, text, KTO, epochs=2), tmp_path / "work")
    first, *_, last = asyncio.run(run(bench))

    assert counts == (first.metrics["good"], first.metrics["bad"])
    assert last.metrics["loss"] < first.metrics["loss"]
    assert last.metrics["margin"] > first.metrics["margin"]
    assert "reached steps = 3" == last.stop_reason


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [said("user", "a")], "completion": [said("assistant", "b")]}, "p.jsonl:1: label is None"),
        (labelled("a", "b", is_good=True) | {"label": "good"}, "p.jsonl:1: label is 'good'"),
        (labelled("a", "b", is_good=True) | {"completion": "b"}, "p.jsonl:1: expected .*or for kto"),
        (labelled("a", "b", is_good=True) | {"completion": [said("user", "b")]}, "no message has the role"),
    ],
)
def test_answer_without_a_label_or_a_text_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(lines(row))

    with pytest.raises(DatasetError, match=message):
        read_answers(path)


def test_settings_that_texts_make_idle_are_refused_by_ipo_and_kto() -> None:
    with pytest.raises(ConfigError, match="ipo reads what it learns from in data = 'p', so pairs would be ignored"):
        made(IPO, data="p", pairs="all")
    with pytest.raises(ConfigError, match="kto reads what it learns from in data = 'p', so good_from would be ignored"):
        made(KTO, data="p", good_from=0.5)
