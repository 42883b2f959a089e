"""Shared parts of stores on databases: rows, packed spans and batches.

A store on a server loads what its operations need (:func:`needs_of`), runs them over :class:`LoadedTables`, and writes
their :class:`Changes`. A store of another kind needs only :mod:`agl.stores`.
"""
