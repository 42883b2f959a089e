"""Checkpoints are complete or absent, exact, and never pickle."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors import SafetensorError

from agl.errors import AglError, ConfigError, RunError
from agl.schemas import Weights
from agl_algo_torch.learner.checkpoint import load_training, read_origin, save_served, save_training
from agl_algo_torch.learner.model import load_model, served_state
from agl_algo_torch.learner.optim import apply_gradients, build_optimizer, learning_rate
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.weights import read_weights
from agl_objectives.directories import damage, prune, write_directory
from agl_objectives.reports import averaged
from agl_objectives.settings import Compute, Lora, Optim

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OPTIM = Optim(lr=1e-2, weight_decay=0.1, warmup=3, decay="cosine")
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture
def model_dir(make_loaded: Any, tmp_path: Path) -> Path:
    made = make_loaded()
    made.model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def train(learner: PolicyLearner, updates: int) -> list[float]:
    losses: list[float] = []
    for _ in range(updates):
        output = learner.loaded.model(input_ids=IDS, labels=IDS)
        output.loss.backward()
        learner.apply({})
        losses.append(float(output.loss.detach()))
    return losses


def test_updates_of_a_step_that_were_skipped_are_counted_and_its_numbers_are_means_of_the_others() -> None:
    reports = [{"loss": 1.0}, {"updates_skipped": 1.0}, {"loss": 3.0, "value_updates_nonfinite": 1.0}]
    reports += [{"updates_skipped": 1.0}, {"updates_nonfinite": 1.0}, {"updates_nonfinite": 1.0}]
    expected = {"loss": 2.0, "updates_skipped": 2.0, "value_updates_nonfinite": 1.0, "updates_nonfinite": 2.0}
    assert expected == averaged(reports)


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_a_resumed_run_continues_bit_for_bit(model_dir: Path, tmp_path: Path, lora: Lora | None) -> None:
    settings = LearnerSettings(optim=OPTIM, total=10, lora=lora or Lora(), compute=Compute(device="cpu"))
    whole = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    expected = train(whole, 6)
    first = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    start = train(first, 3)
    first.save(tmp_path, step=1, keep=2)
    second = PolicyLearner.resume(tmp_path / "state" / "000001", settings=settings)
    assert 3 == second.updates
    second.begin_step(3)
    assert expected == start + train(second, 3)


def test_a_checkpoint_holds_no_pickle(model_dir: Path, tmp_path: Path) -> None:
    learner = PolicyLearner(
        origin=Weights(uri=str(model_dir)),
        settings=LearnerSettings(optim=OPTIM, total=10, compute=Compute(device="cpu")),
    )
    train(learner, 1)
    learner.save(tmp_path, step=1, keep=2)
    names = sorted(path.name for path in (tmp_path / "state" / "000001").iterdir())
    assert ["checksums.sha256", "optimizer.safetensors", "state.json", "trainable.safetensors"] == names
    assert Weights(uri=str(model_dir)) == read_origin(tmp_path / "state" / "000001")


def test_exported_weights_load_as_what_was_trained(model_dir: Path, tmp_path: Path) -> None:
    learner = PolicyLearner(
        origin=Weights(uri=str(model_dir)),
        settings=LearnerSettings(optim=OPTIM, total=10, compute=Compute(device="cpu")),
    )
    train(learner, 2)
    weights = learner.export(tmp_path, step=1, keep=2)
    assert "hf" == weights.format
    served = load_model(weights.uri, device="cpu").model
    assert torch.equal(learner.loaded.model(input_ids=IDS).logits, served(input_ids=IDS).logits)


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=4)], ids=["all weights", "lora"])
def test_damaged_exported_weights_are_named_and_not_loaded(model_dir: Path, tmp_path: Path, lora: Lora) -> None:
    settings = LearnerSettings(optim=OPTIM, total=10, lora=lora, compute=Compute(device="cpu"))
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    weights = learner.export(tmp_path, step=1, keep=2)
    (file,) = Path(weights.uri).glob("*.safetensors")
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1
    file.write_bytes(whole)
    for load in (
        lambda: PolicyLearner(origin=weights, settings=settings),
        lambda: read_weights(weights, like=served_state(learner.loaded.model)),
    ):
        with pytest.raises(ConfigError, match=f"are damaged: {file} is missing or was changed"):
            load()


def test_an_exported_adapter_is_opened_and_trained_further(model_dir: Path, tmp_path: Path) -> None:
    settings = LearnerSettings(optim=OPTIM, total=10, lora=Lora(rank=4), compute=Compute(device="cpu"))
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    train(learner, 2)
    weights = learner.export(tmp_path, step=1, keep=2)
    assert ("lora", str(model_dir)) == (weights.format, weights.base_model)
    again = PolicyLearner(origin=weights, settings=settings)
    torch.testing.assert_close(
        learner.loaded.model(input_ids=IDS).logits, again.loaded.model(input_ids=IDS).logits, atol=1e-6, rtol=1e-5
    )
    assert train(again, 1)


def test_a_failed_write_leaves_the_old_directory(tmp_path: Path) -> None:
    target = tmp_path / "c"
    write_directory(target, lambda d: (d / "f").write_text("old") and None)

    def fail(directory: Path) -> None:
        (directory / "f").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_directory(target, fail)
    assert "old" == (target / "f").read_text()
    write_directory(target, lambda d: (d / "f").write_text("new") and None)
    assert ("new", ["c"]) == ((target / "f").read_text(), os.listdir(tmp_path))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError(f"No space left on device (os error {errno.ENOSPC})"),
    ],
)
def test_full_disk_is_named_and_leaves_the_old_state_alone(tmp_path: Path, error: Exception) -> None:
    write_directory(tmp_path / "000001", lambda d: (d / "f").write_text("old") and None)

    def fail(directory: Path) -> None:
        (directory / "f").write_text("half")
        raise error

    with pytest.raises(RunError, match=r"disk or a quota is full: .*000002 was not written, with .* MB free"):
        write_directory(tmp_path / "000002", fail)
    assert ["000001"] == os.listdir(tmp_path)


@pytest.mark.long
def test_a_killed_write_leaves_a_whole_directory(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from agl_objectives.directories import write_directory

        def fill(directory, value):
            for name in "ab":
                (directory / name).write_text(value * 1000)

        for number in range(100_000):
            write_directory(Path(sys.argv[1]), lambda d: fill(d, f"{number},"))
            print(number, flush=True)
        """
    )
    target = tmp_path / "c"
    process = subprocess.Popen([sys.executable, "-c", program, str(target)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = -1
    while acknowledged < 20:
        acknowledged = int(process.stdout.readline())
    process.kill()
    rest = process.stdout.read().split()
    process.wait()
    process.stdout.close()
    acknowledged = max([acknowledged, *map(int, rest)])
    found = target if target.exists() else tmp_path / ".c.old"
    texts = {(found / name).read_text() for name in "ab"}
    assert 1 == len(texts)
    assert acknowledged - 1 <= int(texts.pop().split(",")[0]) <= acknowledged + 1


def test_pruning_keeps_the_newest_and_what_is_ahead(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9):
        (tmp_path / f"{step:06d}").mkdir()
    (tmp_path / "notes").mkdir()
    prune(tmp_path, step=3, keep=2)
    assert ["000002", "000003", "000009", "notes"] == sorted(os.listdir(tmp_path))


def test_an_absent_or_newer_checkpoint_is_refused(model_dir: Path, tmp_path: Path) -> None:
    loaded = load_model(str(model_dir), device="cpu")
    optimizer = build_optimizer(loaded.model, OPTIM)
    with pytest.raises(ConfigError, match=r"no whole training checkpoint.*cannot be read"):
        load_training(tmp_path, model=loaded.model, optimizer=optimizer)
    origin = save_served(loaded, tmp_path / "w")
    save_training(tmp_path / "c", model=loaded.model, optimizer=optimizer, updates=1, origin=origin)
    state = json.loads((tmp_path / "c" / "state.json").read_text())
    later = json.dumps({**state, "format": 99})
    (tmp_path / "c" / "state.json").write_text(later)
    with pytest.raises(ConfigError, match=r"state\.json is missing or was changed"):
        load_training(tmp_path / "c", model=loaded.model, optimizer=optimizer)
    write_directory(tmp_path / "c", lambda d: (d / "state.json").write_text(later) and None)
    with pytest.raises(ConfigError, match=r"format 99.*Upgrade"):
        load_training(tmp_path / "c", model=loaded.model, optimizer=optimizer)


def test_checkpoint_is_whole_without_checksums_and_with_files_that_were_added(tmp_path: Path) -> None:
    target = tmp_path / "c"
    write_directory(target, lambda d: (d / "state.json").write_text("{}") and None)
    (target / ".DS_Store").write_text("added")
    assert "" == damage(target, state="state.json")
    checksums = (target / "checksums.sha256").read_text()
    (target / "checksums.sha256").write_text("")
    assert damage(target, state="state.json").endswith("checksums.sha256 is empty")
    (target / "checksums.sha256").unlink()
    assert "" == damage(target, state="state.json")
    (target / "state.json").unlink()
    assert "state.json cannot be read" in damage(target, state="state.json")
    (target / "checksums.sha256").write_text(checksums)
    assert damage(target, state="state.json").endswith("state.json is missing or was changed")


def test_the_rate_warms_up_and_decays_to_zero() -> None:
    rates = [learning_rate(OPTIM, update, left=1 - update / 10) for update in range(11)]
    assert [1e-2 / 4, 0.0] == pytest.approx([rates[0], rates[10]])
    assert max(rates) == rates[3]
    assert sorted(rates[3:], reverse=True) == rates[3:]
    constant = Optim(lr=1.0, warmup=1)
    assert [0.5, 1.0, 1.0] == [learning_rate(constant, update) for update in range(3)]


def test_a_gradient_that_is_not_finite_changes_nothing(model_dir: Path) -> None:
    model = load_model(str(model_dir), device="cpu").model
    optimizer = build_optimizer(model, OPTIM)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    next(model.parameters()).sum().mul(float("nan")).backward()
    assert math.isnan(apply_gradients(optimizer, OPTIM, update=0))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_updates_without_a_finite_gradient_are_skipped_and_counted_until_there_are_too_many(model_dir: Path) -> None:
    settings = LearnerSettings(
        optim=replace(OPTIM, max_nonfinite=2), total=10, compute=Compute(device="cpu", threads=1)
    )
    learner = PolicyLearner(origin=Weights(uri=str(model_dir)), settings=settings)
    weight = next(learner.loaded.model.parameters())

    def update(factor: float) -> dict[str, float]:
        weight.sum().mul(factor).backward()
        return learner.apply({"loss": factor, "tokens": 8.0})

    assert update(1.0).keys() == {"loss", "tokens", "grad_norm"}
    before = weight.detach().clone()
    for _ in range(2):  # the good one between them begins the count anew
        skipped = [update(float("nan")), update(float("inf"))]
        assert skipped == [{"tokens": 8.0, "updates_nonfinite": 1.0}] * 2
        assert torch.equal(before, weight)
        assert learner.skipped.news().startswith("2 updates were skipped")
        assert learner.skipped.news() == ""
        update(1.0)
        before = weight.detach().clone()
    assert (learner.updates, learner.moves) == (7, 3)
    update(float("nan"))
    update(float("nan"))
    with pytest.raises(AglError, match="update 9 is nan: 3 in a row are not finite, and max_nonfinite = 2"):
        update(float("nan"))
    assert torch.equal(before, weight)
