"""Prompt optimisation from recorded runs: `apo`, `gepa` and `random`.

`apo.py` and `random_search.py` read from top to bottom as the algorithms; `critics.py` and `pruner.py` hold two steps
of the first. They share `search.py`, the steps around the search itself, and `search_tools.py`, what each step uses.
Below these `evaluation.py` pays for rollouts, `scores.py` remembers rewards, `race.py` compares candidates,
`budget.py` keeps the ceiling, `candidates.py` the lineage and `journal.py` the story of each candidate, `templates.py`
has the static gate, `evidence.py` the runs that a critic is shown, and `optimizer.py` the model that is asked.
"""

__version__ = "0.1.0"
