"""The base of tracers that change modules of the process, whenever these are imported."""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import ClassVar

from agl.contracts import Tracer
from agl.tracing import ImportWatch, Undo


class ModuleTracer(Tracer):
    """Changes modules while any tracer of its class is installed; several may be at once.

    Attributes:
        changes: Names of modules, each with the function that changes it and returns how to undo that.
    """

    changes: ClassVar[Mapping[str, Callable[[ModuleType], Sequence[Undo]]]] = {}
    _installed: ClassVar[set["ModuleTracer"]]
    _undo: ClassVar[list[Undo]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._installed, cls._undo = set(), []

    def install(self) -> None:
        """Change the modules that are imported now or later; idempotent."""
        if not self._installed:
            watch = ImportWatch(
                tuple(self.changes), lambda module: self._undo.extend(self.changes[module.__name__](module))
            )
            watch.start()
            self._undo.append(watch.stop)
        self._installed.add(self)

    def uninstall(self) -> None:
        """Undo the changes when the last one is uninstalled."""
        self._installed.discard(self)
        while self._undo and not self._installed:
            self._undo.pop()()
