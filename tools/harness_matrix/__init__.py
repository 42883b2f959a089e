"""The harness matrix: coding harnesses run against a scripted model, and every token is accounted for.

``nox -s harness`` runs it and writes ``docs/reference/harnesses.md``.
"""
