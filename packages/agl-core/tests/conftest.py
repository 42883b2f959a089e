"""Fixtures of the core's tests."""

from collections.abc import Callable, Sequence

import pytest

from agl_testing.plugins import PluginFolder

InstallPlugin = Callable[..., None]


@pytest.fixture
def install_plugin(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> InstallPlugin:
    """Return a function that installs a distribution for this process and its children."""
    for name in ("AGL_DISABLED_PLUGINS", "AGL_PLUGINS_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(agl_plugins.folder))

    def install(
        distribution: str, source: str, *, entry: str, version: str = "1.0", requires: Sequence[str] = ()
    ) -> None:
        name = distribution.removeprefix("agl-")
        points = {entry: distribution.replace("-", "_")}
        agl_plugins.install(source, name=name, version=version, requires=requires, entry_points=points)

    return install
