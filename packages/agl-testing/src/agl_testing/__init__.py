"""Test tools for plugin authors: a scripted model server, pytest fixtures, one conformance class per contract.

The server is in :mod:`agl_testing.model_server`, the classes are in :mod:`agl_testing.conformance`.
"""

__version__ = "0.1.0"
