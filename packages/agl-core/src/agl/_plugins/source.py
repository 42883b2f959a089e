"""Where a plugin comes from, as error messages name it."""

from agl.schemas import Record

CORE = "agl-core"
RUN = "agl-run"
"""Holds the trainer and the command; its components are always there when it is installed, like the core's own."""

DISABLED_VARIABLE = "AGL_DISABLED_PLUGINS"
STRICT_VARIABLE = "AGL_PLUGINS_STRICT"


class Source(Record, frozen=True, kw_only=True):
    """Where a plugin comes from.

    Attributes:
        name: The entry point's name, or the one given to ``register``.
        distribution: The installed distribution; ``""`` for a plugin that was registered as an object.
        version: The distribution's version.
        module: What the entry point names.
        requires: The distribution's ``Requires-Dist`` lines.
    """

    name: str
    distribution: str = ""
    version: str = ""
    module: str = ""
    requires: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """The plugin in a sentence: ``'toy' (agl-toy 1.0)``."""
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)

    @property
    def remedy(self) -> str:
        """What to do when it does not work."""
        if self.distribution == CORE:
            return f"install it anew (pip install --force-reinstall {CORE})"
        disable = f"leave it out with {DISABLED_VARIABLE}={self.name}"
        if not self.distribution:
            return f"correct it or {disable}"
        return f"upgrade it (pip install --upgrade {self.distribution}), remove it, or {disable}"


def describe(error: BaseException) -> str:
    """An exception in a sentence: its type and message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
