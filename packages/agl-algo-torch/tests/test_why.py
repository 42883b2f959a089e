"""Steps report how they used each call, and `agl why` prints it for two algorithms of one experiment."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest

import agl
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery
from agl.schemas import CallCredit
from agl_algo_torch.data.credited_rows import prepare
from agl_algo_torch.grpo import GRPO
from agl_algo_torch.ppo import PPO
from agl_algo_torch.preferences import DPO
from agl_algo_torch.rft import RFT
from agl_objectives import uses
from agl_objectives.registry import find_estimator
from agl_run import Quiet, policy
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import invoke_agl
from agl_testing.conformance import AlgorithmScenario
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, paid_by_another, run

if TYPE_CHECKING:
    from pathlib import Path

    from agl.contracts import CallUse
    from agl.schemas import Episode, Weights

COMMON = {"steps": 1, "tasks_per_step": 2, "group_size": 4, "device": "cpu", "threads": 1}


@pytest.fixture
def weights(model_dir: Path) -> Weights:
    from agl.schemas import Weights

    return Weights(uri=str(model_dir))


def report_of(make: Any, weights: Weights, folder: Path, *, rows: int = 1) -> tuple[Any, AlgorithmBench]:
    scenario = AlgorithmScenario(make=make, play=World(rows=rows).play, tunes=("llm",), resources={"llm": weights})
    bench = AlgorithmBench(scenario, folder)
    (report,) = asyncio.run(run(bench))
    return report, bench


def test_every_call_of_grpo_has_its_credit_advantage_and_row(weights: Weights, tmp_path: Path) -> None:
    report, bench = report_of(lambda: made(GRPO, **COMMON), weights, tmp_path, rows=2)
    assert set(report.trained) == set(report.uses) == set(bench.collected)
    for rollout_id, calls in report.uses.items():
        reward = bench.collected[rollout_id].reward
        group = [e.reward or 0.0 for e in bench.collected.values() if _task(e) == _task(bench.collected[rollout_id])]
        assert [0, 1] == [call.row for call in calls]
        assert [reward] * 2 == [call.credit for call in calls]
        above = (reward or 0.0) - sum(group) / len(group)
        assert all((call.advantage or 0.0) * above > 0 or call.advantage == above == 0.0 for call in calls)


def test_ppo_reports_the_mean_advantage_of_a_calls_tokens(weights: Weights, tmp_path: Path) -> None:
    report, bench = report_of(lambda: made(PPO, **COMMON), weights, tmp_path)
    calls = [call for found in report.uses.values() for call in found]
    assert 2 * len(bench.collected) == len(calls)
    # Whitened over the step's tokens, of which every call has one.
    assert 0.0 == pytest.approx(sum(call.advantage or 0.0 for call in calls), abs=1e-4)
    assert len(calls) == pytest.approx(sum((call.advantage or 0.0) ** 2 for call in calls), rel=1e-3)
    assert all(call.row == 0 and call.credit == bench.collected[name].reward for name, call in _named(report.uses))


def test_rft_and_dpo_say_why_a_rollout_was_left_out(weights: Weights, tmp_path: Path) -> None:
    report, _ = report_of(lambda: made(RFT, best=1, min_reward=0.0, **COMMON), weights, tmp_path / "rft")
    notes = [call.note for _, call in _named(report.uses) if call.row < 0]
    assert ["its rollout is not among those that are imitated (min_reward, best)"] == sorted(set(notes))
    assert 2 * 2 == sum(call.row >= 0 for _, call in _named(report.uses)), "the best of each of two groups, two calls"
    report, _ = report_of(lambda: made(DPO, min_gap=0.1, **COMMON), weights, tmp_path / "dpo")
    for name, call in _named(report.uses):
        sides = (
            ("chosen in 1 of the pairs", "rejected in 1 of the pairs")
            if name in report.trained
            else ("its rollout is in no pair",)
        )
        assert call.note in sides
        assert (call.row >= 0) == (name in report.trained)


def test_silent_groups_and_calls_that_train_nothing_are_named(model_dir: Path) -> None:
    loud, silent = paid_by_another(model_dir, count=8)[:4], paid_by_another(model_dir, count=8)[4:]
    loud = [msgspec.structs.replace(e, reward=float(n)) for n, e in enumerate(loud)]
    silent = [msgspec.structs.replace(e, reward=1.0) for e in silent]
    cut = msgspec.structs.replace(loud[3].transitions[1], finish_reason="length")
    lost = msgspec.structs.replace(loud[2].transitions[1], reject="not_selected")
    loud[3] = msgspec.structs.replace(loud[3], transitions=(loud[3].transitions[0], cut))
    loud[2] = msgspec.structs.replace(loud[2], transitions=(loud[2].transitions[0], lost))

    found = prepare(
        [loud, silent], credit=_Every(), estimator=find_estimator("grpo", None).call, mask_truncated=True
    ).uses

    assert [(uses.CUT, -1, 3.0, None)] == [_said(found[loud[3].rollout.rollout_id][1])]
    assert ("not_selected", -1, None, None) == _said(found[loud[2].rollout.rollout_id][1])
    assert {(uses.SILENT, 0, 1.0, 0.0)} == {_said(call) for e in silent for call in found[e.rollout.rollout_id]}
    assert "" == found[loud[0].rollout.rollout_id][0].note


class _Every:
    """Gives every call that is not rejected the reward of its episode."""

    def assign(self, group: Any) -> list[list[CallCredit]]:
        return [
            [
                CallCredit(span_id=call.span_id, value=e.reward or 0.0, baseline="")
                for call in e.transitions
                if not call.reject
            ]
            for e in group
        ]


def _said(call: CallUse) -> tuple[str, int, float | None, float | None]:
    return call.note, call.row, call.credit, call.advantage


def _task(found: Episode) -> str:
    return found.rollout.group_id


def _named(found: dict[str, tuple[CallUse, ...]]) -> list[tuple[str, CallUse]]:
    return [(name, call) for name, calls in found.items() for call in calls]


async def talk(task: dict[str, Any], llm: agl.LLM) -> float:
    """Make two calls; the reward is the task's, or differs between the rollouts of a task."""
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        said: list[Any] = [{"role": "user", "content": task["text"]}]
        answer = await client.chat.completions.create(model=llm.model, messages=said, max_tokens=4)
        other: list[Any] = [{"role": "user", "content": f"again {task['text']}"}]
        await client.chat.completions.create(model=llm.model, messages=other, max_tokens=4)
    if task["text"] == "fails":
        raise ValueError("no such page")
    return 1.0 if task["text"] == "easy" else float(hash(answer.id) % 7)


def test_agl_why_prints_what_each_algorithm_of_an_experiment_did(
    make_loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    url = f"sqlite:///{tmp_path}/runs.db"
    settings: dict[str, Any] = {"compute": {"device": "cpu", "threads": 1}, "tunes": "llm"}
    trainer = agl.Trainer(
        name="two",
        algorithm=[
            algorithm("grpo", steps=1, tasks_per_step=3, group_size=3, **settings),
            algorithm("rft", source="grpo", best=1, min_reward=0.0, **settings),
        ],
        policies={"llm": policy("torch", model=str(tmp_path / "model"), threads=1)},
        store=url,
        folder=tmp_path,
        progress=Quiet(),
    )
    trainer.fit(talk, [{"text": text} for text in ("easy", "hard", "fails")])
    by_text: dict[str, list[str]] = {"easy": [], "hard": [], "fails": []}
    for rollout in asyncio.run(_rollouts(url)):
        by_text[rollout.task["text"]].append(rollout.rollout_id)

    easy = [why(rollout_id, tmp_path) for rollout_id in by_text["easy"]]
    assert all(
        "grpo, step 1: 2 of 2 calls could train, none changed the model; no gradient: every advantage" in each
        for each in easy
    )
    assert all(
        2 == each.count("row 0, credit 1, advantage 0") + each.count("row 1, credit 1, advantage 0") for each in easy
    )
    assert 1 == sum("rft, step 1: trained on 2 of 2 calls" in each for each in easy), "the best of its group"
    assert 2 == sum("did not train: its rollout is not among those that are imitated" in each for each in easy)
    hard = json.loads(why(by_text["hard"][0], tmp_path, "--json"))
    steps = {each["algorithm"]: each for each in hard["training"]}
    assert ["grpo", "rft"] == sorted(steps)
    assert [hard["reward"]] * 2 == [call["credit"] for call in steps["grpo"]["calls"]]
    assert [True, True] == [steps["grpo"]["is_saved"], steps["rft"]["is_saved"]]
    fails = why(by_text["fails"][0], tmp_path)  # its answers were cut, so it counts as one that ran out of tokens
    assert "grpo, step 1: 2 of 2 calls could train, none changed the model; no gradient" in fails
    assert "did not train: its rollout is not among those that are imitated" in fails


def why(rollout_id: str, folder: Path, *options: str) -> str:
    return invoke_agl("why", rollout_id, "--store", "runs.db", *options, folder=folder)


async def _rollouts(url: str) -> Any:
    store = SQLiteStore(url)
    try:
        return await store.rollouts(RolloutQuery(experiment="two"))
    finally:
        await store.close()
