"""Runs as the offline files of W&B hold them."""

from pathlib import Path
from typing import Any

import pytest

from agl.errors import ExportError
from agl_run.sinks import SinkRun
from agl_testing.conformance import PluginConformance, SinkConformance, SinkRead
from agl_wandb.sink import WandbSink

from .offline import read_runs


class TestPlugin(PluginConformance):
    module = "agl_wandb.plugin"


class TestWandb(SinkConformance):
    use = "wandb"
    search = "apo"

    @pytest.fixture(autouse=True)
    def own_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give child processes a service of their own, as programs that are started anew have."""
        monkeypatch.delenv("WANDB_SERVICE", raising=False)

    def params(self, folder: Path) -> dict[str, Any]:
        return {"mode": "offline", "dir": str(folder)}

    def broken_params(self, folder: Path) -> dict[str, Any]:
        (folder / "file").touch()
        return {"mode": "offline", "dir": str(folder / "file")}

    def read(self, folder: Path) -> list[SinkRead]:
        return read_runs(folder)


def test_without_a_key_online_is_refused_and_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    sink = WandbSink(mode="online")

    with pytest.raises(ExportError, match="there is no key of W&B, neither in WANDB_API_KEY nor from `wandb login`"):
        sink.begin(SinkRun(id="small-1-0", name="small-1", experiment="small", run=1, folder=str(tmp_path)))
