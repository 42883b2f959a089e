"""Calls a function once a module has been imported, without importing the module."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnImport = Callable[[ModuleType], None]


class ImportWatch(MetaPathFinder):
    """Calls ``on_import`` with each module of ``names``: at once if it is imported already, else after its import.

    If a module is not imported yet, :meth:`start` puts the watch first on ``sys.meta_path``; :meth:`stop` removes it.
    """

    def __init__(self, names: Sequence[str], on_import: OnImport) -> None:
        self._waiting = set(names)
        self._on_import = on_import

    def start(self) -> None:
        """Report the modules that are imported already, and watch for the others."""
        for name in tuple(self._waiting):
            if name in sys.modules:
                self._report(importlib.import_module(name))  # waits if another thread is importing it
        if self._waiting:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop watching; imports that are under way are not reported."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec of a watched module, with a loader that also reports the import."""
        if fullname not in self._waiting:
            return None
        # The real finders are asked in their order; this one only watches.
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        # On the loader object, which belongs to this one import.
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Removed before it runs, so that reloading the module later is not watched.
            del loader.exec_module
            execute(module)
            self._report(module)

        loader.exec_module = exec_module

    def _report(self, module: ModuleType) -> None:
        # Stopped meanwhile: then nobody wants to know.
        if module.__name__ in self._waiting:
            self._waiting.discard(module.__name__)
            self._on_import(module)
