"""Prompt optimisation from recorded runs: `apo`, `gepa` and `random`.

`apo.py` and `random_search.py` read from top to bottom as the algorithms. What they share is below them:
`evaluate.py` pays for rollouts and remembers what they said, `budget.py` keeps the ceiling, `candidates.py` the
lineage, `templates.py` the static gate, `evidence.py` what a critic is shown, `optimizer.py` the model it asks.
"""

__version__ = "0.1.0"
