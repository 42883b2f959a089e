"""Shared parts of commands: the plugin manager, stores, rollouts, labels and output."""

from agl_run.cli.context import manager_of, pass_manager
from agl_run.cli.opening import store_option, with_store
from agl_run.cli.output import json_option, print_json, print_table
from agl_run.cli.query import CONVERSATIONS, COUNTED, is_counted, pages, seconds_of
from agl_run.experiment.labels import NAME as LABEL
from agl_run.experiment.labels import Move, all_labels, labelled, move

__all__ = [
    "CONVERSATIONS",
    "COUNTED",
    "LABEL",
    "Move",
    "all_labels",
    "is_counted",
    "json_option",
    "labelled",
    "manager_of",
    "move",
    "pages",
    "pass_manager",
    "print_json",
    "print_table",
    "seconds_of",
    "store_option",
    "with_store",
]
