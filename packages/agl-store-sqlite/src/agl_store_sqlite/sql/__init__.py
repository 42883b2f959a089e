"""Shared parts of stores on databases: rows, packed spans and batches.

A store on a server loads the rows that operations need (:func:`needs_of`), runs the operations over
:class:`LoadedTables`, and writes the resulting :class:`Changes`. A store of another kind needs only :mod:`agl.stores`.
"""
