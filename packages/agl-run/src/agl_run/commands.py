"""Shared parts of commands: the plugin manager, stores, rollouts, versions, labels, workers, keys and output."""

from agl_run.cli.context import given_options, manager_of, pass_manager
from agl_run.cli.exec import exec_ as exec_command
from agl_run.cli.lineage import ListedVersion, diff_versions, list_versions, resource_text
from agl_run.cli.logged import place_of
from agl_run.cli.opening import resolve_url, store_option, with_store
from agl_run.cli.output import json_line, json_option, print_json, print_table
from agl_run.cli.query import (
    CONVERSATIONS,
    COUNTED,
    check_experiment,
    filter_options,
    find_ids,
    is_counted,
    make_query,
    pages,
    rewards_of,
    seconds_of,
)
from agl_run.cli.workers import ListedWorker, list_workers
from agl_run.comparison import interval
from agl_run.control_characters import visible
from agl_run.conversations import ShownMessages, labelled_texts
from agl_run.experiment.alerts import Alert, read_alerts
from agl_run.experiment.collect import id_prefix
from agl_run.experiment.hints import command
from agl_run.experiment.kept_fits import KeptFit, read_fits
from agl_run.experiment.kept_trials import KeptTrial, TrialScore, read_trials
from agl_run.experiment.labels import NAME as LABEL
from agl_run.experiment.labels import label_path, labelled, move, move_back
from agl_run.experiment.retaining import retaining, taking_turns
from agl_run.experiment.retention import FINISHED, RetentionLimits, delete_finished, needed_experiments
from agl_run.experiment.run_differences import RunDifference, compare_runs
from agl_run.experiment.state import load_settings
from agl_run.experiment.step_tallies import AgentTally, StepTally, keep_tallies, read_tallies
from agl_run.experiment.store_url import as_url
from agl_run.explain import explain, explain_training
from agl_run.heap import settle_heap
from agl_run.placeholder_key import PLACEHOLDER_KEY
from agl_run.runners.refusals import KEY_ADVICE
from agl_run.saved_training import is_saved
from agl_run.store_contract import build_store
from agl_run.suggestions import Suggestion, suggestions_of
from agl_run.training_records import TrainingRecord, token_values, training_of

__all__ = [
    "CONVERSATIONS",
    "COUNTED",
    "FINISHED",
    "KEY_ADVICE",
    "LABEL",
    "PLACEHOLDER_KEY",
    "AgentTally",
    "Alert",
    "KeptFit",
    "KeptTrial",
    "ListedVersion",
    "ListedWorker",
    "RetentionLimits",
    "RunDifference",
    "ShownMessages",
    "StepTally",
    "Suggestion",
    "TrainingRecord",
    "TrialScore",
    "as_url",
    "build_store",
    "check_experiment",
    "command",
    "compare_runs",
    "delete_finished",
    "diff_versions",
    "exec_command",
    "explain",
    "explain_training",
    "filter_options",
    "find_ids",
    "given_options",
    "id_prefix",
    "interval",
    "is_counted",
    "is_saved",
    "json_line",
    "json_option",
    "keep_tallies",
    "label_path",
    "labelled",
    "labelled_texts",
    "list_versions",
    "list_workers",
    "load_settings",
    "make_query",
    "manager_of",
    "move",
    "move_back",
    "needed_experiments",
    "pages",
    "pass_manager",
    "place_of",
    "print_json",
    "print_table",
    "read_alerts",
    "read_fits",
    "read_tallies",
    "read_trials",
    "resolve_url",
    "resource_text",
    "retaining",
    "rewards_of",
    "seconds_of",
    "settle_heap",
    "store_option",
    "suggestions_of",
    "taking_turns",
    "token_values",
    "training_of",
    "visible",
    "with_store",
]
