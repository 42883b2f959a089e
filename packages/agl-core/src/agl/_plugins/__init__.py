"""Plugins: found by entry point, checked before they are imported, quarantined when they fail.

The :class:`PluginManager` is an object that its owner passes on; nothing here is global.
"""

from agl._plugins.manager import PluginManager

__all__ = ["PluginManager"]
