"""Breaks the heart of the code in small ways, one at a time, and tells which breaks the unit tests did not notice.

mutmut makes the mutants and runs the tests. Here is what it is run on (``heart.toml``), which mutants change nothing
(``equivalent.toml``), and the report.
"""
