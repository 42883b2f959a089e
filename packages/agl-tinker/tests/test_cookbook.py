"""The unchanged training loops of tinker-cookbook with a server.

The loops need some hundred megabytes, and are not installed for the everyday tests; ``pip install tinker-cookbook
sympy pylatexenc math-verify`` lets this file run. Small datasets replace those that the loops would download; the
renderer and the reward are replaced too.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from .world import KEY, Served

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
datasets = pytest.importorskip("datasets", reason="the package datasets, of tinker-cookbook, is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return `prepared(rows)`, which replaces the data that the loops load from the hub."""
    from tinker_cookbook import model_info

    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(model_info, "get_recommended_renderer_name", lambda name: "role_colon")

    def prepare(rows: list[Any]) -> None:
        found = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)

    return prepare


def metrics(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_supervised_loop(served: Served, prepared: Any, tmp_path: Path) -> None:
    from tinker_cookbook.recipes import sl_loop

    words = ("ab", "cd", "ef", "gh")
    prepared(
        [
            {"messages": [{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w * 3}]}
            for w in words * 8
        ]
    )
    sl_loop.main(
        sl_loop.Config(
            base_url=served.url,
            log_path=str(tmp_path),
            model_name=served.name,
            batch_size=8,
            learning_rate=1e-2,
            max_length=128,
            lora_rank=8,
            save_every=2,
        )
    )
    found = metrics(tmp_path, "train_mean_nll")
    assert 4 == len(found)
    assert found[-1] < found[0] - 0.5


def test_reinforcement_loop(served: Served, prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify", reason="math-verify, which the loop imports, is not installed")
    from tinker_cookbook.recipes import rl_loop

    prepared([{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(48)])
    monkeypatch.setattr(rl_loop, "get_reward", lambda text, _: sum(c.isascii() for c in text) / max(1, len(text)))
    rl_loop.main(
        rl_loop.Config(
            base_url=served.url,
            log_path=str(tmp_path),
            model_name=served.name,
            batch_size=4,
            group_size=8,
            learning_rate=1e-2,
            lora_rank=8,
            save_every=5,
            max_tokens=8,
            loss_fn="importance_sampling",
        )
    )
    found = metrics(tmp_path, "reward/total")
    assert 12 == len(found)
    assert found[-1] > found[0] + 0.2
