"""Fixtures for a policy over a stand-in for vLLM, which runs as a program like real vLLM."""

import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl.schemas import ResourceVersion, Weights, WeightsProbe, write_probe
from agl_vllm.policy import VLLMPolicy

FAKE = Path(__file__).parent / "fake"
TOKENS = (3, 11, 4, 26, 5)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put the stand-in where servers find vLLM; return a function that sets a fault of servers that start later."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    return lambda how: monkeypatch.setenv("FAKE", how)


@pytest.fixture
def make_weights(tmp_path: Path) -> Callable[..., Weights]:
    """Return `make("v1", shift=...)`, which writes the stand-in's weights, with a probe if `has_probe` is true."""

    def make(name: str, *, shift: float, base: Weights | None = None, has_probe: bool = True, rank: int = 4) -> Weights:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "weights.json").write_text(json.dumps({"shift": shift}))
        whole = shift + (json.loads(Path(base.uri, "weights.json").read_text())["shift"] if base else 0.0)
        if has_probe:
            logprobs = tuple(-1.0 - whole - (token % 7) / 10 for token in TOKENS[1:])
            write_probe(folder, WeightsProbe(token_ids=TOKENS, logprobs=logprobs))
        if base is None:
            return Weights(uri=str(folder))
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        return Weights(uri=str(folder), base_model=base.uri, format="lora")

    return make


@pytest.fixture
def base(make_weights: Callable[..., Weights], fake: object) -> Weights:
    """Write the weights that servers start with."""
    return make_weights("base", shift=0.0, has_probe=False)


def published(weights: Any, version: str = "grpo-1") -> ResourceVersion:
    return ResourceVersion(name="main_llm", version=version, resource=weights)


def started(base: Weights, **settings: Any) -> VLLMPolicy:
    return VLLMPolicy(name="main_llm", model=base.uri, python=sys.executable, **{"dtype": "float32", **settings})


def noted(base_url: str) -> dict[str, Any]:
    """Return what the stand-in noted: the requests to it, and the arguments of its start."""
    with urllib.request.urlopen(f"{base_url.removesuffix('/v1')}/noted") as answer:
        return json.load(answer)
