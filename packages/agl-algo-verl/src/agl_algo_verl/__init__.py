"""Training with VERL for agl: its engine, losses and advantages, on batches made from recorded runs.

Importing this module imports neither verl nor torch; the parts are in the modules that the plugin registers.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
