"""Installs distributions with plugins, working or broken, for the duration of a test.

A distribution here is a folder on ``sys.path`` with a module and a ``dist-info``. The plugin manager finds it through
importlib.metadata, which needs nothing else, so nothing is patched. Everything is removed after the test.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

CORE_BOUND = "agl-core>=0.1,<0.2"


class PluginFolder:
    """Installs distributions into a folder, which comes first on ``sys.path`` between :meth:`open` and :meth:`close`.

    Use it as the fixture ``agl_plugins``. Pass :attr:`environment` to child processes to give them the same plugins.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        source: str,
        *,
        name: str = "toy",
        distribution: str = "",
        version: str = "1.0",
        requires: Sequence[str] = (CORE_BOUND,),
        entry_points: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> str:
        """Install a distribution with one plugin module and return the module's name.

        Args:
            source: The source of the plugin module.
            name: The entry point's name; the module is ``agl_<name>``.
            distribution: The distribution's name; by default ``agl-<name>``.
            version: The distribution's version.
            requires: The distribution's ``Requires-Dist`` lines.
            entry_points: Entry points of the group ``agl``, as module by name; by default the module under ``name``.
            files: Texts of further files, by path relative to the folder.
        """
        module = f"agl_{name.replace('-', '_')}"
        distribution = distribution or f"agl-{name}"
        points = {name: module} if entry_points is None else entry_points
        self._write(f"{module}.py", source)
        for path, text in (files or {}).items():
            self._write(path, text)
        info = f"{distribution.replace('-', '_')}-{version}.dist-info"
        requirements = "".join(f"Requires-Dist: {line}\n" for line in requires)
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{requirements}"
        self._write(f"{info}/METADATA", metadata)
        lines = "".join(f"{key} = {value}\n" for key, value in points.items())
        self._write(f"{info}/entry_points.txt", f"[agl]\n{lines}")
        self._write(f"{info}/RECORD", "")
        importlib.invalidate_caches()
        return module

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with the folder on the Python path."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path}

    def open(self) -> None:
        """Put the folder first on ``sys.path``."""
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()

    def close(self) -> None:
        """Remove the folder from ``sys.path``, and remove modules imported from it from ``sys.modules``."""
        sys.path.remove(str(self.folder))
        inside = str(self.folder) + os.sep
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(inside):
                del sys.modules[name]
        importlib.invalidate_caches()

    def _write(self, path: str, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
