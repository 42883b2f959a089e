"""``agl data export`` writes trained weights merged, in shards, as GGUF, and with a model card."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner, Result

from agl.contracts import ExperimentRecord, Metric, Trained
from agl.schemas import ResourceVersion, Weights
from agl.stores import MemoryStore
from agl_algo_torch.learner import checkpoint
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_data.export.models import model_card
from agl_inspect.terminal.program import cli
from agl_inspect.versions import ShownVersion
from agl_objectives.directories import damage
from agl_objectives.settings import Compute, Lora, Optim
from agl_store_sqlite import SQLiteStore

if TYPE_CHECKING:
    from pathlib import Path

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.tensor([[5, 6, 7, 8, 9, 200, 31]])


@pytest.fixture
def learner(model_dir: Path) -> PolicyLearner:
    """A learner whose adapter has moved."""
    settings = LearnerSettings(optim=Optim(lr=1e-2), lora=Lora(rank=4), compute=Compute(device="cpu", threads=1))
    made = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    for _ in range(3):
        made.loaded.model(input_ids=IDS, labels=IDS).loss.backward()  # pyright: ignore[reportUnknownMemberType]
        made.apply({})
    return made


@pytest.fixture
def store(learner: PolicyLearner, model_dir: Path, tmp_path: Path) -> str:
    """A store in which the learner's adapter is the version of step 2 of an experiment."""
    adapter = learner.export(tmp_path, step=2, keep=1)
    start = ResourceVersion(name="small", version="initial", resource=Weights(uri=str(model_dir)))
    made = ResourceVersion(
        name="small", version="sums-1-grpo-2", parent="initial", algorithm="grpo", step=2, resource=adapter
    )
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    names: dict[str, Any] = {"experiment": "sums", "run": 1, "algorithm": "grpo"}

    async def fill() -> None:
        opened = SQLiteStore(url)
        await opened.publish([start, made])
        ledger = [Trained(**names, step=n, rollout_ids=(f"r{n}", f"s{n}")) for n in (1, 2, 3)]
        await opened.save_state({}, experiment=ExperimentRecord(name="sums", agent="sums:solve"), trained=ledger)
        await opened.log_metrics([Metric(**names, step=n, name="reward", value=n / 4) for n in (1, 2, 3)])
        await opened.close()

    asyncio.run(fill())
    return url


def export(store: str, form: str, target: Path) -> Result:
    words = ["data", "export", "small", "--format", form, "--output", str(target), "--store", store]
    return CliRunner().invoke(cli, words)


def test_merged_weights_answer_as_base_and_adapter_do_and_are_cut_into_files(
    learner: PolicyLearner, store: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", "100KB")

    result = export(store, "merged", tmp_path / "merged")

    assert result.exit_code == 0, result.output
    assert "written to" in result.output
    assert "a Hugging Face directory" in result.output
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    with torch.no_grad():
        expected = learner.loaded.model(input_ids=IDS).logits
        found: Any = load_model(str(tmp_path / "merged"), device="cpu").model
        base: Any = load_model(str(model_dir), device="cpu").model
        assert float((found(input_ids=IDS).logits - expected).abs().max()) < 1e-5
        assert float((base(input_ids=IDS).logits - expected).abs().max()) > 1e-2


def test_model_card_names_base_run_data_and_curve(store: str, model_dir: Path, tmp_path: Path) -> None:
    assert export(store, "model", tmp_path / "out").exit_code == 0

    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# small\n")  # the hub could not follow a path of this machine
    rows = {
        line
        for line in (
            f"| base model | {model_dir.name} |",
            "| algorithm | grpo |",
            "| experiment | sums, run 1 |",
            "| agent | sums:solve |",
            "| rollouts trained on | 4 |",
            "| steps | 2 |",
            "| 1 | 0.2500 |",
            "| 2 | 0.5000 |",
        )
        if line not in card.splitlines()
    }
    assert not rows, card
    assert "0.7500" not in card  # a later step


@pytest.mark.parametrize("uri", ["Org/Tiny-1B", "/data/ann/.cache/huggingface/hub/models--Org--Tiny-1B/snapshots/0a1b"])
def test_model_card_names_a_base_of_the_hub(uri: str) -> None:
    start = ResourceVersion(name="small", version="initial", resource=Weights(uri=uri))
    shown = ShownVersion(version=start, labels=[], ancestors=[])

    async def card() -> str:
        store = MemoryStore()
        await store.publish([start])
        return await model_card(store, shown)

    assert asyncio.run(card()).startswith("---\nbase_model: Org/Tiny-1B\n---\n\n# small\n")


def test_exported_adapter_has_the_checksums_of_its_files(store: str, tmp_path: Path) -> None:
    assert export(store, "model", tmp_path / "out").exit_code == 0

    assert damage(tmp_path / "out") == ""
    lines = (tmp_path / "out" / "checksums.sha256").read_text().splitlines()
    assert "adapter_model.safetensors" in {line.partition("  ")[2] for line in lines}


def test_gguf_is_written_by_the_converter_of_llama_cpp(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = export(store, "gguf", tmp_path / "small.gguf")
    assert result.exit_code == 1
    assert "python convert_hf_to_gguf.py DIRECTORY --outfile FILE.gguf" in " ".join(result.output.split())

    tool = tmp_path / "bin" / "convert_hf_to_gguf.py"
    tool.parent.mkdir()
    tool.write_text("import os, sys\nopen(sys.argv[3], 'w').write(' '.join(sorted(os.listdir(sys.argv[1]))))\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))

    result = export(store, "gguf", tmp_path / "small.gguf")

    assert result.exit_code == 0, result.output
    assert {"config.json", "model.safetensors", "tokenizer.json"} < set((tmp_path / "small.gguf").read_text().split())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
