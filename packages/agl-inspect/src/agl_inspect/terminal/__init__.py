"""The kit for command lines: the ``agl`` command, options for stores and rollouts, output."""

from agl_inspect.terminal.completion import complete_experiment, complete_rollout
from agl_inspect.terminal.context import given_options, manager_of, pass_manager
from agl_inspect.terminal.opening import new_store, resolve_url, store_option, with_store
from agl_inspect.terminal.output import STOPPED, echo, json_option, print_json, print_table, short
from agl_inspect.terminal.program import Modes, OpenGroup, main
from agl_inspect.terminal.query import (
    CONVERSATIONS,
    COUNTED,
    check_experiment,
    deciding,
    filter_options,
    find,
    find_ids,
    is_counted,
    make_query,
    pages,
    read_one,
    rewards_of,
    seconds_of,
    span_options,
)
from agl_inspect.terminal.ranking import fit_and_keep, lacking, print_fit, settings_of

__all__ = [
    "CONVERSATIONS",
    "COUNTED",
    "STOPPED",
    "Modes",
    "OpenGroup",
    "check_experiment",
    "complete_experiment",
    "complete_rollout",
    "deciding",
    "echo",
    "filter_options",
    "find",
    "find_ids",
    "fit_and_keep",
    "given_options",
    "is_counted",
    "json_option",
    "lacking",
    "main",
    "make_query",
    "manager_of",
    "new_store",
    "pages",
    "pass_manager",
    "print_fit",
    "print_json",
    "print_table",
    "read_one",
    "resolve_url",
    "rewards_of",
    "seconds_of",
    "settings_of",
    "short",
    "span_options",
    "store_option",
    "with_store",
]
