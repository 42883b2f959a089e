"""Plugins: found by entry point, checked before they are imported, quarantined when they fail.

There is no global manager: whoever makes a :class:`PluginManager` passes it to those who need it.
"""

from agl._plugins.manager import PluginManager

__all__ = ["PluginManager"]
