"""Prompt optimisation from recorded runs: `apo`, `gepa` and `random`.

`apo.py`, `gepa.py` and `random_search.py` read from top to bottom as the algorithms. They share the folders:

    proposals/     origins of candidates: critics, evidence, merges, demonstrations, and the model that is asked
    acceptance/    which candidates may be tried (`static_gate.py`), which are accepted (`contest.py`), which one wins
    measurement/   rewards of candidates: paid for, remembered, estimated
    texts/         the texts of a candidate and the lineage of all
    search/        the steps around an algorithm's own: settings, budget, state, report
"""

__version__ = "0.1.0"
