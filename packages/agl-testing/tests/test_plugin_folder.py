"""The plugin manager loads distributions from a PluginFolder, and PluginConformance detects faulty plugins."""

import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from agl import PluginManager
from agl.errors import BrokenPluginError
from agl_testing.conformance import PluginConformance
from agl_testing.plugins import PluginFolder

SOUND = """
import agl


@agl.hookimpl
def agl_rewards():
    yield agl.RewardEntry(name="{name}", factory="agl_{module}:Always", summary="always the same")


class Always:
    def __call__(self, rollout, spans):
        return 1.0
"""


def sound(name: str) -> str:
    return SOUND.format(name=name, module=name.replace("-", "_"))


class SoundPlugin(PluginConformance):
    module = "agl_sound"


CLASS_TESTS = sorted(name for name in dir(PluginConformance) if name.startswith("test_"))


@pytest.mark.parametrize("test", CLASS_TESTS)
def test_sound_plugin_passes(test: str, agl_plugins: PluginFolder) -> None:
    agl_plugins.install(sound("sound"), name="sound")
    _run(SoundPlugin(), test, agl_plugins)


@pytest.mark.parametrize(
    ("source", "requires", "test"),
    [
        (sound("sound"), ("agl-core>=0.1",), "test_distribution_bounds_the_core_from_both_sides"),
        (sound("sound"), (), "test_distribution_bounds_the_core_from_both_sides"),
        (sound("Sound!"), (), "test_names_are_well_formed_and_every_component_has_a_summary"),
        (sound("sound").replace("always the same", ""), (), "test_names_are_well_formed_and_every_component_has_a_sum"),
        (sound("sound").replace(":Always", ":Nobody"), (), "test_factories_are_lazy_and_can_be_imported"),
        (sound("sound").replace("agl_rewards", "agl_rewrads"), (), "test_hook_implementations_are_known_hooks"),
        ("import pytest\n" + sound("sound"), (), "test_importing_the_plugin_imports_agl_and_the_standard_library_only"),
    ],
)
def test_unsound_plugin_fails(source: str, requires: tuple[str, ...], test: str, agl_plugins: PluginFolder) -> None:
    agl_plugins.install(source, name="sound", requires=requires)
    name = next(full for full in CLASS_TESTS if full.startswith(test))
    with pytest.raises(Exception, match=r".") as caught:
        _run(SoundPlugin(), name, agl_plugins)
    assert not isinstance(caught.value, (TypeError, subprocess.CalledProcessError))


def test_installed_plugin_is_found_here_and_in_child_processes(agl_plugins: PluginFolder) -> None:
    agl_plugins.install(sound("toy"), version="3.4")
    assert "3.4" == version("agl-toy")
    assert "toy" == PluginManager.from_environment(environ={}).reward("toy").name
    code = "from importlib.metadata import version; print(version('agl-toy'))"
    run = subprocess.run([sys.executable, "-c", code], env=agl_plugins.environment, capture_output=True, text=True)
    assert "3.4" == run.stdout.strip()


def test_broken_plugin_is_quarantined_with_its_distribution(agl_plugins: PluginFolder) -> None:
    agl_plugins.install("raise RuntimeError('half a plugin')", name="half", version="0.7")
    with pytest.raises(BrokenPluginError, match=r"agl-half 0\.7.*half a plugin"):
        PluginManager.from_environment(strict=True, environ={})


def test_closed_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = PluginFolder(tmp_path)
    before = list(sys.path)
    folder.open()
    module = folder.install(sound("gone"), name="gone")
    __import__(module)
    folder.close()
    assert (before, False) == (sys.path, module in sys.modules)
    assert "gone" not in entry_points(group="agl").names


def _run(case: PluginConformance, test: str, plugins: PluginFolder) -> None:
    method = getattr(case, test)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", plugins.environment["PYTHONPATH"])
        if "plugin" in method.__code__.co_varnames[: method.__code__.co_argcount]:
            method(__import__(case.module))
        else:
            method()
