"""The core's own stores: ``memory://`` and ``sqlite:///``; each is imported when it is asked for."""
