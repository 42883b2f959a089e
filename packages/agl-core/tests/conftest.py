"""Fixtures of the core's tests."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

InstallPlugin = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path`` and on the ``PYTHONPATH`` of children, like a site-packages of this test alone."""
    folder = tmp_path / "site"
    folder.mkdir()
    for name in ("AGL_DISABLED_PLUGINS", "AGL_PLUGINS_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def install_plugin(site: Path) -> InstallPlugin:
    """Return a function that installs a distribution: its files, and the metadata that an installer writes."""

    def install(
        distribution: str, source: str, *, entry: str, version: str = "1.0", requires: tuple[str, ...] = ()
    ) -> None:
        module = distribution.replace("-", "_")
        (site / f"{module}.py").write_text(source, encoding="utf-8")
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[agl]\n{entry} = {module}\n", encoding="utf-8")
        importlib.invalidate_caches()

    return install
