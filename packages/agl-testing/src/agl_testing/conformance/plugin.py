"""The conformance class of plugins: they import little, have correct metadata, and name only factories that exist."""

# ruff: noqa: D102  # the names of the tests say what holds

import importlib
import re
import subprocess
import sys
from importlib.metadata import Distribution, EntryPoint, entry_points, packages_distributions
from types import SimpleNamespace
from typing import ClassVar, get_args

import msgspec
import pytest
from click.testing import CliRunner

from agl import PluginManager
from agl.contracts import Entry, Kind
from agl_inspect.terminal.program import cli
from agl_testing.conformance._base import Conformance, require

NAME = re.compile(r"[a-z][a-z0-9-]*")

GROUP = "agl"
"""The entry-point group of plugins."""

_LIST_IMPORTS = """
import sys
import agl, agl.contracts
before = set(sys.modules)
import {module}
print("\\n".join(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""


class PluginConformance(Conformance):
    """Run every test of the plugin contract.

    .. code-block:: python

        class TestPlugin(PluginConformance):
            module = "agl_toy.plugin"
    """

    contract: ClassVar[str] = "plugin"

    module: ClassVar[str] = ""
    """The plugin module, as the entry point names it."""

    is_installed: ClassVar[bool] = True
    """True if the plugin's distribution is installed and has an entry point for the module."""

    @pytest.fixture
    def plugin(self) -> object:
        """The imported plugin module."""
        if not self.module:
            raise NotImplementedError("set 'module' to the module that the plugin's entry point names")
        return importlib.import_module(self.module)

    def test_importing_the_plugin_imports_agl_and_the_standard_library_only(self, plugin: object) -> None:
        del plugin
        code = _LIST_IMPORTS.format(module=self.module)
        listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        package = self.module.partition(".")[0]
        allowed = {*sys.stdlib_module_names, "agl", package, *_dependencies_of_core()}
        assert [] == sorted(set(listed) - allowed)

    def test_plugin_is_accepted_by_the_manager_alone(self, plugin: object) -> None:
        manager = PluginManager(strict=True)
        manager.register(plugin, name="under-test")
        assert "loaded" == next(status.state for status in manager.status() if status.name == "under-test")

    def test_hook_implementations_are_known_hooks(self, plugin: object) -> None:
        hooks = {name: hook for name, hook in vars(plugin).items() if name.startswith("agl_") and callable(hook)}
        for name, hook in hooks.items():
            PluginManager().register(SimpleNamespace(**{name: hook}), name="under-test")

    def test_names_are_well_formed_and_every_component_has_a_summary(self, plugin: object) -> None:
        for entry in _entries(plugin):
            assert NAME.fullmatch(entry.name), f"{entry.name!r}: lower case, digits and hyphens, starting with a letter"
            assert entry.summary.strip(), f"{entry.name!r} has no summary for 'agl plugins list'"

    def test_factories_are_lazy_and_can_be_imported(self, plugin: object) -> None:
        manager = PluginManager()
        manager.register(plugin, name="under-test")
        for entry in _entries(plugin):
            assert isinstance(entry.factory, str), f"{entry.name!r}: name the factory as 'module:attribute'"
            assert callable(manager.resolve(entry))

    def test_hooks_give_equal_frozen_records_every_time(self, plugin: object) -> None:
        assert _entries(plugin) == _entries(plugin)
        for entry in _entries(plugin):
            with pytest.raises(AttributeError):
                entry.name = "other"  # pyright: ignore[reportAttributeAccessIssue]  # frozen is what is tested
            assert msgspec.structs.replace(entry) == entry

    def test_distribution_registers_the_module_in_the_agl_group(self) -> None:
        require(self.is_installed, "is_installed", "plugin")
        assert [self.module] == [point.value for point in self._entry_points()]

    def test_distribution_bounds_the_core_from_both_sides(self) -> None:
        require(self.is_installed, "is_installed", "plugin")
        for point in self._entry_points():
            lines = [line for line in _requires(point) if re.match(r"agl[-_.]core\b", line, re.IGNORECASE)]
            assert 1 == len(lines), "the distribution requires agl-core exactly once"
            assert re.search(r">=\s*\d", lines[0]), f"no lower bound in {lines[0]!r}"
            assert re.search(r"<\s*\d", lines[0]), f"no upper bound in {lines[0]!r}; write agl-core>=0.N,<0.N+1"

    def test_installed_plugin_loads_strictly(self) -> None:
        require(self.is_installed, "is_installed", "plugin")
        manager = PluginManager.from_environment(strict=True, environ={})
        names = [point.name for point in self._entry_points()]
        assert {"loaded"} == {status.state for status in manager.status() if status.name in names}

    def test_agl_plugins_check_finds_no_error(self) -> None:
        require(self.is_installed, "is_installed", "plugin")
        for point in self._entry_points():
            done = CliRunner().invoke(cli, ["plugins", "check", point.name])
            assert 0 == done.exit_code, done.output

    def _entry_points(self) -> list[EntryPoint]:
        found = [point for point in entry_points(group=GROUP) if point.value == self.module]
        assert found, f"no installed distribution has an entry point {GROUP!r} with the value {self.module!r}"
        return found


def _entries(plugin: object) -> list[Entry]:
    manager = PluginManager()
    own = {(kind, entry.name) for kind in get_args(Kind) for entry in manager.entries(kind)}
    manager.register(plugin, name="under-test")
    return [e for kind in get_args(Kind) for e in manager.entries(kind) if (kind, e.name) not in own]


def _requires(point: EntryPoint) -> list[str]:
    dist = point.dist
    return list(dist.requires or ()) if dist is not None else []


def _dependencies_of_core() -> set[str]:
    """Return the top-level modules of the distributions that agl-core depends on."""
    names = {re.split(r"[^\w.-]", line)[0].lower() for line in Distribution.from_name("agl-core").requires or ()}
    return {module for module, dists in packages_distributions().items() if names & {d.lower() for d in dists}}
