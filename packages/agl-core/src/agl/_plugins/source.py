"""The origin of a plugin, as error messages name it."""

from agl.schemas import Record

CORE = "agl-core"
ENGINE = ("agl-inspect", "agl-run", "agl-store-sqlite")
"""The distributions of the engine; their components load like the core's own where they are installed."""

DISABLED_VARIABLE = "AGL_DISABLED_PLUGINS"
STRICT_VARIABLE = "AGL_PLUGINS_STRICT"


class Source(Record, frozen=True, kw_only=True):
    """The origin of a plugin.

    Attributes:
        name: The entry point's name, or the one given to ``register``.
        distribution: The installed distribution; ``""`` for a plugin that was registered as an object.
        version: The distribution's version.
        module: The module that the entry point names.
        requires: The distribution's ``Requires-Dist`` lines.
    """

    name: str
    distribution: str = ""
    version: str = ""
    module: str = ""
    requires: tuple[str, ...] = ()

    @property
    def shown_name(self) -> str:
        """The plugin as messages name it: ``'toy' (agl-toy 1.0)``."""
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)

    @property
    def remedy(self) -> str:
        """The user's next step when the plugin fails."""
        if self.distribution == CORE:
            return f"reinstall it (pip install --force-reinstall {CORE})"
        disable = f"leave it out with {DISABLED_VARIABLE}={self.name}"
        if not self.distribution:
            return f"correct it or {disable}"
        return f"upgrade it (pip install --upgrade {self.distribution}), remove it, or {disable}"


def interrupted(what: str, source: Source) -> str:
    """The message for a KeyboardInterrupt within an import of the plugin's."""
    return f"{what} interrupted while it was imported; if nobody pressed Ctrl-C, it did so itself: {source.remedy}"


def describe(error: BaseException) -> str:
    """An exception as one phrase: its type and message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
