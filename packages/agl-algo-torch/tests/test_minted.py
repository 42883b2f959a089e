"""GRPO trains proposer and solver from the rollouts of `mint`, each on its own calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai

import agl
from agl.algorithms import algorithm
from agl.schemas import JsonResource
from agl_run import Quiet, policy

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def play(task: dict[str, Any], proposer: agl.LLM, solver: agl.LLM, rollout: agl.Rollout) -> float | None:
    """Propose a task of three tokens, or answer one: of every second task all answers win, else half of them."""
    llm = proposer if "propose" in task else solver
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        said: Any = [{"role": "user", "content": task.get("ask", "ask")}]
        answer = await client.chat.completions.create(model=llm.model, messages=said, max_tokens=3)
    if llm is solver:
        return float(int(rollout.rollout_id[-1]) % 2 == 0 or task["ask"][0] in "02")
    agl.emit_object({"ask": f"{rollout.rollout_id[-1]} {answer.choices[0].message.content}"}, name="task")
    return None


def test_grpo_trains_proposer_and_solver_on_their_own_calls(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"compute": {"device": "cpu", "threads": 1}, "source": "mint", "steps": 3}
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    served = policy("torch", model=str(model_dir), threads=1)
    trainer = agl.Trainer(
        name="duo",
        algorithm=[
            algorithm("mint", tunes="minted", budget=8, group_size=4),
            algorithm("grpo", name="solving", tunes="solver", **settings),
            algorithm("grpo", name="proposing", tunes="proposer", **settings),
        ],
        policies={"solver": served, "proposer": served},
        initial_resources={"minted": JsonResource(value=[])},
        schedule="alternate",
        store="memory://",
        folder=tmp_path,
        workdir=str(tmp_path / "work"),
        progress=Quiet(),
    )
    result = trainer.fit(play, [{"propose": "any"}])
    assert {"mint": 2, "proposing": 2, "solving": 2} == result.steps
    lines = map(json.loads, (tmp_path / "work" / "duo" / "metrics.jsonl").read_text().splitlines())
    found = {(line["algorithm"], line["name"]): line["value"] for line in lines if line["step"] == 1}
    assert (4, 16, 0.75) == tuple(found["solving", name] for name in ("groups", "rows", "reward"))
    assert (1, 4, 0.5) == tuple(found["proposing", name] for name in ("groups", "rows", "reward"))
    assert 0.0 < found["solving", "grad_norm"]
    assert 0.0 < found["proposing", "grad_norm"]
