"""Prompt optimisation from recorded runs: `apo`, `gepa` and `random`.

`apo.py`, `gepa.py` and `random_search.py` read from top to bottom as the algorithms. They share these folders:

    proposals/     sources of candidates: critics, evidence, merges, demonstrations, and calls of the optimizer's model
    acceptance/    which candidates may be tried (`static_checks.py`), which one is best (`contest.py`), whether it is
                   better than the first prompt (`proof.py`), and by how much (`final_measurement.py`)
    measurement/   rewards of candidates: paid for, remembered, estimated
    texts/         the texts of a candidate, and the lineage of all candidates
    search/        the parts of a step that all algorithms share: settings, budget, state, report
"""

__version__ = "0.1.0"
