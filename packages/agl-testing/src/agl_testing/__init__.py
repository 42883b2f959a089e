"""Test tools for plugin authors: a scripted model server, pytest fixtures, and a conformance class for each contract.

The server is in :mod:`agl_testing.model_server`, the classes are in :mod:`agl_testing.conformance`.
"""

__version__ = "0.1.0"
