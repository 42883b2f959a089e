"""A finished experiment that gets more steps ends with the same weights as one that had all steps from the start."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch

import agl
from agl.algorithms import algorithm
from agl.errors import ConfigError
from agl_algo_torch.learner.model import load_model
from agl_run import Quiet, policy

if TYPE_CHECKING:
    from pathlib import Path

TASKS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
TASKS_OF_VALIDATION = [{"text": "four"}]
DIALOGUE = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "aaaa"}]}


def write(task: dict[str, str], llm: agl.LLM) -> float:
    """Make one call; the reward is an arbitrary function of the answer."""
    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key or "none") as client:
        answer = client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["text"]}],
            max_tokens=4,
        )
    return zlib.crc32((answer.choices[0].message.content or "").encode()) % 5 / 4


@pytest.fixture
def model_dir(make_loaded: Any, tmp_path: Path) -> Path:
    """Directory of a saved tiny model that may sample any token."""
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Stage:
    """An experiment of `sft` and then `grpo`, with its own folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir()
        (folder / "dialogues.jsonl").write_text(json.dumps(DIALOGUE) + "\n")
        self.folder, self.model = folder, model

    def fit(self, *, steps: int, updates: int = 2, resume: bool = False) -> Any:
        compute = {"threads": 1, "device": "cpu"}
        warm = algorithm(
            "sft", tunes="llm", data="dialogues.jsonl", updates=updates, optim={"lr": 1e-3}, compute=compute
        )
        settings: dict[str, Any] = {"tasks_per_step": 2, "group_size": 4, "optim": {"lr": 3e-3}, "compute": compute}
        trainer = agl.Trainer(
            name="small",
            algorithm=[warm, algorithm("grpo", tunes="llm", steps=steps, **settings)],
            policies={"llm": policy("torch", model=str(self.model), threads=1)},
            store=f"sqlite:///{self.folder}/runs.db",
            n_runners=1,  # the same batches, and so the same rounding, in every run
            folder=self.folder,
            progress=Quiet(),
        )
        return trainer.fit(write, TASKS, TASKS_OF_VALIDATION, resume=resume)

    def weights(self) -> dict[str, torch.Tensor]:
        newest = max(self.folder.glob("**/grpo/weights/[0-9]*"))
        return dict(load_model(str(newest), device="cpu").model.state_dict())


def test_steps_in_two_sittings_give_the_weights_of_as_many_in_one(model_dir: Path, tmp_path: Path) -> None:
    whole, parts = Stage(tmp_path / "whole", model_dir), Stage(tmp_path / "parts", model_dir)
    one = whole.fit(steps=3)
    parts.fit(steps=2)
    before = parts.weights()
    two = parts.fit(steps=3, resume=True)
    assert {"sft": 1, "grpo": 3} == one.steps == two.steps
    assert (one.before, one.after) == (two.before, two.after)
    found = parts.weights()
    assert any(not torch.equal(tensor, found[name]) for name, tensor in before.items())
    assert all(torch.equal(tensor, found[name]) for name, tensor in whole.weights().items())

    with pytest.raises(
        ConfigError, match=r"finished \(sft: updates done: 2; grpo: reached steps = 3\).*Give an algorithm"
    ):
        parts.fit(steps=3, resume=True)
    with pytest.raises(ConfigError, match=r"'sft' asks for further steps .* 'grpo', which comes after it"):
        parts.fit(steps=4, updates=3, resume=True)
    with pytest.raises(ConfigError, match=r"is finished; pass --fresh .* --resume"):
        parts.fit(steps=4)
