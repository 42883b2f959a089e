"""Runs as the offline files of W&B hold them."""

from pathlib import Path
from typing import Any

import pytest

from agl_testing.conformance import PluginConformance, SinkConformance, SinkRead

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
