"""Advice on a run from its numbers: suggestions, alerts, differences between runs, and a ranking of parameters."""

from agl_inspect.advice.past_runs import History, kind_of, parameters_of, runs_of_kind
from agl_inspect.advice.ranking import DatedFit, Fit, read_fits
from agl_inspect.advice.run_differences import RunDifference, compare_runs
from agl_inspect.advice.suggestions import (
    Alert,
    AlertKind,
    Suggestion,
    add_alert,
    read_alerts,
    suggestions_for,
    suggestions_of,
)

__all__ = [
    "Alert",
    "AlertKind",
    "DatedFit",
    "Fit",
    "History",
    "RunDifference",
    "Suggestion",
    "add_alert",
    "compare_runs",
    "kind_of",
    "parameters_of",
    "read_alerts",
    "read_fits",
    "runs_of_kind",
    "suggestions_for",
    "suggestions_of",
]
